"""Simulate how much of a day on Spot instances is useful work, with several ways to handle reclaims.

python -m tests.benchmarks.goodput                           simulate 1,000 days per figure
python -m tests.benchmarks.goodput --instance-seconds 240    with another duration

Goodput is the time of steps that are not lost, divided by the time for which an instance is held. The simulation covers
a day of that time, with random reclaims (a Poisson process) and EC2's notice two minutes before each. The policies:

    trainyard              saves at intervals (checkpoint_every_steps: auto, which assumes a reclaim every 6 h); saves
                           at the notice, continues, saves again shortly before the end, and exits
    save and exit          the same, but exits after the save at the notice; the instance is still held
    save once              the same, but continues after the save at the notice until the instance is gone
    notice ignored         saves by Young's formula with the true rate, and trains until the instance is gone
    every 500 steps        saves like transformers by default, and trains until the instance is gone
    published tutorial     saves every 5,000 steps and never resumes: only the work since the last reclaim counts

All except the tutorial resume from the last complete checkpoint, and all start equally fast. The default durations are
those that `saving`, and an earlier `start_up` with 1,000,000 examples, measured for BERT-base on two idle cores.
"""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from jobs.container.saving.interruption import NOTICE_MARGIN_SECONDS, NOTICE_SECONDS
from jobs.container.saving.interval import interval_seconds
from jobs.container.saving.stop import Measured, needed_seconds

DAY_SECONDS = 86_400.0
MEAN_HOURS = (1.0, 6.0, 24.0)
ASSUMED_HOURS = 6.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations, in seconds."""

    step: float = 0.78
    stall: float = 0.10
    """How long a save stops the training."""
    upload: float = 13.9
    """Time from the end of the stall until the checkpoint is complete."""
    restart: float = 10.3
    """Time from when a job can start on an instance to its first step."""
    instance: float = 0.0
    """Time from when the instance is held until a job can start on it; not measured yet."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a training handles reclaims."""

    name: str
    every: float
    """Seconds of steps between two saves."""
    at_notice: str = "nothing"
    """`nothing`, `saves`, `exits` or `saves twice`."""
    resumes: bool = True


def policies_of(costs: Costs, mean_hours: float) -> Sequence[Policy]:
    save = costs.stall + costs.upload
    auto = interval_seconds(
        stall_seconds=costs.stall, mean_seconds_between_reclaims=ASSUMED_HOURS * 3600, complete_seconds=save
    )
    return (
        Policy(name="trainyard", every=auto, at_notice="saves twice"),
        Policy(name="save and exit", every=auto, at_notice="exits"),
        Policy(name="save once", every=auto, at_notice="saves"),
        Policy(name="notice ignored", every=max(math.sqrt(2 * costs.stall * mean_hours * 3600), save)),
        Policy(name="every 500 steps", every=500 * costs.step),
        Policy(name="published tutorial", every=5000 * costs.step, resumes=False),
    )


def goodput(policy: Policy, costs: Costs, *, mean_hours: float, days: int, seed: int) -> float:
    """Return the mean share of useful step time over `days` days."""
    useful = 0.0
    for day in range(days):
        chance = random.Random(f"{seed} {day}")
        kept, held, gone = 0.0, 0.0, chance.expovariate(1 / (mean_hours * 3600))
        while gone < DAY_SECONDS:
            first_step = held + costs.instance + costs.restart
            kept = kept + _kept(policy, costs, gone - first_step) if policy.resumes else 0.0
            held, gone = gone, gone + chance.expovariate(1 / (mean_hours * 3600))
        useful += kept + _worked(policy, costs, DAY_SECONDS - held - costs.instance - costs.restart)
    return useful / (days * DAY_SECONDS)


def _kept(policy: Policy, costs: Costs, seconds: float) -> float:
    """Return the saved work, in seconds, when the instance ends `seconds` after the first step."""
    save = costs.stall + costs.upload
    complete = max(0.0, seconds - costs.upload) // (policy.every + costs.stall) * policy.every
    if policy.at_notice == "nothing" or save + costs.step > NOTICE_SECONDS:
        return complete
    saved_at = seconds - NOTICE_SECONDS
    if policy.at_notice == "saves twice":
        last = needed_seconds(Measured(save=save, step=costs.step)) + NOTICE_MARGIN_SECONDS
        # The current step then ends half a step later on average; the save at the notice also stops the training.
        saved_at += max(0.0, NOTICE_SECONDS - last + costs.step / 2 - costs.stall)
    worked = _worked(policy, costs, saved_at)
    return max(worked, complete) if policy.at_notice == "saves" else worked


def _worked(policy: Policy, costs: Costs, seconds: float) -> float:
    """Return the seconds of work in the first `seconds` after the first step."""
    saves, rest = divmod(max(0.0, seconds), policy.every + costs.stall)
    return saves * policy.every + min(rest, policy.every)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.goodput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for part in fields(Costs):
        parser.add_argument(f"--{part.name}-seconds", type=float, default=part.default, help=f"default: {part.default}")
    parser.add_argument("--days", type=int, default=1000, help="days to simulate for each figure (default: 1000)")
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args())
    costs = Costs(**{part.name: options[f"{part.name}_seconds"] for part in fields(Costs)})
    print(costs)
    print(f"{'a reclaim every':<20}" + "".join(f"{hours:>8g} h" for hours in MEAN_HOURS))
    for row in zip(*(policies_of(costs, hours) for hours in MEAN_HOURS), strict=True):
        shares = (
            goodput(policy, costs, mean_hours=hours, days=options["days"], seed=options["seed"])
            for policy, hours in zip(row, MEAN_HOURS, strict=True)
        )
        print(f"{row[0].name:<20}" + "".join(f"{100 * share:8.2f} %" for share in shares))


if __name__ == "__main__":
    main()
