"""A run: its id, where its files lie, and what is written there.

One submission is one run, through all its attempts. Everything it writes lies under
`s3://<run bucket>/<team>/<run id>/`:

    spec.yaml                 the spec as resolved and planned; of a resumed run, as it was resumed last
    checkpoints/step-N/       with manifest.json written last: without it the checkpoint does not exist
    metrics.jsonl             one JSON object a line: `step`, `epoch`, `time`, and what was measured
    tensorboard/              event files
    model/                    what `from_pretrained` loads
    attempts/N.json           one `Attempt`, written when it starts and again when it ends
    gang/JOB/                 of nodes that are jobs of their own: where they meet (jobs.train.launcher.gang_folder)
    moves/JOB.json            written once, when the run goes on as another Batch job than JOB: {"successor": …}
    notebook/                 of a notebook: its folder, saved while it runs
    notebook.json             of a notebook: one `NotebookServer`, there while it runs
    artifact.json             where what it made for other runs lies: one `jobs.contract.artifact.Pointer`
    fabric.json               of a fabric-check: all that it found and measured
    receipt.json              one `Receipt`, over all attempts so far
"""

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from jobs.contract.errors import UsageError
from jobs.contract.queues import Capacity

SPEC = "spec.yaml"
CHECKPOINTS = "checkpoints/"
MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard/"
MODEL = "model/"
ATTEMPTS = "attempts/"
GANG = "gang/"
RECEIPT = "receipt.json"
FABRIC = "fabric.json"
NOTEBOOK = "notebook/"
NOTEBOOK_SERVER = "notebook.json"

CHECKPOINT_TAG = ("trainyard:kind", "checkpoint")
"""Tag of every object of a checkpoint. The run bucket lets old checkpoints expire by it, since an S3 lifecycle rule
cannot name a prefix that has a team and a run before `checkpoints/`."""

KEPT_CHECKPOINT_TAG = ("trainyard:kind", "kept-checkpoint")
"""In its place on those that a run was told to keep: they do not expire."""

RUN_URI_VARIABLE = "TRAINYARD_RUN_URI"
ACCELERATOR_VARIABLE = "TRAINYARD_ACCELERATOR"
ALLOW_CHANGES_FLAG = "--allow-changes"
"""Of the launcher: a checkpoint that was made with other arguments is resumed all the same."""

GANG_FLAG = "--gang-min-nnodes"
"""Of the launcher: its job is a child of an array, and trains with the others; on how many at least."""

GANG_ATTEMPTS_FLAG = "--gang-attempts"
"""Of the same: how often Batch starts each child. One that has used them up is not waited for."""

GANG_WAIT_SECONDS = 900.0
"""How long the nodes of a gang wait for all of them; then as few train as may."""

START_TIMEOUT_SECONDS = 900.0
"""How long the nodes of a job that AWS Batch starts together wait for each other, unless its spec says otherwise: EC2
may start them minutes apart."""

HANG_TIMEOUT_SECONDS = 120.0
"""Without a step, after which an attempt that trains has hung, unless its spec says otherwise."""

UTILIZATION_KEY = "accelerator_utilization_percent"
"""First key of the JSON line in which a node logs, once a minute, how busy its accelerators are."""

_RUN_ID = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)-(?P<day>\d{8})-(?P<time>\d{6})-(?P<unique>[0-9a-f]{4})")


def new_run_id(name: str, *, now: datetime) -> str:
    """`<spec name>-<UTC yyyymmdd-hhmmss>-<4 hex>`: the fraction of the second, so that ids of a name sort by time."""
    fraction = (now.microsecond << 16) // 1_000_000
    return f"{name}-{now.astimezone(timezone.utc):%Y%m%d-%H%M%S}-{fraction:04x}"


def submitted_at(run_id: str) -> datetime:
    """The moment that a run's id names. Raises ValueError where it is no run's id."""
    match = _RUN_ID.fullmatch(run_id)
    if match is None:
        raise ValueError(f"{run_id!r} is not a run's id")
    return datetime.strptime(f"{match['day']}{match['time']}+0000", "%Y%m%d%H%M%S%z")


def spec_name(run_id: str) -> str:
    """The name of the spec that a run's id begins with; what is no run's id is left as it is."""
    match = _RUN_ID.fullmatch(run_id)
    return match["name"] if match else run_id


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def is_utilization(line: str) -> bool:
    """Whether a line of a job's log is for CloudWatch's metric, not for people."""
    return line.startswith(f'{{"{UTILIZATION_KEY}"')


