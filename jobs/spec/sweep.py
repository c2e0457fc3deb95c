"""A sweep: one spec for many runs, its points, which differ in some arguments and share everything else.

    sweep: {arguments.learning_rate: [1e-5, 3e-5], arguments.seed: [1, 2, 3], parallel: 2}
    sweep: {random: 20, arguments.learning_rate: {log: [1e-6, 1e-3]}, arguments.epochs: {integers: [1, 8]}}

The sweep is one submission: an array job whose children, the workers, each claim the next unclaimed point. Each point
is a separate run with its own folder. The sweep's folder contains, in addition to the spec:

    sweep.json                       the points: one `SweepRecord`
    claims/JOB/N.json                one `Claim`: which worker of the Batch job JOB took point N, and how it ended
    claims/JOB/stop.json             a `Claim` with the reason why no further point was started: the budget
    halving/RUNG/values/N.json       one `RungValue`: the evaluation of point N at that rung
    halving/RUNG/verdicts/N.json     one `Verdict`: whether point N continued

Each point's folder contains `member-of.json`, which names the sweep.

Successive halving stops points that are behind the others at a step, called a rung:

    sweep: {arguments.learning_rate: [1e-5, 3e-5, 1e-4], halving: {from_step: 100, factor: 3}}

Here the rungs are at the steps 100, 300, 900, …. At its first evaluation at or after a rung, a point is ranked against
every point that has reached the rung so far, and continues only if it is in the top third; it does not wait for the
others. (This is ASHA: Li et al. 2018, arXiv 1810.05934, in the variant that only stops points and never restarts them,
like Optuna's SuccessiveHalvingPruner.) Values and verdicts are written once, so that a resumed point keeps its
verdict.
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
from jobs.core.words import main_result, smaller_is_better
from jobs.spec.arguments import Arguments, Strict
from jobs.spec.recipe import Recipe

_FOLDER = "halving"


class Halving(Strict):
    """When to stop the worst points of a sweep."""

    from_step: int = Field(ge=1)
    """First step at which points are compared."""
    factor: int = Field(default=3, ge=2, le=100)
    """One in this many points continues, and the next comparison is at this multiple of the step."""

    def rung(self, step: int) -> int | None:
        """Return the last rung at or before a step; None before the first rung."""
        if step < self.from_step:
            return None
        rung = self.from_step
        while rung * self.factor <= step:
            rung *= self.factor
        return rung


class Comparison(Halving):
    """How to compare a point of a sweep with the other points."""

    metric: str
    smaller_is_better: bool

    def verdict(self, own: "RungValue", others: Iterable["RungValue"], *, rung: int) -> Verdict:
        """Return whether a point continues. `others` are the other points that have reached the rung.

        Equal values share the better rank. A value that is not a number ranks last and stops its point.
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
    """The evaluation of a point when it reached a rung."""

    model_config = ConfigDict(extra="forbid")

    step: int
    value: float | None
    """None if it was not a number."""

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
"""Tag of a sweep's job; its value is the number of points that the job has to run."""

NO_POINT_LEFT_REASON = "no point of the sweep is left for this worker"
"""Reason of a worker that was cancelled before it started, because other workers had taken all points."""

BEST = "@best"
"""Suffix of a sweep's name that stands for its best point: `run://name@best/model`."""

MAX_POINTS = 1000

_PREFIX = "arguments."
_NAME_CHARACTERS = 63 - len("-p1000")
_DRAWS_PER_POINT = 100
"""Maximum draws per point; a point that was drawn before is drawn again."""


