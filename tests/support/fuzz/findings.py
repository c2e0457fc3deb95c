"""What a round of hostile input tried, and the faults that it found."""

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Literal, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.strategies import SearchStrategy

LIMIT_SECONDS = 5.0
"""What takes more processor time than this, in this process and those that it waited for, is a hang.

The clock would count what else the machine does: on a busy one every tenth start of Python takes longer.
"""

WAIT_SECONDS = 30.0
"""What takes longer on the clock is a hang too: it waits for something that does not come."""

_SHOWN_CHARACTERS = 600

T = TypeVar("T")


class Nonsense(Exception):  # noqa: N818 - it says what was found
    """Something was accepted that no job, no AWS and no user can work with."""


class _TookTooLong(BaseException):
    """A limit has passed; no handler of the code under test may swallow it."""


@dataclass(frozen=True)
class Finding:
    """A fault: what was given, and what came of it."""

    kind: Literal["traceback", "hang", "nonsense", "command"]
    given: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}\n    given: {self.given[:_SHOWN_CHARACTERS]}"


@dataclass
class Round:
    """Counts of one kind of input; `canary` is the file that every hostile text tries to make."""

    name: str
    canary: Path
    tried: int = 0
    accepted: int = 0
    most_processor_seconds: float = 0.0
    slowest_seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What else is to be told of it."""

    def look(self, what: object, attempt: Callable[[], bool]) -> None:
        """Make an attempt, which says whether its input was accepted; whatever it raises, or leaves behind, is a fault.

        What takes too long is tried once more: other work of the machine costs processor time too, as caches are lost.
        """
        self.tried += 1
        shown = what if isinstance(what, str) else repr(what)
        try:
            try:
                self.accepted += self._timed(attempt)
            except _TookTooLong:
                self.accepted += self._timed(attempt)
        except _TookTooLong:
            limits = f"more than {LIMIT_SECONDS:g} s of processor time or {WAIT_SECONDS:g} s on the clock"
            self.findings.append(Finding("hang", shown, f"{limits}, twice"))
        except Nonsense as error:
            self.findings.append(Finding("nonsense", shown, str(error)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - each is a fault
            self.findings.append(Finding("traceback", shown, f"{type(error).__name__}: {str(error)[:500]}"))
        if self.canary.exists():
            self.canary.unlink()
            self.findings.append(Finding("command", shown, "a command of the input ran"))

    def _timed(self, attempt: Callable[[], bool]) -> bool:
        began, used = time.monotonic(), _processor_seconds()
        with _limit():
            accepted = attempt()
        self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)
        used = _processor_seconds() - used
        self.most_processor_seconds = max(self.most_processor_seconds, used)
        if used > LIMIT_SECONDS:  # of processes that were started, which no timer of this one counts
            raise _TookTooLong
        return accepted

    def __str__(self) -> str:
        counts = dict.fromkeys(("traceback", "hang", "nonsense", "command"), 0)
        for finding in self.findings:
            counts[finding.kind] += 1
        found = "  ".join(
            f"{count} {kind}s" if kind != "nonsense" else f"{count} {kind}" for kind, count in counts.items()
        )
        return (
            f"{self.name:<10} {self.tried:6,} tried  {self.accepted:6,} accepted  "
            f"slowest {self.most_processor_seconds:4.1f} s ({self.slowest_seconds:4.1f} s on the clock)  "
            f"{'  '.join([found, *self.notes])}"
        )


def _processor_seconds() -> float:
    """Return the processor time of this process and of all that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TookTooLong

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, LIMIT_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WAIT_SECONDS),
    )
    handlers = {number: signal.signal(number, stop) for number, _timer, _seconds in timers}
    for _number, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, timer, _seconds in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])


def draw_each(strategy: SearchStrategy[T], look_at: Callable[[T], None], *, count: int, number: int) -> None:
    """Have `look_at` look at `count` draws of the strategy, the same ones for the same `number` on the same machine."""

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(value: T) -> None:
        look_at(value)

    with TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        run()
