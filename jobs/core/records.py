"""The records of a run on S3, and how to read them: one `Attempt` per start, and a `Receipt` over all attempts.

Readers ignore fields that a later release has added. A damaged file or line is skipped with one warning that names it,
because a damaged record must not stop a run.
"""

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from jobs.core.errors import TrainyardError
from jobs.core.instance_types import instance_type
from jobs.core.queues import Capacity
from jobs.core.words import counted, printable

IMAGE_DIGEST = "image digest"
"""Key in `Attempt.ran_with` of the image's digest in its registry."""


class CardUse(BaseModel):
    """How busy an attempt's cards are, over all nodes. For a job on CPUs, the CPUs count as cards."""

    model_config = ConfigDict(extra="forbid")

    utilization_percent: float
    """Mean over the cards in the latest minute."""
    memory_percent: float
    """Share of the cards' memory in use in that minute."""
    mean_utilization_percent: float
    """Mean over all minutes of the attempt."""
    idle_seconds: float
    """Time since the first step during which no card of the main node was busy."""


class Attempt(BaseModel):
    """One start of a run by Batch, stored as `attempts/N.json`. Times are UTC, in ISO 8601."""

    model_config = ConfigDict(extra="forbid")

    number: int
    """Number of the attempt, counted over all Batch jobs of the run. (Batch starts at 1 in each job.)"""
    job_id: str | None = None
    """Batch job of the attempt. None if it ran outside Batch."""
    started_at: datetime
    finished_at: datetime | None = None
    """End of the attempt. None while it runs, and permanently if the node was lost."""
    last_seen_at: datetime
    """Latest heartbeat; a lost attempt is billed up to this time."""
    exit_code: int | None = None
    reason: str | None = None
    """Why the attempt ended, unless it exited by itself."""
    instance_type: str
    capacity: Capacity | None = None
    """Capacity whose price applies: as reported by the main node's instance, else as submitted. On-Demand if any node
    of a node group on Spot is On-Demand."""
    spot_usd_per_hour: float | None = None
    """EC2's price for an hour of one Spot instance when the run was submitted or resumed.

    None if EC2 gave no price; then the recorded price applies."""
    zone: str | None = None
    """Availability zone of the main node, or None if unknown. All nodes of one job are in one zone; the nodes of a
    node group may be in several."""
    accelerator: str
    nnodes: int
    world_size: int
    ran_with: dict[str, str] = {}
    """Image with release, code revision and digest, if the attempt ran in one, and package versions by name."""
    waited_instance_seconds: float = 0.0
    """Total time that the nodes of a node group, which are separate jobs, waited for each other before this attempt."""
    training_started_at: datetime | None = None
    """Start of the first step. None if there was no step, or the job does not train."""
    resumed_from_step: int = 0
    """Step of the checkpoint that the training loaded. 0 if it started from scratch, or is a script that loads its
    checkpoints itself."""
    restored_step: int | None = None
    """Step of the newest checkpoint that was restored for a script, which loads it by itself; 0 if there was none.
    Whether the script loaded it is not known. None for other jobs."""
    repeats_from_step: int | None = None
    """Latest step at which such a script can have started, inferred from steps that it saved again. None if it saved
    none again."""
    saved_at: datetime | None = None
    """Time at which such a script last saved a checkpoint in this attempt. None if it saved none."""
    last_step: int = 0
    compiling_seconds: float = 0.0
    """Extra time that steps took because a graph was compiled for a new batch shape."""
    saving_seconds: float = 0.0
    """Time that the training was paused for checkpoints and for the final model."""
    cards: CardUse | None = None
    """None if it could not be measured."""
    changed: dict[str, tuple[Any, Any]] = {}
    """Arguments that differ from those of the resumed checkpoint, because changes were allowed: old and new value."""

    @property
    def start_step(self) -> int:
        """Return the first step as far as known; a script is assumed to load the restored checkpoint."""
        if self.repeats_from_step is not None:
            return self.repeats_from_step
        return self.restored_step or self.resumed_from_step

    @property
    def may_repeat(self) -> bool:
        """Return whether steps may have been repeated: it is not known if a script loads the restored checkpoint."""
        return bool(self.restored_step) and self.repeats_from_step is None


