"""Check of the cost allocation tags by which the stage's budgets count."""

from collections.abc import Iterator

from botocore.exceptions import ClientError

from infra.preflight.account import Account, Finding, ok, problem, unknown
from infra.stages import Stage

TAGS = "cost allocation tags"


def cost_allocation_tags(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that the tags are active. While one is not, its budgets count 0 USD and never stop anything.

    Only the account that pays may list and activate them. Sources: AWS Billing user guide, "Using user-defined cost
    allocation tags"; the refusal of other accounts: hashicorp/terraform-provider-aws#37636.
    """
    tags = _tags_of_budgets(stage)
    if not tags:
        yield ok(TAGS, "not needed: no budget of the settings counts by tag")
        return
    active = " ".join(f"TagKey={tag},Status=Active" for tag in tags)
    activate = f"aws ce update-cost-allocation-tags-status --cost-allocation-tags-status {active}"
    effect = "until it is active, the budgets that count by it stay at 0 USD and stop nothing"
    try:
        listed = account.client("ce").list_cost_allocation_tags(TagKeys=tags)["CostAllocationTags"]
    except ClientError as error:
        if "Linked account" not in str(error):
            raise
        text = f"only the account that pays for {account.id} can tell whether {' and '.join(tags)} are active; {effect}"
        yield unknown(TAGS, text, f"with credentials of that account: {activate}")
        return
    statuses = {tag["TagKey"]: tag["Status"] for tag in listed}
    for tag in tags:
        if tag not in statuses:
            text = f"AWS does not know {tag} yet, as it will up to a day after the first deployment; {effect}"
            yield unknown(TAGS, text, f"a day after the deployment: {activate}")
        elif statuses[tag] != "Active":
            yield problem(TAGS, f"{tag} is not active; {effect}", activate)
        else:
            yield ok(TAGS, f"{tag} is active")


def _tags_of_budgets(stage: Stage) -> list[str]:
    if any(team.monthly_budget_usd is not None for team in stage.teams):
        return ["trainyard:stage", "trainyard:team"]
    return ["trainyard:stage"] if stage.monthly_budget_usd is not None and not stage.dedicated_account else []
