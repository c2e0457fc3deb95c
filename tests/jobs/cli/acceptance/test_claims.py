"""What a record comes to: no claim is called proven that nothing has shown."""

from datetime import datetime, timezone

from jobs.cli.acceptance.command import steps_of
from jobs.contract.acceptance import (
    CLAIMS,
    STEPS,
    AcceptanceRecord,
    Evidence,
    StepRecord,
    claims_of,
    claims_seen,
    outcome_of,
)
from jobs.report.acceptance import acceptance_page
from tests.support.jobs.acceptance import context_of

NOW = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)


def record() -> AcceptanceRecord:
    return AcceptanceRecord(
        stage="dev",
        account="123456789012",
        region="us-east-1",
        embedded=False,
        max_usd=40,
        started_at=NOW,
        steps=[StepRecord(name=name) for name in STEPS],
    )


def test_a_step_is_proven_where_all_of_its_claims_are() -> None:
    proven = [Evidence(claim=claim.name, outcome="proven", text="seen") for claim in claims_of("deploy")]
    assert outcome_of(proven) == "proven"
    assert outcome_of([*proven, Evidence(claim="images", outcome="not proven here", text="")]) == "not proven here"


def test_evidence_of_a_step_that_failed_later_counts_for_nothing() -> None:
    found = record()
    deploy = found.step("deploy")
    deploy.evidence = [Evidence(claim="templates", outcome="proven", text="8 stacks")]
    deploy.outcome, deploy.error = "failed", "<script>alert(1)</script> no such role"
    outcomes = {claim.name: outcome for claim, outcome, _ in claims_seen(found)}
    assert outcomes["templates"] == outcomes["images"] == "failed"
    assert outcomes["resumes"] == "not reached"
    page = acceptance_page(found, now=NOW)
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; no such role" in page


def test_names_of_claims_are_unique_and_the_command_has_each_step_in_its_order() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert [step.name for step in steps_of(context_of())] == list(STEPS)


def test_the_worst_case_of_the_settings_stage_is_within_the_default_limit() -> None:
    steps = steps_of(context_of())
    assert 10 < sum(step.usd for step in steps) < 40
    spot, hours = 3.93, 1.25
    assert next(step for step in steps if step.name == "reclaim").usd == spot * hours
