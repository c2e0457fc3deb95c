"""An acceptance run: the claims of the README that it proves, step by step, and the record that it keeps of itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

Outcome = Literal["proven", "not proven here", "failed", "not reached"]

PROVEN: Outcome = "proven"
NOT_PROVEN: Outcome = "not proven here"
FAILED: Outcome = "failed"
NOT_REACHED: Outcome = "not reached"

OUTCOMES: tuple[Outcome, ...] = (PROVEN, NOT_PROVEN, FAILED, NOT_REACHED)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something that is said of a stage, and the step that shows it."""

    name: str
    step: str
    text: str
    on_embedded: bool = False
    """Whether the embedded AWS can show it. Where it can't, nobody may call it proven there."""


PLAN = "plan"
PREFLIGHT = "preflight"
DEPLOY = "deploy"
AMI_JOINS = "ami-joins"
CPU_JOB = "cpu-job"
ACCELERATOR_JOB = "accelerator-job"
FABRIC_CHECK = "fabric-check"
RECLAIM = "reclaim"
ISOLATION = "isolation"
WATCHED = "watched"
DESTROY = "destroy"

CLAIMS = (
    Claim(name="prices", step=PLAN, text="By AWS's prices of that day the worst case is within the limit"),
    Claim(name="account", step=PREFLIGHT, text="The account can take the stage: offers, zones, quotas, roles"),
    Claim(
        name="templates",
        step=DEPLOY,
        text="The templates deploy through the CDK CLI, one after the other",
        on_embedded=True,
    ),
    Claim(name="images", step=DEPLOY, text="The job images are built and pushed, and Image Builder makes the AMI"),
    Claim(
        name="joins", step=AMI_JOINS, text="An accelerator instance boots its AMI, joins its cluster, and runs a job"
    ),
    Claim(
        name="batch",
        step=CPU_JOB,
        text="A job goes through the Batch API, reads its team's files and leaves a receipt",
        on_embedded=True,
    ),
    Claim(name="container", step=CPU_JOB, text="It runs in its image, on an instance that Batch started for it"),
    Claim(
        name="training",
        step=ACCELERATOR_JOB,
        text="A spec fine-tunes a model, and says how good it is",
        on_embedded=True,
    ),
    Claim(name="accelerator", step=ACCELERATOR_JOB, text="It does so on the stage's accelerators"),
    Claim(
        name="collectives",
        step=FABRIC_CHECK,
        text="Two nodes meet, and what they compute together is right",
        on_embedded=True,
    ),
    Claim(
        name="fabric", step=FABRIC_CHECK, text="They reach each other by HCCL or NCCL, over the fabric of their type"
    ),
    Claim(
        name="resumes",
        step=RECLAIM,
        text="A training whose node is taken away comes back, and goes on from its checkpoint",
        on_embedded=True,
    ),
    Claim(name="spot", step=RECLAIM, text="It does so where EC2 itself takes a Spot instance back"),
    Claim(name="iam", step=ISOLATION, text="AWS refuses a team's job the files of another team"),
    Claim(name="alerts", step=WATCHED, text="Alarms, dashboard and metrics are there, and somebody would be told"),
    Claim(name="bill", step=WATCHED, text="Budgets are there, and AWS's bill is split by tag"),
    Claim(name="costs", step=WATCHED, text="AWS's bill has for runs what their receipts say, by tag"),
    Claim(
        name="gone",
        step=DESTROY,
        text="The stage goes, and only what is meant to stay is left",
        on_embedded=True,
    ),
)

STEPS = tuple(dict.fromkeys(claim.step for claim in CLAIMS))
"""All steps, in their order."""


def claims_of(step: str) -> list[Claim]:
    return [claim for claim in CLAIMS if claim.step == step]


class Evidence(BaseModel):
    """What was seen of a claim."""

    model_config = ConfigDict(extra="forbid")

    claim: str
    outcome: Outcome
    text: str
    ids: dict[str, str] = {}
    """What AWS calls the things that were seen, by what they are."""


class StepRecord(BaseModel):
    """One step, as far as it has come."""

    model_config = ConfigDict(extra="forbid")

    name: str
    usd: float = 0.0
    """The most that it may cost."""
    begun_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: Outcome = NOT_REACHED
    evidence: list[Evidence] = []
    error: str = ""
    ids: dict[str, str] = {}
    """What the step has made, by which it is found again and undone."""
    undo_due: bool = False
    """Whether something of it may be there still."""
    undo_error: str = ""

    @property
    def done(self) -> bool:
        """Return whether it came to its end; what could not be proven by then is no reason to do it again."""
        return self.outcome in (PROVEN, NOT_PROVEN)


class AcceptanceRecord(BaseModel):
    """An acceptance run, as its state file and its report have it."""

    model_config = ConfigDict(extra="forbid")

    stage: str
    account: str
    region: str
    embedded: bool
    max_usd: float
    keep: bool = False
    """Whether the stage stays."""
    started_at: datetime
    metered_at: datetime | None = None
    """Up to when `spent_usd` counts."""
    spent_usd: float = 0.0
    steps: list[StepRecord]

    def step(self, name: str) -> StepRecord:
        return next(step for step in self.steps if step.name == name)

    @property
    def complete(self) -> bool:
        return all(step.done for step in self.steps)


def outcome_of(evidence: Iterable[Evidence]) -> Outcome:
    """Return the outcome of a step that has come to its end: proven where all of its claims are."""
    return PROVEN if all(found.outcome == PROVEN for found in evidence) else NOT_PROVEN


def claims_seen(record: AcceptanceRecord) -> list[tuple[Claim, Outcome, Evidence | None]]:
    """Return each claim with its outcome and what was seen of it.

    What a step that failed did not come to say has the step's outcome.
    """
    found = []
    for claim in CLAIMS:
        step = record.step(claim.step)
        evidence = next((seen for seen in step.evidence if seen.claim == claim.name), None)
        found.append((claim, evidence.outcome if evidence and step.done else step.outcome, evidence))
    return found
