"""The README's claims that an acceptance run proves step by step, and the record of its progress."""

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
ISOLATION, UPDATE, WATCHED, DESTROY = "isolation", "update", "watched", "destroy"


@dataclass(frozen=True)
class Claim:
    """A statement about a stage, and the step that proves it."""

    step: str
    name: str
    text: str


CLAIMS = (
    Claim(PLAN, "prices", "At AWS's current prices, the worst-case cost is within the limit"),
    Claim(PREFLIGHT, "account", "The account meets the stage's requirements: instance offers, zones, quotas, roles"),
    Claim(DEPLOY, "templates", "The CDK CLI deploys the templates one after the other"),
    Claim(DEPLOY, "images", "The job images are built and pushed, and Image Builder makes the AMI"),
    Claim(CPU_JOB, "batch", "A job runs through the Batch API, reads its team's files and writes a receipt"),
    Claim(CPU_JOB, "container", "The job runs in its image, on an instance that Batch started"),
    Claim(ACCELERATOR_JOB, "joins", "An accelerator instance boots its AMI, joins its cluster, and runs a job"),
    Claim(ACCELERATOR_JOB, "training", "A spec fine-tunes a model and reports its quality"),
    Claim(ACCELERATOR_JOB, "accelerator", "The fine-tuning runs on the stage's accelerators"),
    Claim(FABRIC_CHECK, "collectives", "Two nodes find each other, and their collectives give correct results"),
    Claim(FABRIC_CHECK, "fabric", "The nodes communicate by HCCL or NCCL over the fabric of their type"),
    Claim(RECLAIM, "resumes", "A training that loses its node continues from its checkpoint"),
    Claim(RECLAIM, "spot", "The training also continues when EC2 itself reclaims a Spot instance"),
    Claim(ISOLATION, "iam", "AWS denies a team's job access to the files of another team"),
    Claim(UPDATE, "update", "A deployment of another AMI replaces instances, and a running job continues"),
    Claim(WATCHED, "alerts", "Alarms, dashboard and metrics exist, and alarms have a recipient"),
    Claim(WATCHED, "bill", "Budgets exist, and AWS's bill is split by tag"),
    Claim(WATCHED, "costs", "AWS's bill by tag agrees with the receipts of the runs"),
    Claim(DESTROY, "gone", "The stage is deleted, and only resources that are meant to stay remain"),
)

STEPS = tuple(dict.fromkeys(claim.step for claim in CLAIMS))
"""All steps in order."""


class Evidence(BaseModel):
    """The evidence for a claim."""

    model_config = ConfigDict(extra="forbid")

    claim: str
    outcome: Outcome
    text: str
    ids: dict[str, str] = {}
    """AWS ids of the resources involved, by role."""


class StepRecord(BaseModel):
    """The progress of one step."""

    model_config = ConfigDict(extra="forbid")

    name: str
    usd: float = 0.0
    """Maximum cost of the step."""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: Outcome = NOT_REACHED
    evidence: list[Evidence] = []
    error: str = ""
    ids: dict[str, str] = {}
    """Ids of the resources that the step created, used to find and undo them."""
    needs_undo: bool = False
    """Whether resources of the step may still exist."""
    undo_error: str = ""

    @property
    def done(self) -> bool:
        """Return whether the step ran to its end; unproven claims do not make it run again."""
        return self.outcome in (PROVEN, NOT_PROVEN)


class AcceptanceRecord(BaseModel):
    """An acceptance run, as stored in its state file and shown in its report."""

    model_config = ConfigDict(extra="forbid")

    stage: str
    account: str
    region: str
    emulated: bool
    max_usd: float
    keep: bool = False
    """Whether to keep the stage."""
    started_at: datetime
    metered_at: datetime | None = None
    """Time up to which `spent_usd` is counted."""
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
    """Return the outcome of a finished step: proven if all its claims are."""
    return PROVEN if all(found.outcome == PROVEN for found in evidence) else NOT_PROVEN


def claim_outcomes(record: AcceptanceRecord) -> list[tuple[Claim, Outcome, Evidence | None]]:
    """Return each claim with its outcome and evidence. A claim without evidence has the outcome of its step."""
    found = []
    for claim in CLAIMS:
        step = record.step(claim.step)
        evidence = next((seen for seen in step.evidence if seen.claim == claim.name), None)
        found.append((claim, evidence.outcome if evidence and step.done else step.outcome, evidence))
    return found
