"""The records that a run keeps of itself on S3: one `Attempt` for each start, and the `Receipt` over all of them."""

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
"""The key of `Attempt.ran_with` for what a registry knows an image by, whatever its tags."""


class CardUse(BaseModel):
    """How busy the cards of an attempt are, over all its nodes; of a job on CPUs: those."""

    model_config = ConfigDict(extra="forbid")

    utilization_percent: float
    """The mean over the cards in the newest minute."""
    memory_percent: float
    """The part of their memory that was in use then."""
    mean_utilization_percent: float
    """The mean over all minutes of the attempt."""
    idle_seconds: float
    """Time in which no card of the main node did anything, from the first step on."""


class Attempt(BaseModel):
    """One start of a run by Batch, as `attempts/N.json` holds it. Times are UTC, in ISO 8601."""

    model_config = ConfigDict(extra="forbid")

    number: int
    """Counts on through all the Batch jobs that a run may come to have: Batch itself begins with 1 in each."""
    job_id: str | None = None
    """The Batch job whose attempt it was. None: it ran outside Batch."""
    started_at: datetime
    finished_at: datetime | None = None
    """The end; None while it runs, and for ever where the node was lost."""
    last_seen_at: datetime
    """The latest heartbeat; a lost attempt is billed up to it."""
    exit_code: int | None = None
    reason: str | None = None
    """Why it ended, where that was not its own exit."""
    instance_type: str
    capacity: Capacity | None = None
    """The capacity that its instances are priced at: what the main node's own says of itself, else what was submitted.
    On-Demand where one of several nodes on Spot is."""
    spot_usd_per_hour: float | None = None
    """What EC2 said, as the run was submitted or resumed, that an hour of one Spot instance costs.

    None: it did not say, and the recorded price counts."""
    zone: str | None = None
    """The availability zone of the main node; None: nobody said. The nodes of one job are in one zone, a gang's need
    not be."""
    accelerator: str
    nnodes: int
    world_size: int
    ran_with: dict[str, str] = {}
    """The image, with release and revision of the code, and its digest, where it ran in one; versions by package."""
    waited_instance_seconds: float = 0.0
    """Time that its nodes, where each is a job of its own, waited for each other before it, added up."""
    training_started_at: datetime | None = None
    """The begin of its first step; None: it came to none, or does not train."""
    resumed_from_step: int = 0
    """The step of the checkpoint that the training has loaded; 0: it began at its beginning, or is a script that reads
    its checkpoints itself."""
    restored_step: int | None = None
    """Of a script that reads its checkpoints itself: the newest one that was put back, 0 if there was none. Nobody sees
    whether the script has read it. None: no such script."""
    repeats_from_step: int | None = None
    """Of such a script: the step that it began at, at best, since it saved later ones again. None: no sign of it."""
    saved_at: datetime | None = None
    """When the newest checkpoint of such a script was taken. None: this attempt has saved none."""
    last_step: int = 0
    compiling_seconds: float = 0.0
    """What its steps have taken longer because a graph was compiled for each new shape of a batch."""
    saving_seconds: float = 0.0
    """Time that its training stood still for checkpoints, and for the model that it leaves."""
    cards: CardUse | None = None
    """None: nobody could say."""
    changed: dict[str, tuple[Any, Any]] = {}
    """Arguments that are not those of the checkpoint it resumed, since that was asked for: theirs, and its own."""

    @property
    def start_step(self) -> int:
        """The step that it began at, as far as that is known: a script is taken to have read what was put back."""
        if self.repeats_from_step is not None:
            return self.repeats_from_step
        return self.restored_step or self.resumed_from_step

    @property
    def may_repeat(self) -> bool:
        """Whether nobody knows if it did steps again: a checkpoint was put back for a script that reads it itself."""
        return bool(self.restored_step) and self.repeats_from_step is None


class Inputs(BaseModel):
    """What tells the inputs of a script or an evaluation from any others, as `inputs.json` holds it."""

    model_config = ConfigDict(extra="forbid")

    fingerprints: dict[str, str]
    """By location; those of the hub are told by their revisions."""


