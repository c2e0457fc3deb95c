"""What a day of reclaims leaves of a training's work: arithmetic on a few durations."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.train.launcher.shutdown import NOTICE_SECONDS

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long things take, in seconds."""

    step: float
    stall: float
    """For which the training stands still for a save, while it goes on."""
    upload: float
    """After that, until the checkpoint counts."""
    ending: float
    """From a notice to the end of the attempt, its work saved."""
    restart: float
    """From the start of an attempt to its first step."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a training does about reclaims."""

    name: str
    save_every_seconds: float
    """Seconds of steps between two saves."""
    resumes: bool
    heeds_notice: bool


def useful_seconds(policy: Policy, costs: Costs, reclaims: Sequence[float], *, end: float = DAY_SECONDS) -> float:
    """Return the seconds of steps that the run has done, and not lost, when `end` comes.

    An instance is held from 0 on. At each of the `reclaims`, ascending, EC2 takes it, and another one is there at once.
    Who heeds the notice two minutes before works no more until then: the instance is still paid for.
    """
    kept = start = 0.0
    for until in (*reclaims, end):
        began = start + costs.restart
        notice = until - NOTICE_SECONDS
        if until == end:
            kept += _worked(policy, costs, end - began)
        elif policy.heeds_notice and costs.ending <= NOTICE_SECONDS:
            kept += _worked(policy, costs, notice - began)
        elif policy.resumes:
            kept += _saved(policy, costs, until - began)
        else:
            kept = 0.0
        start = until
    return kept


def _worked(policy: Policy, costs: Costs, seconds: float) -> float:
    """Return the work of steps in so many seconds from the first one on."""
    saves, rest = divmod(max(0.0, seconds), policy.save_every_seconds + costs.stall)
    return saves * policy.save_every_seconds + min(rest, policy.save_every_seconds)


def _saved(policy: Policy, costs: Costs, seconds: float) -> float:
    """Return the work of steps up to the last checkpoint that is complete by then."""
    saves = max(0.0, seconds - costs.upload) // (policy.save_every_seconds + costs.stall)
    return saves * policy.save_every_seconds


def reclaims(chance: random.Random, *, mean_hours: float, end: float = DAY_SECONDS) -> list[float]:
    """Return the moments of a Poisson process, up to `end`."""
    found: list[float] = []
    at = chance.expovariate(1 / (mean_hours * 3600))
    while at < end:
        found.append(at)
        at += chance.expovariate(1 / (mean_hours * 3600))
    return found


def goodput(
    policy: Policy, costs: Costs, *, mean_hours: float, days: int, seed: int, waiting_seconds: float = 0.0
) -> float:
    """Useful step time over the time in which an instance is held, on the mean of so many days.

    `waiting_seconds` after each reclaim, for another instance, are counted as if one were held.
    """
    useful = total = 0.0
    for day in range(days):
        times = reclaims(random.Random(f"{seed} {day}"), mean_hours=mean_hours)
        useful += useful_seconds(policy, costs, times)
        total += DAY_SECONDS + waiting_seconds * len(times)
    return useful / total
