"""Turn SIGTERM and Spot notices into requests that the ranks save and stop in time. Used by the launcher.

Before and after the ranks run, SIGTERM and Ctrl-C raise Interrupted, and the job is resumed later. While the ranks run,
those that train announce through a file in the scratch folder that they listen for requests (jobs.container.channel).
The launcher then turns SIGTERM or a Spot notice into a request, a file beside it, and waits until the ranks have ended
or the time is nearly over. If no rank listens (before the first step, or in a job that has nothing to save), SIGTERM
ends the ranks at once.

A Spot notice contains the time at which the instance ends, so its request contains a deadline, and the ranks train
until shortly before. SIGTERM alone makes them save and stop at once: the job was cancelled or has timed out.
"""

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jobs.container.channel import RequestFiles
from jobs.container.instance import InstanceMetadata

log = logging.getLogger("trainyard")

POLL_SECONDS = 5.0
"""Time between two checks for a Spot notice, as EC2's guide recommends."""

DEFAULT_STOP_TIMEOUT_SECONDS = 30.0
"""Time between SIGTERM and SIGKILL if the ECS agent's configuration does not set it: the agent's own default."""

NOTICE_SECONDS = 120.0
"""Time between a Spot notice and the end of the instance."""

MARGIN_SECONDS = 10.0
"""Part of the grace period reserved for ending late ranks (SIGTERM, then SIGKILL) and writing the record."""

NOTICE_MARGIN_SECONDS = 6.0
"""The same margin before the time in a Spot notice, when EC2 begins to shut the system down."""