class Inputs(BaseModel):
    """Fingerprints of the inputs of a script or an evaluation, stored as `inputs.json`."""

    model_config = ConfigDict(extra="forbid")

    fingerprints: dict[str, str]
    """Fingerprint by location; for a location on the hub, its revision."""


class Stored(BaseModel):
    """The current size of a run's files on S3, and their storage cost."""

    model_config = ConfigDict(extra="forbid")

    all_bytes: int
    checkpoint_bytes: int
    """Size of the checkpoints, which expire."""
    old_version_bytes: int | None
    """Size of deleted and replaced versions, which S3 keeps for some days. None if the caller may not list them."""
    usd_per_month: float
    """Cost of everything above."""
    price: str
    """The price with its date and source."""


class Verdict(BaseModel):
    """How a point of a sweep ranked at a rung, and whether it was stopped there."""

    model_config = ConfigDict(extra="forbid")

    rung: int
    step: int
    """Step of the evaluation: the first one at or after the rung."""
    metric: str
    value: float | None
    """None if it was not a number."""
    rank: int
    """1 is the best."""
    of: int
    """Number of points that had reached the rung by then, including this one."""
    stops: bool
    """Whether the point is stopped."""

    @property
    def text(self) -> str:
        """Return the verdict as text: `ranked 5 of 6 at step 200`."""
        not_a_number = f", where {self.metric} was not a number" if self.value is None else ""
        return f"ranked {self.rank} of {self.of} at step {self.step}{not_a_number}"


class Receipt(BaseModel):
    """Time, cost and results of a run over all attempts so far. Costs are estimates: instance hours times a price."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    team: str
    job: str
    state: Literal["running", "interrupted", "succeeded", "failed"]
    attempts: list[Attempt]
    duration_seconds: float
    """Total duration of the attempts."""
    instance_hours: float
    instance_type: str
    """Instance type of the newest attempt; earlier attempts may have run on another."""
    on_demand_usd: float
    """Cost of all attempts, each on its own instance type, at On-Demand prices."""
    spot_usd: float
    """Cost of all attempts at Spot prices."""
    estimated_usd: float | None = None
    """Cost of all attempts, each at the price of its capacity."""
    saved_usd: float | None = None
    """How much more On-Demand instances would have cost. None if the run was free because it ran on a laptop."""
    saved_percent: float | None = None
    waiting_usd: float | None = None
    """Part of estimated_usd: nodes waited for each other."""
    starting_usd: float | None = None
    """Part of estimated_usd: from each attempt's start to its first step."""
    compiling_usd: float | None = None
    """Part of estimated_usd: graphs were compiled."""
    saving_usd: float | None = None
    """Part of estimated_usd: the training was paused for saves."""
    lost_usd: float | None = None
    """Part of estimated_usd: steps that a later attempt had to repeat."""
    idle_usd: float | None = None
    """Part of estimated_usd: after the first step, all cards were idle for an unknown reason."""
    stored: Stored | None = None
    """Size and cost of the files. `trainyard receipt` and the report query S3 for it; the container does not."""
    budget: str = ""
    """The used part of max_usd and max_hours as text; empty if the spec sets neither."""
    price_date: str
    price_source: str
    estimate_note: str
    """Limits of the estimate, to read before quoting it."""
    halving: Verdict | None = None
    """Latest comparison of a point of a sweep with successive halving."""
    result: dict[str, Any]
    """Final metrics; for a fine-tuning: eval_accuracy, eval_f1, eval_majority_accuracy, train_samples_per_second."""

    @property
    def stopped_early(self) -> bool:
        """Return whether successive halving stopped the run before its regular end."""
        return self.state == "succeeded" and self.halving is not None and self.halving.stops


log = logging.getLogger("trainyard")

Record = TypeVar("Record", bound=BaseModel)

_WARNINGS_KEPT = 4096
"""Number of warnings to remember: records are read every 30 s, and each warning is logged once."""

LARGEST_STEP = 2**53

_SKIPPED = "cannot be read and is skipped"
_NEXT_STEP = "trainyard fetch RUN downloads it unchanged; the run can be resumed without it"


class UnreadableError(TrainyardError):
    """A record cannot be read: it is damaged, or a release with another format wrote it."""


def parse_record(model: type[Record], content: bytes, *, place: object) -> Record:
    """Parse the record from `place`. Raises UnreadableError if it is not valid."""
    try:
        return model.model_validate_json(content, extra="ignore")
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{place} cannot be read: {_first_line(error)}",
            next_step=_NEXT_STEP,
        ) from None