class Stored(BaseModel):
    """A run's files on S3 as they are now, without old versions, and what it costs to keep them."""

    model_config = ConfigDict(extra="forbid")

    all_bytes: int
    checkpoint_bytes: int
    """The part of them that its checkpoints take, which expire."""
    usd_per_month: float
    price: str
    """The price, with its day and its source."""


class Verdict(BaseModel):
    """How a point stood among those that had reached a rung, and whether it was stopped there."""

    model_config = ConfigDict(extra="forbid")

    rung: int
    step: int
    """Of its evaluation: that of the rung, or the first one after it."""
    metric: str
    value: float | None
    """None: it was no number."""
    rank: int
    """From 1 on, which is the best."""
    of: int
    """The points that had reached the rung by then, itself included."""
    stops: bool

    @property
    def text(self) -> str:
        """Return it as text: `ranked 5 of 6 at step 200`."""
        no_number = f", where {self.metric} was no number" if self.value is None else ""
        return f"ranked {self.rank} of {self.of} at step {self.step}{no_number}"


class Receipt(BaseModel):
    """The account of a run over all its attempts so far. Costs are instance hours times a row's price: an estimate."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    team: str
    job: str
    state: Literal["running", "interrupted", "succeeded", "failed"]
    attempts: list[Attempt]
    duration_seconds: float
    """Sum of the attempts' durations."""
    instance_hours: float
    instance_type: str
    """The newest attempt's; a run may have gone on on another."""
    on_demand_usd: float
    """Cost of all attempts, each on its own instance type, at On-Demand prices."""
    spot_usd: float
    """Cost of all attempts at Spot prices."""
    estimated_usd: float | None = None
    """Cost of all attempts, each at the price of the capacity that it ran on."""
    saved_usd: float | None = None
    """What On-Demand instances would have cost more than this. None: it ran on a stand-in, for which nobody pays."""
    saved_percent: float | None = None
    waiting_usd: float | None = None
    """The part of estimated_usd in which nodes waited for each other."""
    starting_usd: float | None = None
    """The part of it from each attempt's start to its first step."""
    compiling_usd: float | None = None
    """The part of it in which graphs were compiled."""
    saving_usd: float | None = None
    """The part of it in which the training stood still for saves."""
    lost_usd: float | None = None
    """The part of it in which steps were made that a later attempt had to make again."""
    idle_usd: float | None = None
    """The part of it, once an attempt had begun to work, in which no card did anything for no known reason."""
    stored: Stored | None = None
    """What its files take; `trainyard receipt` and the report ask S3, the container does not."""
    budget: str = ""
    """The used part of max_usd and max_hours as text; empty where the spec sets neither."""
    price_date: str
    price_source: str
    estimate_note: str
    """The limits of the figures, to be read before they are quoted."""
    halving: Verdict | None = None
    """Of a point of a sweep with successive halving: how it stood when it was compared with the others last."""
    result: dict[str, Any]
    """The final metrics: of a fine-tuning, eval_accuracy, eval_f1, eval_majority_accuracy, train_samples_per_second."""

    @property
    def stopped_early(self) -> bool:
        """Return whether it ended well before its end, since successive halving stopped it."""
        return self.state == "succeeded" and self.halving is not None and self.halving.stops


log = logging.getLogger("trainyard")

Record = TypeVar("Record", bound=BaseModel)

_WARNINGS_KEPT = 4096
"""Records are read every half minute, and each warning is given once: so many are remembered."""

_LARGEST_STEP = 2**53

_LEFT_OUT = "cannot be read: it is left out"
_AS_IT_IS = "trainyard fetch RUN brings it as it is; its run is resumed without it"


class UnreadableError(TrainyardError):
    """A file that is no record of its kind: it is damaged, or of a release that writes another one."""