class Range(Strict):
    """A range from which values of an argument are drawn; exactly one key is set."""

    log: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """Minimum and maximum, both above 0; each order of magnitude is equally likely."""
    uniform: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """Minimum and maximum; each number is equally likely."""
    integers: list[int] | None = Field(default=None, min_length=2, max_length=2)
    """Minimum and maximum; each whole number is equally likely."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        given = [ends for ends in (self.log, self.uniform, self.integers) if ends is not None]
        if len(given) != 1:
            raise ValueError("a range must be one of {log: [1e-6, 1e-3]}, {uniform: [0, 0.5]} or {integers: [1, 8]}")
        low, high = given[0]
        if not low < high:
            raise ValueError(f"a range must be [minimum, maximum], not [{low}, {high}]")
        if self.log is not None and low <= 0:
            raise ValueError(f"the minimum of a log range must be above 0, not {low}")
        return self

    def draw(self, share: float) -> int | float:
        """Return the value at `share` of the range (0 to below 1), rounded to four significant digits."""
        if self.integers is not None:
            first, last = self.integers
            return first + int(share * (last - first + 1))
        if self.log is not None:
            low, high = self.log
            found = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            low, high = self.uniform or (0.0, 1.0)
            found = low + share * (high - low)
        return min(high, max(low, float(f"{found:.4g}")))


Values = Annotated[
    Annotated[list[Any], Tag("values")] | Annotated[Range, Tag("range")],
    Discriminator(lambda values: "values" if isinstance(values, list) else "range"),
]


class Sweep(Strict):
    """The points of a sweep, how many run at once, and what ranks them."""

    model_config = ConfigDict(json_schema_extra={"patternProperties": {r"^arguments\.": {}}})

    arguments: dict[str, Values] = Field(default_factory=dict)
    """Values of each argument, or a range if `random` is set; as a shorthand, `arguments.NAME` can be a key of
    sweep."""
    random: int | None = Field(default=None, ge=1, le=MAX_POINTS)
    """Number of points to draw at random. Default: one point for each combination of the values."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the random draws."""
    parallel: int | None = Field(default=None, ge=1, le=MAX_POINTS)
    """Number of points that run at once, each on one instance. Default: as many as the stage has room for."""
    metric: str | None = None
    """Metric that ranks the points. Default: the main metric of the kind."""
    direction: Literal["minimize", "maximize"] | None = None
    """Whether smaller or larger values of the metric are better. Default: minimize if the metric ends in loss,
    perplexity, rmse or mae, else maximize."""
    halving: Halving | None = None
    """Stop points early if they are behind the others. Default: every point runs to its end."""

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, data: Any) -> Any:
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
    def _check_arguments(cls, arguments: Any) -> Any:
        if not isinstance(arguments, Mapping):
            return arguments
        for name, values in arguments.items():
            if not isinstance(name, str) or not all(name.split(".")):
                raise ValueError(f"'{name}' is not an argument name; it should look like learning_rate")
            if name.partition(".")[0] == "code":
                raise ValueError("code: all points must run the same code")
            if not isinstance(values, (list, Mapping, Range)) or not values:
                raise ValueError(f"{name}: must be a list, [1, 2, 3], or a range, {{log: [1e-6, 1e-3]}}")
        return arguments

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        if not self.arguments:
            raise ValueError("sweeps no argument; it should look like {arguments.learning_rate: [1e-5, 3e-5]}")
        names = list(self.arguments)
        for name in names:
            if any(other.startswith(f"{name}.") for other in names):
                raise ValueError(f"{name}: is swept both as a whole and in parts")
        if self.random is None:
            ranges = [name for name, values in self.arguments.items() if isinstance(values, Range)]
            if ranges:
                raise ValueError(f"{ranges[0]}: a range needs random, the number of points to draw")
            count = math.prod(len(values) for values in self.arguments.values() if isinstance(values, list))
            if count > MAX_POINTS:
                raise ValueError(
                    f"has {count} points, more than {MAX_POINTS}; draw some of them with random: {MAX_POINTS}"
                )
        return self

    def smaller_is_better(self, metric: str) -> bool:
        if self.direction is not None:
            return self.direction == "minimize"
        return smaller_is_better(metric)

    def metric_of(self, result: Mapping[str, Any]) -> tuple[str, float] | None:
        """Return the metric that ranks a point, as name and value; None if its result does not have it."""
        if self.metric is None:
            return main_result(result)
        value = result.get(self.metric)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return (self.metric, float(value)) if is_number else None  # type: ignore[arg-type]

    def comparison(self, arguments: Arguments) -> Comparison | None:
        """Return how to compare a point that has these arguments with the others; None without successive halving.

        Raises UsageError if a comparison would never be possible.
        """
        if self.halving is None:
            return None
        known = arguments.evaluation_metrics()
        if known == ():
            raise UsageError("sweep.halving: this kind of job has no evaluations to compare points by")
        main = main_result(dict.fromkeys(known or (), 0.0))
        metric = self.metric or (main[0] if main else None)
        if metric is None:
            raise UsageError(
                "sweep.halving: the metrics of a script are unknown; set sweep.metric to one it logs (eval_loss, …)"
            )
        if known is not None and metric not in known:
            raise UsageError(
                f"sweep.metric: evaluations of this job have no metric '{metric}'{did_you_mean(metric, known)}"
            )
        if isinstance(arguments, Recipe):
            _check_evaluates(arguments, self.halving.from_step)
        return Comparison(**self.halving.model_dump(), metric=metric, smaller_is_better=self.smaller_is_better(metric))


