"""What a day of reclaims leaves of a training's work: arithmetic on a few durations."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jobs.train.launcher.shutdown import NOTICE_MARGIN_SECONDS, NOTICE_SECONDS
from jobs.train.trainer.notice import Measured, action, needed_seconds, save_seconds

DAY_SECONDS = 86_400.0

AtNotice = Literal["nothing", "leaves", "saves", "saves twice"]
"""What a training does when EC2 says that it takes the instance in two minutes.

- nothing: it trains until the instance is gone.
- leaves: it saves and leaves.
- saves: it saves, and trains on until the instance is gone; its regular saves go on.
- saves twice: it saves, trains on, saves again as late as it may (jobs/train/trainer/notice.py), and leaves.
"""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long things take, in seconds."""

    step: float
    stall: float
    """For which a save holds the training up at most."""
    upload: float
    """After that, until the checkpoint counts."""
    restart: float
    """From the time at which a job can start on an instance to the first step on it."""
    instance: float = 0.0
    """Before that, from the time at which the instance is held."""

    @property
    def save(self) -> float:
        return self.stall + self.upload


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a training does about reclaims."""

    name: str
    save_every_seconds: float
    """Seconds of steps between two saves."""
    at_notice: AtNotice = "nothing"
    resumes: bool = True


def useful_seconds(policy: Policy, costs: Costs, reclaims: Sequence[float], *, end: float = DAY_SECONDS) -> float:
    """Return the seconds of steps that the run has done, and not lost, when `end` comes.

    An instance is held from 0 on. At each of the `reclaims`, ascending, EC2 takes it, and another one is held from then
    on. An instance is paid for until then, also by who leaves it before.
    """
    kept, first_step = 0.0, costs.instance + costs.restart
    for until in reclaims:
        kept = kept + _kept(policy, costs, until - first_step) if policy.resumes else 0.0
        first_step = until + costs.instance + costs.restart
    return kept + _worked(policy, costs, end - first_step)


def _kept(policy: Policy, costs: Costs, seconds: float) -> float:
    """Return the work that is saved when the instance goes, so many seconds after the first step."""
    regular = _saved(policy, costs, seconds)
    until_notice = _worked(policy, costs, seconds - NOTICE_SECONDS)
    if policy.at_notice == "nothing" or costs.save + costs.step > NOTICE_SECONDS:
        return regular
    if policy.at_notice == "saves twice":
        left, measured = NOTICE_SECONDS - NOTICE_MARGIN_SECONDS, Measured(save=costs.save, step=costs.step)
        saving = replace(measured, under_way=1e-9)
        if action(left, measured, has_saved=False) == "save" and action(left, saving, has_saved=True) is None:
            # On the mean the step under way then ends half a step later; the save at the notice stalls, too.
            trained = max(0.0, left - needed_seconds(measured) + costs.step / 2 - costs.stall)
            return _kept_by_last(policy, costs, seconds - NOTICE_SECONDS + trained, since=seconds - NOTICE_SECONDS)
    return until_notice if policy.at_notice != "saves" else max(until_notice, regular)


def _kept_by_last(policy: Policy, costs: Costs, last: float, *, since: float) -> float:
    """Return the work that is saved by the last save, which is due at `last`; the notice came at `since`."""
    saves = max(0.0, last + costs.stall) // (policy.save_every_seconds + costs.stall)
    begun = saves * (policy.save_every_seconds + costs.stall) - costs.stall
    # A regular save that begins shortly before is the last one: there is no time for another.
    if begun > max(since, last - save_seconds(Measured(save=costs.save))):
        return saves * policy.save_every_seconds
    return _worked(policy, costs, last)


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


def goodput(policy: Policy, costs: Costs, *, mean_hours: float, days: int, seed: int) -> float:
    """Return useful step time over the time that passes: the mean of `days` days."""
    useful = 0.0
    for day in range(days):
        useful += useful_seconds(policy, costs, reclaims(random.Random(f"{seed} {day}"), mean_hours=mean_hours))
    return useful / (days * DAY_SECONDS)