def parse_record(model: type[Record], content: bytes, *, place: object) -> Record:
    """Return the record that lies at `place`. Raises UnreadableError where it is none."""
    try:
        return model.model_validate_json(content, extra="ignore")
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{place} cannot be read: {_first_line(error)}",
            next_step=_AS_IT_IS,
        ) from None


def read_record(model: type[Record], content: bytes | None, *, place: object) -> Record | None:
    """Return the record that lies at `place`; None where there is none, or, with a warning, none that can be read."""
    try:
        return None if content is None else parse_record(model, content, place=place)
    except UnreadableError:
        _warn(f"{place} {_LEFT_OUT}")
        return None


def parse_receipt(content: bytes, *, place: object) -> Receipt:
    """Return the receipt that lies at `place`. Raises UnreadableError where it is none, or cannot be priced here."""
    receipt = parse_record(Receipt, content, place=place)
    receipt = receipt.model_copy(update={"result": _finite(receipt.result, place)})
    if not receipt.attempts:
        raise UnreadableError(f"{place} cannot be read: it has no attempt", next_step=_AS_IT_IS)
    try:
        for attempt in receipt.attempts:
            instance_type(attempt.instance_type)  # an older release may not know it
    except TrainyardError as error:
        raise UnreadableError(f"{place} cannot be read: {error.args[0]}", next_step=_AS_IT_IS) from None
    return receipt


def read_receipt(content: bytes | None, *, place: object) -> Receipt | None:
    """Return the receipt that lies at `place`; None where there is none, or, with a warning, none that can be read."""
    try:
        return None if content is None else parse_receipt(content, place=place)
    except UnreadableError:
        _warn(f"{place} {_LEFT_OUT}")
        return None


def read_attempt(content: bytes, *, place: object) -> Attempt | None:
    """Return the record of an attempt; None, with a warning, where it cannot be read or priced."""
    try:
        attempt = parse_record(Attempt, content, place=place)
        instance_type(attempt.instance_type)  # an older release may not know it
    except TrainyardError:
        _warn(f"{place} cannot be read: it is left out, and so is what that attempt took")
        return None
    return attempt


def read_json_lines(
    content: bytes | None, *, place: object, accept: Callable[[dict[str, Any]], dict[str, Any] | None] = dict
) -> list[dict[str, Any]]:
    """Return the objects of a file that has one a line, each as `accept` returns it.

    What is no object is left out with one warning for the file, and so is what `accept` returns None for.
    """
    found = map(_object, (content or b"").splitlines())
    accepted = [None if line is None else accept(line) for line in found]
    lines = [None if line is None else _finite(line, place) for line in accepted]
    if None in lines:
        _warn(
            f"{place}: left out {counted(lines.count(None), 'line')} that cannot be read, the first at line "
            f"{lines.index(None) + 1}"
        )
    return [line for line in lines if line is not None]


def line_with_step(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl as it is; None where it has no step."""
    return line if is_step(line.get("step")) else None


def is_step(value: object) -> bool:
    """Return whether a value counts steps: a whole number that a program in any language can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_STEP


def _finite(values: dict[str, Any], place: object) -> dict[str, Any]:
    """Return values with None for each number that no metric can be: JSON takes 400 digits, and infinity by 1e999."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    nonsense = [name for name, value in numbers.items() if not abs(value) <= sys.float_info.max]
    if not nonsense:
        return values
    _warn(f"{place}: {', '.join(nonsense)} has values that are no finite number: these are left out")
    return {**values, **dict.fromkeys(nonsense)}


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
    """The record of a notebook that runs, as `notebook.json` holds it.

    Whoever has the token can run any code there, with the rights of the team's jobs.
    """

    model_config = ConfigDict(extra="forbid")

    job_id: str | None
    """The Batch job, and which attempt of it: one that was lost leaves its file behind."""
    attempt: int
    port: int
    """The port on the instance's loopback."""
    token: str

    def url(self, port: int | None = None, *, path: str = "lab") -> str:
        """Return the address for a browser. `port`: where the notebook's is forwarded to; None: it is here."""
        return f"http://127.0.0.1:{port or self.port}/{path}?token={self.token}"
