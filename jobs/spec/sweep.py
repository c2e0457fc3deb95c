"""A sweep: one spec that stands for many runs, its points, which differ in some arguments and share all else.

    sweep: {arguments.learning_rate: [1e-5, 3e-5], arguments.seed: [1, 2, 3], parallel: 2}
    sweep: {random: 20, arguments.learning_rate: {log: [1e-6, 1e-3]}, arguments.epochs: {integers: [1, 8]}}

The sweep is one submission: an array job whose children, the workers, each take the next point that nobody has. Each
point is a run of its own, with a folder of its own. In the sweep's folder lie, beside its spec:

    sweep.json                the points: one `SweepRecord`
    claims/JOB/N.json         of the Batch job JOB: which worker took point N, and how that ended, one `Claim`
    claims/JOB/stop.json      a `Claim` with the reason why no further point began: the budget
    halving/                  how the points stood at the rungs of successive halving (jobs.spec.sweep)

and in each point's folder `member-of.json`, which names the sweep.
"""

import copy
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from typing_extensions import Self

from jobs.core.errors import UsageError, did_you_mean
from jobs.core.records import Verdict
from jobs.core.run import new_run_id
from jobs.core.words import main_result
from jobs.spec.arguments import Arguments, Strict
from jobs.spec.recipe import SMALLER_IS_BETTER, Recipe

_FOLDER = "halving"


class Halving(Strict):
    """When the worst points of a sweep are stopped."""

    from_step: int = Field(ge=1)
    """First step at which points are compared."""
    factor: int = Field(default=3, ge=2, le=100)
    """One of this many points goes on, and the next comparison is at this many times the step."""

    def rung(self, step: int) -> int | None:
        """Return the last rung up to a step; None before the first one."""
        if step < self.from_step:
            return None
        rung = self.from_step
        while rung * self.factor <= step:
            rung *= self.factor
        return rung


