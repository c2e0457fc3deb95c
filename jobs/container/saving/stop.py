"""Stop a training at the same step on all ranks, with a checkpoint, when its launcher requests it.

After a Spot notice the training saves at once, trains on, saves again, and stops before the instance ends
(`next_action`). The first save covers an instance that ends earlier than announced. The second save starts as late as
the measured times allow, so that the steps in between are kept. If there is no time for two saves, the first is the
only one. SIGTERM and other requests without a deadline save once and stop.

Ranks listen for requests (`channel.RequestFiles`) from their first step on; anything earlier is quickly repeated. A
request interrupts a running evaluation, which may take longer than the time left; the next attempt evaluates again.

All ranks act at the same boundary: the end of a step, or of a batch of an evaluation. Rank 0 decides a few boundaries
ahead and publishes messages in the job's rendezvous store: "continue to boundary 12", and finally "continue to 15,
then stop". A rank passes no boundary until it has read the message that covers it, so all ranks act at the same one
even if an accelerator lags behind its host. A message covers about a tenth of a second, so that ranks with short steps
do not query the store at each of them.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jobs.container.channel import Asked, Request, RequestFiles
from jobs.container.rank import Callback
from jobs.container.saving.snapshot import random_state_preserved

if TYPE_CHECKING:
    from jobs.container.rank import Rank
    from jobs.container.saving.upload import CheckpointUploads

log = logging.getLogger("trainyard")

Action = Literal["save", "stop", "leave"]
"""save: save this step and train on. stop: save this step and stop. leave: stop without another save."""

SPARE_SECONDS = 2.0
"""Time reserved after the last save to write the remaining metrics and to end the ranks' processes."""

_SLOWER = 1.25
"""Factor by which the last save may be slower than the one before, because S3's speed varies, although no training
competes with it. A late save loses all steps since the previous save, possibly the one at the notice. With saves of
13 s, that costs about thirty times as much as this quarter."""

_STEPS = 2
"""Ranks agree one step ahead, so an action may happen two steps after it was due."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Times measured in this run, in seconds."""

    save: float = 0.0
    """Seconds that the last save took until its checkpoint was complete, or 0 if none has completed."""
    under_way: float = 0.0
    """Seconds since the save in progress began, or 0 if none is in progress."""
    step: float = 0.0
    """Duration of the longest of the most recent steps, or of the most recent evaluation batches."""


def needed_seconds(measured: Measured) -> float:
    """Return how long before the end the last save is due. The last save waits for one that is under way."""
    return _saves_seconds(measured) + _STEPS * measured.step + SPARE_SECONDS


def save_seconds(measured: Measured) -> float:
    """Return how long the last save may take."""
    return max(_SLOWER * measured.save, measured.under_way)


def _saves_seconds(measured: Measured) -> float:
    one = save_seconds(measured)
    return one + (one - measured.under_way if measured.under_way else 0.0)


def next_action(left_seconds: float, measured: Measured, *, has_saved: bool, evaluates: bool = False) -> Action | None:
    """Return what the ranks should do if they must end within `left_seconds`, or None to continue.

    `has_saved`: whether a save was requested since the notice. During an evaluation (`evaluates`) ranks cannot save, so
    "save" applies to the step after the evaluation. If no save has been measured yet, they stop the evaluation at once.
    """
    is_measured = measured.save > 0 or measured.under_way > 0
    if left_seconds > needed_seconds(measured) and (is_measured or not evaluates):
        return None if has_saved else "save"
    # The save under way is the last if it takes too long, or began too late, for another save to finish in time.
    if not has_saved or not measured.under_way:
        return "stop"
    takes_long = measured.under_way >= save_seconds(measured)
    if takes_long or left_seconds < _saves_seconds(measured):
        return "leave"
    # Otherwise the last save waits for the one under way, so requesting it earlier would not finish it earlier.
    rest = save_seconds(measured) - measured.under_way
    return None if rest > _STEPS * measured.step else "stop"


_REQUESTS: tuple[Request, ...] = ("stop", "save")

_LOG_TEXTS = {
    "save": "saving step {step}, and training on",
    "stop": "saving step {step}",
    "leave": "stopping after step {step}: another save would not be complete in time",
}

_AHEAD_SECONDS = 0.1
"""How far ahead rank 0 decides, in seconds."""

_AHEAD_BOUNDARIES = 10
"""The most boundaries that rank 0 decides ahead, in case the next ones take longer."""

_NEWEST = 5
"""Number of recent boundaries from which the time to the next ones is estimated."""

