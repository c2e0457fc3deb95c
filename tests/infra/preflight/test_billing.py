from typing import Any

import pytest

from infra.preflight.billing import cost_allocation_tags
from infra.stages import Team
from tests.infra.preflight.conftest import ACCOUNT, findings, refusal

BUDGETS: dict[str, Any] = {
    "monthly_budget_usd": 100.0,
    "teams": (Team(name="research", monthly_budget_usd=50.0),),
}
ACTIVATE = "aws ce update-cost-allocation-tags-status --cost-allocation-tags-status"


def listed(**statuses: str) -> dict[str, Any]:
    tags = [
        {"TagKey": f"trainyard:{name}", "Type": "UserDefined", "Status": status} for name, status in statuses.items()
    ]
    return {"list_cost_allocation_tags": {"CostAllocationTags": tags}}


@pytest.mark.parametrize(
    ("answers", "verdicts"),
    [
        (listed(stage="Active", team="Active"), ["ok", "ok"]),
        (listed(stage="Active", team="Inactive"), ["ok", "problem"]),
        (listed(), ["unknown", "unknown"]),  # before the first deployment, and up to a day later
        # Seen in hashicorp/terraform-provider-aws#37636 and aws/aws-parallelcluster-ui#242
        (
            {
                "list_cost_allocation_tags": refusal(
                    "AccessDeniedException",
                    "Failed to list Cost Allocation Tags: Linked account doesn't have access to cost allocation tags.",
                )
            },
            ["unknown"],
        ),
    ],
    ids=["active", "inactive", "new", "linked"],
)
def test_the_tags_of_budgets_must_be_active(answers: dict[str, Any], verdicts: list[str]) -> None:
    found = findings(cost_allocation_tags, answers, **BUDGETS)
    assert [one.verdict for one in found] == verdicts
    for one in found:
        if one.verdict == "ok":
            continue
        assert "the budgets that count by it stay at 0 USD and stop nothing" in one.text
        assert f"{ACTIVATE} TagKey=trainyard:stage,Status=Active TagKey=trainyard:team,Status=Active" in one.next_step
    if len(verdicts) == 1:
        assert f"only the account that pays for {ACCOUNT} can tell" in found[0].text


def test_a_denied_question_about_tags_is_unknown() -> None:
    (found,) = findings(
        cost_allocation_tags, {"list_cost_allocation_tags": refusal("AccessDeniedException")}, **BUDGETS
    )
    assert (found.verdict, found.text) == ("unknown", "the credentials may not call ce:ListCostAllocationTags")


@pytest.mark.parametrize(
    "settings",
    [{}, {"account": ACCOUNT, "dedicated_account": True, "monthly_budget_usd": 100.0}],
    ids=["none", "account"],
)
def test_without_budgets_by_tag_nothing_is_asked(settings: dict[str, Any]) -> None:
    assert [one.verdict for one in findings(cost_allocation_tags, {}, **settings)] == ["ok"]
