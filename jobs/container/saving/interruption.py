"""How the launcher takes a signal, and how it shuts the ranks down: they save, and stop in the time that is left.

Before the ranks run and after, SIGTERM and Ctrl-C raise Interrupted: the job is to be resumed. While they run, ranks
that train say with a file in the scratch folder that they listen (jobs.container.channel). Then SIGTERM and the Spot
notice become a request, a file beside it, and the launcher waits until the ranks have ended or the time is nearly over.
Without it, before the first step or in a job that has nothing to save, SIGTERM ends them at once.

The Spot notice says when the instance ends, so the request says by when the ranks have to be gone, and they use the
time. SIGTERM alone has them stop at once: somebody cancels the job, or its time is over.
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
"""The time between two looks for a Spot notice, as EC2's guide says."""

DEFAULT_STOP_TIMEOUT_SECONDS = 30.0
"""The time between SIGTERM and SIGKILL where the ECS agent's configuration says nothing else: its own default."""

NOTICE_SECONDS = 120.0
"""The time between the Spot notice and the instance's end."""

MARGIN_SECONDS = 10.0
"""The part of the grace time that is kept for what comes after the ranks: SIGTERM, SIGKILL for those that ignore it,
and the record."""

NOTICE_MARGIN_SECONDS = 6.0
"""The same before the time that a Spot notice names: EC2 begins to shut the system down then."""

_KILL_AFTER_SECONDS = 4.0
"""The time between the ranks' SIGTERM and their SIGKILL once the grace time is over; torch itself would take 30 s."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """SIGTERM (or Ctrl-C) arrived: the job is to be resumed.

    No Exception: botocore takes one that is raised while it waits for an answer for a broken line, and tries again.
    """


_arrived: list[str] = []
"""Names of the signals that came, or why this process sent one to itself."""

_own_reason: list[str] = []
"""Why this process sent SIGTERM to itself, if it did."""


def end_self(reason: str) -> None:
    """Send SIGTERM to this process, which ends as before a reclaim and gives `reason` for it. From any thread."""
    _own_reason.append(reason)
    os.kill(os.getpid(), signal.SIGTERM)


def signal_name(number: int) -> str:
    """Return the name of a signal that came, or why this process sent it to itself."""
    return _own_reason[0] if number == signal.SIGTERM and _own_reason else signal.Signals(number).name


def raise_on_signals() -> None:
    """From now on signals raise Interrupted in the main thread."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Make a signal wait for the end of the block: modules, while imported, may swallow what is raised in them.

    One that was swallowed before the block is raised again at its end, so none is lost before the ranks start.
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
    """Watches for the end of the instance, or of the job, while the ranks run: a context manager.

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
        """`give_up` raises, in the main thread, what ends the ranks at once; it is given the signal's number.

        `pids_of_script`: ranks of a script, which are asked by SIGTERM where nobody listens for requests.
        """
        self.reason: str | None = None
        """Why the ranks were asked to stop; None: they were not."""
        self.overdue_seconds: float | None = None
        """How long they had, where they did not end in that time."""
        self._files = RequestFiles(scratch)
        self._metadata = metadata
        self._grace_seconds = max(1.0, stop_timeout_seconds - MARGIN_SECONDS)
        self._give_up = give_up
        self._pids_of_script = pids_of_script
        self.has_signalled = False
        """True where the ranks of a script get SIGTERM, to end by themselves in the time that is left."""
        self._signalled_script = False
        self._asked_at: float | None = None
        self._deadline: float | None = None
        self._signalled_at: float | None = None
        self._wish: str | None = None
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
        """End the ranks, saved or not; from any thread."""
        self._at_once = True
        os.kill(os.getpid(), signal.SIGTERM)

    def ask_to_stop(self, reason: str) -> None:
        """Let the ranks save and stop, without a limit of time. From any thread."""
        self._wish = reason
        self._wake.set()

    def on_signal(self, number: int) -> None:
        """Ask the ranks to save and stop, if they listen. Ctrl-C ends them at once, for it has reached them too."""
        if self._closed.is_set():
            return
        is_over = self._at_once or self.overdue_seconds is not None
        asks = self._files.is_heard() or bool(self._pids_of_script and self._pids_of_script())
        if number == signal.SIGTERM and not is_over and asks:
            self._signalled_at = time.monotonic()
            self._wake.set()  # no more than that: a handler may have interrupted anything, a line of the log too
            return
        self._give_up(number)

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - a full disk, for instance; the deadline must end the ranks still
                log.warning("warning: the ranks could not be asked to stop: %s", error)
            self._wake.wait(0.2 if self._deadline is not None else POLL_SECONDS)
            self._wake.clear()

    def _look(self) -> None:
        if self._metadata is not None and (time.monotonic() >= self._next_poll or self._signalled_at is not None):
            self._ask_metadata(self._metadata)
            self._next_poll = time.monotonic() + POLL_SECONDS
        if self._signalled_at is not None:
            at, self._signalled_at = self._signalled_at, None
            # After the notice the host sends it, and SIGKILL as the instance ends (spot_notice.sh): who trains with us
            # uses the time. What a script by itself has left is yet to be uploaded then.
            if not self._noticed or self.has_signalled:
                self._by_signal = True
                self._ask_to_stop(signal_name(signal.SIGTERM), at + self._grace_seconds)
        if self._wish is not None:
            reason, self._wish = self._wish, None
            self._ask_to_stop(reason, math.inf)
        self._signal_script()
        self._end_what_is_late()

    def _ask_metadata(self, metadata: InstanceMetadata) -> None:
        if not self._noticed and (notice := metadata.spot_notice()) is not None:
            self._noticed = True
            left = (notice.time - datetime.now(timezone.utc)).total_seconds()
            left = min(left, NOTICE_SECONDS) - NOTICE_MARGIN_SECONDS
            # A clock that is wrong must not take all of the time for a save.
            grace = max(left, DEFAULT_STOP_TIMEOUT_SECONDS - MARGIN_SECONDS)
            self._ask_to_stop(str(notice), time.monotonic() + grace, by=time.time() + left)
        elif not (self._recommended or self._noticed or self._signalled_at) and metadata.rebalance_recommended():
            self._recommended = True
            log.info("rebalance recommendation: EC2 may take this instance away soon; asking for a checkpoint")
            self._files.ask("save", "rebalance recommendation")

    def _ask_to_stop(self, reason: str, deadline: float, *, by: float | None = None) -> None:
        """Ask the ranks to stop, and end them at `deadline`. Of several reasons the first stays, of times the earliest.

        `by`: until when they may train, in seconds since the epoch; None: they are to save and stop at once.
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
                what = "the training saves, trains on, saves again and stops"
            log.info("%s: %s%s", reason, what, limit)
            self._files.ask("stop", reason, by=by)

    def _signal_script(self) -> None:
        """Send SIGTERM to the ranks of a script, once there are any: a notice may come before they do."""
        if not self.has_signalled or self._signalled_script or self._pids_of_script is None:
            return
        if pids := self._pids_of_script():
            self._signalled_script = True
            _signal(pids, signal.SIGTERM)

    def _end_what_is_late(self) -> None:
        if self._deadline is None or self._asked_at is None:
            return
        # After the last step nobody listens any more: what is left would be done again anyway.
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