def run_prefix(team: str, run_id: str) -> str:
    """Key prefix of a run in the run bucket, with its closing slash."""
    return f"{team}/{run_id}/"


@dataclass(frozen=True)
class S3Location:
    """A bucket and a key, or a key prefix."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, uri: str) -> "S3Location":
        """Raises UsageError where `uri` is not `s3://bucket/key`."""
        parts = urlsplit(uri, allow_fragments=False)
        if parts.scheme != "s3" or not parts.netloc:
            raise UsageError(f"'{uri}' is not an S3 location; it should look like s3://bucket/key")
        return cls(parts.netloc, parts.path.lstrip("/"))

    def __truediv__(self, name: str) -> "S3Location":
        return S3Location(self.bucket, f"{self.key.rstrip('/')}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class Attempt(BaseModel):
    """One start of a run by Batch, as `attempts/N.json` holds it. Times are UTC, in ISO 8601."""

    model_config = ConfigDict(extra="forbid")

    number: int
    """Counts on through all the Batch jobs that a run may come to have: Batch itself begins with 1 in each."""
    job_id: str | None = None
    """The Batch job whose attempt it was. None: it ran outside Batch."""
    started_at: datetime
    finished_at: datetime | None = None
    """None while it runs, and for ever where the node was lost."""
    last_seen_at: datetime
    """The latest sign of life; a lost attempt is billed up to it."""
    exit_code: int | None = None
    reason: str | None = None
    """Why it ended, where that was not its own exit."""
    instance_type: str
    capacity: Capacity | None = None
    """What its instances are priced at: what the main node's own says of itself, else what was submitted. On-Demand
    where one of several nodes on Spot is."""
    accelerator: str
    nnodes: int
    world_size: int
    waited_instance_seconds: float = 0.0
    """That its nodes, where each is a job of its own, waited for each other before it, added up."""
    resumed_from_step: int = 0
    last_step: int = 0
    changed: dict[str, tuple[Any, Any]] = {}
    """Arguments that are not those of the checkpoint it resumed, since that was asked for: theirs, and its own."""


class Receipt(BaseModel):
    """What a run took, over all its attempts so far. Costs are instance hours times a row's price: an estimate."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    team: str
    job: str
    state: Literal["running", "interrupted", "succeeded", "failed"]
    attempts: list[Attempt]
    duration_seconds: float
    """Sum over the attempts."""
    instance_hours: float
    instance_type: str
    """Of the newest attempt; a run may have gone on on another."""
    on_demand_usd: float
    """All attempts, each on its own instance type, at On-Demand prices."""
    spot_usd: float
    """The same at Spot prices."""
    estimated_usd: float | None = None
    """Each attempt at the price of the capacity that it ran on."""
    budget: str = ""
    """What was used of max_usd and max_hours; empty where the spec sets neither."""
    price_date: str
    price_source: str
    estimate_note: str
    """What the figures are not: read before they are quoted."""
    result: dict[str, Any]
    """The final metrics: of a fine-tuning, eval_accuracy, eval_f1, eval_majority_accuracy, train_samples_per_second."""


class NotebookServer(BaseModel):
    """How a notebook that runs is reached, as `notebook.json` holds it.

    Whoever has the token can run any code there, with the rights of the team's jobs.
    """

    model_config = ConfigDict(extra="forbid")

    job_id: str | None
    """The Batch job, and which attempt of it: one that was lost leaves its file behind."""
    attempt: int
    port: int
    """On the instance's loopback."""
    token: str

    def url(self, port: int | None = None, *, path: str = "lab") -> str:
        """For a browser. `port`: where the notebook's is forwarded to; None: it is here."""
        return f"http://127.0.0.1:{port or self.port}/{path}?token={self.token}"


@dataclass(frozen=True)
class Progress:
    """One line of a job's log that says how far it is; the command line draws its bar from it."""

    step: int
    total_steps: int
    note: str = ""

    _LINE = re.compile(r"\[progress\] (?P<step>\d+)/(?P<total>\d+)(?: (?P<note>.*))?")

    def __str__(self) -> str:
        return f"[progress] {self.step}/{self.total_steps} {self.note}".rstrip()

    @classmethod
    def parse(cls, line: str) -> "Progress | None":
        match = cls._LINE.search(line)
        return cls(int(match["step"]), int(match["total"]), match["note"] or "") if match else None
