"""Successive halving: those points of a sweep that are behind the others at a step, a rung, are stopped there.

    sweep: {arguments.learning_rate: [1e-5, 3e-5, 1e-4], halving: {from_step: 100, factor: 3}}

Rungs are at the steps 100, 300, 900, …. A point reaches one with its first evaluation at or after it, and goes on where
it is among the best third of those that have reached it by then, itself included; nobody waits for the others (ASHA: Li
et al. 2018, arXiv 1810.05934, in the form that stops points and never starts them again, as Optuna's
SuccessiveHalvingPruner has it). In the sweep's folder lie:

    halving/RUNG/values/N.json      what point N was evaluated to there: one `RungValue`
    halving/RUNG/verdicts/N.json    whether it went on: one `Verdict`

Each is written once, so that a point which was interrupted decides as it did before.
"""

import math
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

from jobs.core.records import Verdict
from jobs.spec.arguments import Strict

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
