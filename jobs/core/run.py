"""A run: its id, and the layout of its folder on S3.

One submission is one run, through all its attempts. A run writes only below `s3://<run bucket>/<team>/<run id>/`:

    spec.yaml                 the resolved spec, as submitted or last resumed
    arguments/HASH.json       the job's arguments, if they are too long for a command line
    checkpoints/step-N/       a checkpoint; it is complete once it contains manifest.json
    metrics.jsonl             one JSON object per line: `step`, `epoch`, `time`, and the metrics; with `numbered`,
                              the step is only the number of the value: the log of a script does not have it
    tensorboard/              event files
    model/                    the folder that `from_pretrained` loads
    attempts/N.json           one `Attempt`, written when it starts and again when it ends
    utilization/N.jsonl       one object per minute of attempt N: `time`, and how busy the cards of all nodes were
    rendezvous/JOB/           how the nodes of a node group find each other (jobs.container.launcher.rendezvous_folder)
    moves/JOB.json            written once, when another Batch job continues the run of JOB: {"successor": …}
    notebook/                 the folder of a notebook, saved while it runs
    notebook.json             one `NotebookServer`, while the notebook runs
    compiled/HASH.tar.gz      what torch.compile has compiled, for one image and type of instance
    artifact.json             one `jobs.core.artifact.Pointer` to the artifact that the run produced
    classes.json              for a classification: one `jobs.data_checks.classes.ClassReport` of the held-out examples
    predictions.jsonl         for a classification: one held-out example per line: `label`, `predicted`, `confidence`
    fabric.json               the results and measurements of a fabric-check
    data.json                 for a fine-tuning: one `jobs.data_checks.data_summary.DataSummary`
    inputs.json               for a script or an evaluation: one `Inputs`
    output/                   a script's output, or an evaluation's predictions and metrics
    output-listing.json       symbolic links and modification times of `output/`; other folders have such a file too
    output/generations.jsonl  one object per line, whose texts the report shows; scripts may write it
    receipt.json              one `Receipt` over all attempts so far
"""

import re
from datetime import datetime, timezone

LATEST = "latest"
"""Stands for the newest run of a team wherever a run id is expected, so no spec can have this name."""

SPEC = "spec.yaml"
ARGUMENTS = "arguments/"
CHECKPOINTS = "checkpoints/"
MANIFEST = "manifest.json"
CHECKPOINT_LINKS = "links.json"
"""Below a script's `checkpoints/`: one `jobs.core.folder_listing.Listing` of the links between checkpoints."""
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard/"
MODEL = "model/"
COMPILED = "compiled/"
ATTEMPTS = "attempts/"
UTILIZATION = "utilization/"
RENDEZVOUS = "rendezvous/"
RECEIPT = "receipt.json"
DATA = "data.json"
INPUTS = "inputs.json"
FABRIC = "fabric.json"
CLASSES = "classes.json"
PREDICTIONS = "predictions.jsonl"
GENERATIONS = "output/generations.jsonl"
NOTEBOOK = "notebook/"
LISTING_SUFFIX = "-listing.json"
"""Appended to a folder's name: the name of its `jobs.core.folder_listing.Listing`."""
NOTEBOOK_SERVER = "notebook.json"

CHECKPOINT_TAG = ("trainyard:kind", "checkpoint")
"""Tag of every object of a checkpoint. The run bucket expires old checkpoints by this tag, because the prefix of an S3
lifecycle rule cannot have wildcards for the team and the run before `checkpoints/`."""

KEPT_CHECKPOINT_TAG = ("trainyard:kind", "kept-checkpoint")
"""Tag of checkpoints to keep (keep_every_steps); they do not expire."""

CACHE_TAG = ("trainyard:kind", "cache")
"""Tag of caches: packages of scripts, compiled graphs. They expire like checkpoints and are rebuilt if missing."""

_MANIFEST = re.compile(rf"{CHECKPOINTS}step-(\d{{1,18}})/{re.escape(MANIFEST)}", re.ASCII)
_ATTEMPT = re.compile(r"(\d{1,9})\.json", re.ASCII)

_RUN_ID = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)-(?P<day>\d{8})-(?P<time>\d{6})-(?P<unique>[0-9a-f]{4})")


def recorded_number(record: str) -> int | None:
    """Return the attempt number of a file name below `attempts/`, or None if the file is not a record."""
    match = _ATTEMPT.fullmatch(record)
    return int(match[1]) if match else None


def new_run_id(name: str, *, now: datetime) -> str:
    """Return `<spec name>-<UTC yyyymmdd-hhmmss>-<4 hex>`.

    The hexadecimal digits are the fraction of the second, so that ids with the same name sort by time.
    """
    fraction = (now.microsecond << 16) // 1_000_000
    return f"{name}-{now.astimezone(timezone.utc):%Y%m%d-%H%M%S}-{fraction:04x}"


def submitted_at(run_id: str) -> datetime:
    """Return the time in a run id. Raises ValueError if the text is not a run id."""
    match = _RUN_ID.fullmatch(run_id)
    if match is None:
        raise ValueError(f"{run_id!r} is not a run id")
    return datetime.strptime(f"{match['day']}{match['time']}+0000", "%Y%m%d%H%M%S%z")


def spec_name(run_id: str) -> str:
    """Return the spec name at the start of a run id; text that is not a run id is returned unchanged."""
    match = _RUN_ID.fullmatch(run_id)
    return match["name"] if match else run_id


def is_latest(text: str) -> bool:
    """Return whether `text` stands for the newest run of a team: `latest`, or `TEAM/latest`."""
    return text == LATEST or text.endswith(f"/{LATEST}")


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def checkpoint_step(name: str) -> int | None:
    """Return the step of a checkpoint, given its manifest's name below the run; None for any other file."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def run_prefix(team: str, run_id: str) -> str:
    """Return the key prefix of a run in the run bucket, with a trailing slash."""
    return f"{team}/{run_id}/"