class Comparison(Halving):
    """How a point of a sweep compares itself with the others."""

    metric: str
    smaller_is_better: bool

    def verdict(self, own: "RungValue", others: Iterable["RungValue"], *, rung: int) -> Verdict:
        """Return whether a point goes on. `others`: those that have reached the rung, without it.

        Equals share the better rank. A value that is no number is the worst, and does not go on even where it is alone.
        """
        values = [other.value for other in others]
        rank = 1 + sum(self._is_better(value, own.value) for value in values)
        of = 1 + len(values)
        stops = own.value is None or rank > max(1, of // self.factor)
        return Verdict(rung=rung, step=own.step, metric=self.metric, value=own.value, rank=rank, of=of, stops=stops)

    def _is_better(self, value: float | None, than: float | None) -> bool:
        if value is None or than is None:
            return value is not None
        return value < than if self.smaller_is_better else value > than


class RungValue(BaseModel):
    """What a point was evaluated to when it reached a rung."""

    model_config = ConfigDict(extra="forbid")

    step: int
    value: float | None
    """None: it was no number."""

    @classmethod
    def of(cls, step: int, value: float | None) -> "RungValue":
        return cls(step=step, value=float(value) if value is not None and math.isfinite(value) else None)


def values_folder(rung: int) -> str:
    return f"{_FOLDER}/{rung}/values"


def value_name(rung: int, number: int) -> str:
    return f"{values_folder(rung)}/{number}.json"


def verdict_name(rung: int, number: int) -> str:
    return f"{_FOLDER}/{rung}/verdicts/{number}.json"


SWEEP = "sweep.json"
MEMBER_OF = "member-of.json"
SWEEP_CLAIMS = "claims/"

SWEEP_TAG = "trainyard:sweep"
"""Tag of a sweep's job; its value is how many points the job has to run."""

NO_POINT_LEFT_REASON = "no point of the sweep is left for this worker"
"""The reason of a worker that was cancelled before it started, since the others had taken all points."""

BEST = "@best"
"""Ends the name of a run in place of the best point's id: `run://name@best/model`."""

MAX_POINTS = 1000

_PREFIX = "arguments."
_NAME_CHARACTERS = 63 - len("-p1000")
_DRAWS_A_POINT = 100
"""So often is drawn anew where a point was drawn before."""


class Range(Strict):
    """Where the values of an argument are drawn from. It has one of its keys."""

    log: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """Least and greatest of numbers above 0; each order of magnitude is drawn as often."""
    uniform: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """Least and greatest of numbers, each drawn as often."""
    integers: list[int] | None = Field(default=None, min_length=2, max_length=2)
    """Least and greatest of whole numbers, each drawn as often."""

    @model_validator(mode="after")
    def _is_one_range(self) -> Self:
        given = [ends for ends in (self.log, self.uniform, self.integers) if ends is not None]
        if len(given) != 1:
            raise ValueError("a range is one of {log: [1e-6, 1e-3]}, {uniform: [0, 0.5]} and {integers: [1, 8]}")
        least, greatest = given[0]
        if not least < greatest:
            raise ValueError(f"a range goes from the least to the greatest, not from {least} to {greatest}")
        if self.log is not None and least <= 0:
            raise ValueError(f"a log range begins above 0, not at {least}")
        return self

    def draw(self, share: float) -> int | float:
        """Return the value at a share of the range, from 0 to below 1; numbers with four figures."""
        if self.integers is not None:
            least, greatest = self.integers
            return least + int(share * (greatest - least + 1))
        if self.log is not None:
            low, high = self.log
            found = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            low, high = self.uniform or (0.0, 1.0)
            found = low + share * (high - low)
        return min(high, max(low, float(f"{found:.4g}")))


def _tag(values: Any) -> str:
    return "values" if isinstance(values, list) else "range"


Values = Annotated[Annotated[list[Any], Tag("values")] | Annotated[Range, Tag("range")], Discriminator(_tag)]


class Sweep(Strict):
    """The points of a sweep, how many run at once, and what ranks them."""

    model_config = ConfigDict(json_schema_extra={"patternProperties": {r"^arguments\.": {}}})

    arguments: dict[str, Values] = Field(default_factory=dict)
    """Values of each argument, or a range with `random`; in short `arguments.NAME` as a key of sweep itself."""
    random: int | None = Field(default=None, ge=1, le=MAX_POINTS)
    """Number of points to draw. Default: one for each combination of the values."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of what random draws."""
    parallel: int | None = Field(default=None, ge=1, le=MAX_POINTS)
    """Points that run at once, each on an instance. Default: as many as the stage has room for."""
    metric: str | None = None
    """Result that ranks the points. Default: the main result of the kind."""
    direction: Literal["minimize", "maximize"] | None = None
    """minimize or maximize. Default: minimize metrics that end in loss or perplexity."""
    halving: Halving | None = None
    """Stop early the points that are behind the others. Default: each runs to its end."""

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        short = {key: value for key, value in data.items() if isinstance(key, str) and key.startswith(_PREFIX)}
        given = data.get("arguments", {})
        if not short or not isinstance(given, Mapping):
            return data
        rest = {key: value for key, value in data.items() if key not in short}
        return {**rest, "arguments": {**given, **{key.removeprefix(_PREFIX): value for key, value in short.items()}}}

    @field_validator("arguments", mode="before")
    @classmethod
    def _values_or_range(cls, arguments: Any) -> Any:
        if not isinstance(arguments, Mapping):
            return arguments
        for name, values in arguments.items():
            if not isinstance(name, str) or not all(name.split(".")):
                raise ValueError(f"'{name}' is no argument's name; it should look like learning_rate")
            if name.partition(".")[0] == "code":
                raise ValueError("code: all points run the same")
            if not isinstance(values, (list, Mapping, Range)) or not values:
                raise ValueError(f"{name}: its values are a list, [1, 2, 3], or a range, {{log: [1e-6, 1e-3]}}")
        return arguments

    @model_validator(mode="after")
    def _has_points(self) -> Self:
        if not self.arguments:
            raise ValueError("it names no argument; it should look like {arguments.learning_rate: [1e-5, 3e-5]}")
        names = list(self.arguments)
        for name in names:
            if any(other.startswith(f"{name}.") for other in names):
                raise ValueError(f"{name}: it is swept as a whole and in parts")
        if self.random is None:
            ranges = [name for name, values in self.arguments.items() if isinstance(values, Range)]
            if ranges:
                raise ValueError(f"{ranges[0]}: values are drawn from a range where random says how many points")
            count = math.prod(len(values) for values in self.arguments.values() if isinstance(values, list))
            if count > MAX_POINTS:
                raise ValueError(f"{count} points; a sweep has at most {MAX_POINTS}. Next: random: {MAX_POINTS}")
        return self

    def smaller_is_better(self, metric: str) -> bool:
        if self.direction is not None:
            return self.direction == "minimize"
        return metric in SMALLER_IS_BETTER or metric.endswith(("loss", "perplexity"))

    def metric_of(self, result: Mapping[str, Any]) -> tuple[str, float] | None:
        """Return the figure that ranks a point, with its name; None where its result has none."""
        if self.metric is None:
            return main_result(result)
        value = result.get(self.metric)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return (self.metric, float(value)) if is_number else None  # type: ignore[arg-type]

    def comparison(self, arguments: Arguments) -> Comparison | None:
        """Return how a point with these arguments compares itself with the others; None: it does not.

        Raises UsageError where it never could.
        """
        if self.halving is None:
            return None
        known = arguments.metrics()
        if known == ():
            raise UsageError("sweep.halving: this kind of job has no evaluations by which points could be compared")
        main = main_result(dict.fromkeys(known or (), 0.0))
        metric = self.metric or (main[0] if main else None)
        if metric is None:
            raise UsageError(
                "sweep.halving: only your script knows what it evaluates; name that in sweep.metric (eval_loss, …)"
            )
        if known is not None and metric not in known:
            raise UsageError(
                f"sweep.metric: '{metric}' is no metric of this job's evaluations{did_you_mean(metric, known)}; they "
                f"have {', '.join(known)}"
            )
        if isinstance(arguments, Recipe):
            _check_evaluates(arguments, self.halving.from_step)
        return Comparison(**self.halving.model_dump(), metric=metric, smaller_is_better=self.smaller_is_better(metric))


def _check_evaluates(recipe: Recipe, from_step: int) -> None:
    """Raise UsageError where no evaluation comes between a step and the end, as far as the recipe tells."""
    every, max_steps = recipe.evaluate_every_steps, getattr(recipe, "max_steps", None)
    if every is None:
        raise UsageError("sweep.halving compares evaluations: set arguments.evaluate_every_steps")
    first = from_step if every == "epoch" else -(-from_step // every) * every
    if max_steps is not None and first >= max_steps:
        raise UsageError(
            f"sweep.halving: the training ends at step {max_steps}, before its first evaluation from step {from_step} "
            f"on, which would be at step {first}; lower from_step or arguments.evaluate_every_steps"
        )


@dataclass(frozen=True, kw_only=True)
class SweepSize:
    """How much one job of a sweep has to do."""

    points: int
    """Those that it has to run: of a resumed sweep, the ones that are left."""
    workers: int
    """So many children run them."""

    @classmethod
    def of(cls, sweep: Sweep, count: int, *, room: int | None = None) -> "SweepSize":
        """Return the size of a sweep of `count` points.

        `room`: instances that its queue can hold. More workers than that would wait until the others have run their
        points, and start an instance each to find nothing to do. None: unknown.
        """
        most = [number for number in (sweep.parallel, room) if number is not None]
        return cls(points=count, workers=max(1, min([count, *most])))

    @property
    def rounds(self) -> int:
        """Return how many points a worker runs, one after the other, where all take as long."""
        return -(-self.points // self.workers)


def points(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the points, each as the values of the arguments that are swept: of a grid the last argument's first.

    Fewer than `random` asks for where there are no more that differ.
    """
    names = list(sweep.arguments)
    if sweep.random is None:
        columns = [values for values in sweep.arguments.values() if isinstance(values, list)]
        return [dict(zip(names, each, strict=True)) for each in itertools.product(*columns)]
    shares = random.Random(sweep.seed)  # noqa: S311 - the same points each time, and no secret
    found: dict[str, dict[str, Any]] = {}
    for _ in range(sweep.random * _DRAWS_A_POINT):
        point = {name: _drawn(values, shares.random()) for name, values in sweep.arguments.items()}
        found.setdefault(repr(point), point)
        if len(found) == sweep.random:
            break
    return list(found.values())


def _drawn(values: Sequence[Any] | Range, share: float) -> Any:
    return values.draw(share) if isinstance(values, Range) else values[int(share * len(values))]


def with_values(arguments: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with a point's values in them. Raises UsageError where a path leads into what has no keys."""
    found = copy.deepcopy(dict(arguments))
    for path, value in point.items():
        set_path(found, path.split("."), value, what=f"sweep: '{_PREFIX}{path}'")
    return found


def set_path(target: Any, keys: Sequence[str], value: Any, *, what: str) -> None:
    """Put a value into nested mappings. Raises UsageError, which begins with `what`, where none can hold it."""
    for key in keys[:-1]:
        if not isinstance(target, dict):
            break
        target = target.setdefault(key, {})
    if not isinstance(target, dict):
        raise UsageError(f"{what} leads into a value that holds no keys")
    target[keys[-1]] = value


def values_text(point: Mapping[str, Any]) -> str:
    """Return a point's values as text: `learning_rate 3e-05, seed 1`."""
    return ", ".join(f"{name} {value}" for name, value in point.items())


def point_name(name: str, number: int, *, count: int) -> str:
    """Return what a point is called: `reviews-p07`, the seventh of some dozens."""
    return f"{name}-p{number:0{len(str(count))}d}"


def point_ids(name: str, *, count: int, now: datetime) -> list[str]:
    """Return the points' run ids. They sort just before the sweep's own, which is the newest run then."""
    before = now - timedelta(microseconds=20)  # a digit of the id is a little less
    return [new_run_id(point_name(name, number, count=count), now=before) for number in range(1, count + 1)]


def check_name(name: str) -> None:
    """Raise ValueError where the points' names would be too long."""
    if len(name) > _NAME_CHARACTERS:
        raise ValueError(f"name: of a sweep it has at most {_NAME_CHARACTERS} characters, since points add theirs")


class PointRecord(BaseModel):
    """One point of a sweep, as sweep.json holds it."""

    model_config = ConfigDict(extra="forbid")

    number: int
    """From 1 on."""
    run_id: str
    values: dict[str, Any]
    """Those of the arguments that are swept."""
    arguments: dict[str, Any]
    """All of its arguments, as its container gets them."""


class SweepRecord(BaseModel):
    """The points of a sweep, as sweep.json holds them."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    points: list[PointRecord]


class MemberOf(BaseModel):
    """The sweep of which a run is a point."""

    model_config = ConfigDict(extra="forbid")

    sweep: str
    number: int


class Claim(BaseModel):
    """A worker's word that it runs a point, or how that ended."""

    model_config = ConfigDict(extra="forbid")

    child: int
    """The worker: its index among the children of the job."""
    starts: int = 0
    ended: Literal["succeeded", "stopped early", "failed", "stopped"] | None = None
    """stopped early: by successive halving; stopped: at the end of the sweep's budget. None: it goes on, or its worker
    was lost."""
    reason: str = ""


def claim_name(job: str, number: int) -> str:
    return f"{SWEEP_CLAIMS}{job}/{number}.json"


def stop_name(job: str) -> str:
    return f"{SWEEP_CLAIMS}{job}/stop.json"


def claimed(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield job and point of each claim, from their names below claims/."""
    for name in names:
        job, _, file = name.partition("/")
        number = file.removesuffix(".json")
        if number.isdecimal():
            yield job, int(number)