_MESSAGES_KEPT = 100
"""Older messages are deleted. No rank can be so far behind, because each step needs the gradients of all ranks."""


class Shutdown(Callback):
    """Saves and stops the training at the same step on all ranks. `reason` is set if it stops early."""

    def __init__(self, rank: "Rank", uploads: "CheckpointUploads") -> None:
        """`uploads` measures, on rank 0, how long saves take."""
        self.reason: str | None = None
        self.leaves_with_save_under_way = False
        """True if an evaluation was interrupted with no time for a save other than the one under way."""
        self.saved_step = 0
        """Step of the Trainer's newest save, or the step at which the training began."""
        self._rank = rank
        self._files = RequestFiles(rank.scratch)
        self._agreement = _Agreement(rank, uploads)
        self._listens = self._evaluates = self._save_is_due = False

    @property
    def is_requested(self) -> bool:
        """Return whether the attempt must stop, as far as this rank knows. Another thread may call it."""
        return self.reason is not None or self._agreement.stop_is_requested

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.saved_step = state.global_step

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.saved_step = state.global_step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._listens:
            self._listens = True
            self._files.listen(self._rank.local_rank)
        if state.global_step >= state.max_steps:
            control.should_save = True  # a Trainer that does not save by steps would skip the last step
            return
        decision = self._agreement.boundary()
        if self._save_is_due or (decision is not None and decision.action != "leave"):
            self._save_is_due = False
            control.should_save = True
        if decision is not None and decision.ends:
            self.reason = decision.reason
            control.should_training_stop = True
        if decision is not None and self._rank.is_first:
            log.info("%s: %s", decision.reason, _LOG_TEXTS[decision.action].format(step=state.global_step))

    def on_prediction_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if not self._evaluates:
            return
        decision = self._agreement.boundary(evaluates=True)
        if decision is None:
            return
        if not decision.ends:
            self._save_is_due = True  # at the next step
        else:
            self.reason = decision.reason
            self.leaves_with_save_under_way = decision.action == "leave" and not self._save_is_due
            raise _EvaluationStoppedError

    def evaluated(self, evaluate: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the result of `evaluate`, or None, with `reason` set, if the attempt ends during it.

        Restores the training's random state afterwards, so that a run that repeats an evaluation ends with the same
        weights.
        """
        self._agreement.begin_stretch()
        self._evaluates = self._listens
        try:
            with random_state_preserved():
                return evaluate()
        except _EvaluationStoppedError:
            return None
        finally:
            self._evaluates = False
            self._agreement.begin_stretch()

    def close(self) -> None:
        """Stop listening: from now on SIGTERM ends the ranks at once. Sets `reason` if a request came just before."""
        decision = self._agreement.last()
        if decision is not None:
            self.reason = decision.reason
        else:
            self.stop_listening()

    def stop_listening(self) -> None:
        """Stop listening: from now on SIGTERM ends the ranks at once, and earlier requests are ignored."""
        self._files.stop_listening(self._rank.local_rank)


class _EvaluationStoppedError(Exception):
    """Raised on all ranks at the same batch, to leave an evaluation."""


class _Decision(NamedTuple):
    """What all ranks do at one boundary, and why."""

    action: Action
    reason: str

    @property
    def ends(self) -> bool:
        return self.action != "save"


class _Agreement:
    """One rank's part in agreeing on a boundary. All ranks call the same methods in the same order."""

    def __init__(self, rank: "Rank", uploads: "CheckpointUploads") -> None:
        self._rank = rank
        self._uploads = uploads
        self._files = RequestFiles(rank.scratch)
        self._done: set[_Decision] = set()
        self._forwarded: dict[Request, Asked] = {}
        self._stop: Asked | None = None
        self._stretch = -1
        self.begin_stretch()

    @property
    def stop_is_requested(self) -> bool:
        return self._stop is not None or self._files.asked("stop") is not None

    def begin_stretch(self) -> None:
        """Restart the count of boundaries, because the next ones are of another kind and duration."""
        self._stretch += 1
        self._messages = 0
        self._boundary = 0
        self._cleared = 1
        self._at_cleared: _Decision | None = None
        self._message_at = time.monotonic()
        self._passed_at: float | None = None
        """Time of the previous boundary. None at the start of a stretch, because the time until its first boundary
        includes other work."""
        self._message_boundary = 0
        self._newest_seconds: deque[float] = deque(maxlen=_NEWEST)

    def boundary(self, *, evaluates: bool = False) -> _Decision | None:
        """Pass a boundary and return what to do there, or None to continue.

        `evaluates`: the boundary is the end of an evaluation batch.
        """
        now = time.monotonic()
        if self._passed_at is not None:
            self._newest_seconds.append(now - self._passed_at)
        self._passed_at = now
        self._evaluates = evaluates
        if self._rank.world_size == 1:
            return self._mark_done(self._next_decision())
        self._boundary += 1
        if self._boundary > self._cleared:
            self._read_message()
        decision = self._at_cleared if self._boundary == self._cleared else None
        if self._boundary == self._cleared and self._rank.is_first:
            self._mark_done(decision)
            self._publish_message()
        return self._mark_done(decision)

    def last(self) -> _Decision | None:
        """Pass the very last boundary. Later requests to stop are too late."""
        if not self._rank.is_first:
            self._forward_requests()
        self._evaluates = False
        found = self._rank.once("shutdown/last", self._next_decision)
        decision = _Decision(*found) if found else None
        return decision if decision is not None and decision.ends else None

    def _publish_message(self) -> None:
        now = time.monotonic()
        seconds = (now - self._message_at) / max(1, self._boundary - self._message_boundary)
        self._message_at, self._message_boundary = now, self._boundary
        decision = self._next_decision()
        ahead = 1 if decision else min(max(1, int(_AHEAD_SECONDS / max(seconds, 1e-6))), _AHEAD_BOUNDARIES)
        self._next = (self._cleared + ahead, decision)
        self._rank.store.set(self._key(self._messages), json.dumps(self._next))
        if self._messages >= _MESSAGES_KEPT:
            self._rank.store.delete_key(self._key(self._messages - _MESSAGES_KEPT))

    def _read_message(self) -> None:
        if self._rank.is_first:
            self._cleared, self._at_cleared = self._next
        else:
            self._forward_requests()
            cleared, decision = json.loads(self._rank.store.get(self._key(self._messages)))
            self._cleared, self._at_cleared = cleared, _Decision(*decision) if decision else None
        self._messages += 1

    def _key(self, message: int) -> str:
        return f"shutdown/{self._stretch}/{message}"

    def _next_decision(self) -> _Decision | None:
        """Return, on rank 0, the next pending decision that any node's launcher has requested."""
        if any(decision.ends for decision in self._done):
            return None
        self._stop = _earliest([*filter(None, [self._stop]), *self._requests("stop")])
        decisions = [_Decision("save", asked.reason) for asked in self._requests("save")]
        if self._stop is not None and (action := self._action(self._stop)) is not None:
            decisions.insert(0, _Decision(action, self._stop.reason))
        return next((decision for decision in decisions if decision not in self._done), None)

    def _action(self, stop: Asked) -> Action | None:
        if stop.by is None:
            return "stop"
        measured = Measured(
            save=self._uploads.seconds,
            under_way=self._uploads.under_way_seconds,
            step=max(self._newest_seconds, default=0.0),
        )
        has_saved = _Decision("save", stop.reason) in self._done
        return next_action(stop.by - time.time(), measured, has_saved=has_saved, evaluates=self._evaluates)

    def _requests(self, request: Request) -> Iterator[Asked]:
        """Yield, on rank 0, the launchers' requests, starting with its own node's."""
        own = self._files.asked(request)
        if own is not None:
            yield own
        # One query of the store covers all nodes until a launcher requests something.
        if self._rank.nnodes > 1 and self._rank.store.check([f"shutdown/asked/{request}"]):
            for node in range(1, self._rank.nnodes):
                if self._rank.store.check([f"shutdown/asked/{request}/{node}"]):
                    yield Asked(*json.loads(self._rank.store.get(f"shutdown/asked/{request}/{node}")))

    def _forward_requests(self) -> None:
        """Forward the requests of this node's launcher to rank 0, if this is the first rank of another node."""
        if self._rank.nnodes == 1 or not self._rank.is_first_on_node:
            return
        for request in _REQUESTS:
            asked = self._files.asked(request)
            if asked is not None and asked != self._forwarded.get(request):
                self._forwarded[request] = asked
                self._rank.store.set(f"shutdown/asked/{request}/{self._rank.node}", json.dumps(asked))
                self._rank.store.set(f"shutdown/asked/{request}", "")

    def _mark_done(self, decision: _Decision | None) -> _Decision | None:
        if decision is not None:
            self._done.add(decision)
        return decision


def _earliest(asked: Sequence[Asked]) -> Asked | None:
    """Return the first reason with the earliest deadline."""
    if not asked:
        return None
    times = [each.by for each in asked if each.by is not None]
    return Asked(asked[0].reason, min(times) if len(times) == len(asked) else None)
