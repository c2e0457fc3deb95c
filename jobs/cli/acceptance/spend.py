"""What an acceptance run has spent, counted while it goes on, and the limit at which it ends.

It counts instances by their tag, Image Builder's included, at today's prices, and what stands idle by the hour.
Storage, requests and transfer are left out: cents here. It is an estimate from what EC2 says, since AWS's bill comes a
day late.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from jobs.cli.acceptance.runner import LimitReachedError
from jobs.contract.words import usd

LOOK_SECONDS = 30.0

SILENCE = timedelta(minutes=5)
"""Without an answer of EC2's for so long nobody knows what is being spent: that counts as the limit."""

UNDO = timedelta(minutes=15)
"""For so long all that runs is kept paid for, since it takes that long to take it away."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """An instance that is paid for."""

    id: str
    launched_at: datetime
    usd_per_hour: float


class Meter:
    """Counts in a thread of its own, between `with` and its end."""

    def __init__(
        self,
        *,
        limit_usd: float,
        spent_usd: float,
        metered_at: datetime | None,
        instances: Callable[[], Sequence[Running]],
        idle_usd_per_hour: Callable[[], float],
        keep: Callable[[datetime, float], None],
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        """`spent_usd`: up to `metered_at`, by earlier starts of the run. `keep`: writes down what has been spent."""
        self.limit_usd = limit_usd
        self.spent_usd = spent_usd
        self._until = metered_at
        self._instances = instances
        self._idle_usd_per_hour = idle_usd_per_hour
        self._keep = keep
        self._now = now
        self._answered_at = now()
        self._alive: Mapping[str, Running] = {}
        self._ended = threading.Event()

    def look(self) -> None:
        """Count what has been spent since the last look. Where EC2 does not answer, the next look counts for this."""
        now = self._now()
        try:
            found = {instance.id: instance for instance in self._instances()}
        except Exception:  # noqa: BLE001 - denied, throttled, unreachable: `check` ends the run if it stays so
            return
        self._answered_at = now
        since = self._until or now
        hour = timedelta(hours=1)
        spent = self._idle_usd_per_hour() * ((now - since) / hour)
        # What was there at the last look and has gone may have gone just now.
        for instance in {**self._alive, **found}.values():
            known = instance.id in self._alive or (self._until is not None and instance.launched_at < since)
            spent += instance.usd_per_hour * ((now - (since if known else instance.launched_at)) / hour)
        self.spent_usd += spent
        self._alive, self._until = found, now
        self._keep(now, self.spent_usd)

    @property
    def reserve_usd(self) -> float:
        """Return what it takes to take away what is there."""
        an_hour = sum(instance.usd_per_hour for instance in self._alive.values()) + self._idle_usd_per_hour()
        return an_hour * (UNDO / timedelta(hours=1))

    def check(self) -> None:
        """Raise LimitReachedError where no more may be spent."""
        silent = self._now() - self._answered_at
        if silent >= SILENCE:
            raise LimitReachedError(
                f"EC2 has not said for {silent.total_seconds() / 60:.0f} minutes what runs; nobody knows what it costs",
                next_step="the same command, once AWS answers",
            )
        if self.spent_usd + self.reserve_usd >= self.limit_usd:
            raise LimitReachedError(
                f"{usd(self.spent_usd)} are spent and {usd(self.reserve_usd)} are kept for the end: that is the limit "
                f"of {usd(self.limit_usd)}",
                next_step="the same command with a higher --max-usd goes on where this ends",
            )

    @contextlib.contextmanager
    def counting(self) -> Iterator["Meter"]:
        """Look now, every half minute, and once more at the end."""
        self._answered_at = self._now()
        self.look()
        thread = threading.Thread(target=self._look_on, name="spend", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()
            self.look()

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look()