def read_record(model: type[Record], content: bytes | None, *, place: object) -> Record | None:
    """Parse the record from `place`. Return None if `content` is None, or, with a warning, if it is not valid."""
    try:
        return None if content is None else parse_record(model, content, place=place)
    except UnreadableError:
        _warn(f"{place} {_SKIPPED}")
        return None


def parse_receipt(content: bytes, *, place: object) -> Receipt:
    """Parse the receipt from `place`.

    Raises UnreadableError if it is not valid, or this release has no price for one of its instance types.
    """
    receipt = parse_record(Receipt, content, place=place)
    receipt = receipt.model_copy(update={"result": _finite(receipt.result, place)})
    if not receipt.attempts:
        raise UnreadableError(f"{place} cannot be read: it has no attempts", next_step=_NEXT_STEP)
    try:
        for attempt in receipt.attempts:
            instance_type(attempt.instance_type)  # this release may lack the type
    except TrainyardError as error:
        raise UnreadableError(f"{place} cannot be read: {error.args[0]}", next_step=_NEXT_STEP) from None
    return receipt


def read_receipt(content: bytes | None, *, place: object) -> Receipt | None:
    """Parse the receipt from `place`. Return None if `content` is None, or, with a warning, if it is not valid."""
    try:
        return None if content is None else parse_receipt(content, place=place)
    except UnreadableError:
        _warn(f"{place} {_SKIPPED}")
        return None


def read_attempt(content: bytes, *, place: object) -> Attempt | None:
    """Parse the record of an attempt. Return None, with a warning, if it is not valid or has no price here."""
    try:
        attempt = parse_record(Attempt, content, place=place)
        instance_type(attempt.instance_type)  # this release may lack the type
    except TrainyardError:
        _warn(f"{place} {_SKIPPED}; totals do not include this attempt")
        return None
    return attempt


def read_json_lines(
    content: bytes | None, *, place: object, accept: Callable[[dict[str, Any]], dict[str, Any] | None] = dict
) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, each transformed by `accept`.

    Lines that are not objects, or for which `accept` returns None, are skipped with one warning for the file.
    """
    found = map(_object, (content or b"").splitlines())
    accepted = [None if line is None else accept(line) for line in found]
    lines = [None if line is None else _finite(line, place) for line in accepted]
    if None in lines:
        _warn(
            f"{place}: skipped {counted(lines.count(None), 'line')} that cannot be read, the first at line "
            f"{lines.index(None) + 1}"
        )
    return [line for line in lines if line is not None]


def line_with_step(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl unchanged, or None if it has no step."""
    return line if is_step(line.get("step")) else None


def is_step(value: object) -> bool:
    """Return whether a value is a step: a whole number that every language can represent exactly."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_STEP


def _finite(values: dict[str, Any], place: object) -> dict[str, Any]:
    """Replace numbers that do not fit a float with None: JSON allows 400 digits, and 1e999 becomes infinity."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    too_large = [name for name, value in numbers.items() if not abs(value) <= sys.float_info.max]
    if not too_large:
        return values
    _warn(f"{place}: skipped values of {', '.join(too_large)} that are not finite numbers")
    return {**values, **dict.fromkeys(too_large)}


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _first_line(error: Exception) -> str:
    errors: Iterable[Any] = error.errors() if hasattr(error, "errors") else ()
    for item in errors:
        return str(item["msg"])
    return str(error).splitlines()[0]


@functools.lru_cache(maxsize=_WARNINGS_KEPT)
def _warn(text: str) -> None:
    log.warning("warning: %s", printable(text))


class NotebookServer(BaseModel):
    """A running notebook, stored as `notebook.json`.

    Anyone who has the token can run any code there, with the permissions of the team's jobs.
    """

    model_config = ConfigDict(extra="forbid")

    job_id: str | None
    """The Batch job; with `attempt`, it shows whether the file is stale, since a lost attempt leaves its file
    behind."""
    attempt: int
    port: int
    """Port on the instance's loopback interface."""
    token: str

    def url(self, port: int | None = None, *, path: str = "lab") -> str:
        """Return the URL for a browser. `port` is the local port forwarded to the notebook; None if it runs here."""
        return f"http://127.0.0.1:{port or self.port}/{path}?token={self.token}"
