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

PLAN, PREFLIGHT, DEPLOY, CPU_JOB = "plan", "preflight", "deploy", "cpu-job"
ACCELERATOR_JOB, FABRIC_CHECK, RECLAIM = "accelerator-job", "fabric-check", "reclaim"
ISOLATION, WATCHED, DESTROY = "isolation", "watched", "destroy"


@dataclass(frozen=True)
class Claim:
    """A statement about a stage, and the step that proves it."""

    step: str
    name: str
    text: str


CLAIMS = (
    Claim(PLAN, "prices", "By AWS's prices of that day the worst case is within the limit"),
    Claim(PREFLIGHT, "account", "The account can take the stage: offers, zones, quotas, roles"),
    Claim(DEPLOY, "templates", "The templates deploy through the CDK CLI, one after the other"),
    Claim(DEPLOY, "images", "The job images are built and pushed, and Image Builder makes the AMI"),
    Claim(CPU_JOB, "batch", "A job goes through the Batch API, reads its team's files and leaves a receipt"),
    Claim(CPU_JOB, "container", "It runs in its image, on an instance that Batch started for it"),
    Claim(ACCELERATOR_JOB, "joins", "An accelerator instance boots its AMI, joins its cluster, and runs a job"),
    Claim(ACCELERATOR_JOB, "training", "A spec fine-tunes a model, and reports how good it is"),
    Claim(ACCELERATOR_JOB, "accelerator", "It does so on the stage's accelerators"),
    Claim(FABRIC_CHECK, "collectives", "Two nodes meet, and what they compute together is right"),
    Claim(FABRIC_CHECK, "fabric", "They reach each other by HCCL or NCCL, over the fabric of their type"),
    Claim(RECLAIM, "resumes", "A training whose node is taken away continues from its checkpoint"),
    Claim(RECLAIM, "spot", "It does so when EC2 itself takes a Spot instance back"),
    Claim(ISOLATION, "iam", "AWS refuses a team's job the files of another team"),
    Claim(WATCHED, "alerts", "Alarms, dashboard and metrics are there, and somebody would be told"),
    Claim(WATCHED, "bill", "Budgets are there, and AWS's bill is split by tag"),
    Claim(WATCHED, "costs", "AWS's bill has for runs what their receipts say, by tag"),
    Claim(DESTROY, "gone", "The stage goes, and only what is meant to stay is left"),
)

STEPS = tuple(dict.fromkeys(claim.step for claim in CLAIMS))
"""All steps, in their order."""


class Evidence(BaseModel):
    """What was seen of a claim."""

    model_config = ConfigDict(extra="forbid")

    claim: str
    outcome: Outcome
    text: str
    ids: dict[str, str] = {}
    """AWS's ids of what was seen, by what it is."""


class StepRecord(BaseModel):
    """The progress of one step."""

    model_config = ConfigDict(extra="forbid")

    name: str
    usd: float = 0.0
    """The most that it may cost."""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: Outcome = NOT_REACHED
    evidence: list[Evidence] = []
    error: str = ""
    ids: dict[str, str] = {}
    """What the step has made, by which it is found again and undone."""
    needs_undo: bool = False
    """Whether something of it may still be there."""
    undo_error: str = ""

    @property
    def done(self) -> bool:
        """Return whether it reached its end; what could not be proven by then is no reason to repeat it."""
        return self.outcome in (PROVEN, NOT_PROVEN)


class AcceptanceRecord(BaseModel):
    """An acceptance run, as its state file and its report have it."""

    model_config = ConfigDict(extra="forbid")

    stage: str
    account: str
    region: str
    emulated: bool
    max_usd: float
    keep: bool = False
    """Whether the stage stays."""
    started_at: datetime
    metered_at: datetime | None = None
    """The time up to which `spent_usd` counts."""
    spent_usd: float = 0.0
    steps: list[StepRecord]

    def step(self, name: str) -> StepRecord:
        return next(step for step in self.steps if step.name == name)

    @property
    def complete(self) -> bool:
        return all(step.done for step in self.steps)


def claims_of(step: str) -> list[Claim]:
    return [claim for claim in CLAIMS if claim.step == step]


def outcome_of(evidence: Iterable[Evidence]) -> Outcome:
    """Return the outcome of a step that has reached its end: proven if all of its claims are."""
    return PROVEN if all(found.outcome == PROVEN for found in evidence) else NOT_PROVEN


def claim_outcomes(record: AcceptanceRecord) -> list[tuple[Claim, Outcome, Evidence | None]]:
    """Return each claim with its outcome and its evidence. A claim without evidence has the outcome of its step."""
    found = []
    for claim in CLAIMS:
        step = record.step(claim.step)
        evidence = next((seen for seen in step.evidence if seen.claim == claim.name), None)
        found.append((claim, evidence.outcome if evidence and step.done else step.outcome, evidence))
    return found
