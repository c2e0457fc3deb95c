"""A run: its id, where its files lie, and what is written there.

One submission is one run, through all its attempts. Everything it writes lies under
`s3://<run bucket>/<team>/<run id>/`:

    spec.yaml                 the spec as resolved and planned; of a resumed run, as it was resumed last
    arguments/HASH.json       of a job whose arguments are too long for a command line: those
    checkpoints/step-N/       with manifest.json written last: without it the checkpoint does not exist
    metrics.jsonl             one JSON object a line: `step`, `epoch`, `time`, and what was measured
    tensorboard/              event files
    model/                    what `from_pretrained` loads
    attempts/N.json           one `Attempt`, written when it starts and again when it ends
    utilization/N.jsonl       of attempt N: an object a minute, with `time` and how busy the cards were, over all nodes
    gang/JOB/                 of nodes that are jobs of their own: where they meet (jobs.container.launcher.gang_folder)
    moves/JOB.json            written once, when the run goes on as another Batch job than JOB: {"successor": …}
    notebook/                 of a notebook: its folder, saved while it runs
    notebook.json             of a notebook: one `NotebookServer`, there while it runs
    artifact.json             where what it made for other runs lies: one `jobs.core.artifact.Pointer`
    classes.json              of a classification: one `jobs.data_checks.classes.ClassReport` of its held-out examples
    predictions.jsonl         of a classification: a held-out example a line, with `label`, `predicted`, `confidence`
    fabric.json               of a fabric-check: all that it found and measured
    data.json                 of a fine-tuning: one `jobs.data_checks.data_summary.DataSummary`
    inputs.json               of a script and of an evaluation: one `Inputs` of what it read
    output/                   of a script: what it wrote there; of an evaluation: the predictions, and its metrics
    output-listing.json       of that folder, and of others beside them: symbolic links, and when files were changed
    output/generations.jsonl  of a script that writes one: an object a line, whose texts the report shows
    receipt.json              one `Receipt`, over all attempts so far
"""

import re
from datetime import datetime, timezone

LATEST = "latest"
"""Names the newest run of a team in place of a run's id, so that no spec may be called that."""

SPEC = "spec.yaml"
ARGUMENTS = "arguments/"
CHECKPOINTS = "checkpoints/"
MANIFEST = "manifest.json"
CHECKPOINT_LINKS = "links.json"
"""Below `checkpoints/`, of a script: one `jobs.core.folder_listing.Listing` of the links between its checkpoints."""
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard/"
MODEL = "model/"
ATTEMPTS = "attempts/"
UTILIZATION = "utilization/"
GANG = "gang/"
RECEIPT = "receipt.json"
DATA = "data.json"
INPUTS = "inputs.json"
FABRIC = "fabric.json"
CLASSES = "classes.json"
PREDICTIONS = "predictions.jsonl"
GENERATIONS = "output/generations.jsonl"
NOTEBOOK = "notebook/"
LISTING_SUFFIX = "-listing.json"
"""Ends, behind the name of a folder, the name of its `jobs.core.folder_listing.Listing`."""
NOTEBOOK_SERVER = "notebook.json"

CHECKPOINT_TAG = ("trainyard:kind", "checkpoint")
"""Tag of every object of a checkpoint. The run bucket lets old checkpoints expire by it, since an S3 lifecycle rule
cannot name a prefix that has a team and a run before `checkpoints/`."""

KEPT_CHECKPOINT_TAG = ("trainyard:kind", "kept-checkpoint")
"""Tag, in its place, of the checkpoints that a run was told to keep: they do not expire."""

CACHE_TAG = ("trainyard:kind", "cache")
"""Tag of what is kept for further attempts beside a team's runs: packages of scripts, recipes of HPUs. They
expire as checkpoints do, and are made again where they are missing."""

_MANIFEST = re.compile(rf"{CHECKPOINTS}step-(\d{{1,18}})/{re.escape(MANIFEST)}", re.ASCII)
_ATTEMPT = re.compile(r"(\d{1,9})\.json", re.ASCII)

_RUN_ID = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)-(?P<day>\d{8})-(?P<time>\d{6})-(?P<unique>[0-9a-f]{4})")


def recorded_number(record: str) -> int | None:
    """Return the number of the attempt whose record has this name below `attempts/`; None where it is no record's."""
    match = _ATTEMPT.fullmatch(record)
    return int(match[1]) if match else None


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


def is_latest(text: str) -> bool:
    """Return whether `text` names the newest run of a team: `latest`, or `TEAM/latest`."""
    return text == LATEST or text.endswith(f"/{LATEST}")


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def checkpoint_step(name: str) -> int | None:
    """Return the step of the checkpoint whose manifest has this name below its run; None for every other file."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def run_prefix(team: str, run_id: str) -> str:
    """Return the key prefix of a run in the run bucket, with its closing slash."""
    return f"{team}/{run_id}/"
