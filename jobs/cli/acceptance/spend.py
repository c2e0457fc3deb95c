"""What an acceptance run has spent, counted while it runs, and the limit at which it ends.

Instances with the stage's tag count at today's prices, Image Builder's included, and so does what the stage costs idle.
Storage, requests and transfer are left out: cents here. It is an estimate: AWS's bill comes a day late.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from jobs.cli.acceptance.runner import LimitReachedError
from jobs.core.words import usd

LOOK = timedelta(seconds=30)

SILENCE = timedelta(minutes=5)
"""If EC2 has not answered for this long, nobody knows what is being spent: that counts as the limit."""

UNDO = timedelta(minutes=15)
"""The time that taking everything away takes: what runs is kept paid for as long."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """An instance that is paid for."""

    id: str
    launched_at: datetime
    usd_per_hour: float


@dataclass(kw_only=True)
class Meter:
    """Counts whenever it is asked, at most every half minute."""

    limit_usd: float
    spent_usd: float
    """Up to `until`, by earlier starts of the run."""
    until: datetime
    instances: Callable[[], list[Running]]
    idle_usd_per_hour: Callable[[], float]
    keep: Callable[[datetime, float], None]
    """Records what has been spent up to a time."""
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    _alive: Mapping[str, Running] = field(default_factory=dict)
    _answered_at: datetime | None = None
    _looked_at: datetime | None = None

    def look(self) -> None:
        """Count what has been spent since the last look. If EC2 does not answer, the next look counts for this one."""
        now = self._looked_at = self.now()
        self._answered_at = self._answered_at or now
        try:
            found = {instance.id: instance for instance in self.instances()}
        except Exception:  # noqa: BLE001 - denied, throttled, unreachable: `check` ends the run if it stays so
            return
        self._answered_at = now
        spent = self.idle_usd_per_hour() * _hours(now - self.until)
        # What was there at the last look and has gone may have gone just now.
        for instance in {**self._alive, **found}.values():
            since = self.until if instance.id in self._alive else max(self.until, instance.launched_at)
            spent += instance.usd_per_hour * _hours(now - since)
        self.spent_usd += spent
        self._alive, self.until = found, now
        self.keep(now, self.spent_usd)

    def look_if_due(self) -> None:
        """Count if the last look was half a minute ago."""
        if self._looked_at is None or self.now() - self._looked_at >= LOOK:
            self.look()

    @property
    def reserve_usd(self) -> float:
        """Return what it costs to take away what is there."""
        an_hour = sum(instance.usd_per_hour for instance in self._alive.values()) + self.idle_usd_per_hour()
        return an_hour * _hours(UNDO)

    def check(self) -> None:
        """Raise LimitReachedError if no more may be spent."""
        self.look_if_due()
        silent = self.now() - (self._answered_at or self.now())
        if silent >= SILENCE:
            raise LimitReachedError(
                f"EC2 has not reported for {silent.total_seconds() / 60:.0f} minutes what runs; its cost is unknown",
                next_step="the same command, once AWS answers",
            )
        if self.spent_usd + self.reserve_usd >= self.limit_usd:
            raise LimitReachedError(
                f"{usd(self.spent_usd)} are spent and {usd(self.reserve_usd)} are kept for the end: that is the limit "
                f"of {usd(self.limit_usd)}",
                next_step="the same command with a higher --max-usd continues from here",
            )


def _hours(time: timedelta) -> float:
    return time / timedelta(hours=1)
