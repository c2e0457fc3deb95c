"""Moments at which a training is interrupted: drawn, waited for, and struck."""

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import psutil

from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from tests.support.benchmarks.phases import EVALUATION, LAUNCHER, LOOK_SECONDS, PARTS, PHASES, START_UP, Phases, State
from tests.support.train.faulty_s3 import FaultyS3
from tests.support.train.launching import Launched, Run
from tests.support.train.metadata_service import REBALANCE, MetadataService

SIGTERM, SPOT, REBALANCED = ANNOUNCED = ("SIGTERM", "Spot notice", "rebalance")
NOTICES = (SPOT, REBALANCED)
"""Those that a launcher has to ask for."""
KILL_RANK, KILL_LAUNCHER, KILL_ALL = ("SIGKILL of a rank", "SIGKILL of the launcher", "SIGKILL of all")
WAYS = (*ANNOUNCED, KILL_RANK, KILL_LAUNCHER, KILL_ALL)
DENIED = "access denied"
"""By S3, to every request for a while: a way for those who have faults of S3 drawn too."""
DENIED_SECONDS = 3.0
BEFORE_PYTHON_LISTENS = -signal.SIGTERM
"""Exit code of a launcher whose SIGTERM came before its first line; process 1 of a container would not take it."""
LIMIT_SECONDS = {SIGTERM: 30.0, SPOT: 120.0, REBALANCED: 120.0}
"""For an announced ending: what Batch leaves between SIGTERM and SIGKILL, and EC2 between its notice and the end."""
NOTICE_SECONDS = (10.0, 18.0)
"""So long before its end an instance gets its notice, drawn between the two: trainings here are over in two minutes."""
SEEN_SECONDS = 5.0
"""For an attempt to see a notice; it takes some hundredths."""
AGAIN_SECONDS = 0.1
"""Between two looks at what takes long to be looked at."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One interruption, and what came of it."""

    way: str
    part: str
    """What is to be hit: a phase, or a part of the start-up."""
    after: float
    """From which step on, as a share of those that the attempt has before it."""
    within: float
    """When in the phase, as a share of its length."""
    is_drawn: bool = True
    """Or it is one that a drawn one needs before it."""
    attempt: int = 0
    seconds: float = 0.0
    hit: State | None = None
    exit_code: int | None = None
    """None: it did not end."""
    ended_after_seconds: float = 0.0
    """From the blow to the end of the launcher."""
    next_from: int = 0
    """The step that the next attempt resumed from; 0: there was no checkpoint yet, or no next attempt."""

    @property
    def phase(self) -> str:
        return START_UP if self.part in PARTS else self.part

    @property
    def counts(self) -> bool:
        """Return whether it is one of those that were drawn, and has hit what it was to hit."""
        return self.is_drawn and self.hit is not None and self.hit.part == self.part

    @property
    def is_answered(self) -> bool:
        """An announced ending must leave in time, with a code with which Batch starts the job again, or 0."""
        answers = (0, INTERRUPTED_EXIT_CODE, BEFORE_PYTHON_LISTENS)
        return self.exit_code is not None and (
            self.way not in ANNOUNCED
            or (self.exit_code in answers and self.ended_after_seconds <= LIMIT_SECONDS[self.way])
        )

    def again(self, chance: random.Random) -> "Moment":
        return replace(self, after=chance.random(), within=chance.random())