_KILL_AFTER_SECONDS = 4.0
"""Time between SIGTERM and SIGKILL for the ranks once the grace period is over. torch itself would take 30 s."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """SIGTERM or Ctrl-C arrived, and the job is to be resumed later.

    Not an Exception, because botocore would treat it as a broken connection and retry the request.
    """


_arrived: list[str] = []
"""Names of the signals that arrived. For a signal from this process itself, the reason instead."""

_own_reason: list[str] = []
"""Why this process sent SIGTERM to itself, if it did."""


def end_self(reason: str) -> None:
    """Send SIGTERM to this process, which then ends as on a reclaim and reports `reason`. Works from any thread."""
    _own_reason.append(reason)
    os.kill(os.getpid(), signal.SIGTERM)


def signal_name(number: int) -> str:
    """Return the name of a signal, or the reason if this process sent it to itself."""
    return _own_reason[0] if number == signal.SIGTERM and _own_reason else signal.Signals(number).name


def raise_on_signals() -> None:
    """From now on, raise Interrupted in the main thread when a signal arrives."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Delay signals until the end of the block, because modules may swallow exceptions during their import.

    Signals swallowed before the block are also raised at its end, so none is lost before the ranks start.
    """
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: _arrived.append(signal_name(number)))
    try:
        yield
    finally:
        raise_on_signals()
    if _arrived:
        raise Interrupted(_arrived[0])


def _interrupt(number: int, _: Any) -> None:
    _arrived.append(signal_name(number))
    raise Interrupted(_arrived[0])


class ShutdownWatch:
    """Context manager that watches for the end of the instance or of the job while the ranks run.

    `on_signal` handles signals in the main thread.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        metadata: InstanceMetadata | None,
        stop_timeout_seconds: float,
        give_up: Callable[[int], None],
        pids_of_script: Callable[[], list[int]] | None = None,
    ) -> None:
        """`give_up` takes a signal's number and raises, in the main thread, the exception that ends the ranks at once.

        `pids_of_script` returns the process ids of a script's ranks, which get SIGTERM if they do not listen.
        """
        self.reason: str | None = None
        """Why the ranks were asked to stop, or None if they were not."""
        self.overdue_seconds: float | None = None
        """Time that the ranks had to end, or None if they have not exceeded it."""
        self._files = RequestFiles(scratch)
        self._metadata = metadata
        self._grace_seconds = max(1.0, stop_timeout_seconds - MARGIN_SECONDS)
        self._give_up = give_up
        self._pids_of_script = pids_of_script
        self.has_signalled = False
        """True if the ranks of a script get SIGTERM, so that they can save and end by themselves."""
        self._signalled_script = False
        self._asked_at: float | None = None
        self._deadline: float | None = None
        self._signalled_at: float | None = None
        self._requested_reason: str | None = None
        self._by_signal = self._at_once = False
        self._noticed = self._recommended = False
        self._next_poll = 0.0
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shutdown", daemon=True)

    def __enter__(self) -> "ShutdownWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._wake.set()

    def end_now(self) -> None:
        """End the ranks even if they have not saved. Works from any thread."""
        self._at_once = True
        os.kill(os.getpid(), signal.SIGTERM)

    def ask_to_stop(self, reason: str) -> None:
        """Have the ranks save and stop, without a time limit. Works from any thread."""
        self._requested_reason = reason
        self._wake.set()

    def on_signal(self, number: int) -> None:
        """Ask the ranks to save and stop if they listen. Ctrl-C ends them at once, because they receive it too."""
        if self._closed.is_set():
            return
        is_over = self._at_once or self.overdue_seconds is not None
        listens = self._files.is_heard() or bool(self._pids_of_script and self._pids_of_script())
        if number == signal.SIGTERM and not is_over and listens:
            self._signalled_at = time.monotonic()
            self._wake.set()  # nothing more: the handler may have interrupted anything, even a log call
            return
        self._give_up(number)

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - a full disk, for instance; the deadline must still end the ranks
                log.warning("warning: the ranks could not be asked to stop: %s", error)
            self._wake.wait(0.2 if self._deadline is not None else POLL_SECONDS)
            self._wake.clear()

    def _look(self) -> None:
        if self._metadata is not None and (time.monotonic() >= self._next_poll or self._signalled_at is not None):
            self._poll_metadata(self._metadata)
            self._next_poll = time.monotonic() + POLL_SECONDS
        if self._signalled_at is not None:
            at, self._signalled_at = self._signalled_at, None
            # After a notice the host sends SIGTERM, and SIGKILL when the instance ends (spot_notice.sh). A training
            # that listens uses the time in between. A script must end earlier, so that its files can be uploaded.
            if not self._noticed or self.has_signalled:
                self._by_signal = True
                self._ask_to_stop(signal_name(signal.SIGTERM), at + self._grace_seconds)
        if self._requested_reason is not None:
            reason, self._requested_reason = self._requested_reason, None
            self._ask_to_stop(reason, math.inf)
        self._signal_script()
        self._end_late_ranks()

    def _poll_metadata(self, metadata: InstanceMetadata) -> None:
        if not self._noticed and (notice := metadata.spot_notice()) is not None:
            self._noticed = True
            left = (notice.time - datetime.now(timezone.utc)).total_seconds()
            left = min(left, NOTICE_SECONDS) - NOTICE_MARGIN_SECONDS
            # Leave time for a save even if the clock is wrong.
            grace = max(left, DEFAULT_STOP_TIMEOUT_SECONDS - MARGIN_SECONDS)
            self._ask_to_stop(str(notice), time.monotonic() + grace, by=time.time() + left)
        elif not (self._recommended or self._noticed or self._signalled_at) and metadata.rebalance_recommended():
            self._recommended = True
            log.info("rebalance recommendation: EC2 may reclaim this instance soon; requesting a checkpoint")
            self._files.ask("save", "rebalance recommendation")

    def _ask_to_stop(self, reason: str, deadline: float, *, by: float | None = None) -> None:
        """Ask the ranks to stop, and end them at `deadline`. The first reason and the earliest deadline count.

        `by` is the time until which they may train, in seconds since the epoch. Without it, they save and stop at once.
        """
        self._deadline = min(deadline, self._deadline or deadline)
        if self.reason is None:
            self.reason = reason
            self._asked_at = time.monotonic()
            limit = f", within {deadline - self._asked_at:.0f} s" if deadline < math.inf else ""
            if self._pids_of_script is not None and deadline < math.inf and not self._files.is_heard():
                self.has_signalled = True
            if self.has_signalled:
                what = "the script gets SIGTERM, to save and stop"
            elif by is None:
                what = "the training saves and stops"
            else:
                what = "the training saves, continues, saves again and stops"
            log.info("%s: %s%s", reason, what, limit)
            self._files.ask("stop", reason, by=by)

    def _signal_script(self) -> None:
        """Send SIGTERM to the ranks of a script once they exist. A notice may arrive before they start."""
        if not self.has_signalled or self._signalled_script or self._pids_of_script is None:
            return
        if pids := self._pids_of_script():
            self._signalled_script = True
            _signal(pids, signal.SIGTERM)

    def _end_late_ranks(self) -> None:
        if self._deadline is None or self._asked_at is None:
            return
        # After the last step no rank listens. The remaining work would be repeated anyway.
        unheard = self._by_signal and not self._files.is_heard() and not self.has_signalled
        if not unheard and time.monotonic() < self._deadline:
            return
        self.overdue_seconds = time.monotonic() - self._asked_at
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._closed.wait(_KILL_AFTER_SECONDS):
            _signal(self._pids_of_script() if self._pids_of_script else self._files.listeners(), signal.SIGKILL)
        self._closed.wait()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
