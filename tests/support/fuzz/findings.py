"""Count what a round of hostile input tries, and collect its findings."""

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.strategies import SearchStrategy

CPU_SECONDS = 5.0
"""Above this CPU time, an attempt counts as a hang; so does an attempt above CLOCK_SECONDS of wall-clock time."""
CLOCK_SECONDS = 30.0

T = TypeVar("T")


class Nonsense(Exception):  # noqa: N818 - the name of a finding
    """Raised if a program accepted input that neither a job, AWS nor a user can use."""


class _TookTooLong(BaseException):
    """Raised at a limit. It is a BaseException, so that no handler of the code under test catches it."""


@dataclass
class Round:
    """Counts and findings of one kind of input. `canary` is the file that every hostile text tries to create."""

    name: str
    canary: Path
    tried: int = 0
    accepted: int = 0
    findings: list[str] = field(default_factory=list)

    def look(self, what: object, attempt: Callable[[], bool]) -> None:
        """Run an attempt, which returns whether its input was accepted.

        An exception or a created canary is a finding. A hang must happen twice, because other work takes time too.
        """
        self.tried += 1
        try:
            try:
                self.accepted += _limited(attempt)
            except _TookTooLong:
                self.accepted += _limited(attempt)
        except _TookTooLong:
            self.find("hang", what, f"more than {CPU_SECONDS:g} s of CPU time or {CLOCK_SECONDS:g} s, twice")
        except Nonsense as error:
            self.find("nonsense", what, str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - each is a finding
            self.find("traceback", what, f"{type(error).__name__}: {str(error)[:500]}")
        if self.canary.exists():
            self.canary.unlink()
            self.find("command", what, "a command of the input ran")

    def find(self, kind: str, what: object, detail: str) -> None:
        shown = what if isinstance(what, str) else repr(what)
        self.findings.append(f"{kind}: {detail}\n    given: {shown[:600]}")

    def __str__(self) -> str:
        counts = f"{self.tried:6,} tried  {self.accepted:6,} accepted  {len(self.findings)} findings"
        return "\n".join([f"{self.name:<10} {counts}", *self.findings])


def _limited(attempt: Callable[[], bool]) -> bool:
    def stop(*_: object) -> None:
        raise _TookTooLong

    began, before = _cpu_seconds(), signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, CLOCK_SECONDS)
    try:
        accepted = attempt()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if _cpu_seconds() - began > CPU_SECONDS:
        raise _TookTooLong
    return accepted


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def draw_each(strategy: SearchStrategy[T], look_at: Callable[[T], None], *, count: int, number: int) -> None:
    """Call `look_at` with `count` draws of the strategy. The same `number` gives the same draws on the same machine."""

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


@contextlib.contextmanager
def collected(round_: Round, what: object) -> Iterator[None]:
    """Record an error of the block as a finding, and continue."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - each is a finding
        round_.find("traceback", what, f"{type(error).__name__}: {str(error)[-1500:]}")
