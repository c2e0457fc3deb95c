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
from datetime import datetime, timezone

LATEST = "latest"
"""Names the newest run of the stage in place of a run's id, so that no spec may be called that."""

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
"""Tag, in its place, of the checkpoints that a run was told to keep: they do not expire."""

_RUN_ID = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)-(?P<day>\d{8})-(?P<time>\d{6})-(?P<unique>[0-9a-f]{4})")


def new_run_id(name: str, *, now: datetime) -> str:
    """Return `<spec name>-<UTC yyyymmdd-hhmmss>-<4 hex>`.

    The hexadecimal digits are the fraction of the second, so that ids of a name sort by time.
    """
    fraction = (now.microsecond << 16) // 1_000_000
    return f"{name}-{now.astimezone(timezone.utc):%Y%m%d-%H%M%S}-{fraction:04x}"


def submitted_at(run_id: str) -> datetime:
    """Return the moment that a run's id names. Raises ValueError where it is no run's id."""
    match = _RUN_ID.fullmatch(run_id)
    if match is None:
        raise ValueError(f"{run_id!r} is not a run's id")
    return datetime.strptime(f"{match['day']}{match['time']}+0000", "%Y%m%d%H%M%S%z")


def spec_name(run_id: str) -> str:
    """Return the name of the spec that a run's id begins with; what is no run's id is left as it is."""
    match = _RUN_ID.fullmatch(run_id)
    return match["name"] if match else run_id


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def run_prefix(team: str, run_id: str) -> str:
    """Return the key prefix of a run in the run bucket, with its closing slash."""
    return f"{team}/{run_id}/"