def _check_evaluates(recipe: Recipe, from_step: int) -> None:
    """Raise UsageError if the recipe has no evaluation between a step and the end of the training."""
    every, max_steps = recipe.evaluate_every_steps, getattr(recipe, "max_steps", None)
    if every is None:
        raise UsageError("sweep.halving needs evaluations: set arguments.evaluate_every_steps")
    first = from_step if every == "epoch" else -(-from_step // every) * every
    if max_steps is not None and first >= max_steps:
        raise UsageError(
            f"sweep.halving: the training ends at step {max_steps}, before the first evaluation after from_step "
            f"{from_step}, which would be at step {first}; lower from_step or arguments.evaluate_every_steps"
        )


@dataclass(frozen=True, kw_only=True)
class SweepSize:
    """The number of points and workers of one job of a sweep."""

    points: int
    """Points that the job has to run; for a resumed sweep, the remaining points."""
    workers: int
    """Children of the array job, which run the points."""

    @classmethod
    def of(cls, sweep: Sweep, count: int, *, room: int | None = None) -> "SweepSize":
        """Return the size of a sweep of `count` points.

        `room` is the number of instances that the queue can hold, or None if unknown. More workers would wait until
        the others have run all points, and then each start an instance with nothing to do.
        """
        most = [number for number in (sweep.parallel, room) if number is not None]
        return cls(points=count, workers=max(1, min([count, *most])))

    @property
    def rounds(self) -> int:
        """Return how many points a worker runs one after the other, if all take equally long."""
        return -(-self.points // self.workers)


def points(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the points, each as a dict of the swept arguments; in a grid, the last argument varies fastest.

    Returns fewer than `random` points if there are not enough different ones.
    """
    names = list(sweep.arguments)
    if sweep.random is None:
        columns = [values for values in sweep.arguments.values() if isinstance(values, list)]
        return [dict(zip(names, each, strict=True)) for each in itertools.product(*columns)]
    shares = random.Random(sweep.seed)  # noqa: S311 - the same points each time, and no secret
    found: dict[str, dict[str, Any]] = {}
    for _ in range(sweep.random * _DRAWS_PER_POINT):
        point = {name: _drawn(values, shares.random()) for name, values in sweep.arguments.items()}
        found.setdefault(repr(point), point)
        if len(found) == sweep.random:
            break
    return list(found.values())


def _drawn(values: Sequence[Any] | Range, share: float) -> Any:
    return values.draw(share) if isinstance(values, Range) else values[int(share * len(values))]


def with_values(arguments: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with a point's values. Raises UsageError if a path leads into a value without keys."""
    found = copy.deepcopy(dict(arguments))
    for path, value in point.items():
        set_path(found, path.split("."), value, what=f"sweep: '{_PREFIX}{path}'")
    return found


def set_path(target: Any, keys: Sequence[str], value: Any, *, what: str) -> None:
    """Set a value in nested mappings. Raises UsageError, starting with `what`, if the path leads into a non-mapping."""
    for key in keys[:-1]:
        if not isinstance(target, dict):
            break
        target = target.setdefault(key, {})
    if not isinstance(target, dict):
        raise UsageError(f"{what} leads into a value that is not a mapping")
    target[keys[-1]] = value


def values_text(point: Mapping[str, Any]) -> str:
    """Return a point's values as text: `learning_rate 3e-05, seed 1`."""
    return ", ".join(f"{name} {value}" for name, value in point.items())


def point_name(name: str, number: int, *, count: int) -> str:
    """Return the name of a point: `reviews-p07` for the seventh of a few dozen points."""
    return f"{name}-p{number:0{len(str(count))}d}"


def point_ids(name: str, *, count: int, now: datetime) -> list[str]:
    """Return the points' run ids, which sort just before the sweep's so that the sweep is the newest run."""
    before = now - timedelta(microseconds=20)  # a digit of the id is about 15 microseconds
    return [new_run_id(point_name(name, number, count=count), now=before) for number in range(1, count + 1)]


def check_name(name: str) -> None:
    """Raise ValueError if the names of the points would be too long."""
    if len(name) > _NAME_CHARACTERS:
        raise ValueError(
            f"name: a sweep's name can have at most {_NAME_CHARACTERS} characters, because points append a number"
        )


class PointRecord(BaseModel):
    """One point of a sweep in sweep.json."""

    model_config = ConfigDict(extra="forbid")

    number: int
    """Number of the point, starting at 1."""
    run_id: str
    values: dict[str, Any]
    """Values of the swept arguments."""
    arguments: dict[str, Any]
    """All arguments of the point, as passed to its container."""


class SweepRecord(BaseModel):
    """The points of a sweep, stored as sweep.json."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    points: list[PointRecord]


class MemberOf(BaseModel):
    """The sweep that a run is a point of, stored as member-of.json."""

    model_config = ConfigDict(extra="forbid")

    sweep: str
    number: int


class Claim(BaseModel):
    """A worker's claim to run a point, and how the point ended."""

    model_config = ConfigDict(extra="forbid")

    child: int
    """The worker, as its index among the children of the job."""
    starts: int = 0
    """Number of times that the point was started."""
    ended: Literal["succeeded", "stopped early", "failed", "stopped"] | None = None
    """`stopped early` by successive halving, `stopped` at the end of the sweep's budget. None if the point is running,
    or its worker was lost."""
    reason: str = ""
    """Why the point failed or was stopped."""


def claim_name(job: str, number: int) -> str:
    return f"{SWEEP_CLAIMS}{job}/{number}.json"


def stop_name(job: str) -> str:
    return f"{SWEEP_CLAIMS}{job}/stop.json"


def claimed(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield job and point of each claim, given the names of files below claims/."""
    for name in names:
        job, _, file = name.partition("/")
        number = file.removesuffix(".json")
        if number.isdecimal():
            yield job, int(number)