def drawn(count: int, seed: int, trainings: int, ways: Sequence[str] = WAYS) -> list[list[Moment]]:
    """For each training. Each way, each phase, and each part of a start-up as often as the others; of 30 moments none
    has the way and the phase of another."""
    chance = random.Random(seed)
    phases, ways, parts = list(PHASES), list(ways), list(PARTS)
    while True:
        for names in (phases, ways, parts):
            chance.shuffle(names)
        pairs = [(phases[number % len(phases)], ways[number % len(ways)]) for number in range(count)]
        found = [
            (way, parts[number % len(parts)] if phase == START_UP else phase)
            for number, (phase, way) in enumerate(pairs)
        ]
        if not any((way, part) == (KILL_RANK, LAUNCHER) for way, part in found):  # it has none yet
            break
    moments = [Moment(way=way, part=part, after=chance.random(), within=chance.random()) for way, part in found]
    of_each = [moments[count * number // trainings : count * (number + 1) // trainings] for number in range(trainings)]
    for of_one in of_each:
        chance.shuffle(of_one)
    return of_each


class Interruption:
    """Interrupt one attempt, at one moment."""

    def __init__(self, moment: Moment, run: Run, launched: Launched, phases: Phases, s3: FaultyS3) -> None:
        self._moment = moment
        self._s3 = s3
        self._run = run
        self._launched = launched
        self._phases = phases
        self._ranks: list[psutil.Process] | None = None

    def reach(self, lengths: Mapping[str, float], steps: int, chance: random.Random) -> bool:
        """Waits for the moment, whose phase is as long as in `lengths`; False where the attempt ends before it."""
        moment, within = self._moment, self._moment.within
        for state in self._phases.until_the_end():
            if state is None:
                continue
            if self._ranks is None and state.phase != START_UP:
                self._ranks = self._running_ranks()  # looking for them takes longer than a save
            first = self._phases.resumed_from
            if state.part != moment.part or (
                state.phase != START_UP and state.step < int(first + moment.after * (steps - first))
            ):
                continue
            if self._lasts(state, within * lengths[state.part]):
                return True
            within = chance.random()  # it was shorter this time
        return False

    def strike(self, metadata: MetadataService, chance: random.Random) -> State:
        """What was hit."""
        before = self._phases.look()
        way, now = self._moment.way, datetime.now(timezone.utc)
        if way == SIGTERM:
            self._launched.process.send_signal(signal.SIGTERM)
        elif way == SPOT:
            metadata.give_notice(chance.uniform(*NOTICE_SECONDS))
        elif way == REBALANCED:
            metadata.news[REBALANCE] = {"noticeTime": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
        elif way == DENIED:
            self._s3.denies = lambda _method, _path: True
        else:
            self._kill(chance)
        after, until = self._phases.look(), time.monotonic() + SEEN_SECONDS
        # In a start-up nobody asks yet: what counts there is when it was there to be seen.
        asks = way in NOTICES and self._moment.phase != START_UP
        while asks and not metadata.told.wait(LOOK_SECONDS) and time.monotonic() < until:
            after = self._phases.look()  # once it is told, an evaluation is left within milliseconds
        if way == DENIED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launched.process.wait(DENIED_SECONDS)
            self._s3.denies = lambda _method, _path: False
        if before is not None and after is not None and before.part == after.part:
            return after
        return State(phase="", what=", ".join(state.what if state else "something else" for state in (before, after)))

    def _lasts(self, state: State, seconds: float) -> bool:
        """Return whether it is still at that after so many seconds; in an evaluation, while rank 0 evaluates."""
        until = time.monotonic() + seconds
        while self._launched.process.poll() is None:
            now = self._phases.look()
            if now is None or now.what != state.what:
                return False
            if time.monotonic() >= until:
                if self._is_ready(state):
                    return True
                until = time.monotonic() + AGAIN_SECONDS
            time.sleep(LOOK_SECONDS)
        return False

    def _is_ready(self, state: State) -> bool:
        ranks = self._ranks
        if ranks is None and self._moment.way == KILL_RANK:
            return bool(self._running_ranks())
        return state.phase != EVALUATION or (ranks is not None and self._phases.evaluates(ranks[0].pid))

    def _kill(self, chance: random.Random) -> None:
        launcher = psutil.Process(self._launched.process.pid)
        ranks = self._ranks
        if self._moment.way == KILL_LAUNCHER:
            struck = [launcher]
        elif self._moment.way == KILL_RANK:
            struck = [chance.choice(ranks or self._running_ranks())]
        else:
            struck = [launcher, *ranks] if ranks else list(self._run.processes())
        for process in struck:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _running_ranks(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._launched.ranks()
        return []
