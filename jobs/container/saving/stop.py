"""Shut the ranks down when that was announced: all save, and stop where that is asked for, at the same step.

Where the launcher says by when they have to be gone, as at a Spot notice, they save at once, train on, and save again
before they leave (`notice`).

From its first step on an attempt listens to its launcher (`channel.RequestFiles`); what came before is quickly done
again. An evaluation is left in its midst, for it may take longer than what time is left: the next attempt makes up for
it.

All ranks come to act at the same boundary, which is the end of a step, or of a batch evaluated. Rank 0 decides, some
boundaries ahead, and says so in the store of the job: "go on up to boundary 12", in the end "up to 15, and there:
stop". A rank passes no boundary before it has read what holds there, so all act at the same one, also where an
accelerator runs behind its host. Each word reaches as far as a tenth of a second: in short steps the store is not asked
at every one.
"""

import contextlib
import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from jobs.container.callback import Callback
from jobs.container.channel import Asked, Request, RequestFiles
from jobs.container.saving import notice

if TYPE_CHECKING:
    from jobs.container.rank import Rank
    from jobs.container.saving.checkpoint import CheckpointUploads

log = logging.getLogger("trainyard")

_REQUESTS: tuple[Request, ...] = ("stop", "save")

_SAYS = {
    "save": "saving step {step}, and training on",
    "stop": "saving step {step}",
    "leave": "stopping after step {step}: another save would not be complete in time",
}

_AHEAD_SECONDS = 0.1
"""The time for which rank 0 decides ahead."""

_AHEAD_BOUNDARIES = 10
"""The most boundaries that rank 0 decides ahead, in case those that follow take longer."""

_NEWEST = 5
"""The number of boundaries by which the time to the next ones is judged."""

_WORDS_KEPT = 100
"""Older words are deleted. No rank is so many behind: the gradients of a step need all of them."""


class Shutdown(Callback):
    """Listens on every rank. After the training `reason` says why it stopped before its end, if it did."""

    def __init__(self, rank: "Rank", uploads: "CheckpointUploads") -> None:
        """`uploads` knows, on rank 0, how long saves take."""
        self.reason: str | None = None
        self.leaves_with_save_under_way = False
        """True after an evaluation was left in its midst with no time for another save than the one under way."""
        self.saved_step = 0
        """The step of the Trainer's newest save, or the one that it began with."""
        self._rank = rank
        self._files = RequestFiles(rank.scratch)
        self._agreement = _Agreement(rank, uploads)
        self._listens = self._evaluates = self._save_is_due = False

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.saved_step = state.global_step

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.saved_step = state.global_step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._listens:
            self._listens = True
            self._files.listen(self._rank.local_rank)
        if state.global_step >= state.max_steps:
            control.should_save = True  # a Trainer that does not save by steps would leave that out
            return
        decision = self._agreement.boundary()
        if self._save_is_due or (decision is not None and decision.action != "leave"):
            self._save_is_due = False
            control.should_save = True
        if decision is not None and decision.ends:
            self.reason = decision.reason
            control.should_training_stop = True
        if decision is not None and self._rank.is_first:
            log.info("%s: %s", decision.reason, _SAYS[decision.action].format(step=state.global_step))

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
            raise _EvaluationLeftError

    def evaluated(self, evaluate: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return what `evaluate` finds; None where it was left because the attempt ends, for which `reason` is set.

        It takes none of the training's random numbers: a run that makes up for an evaluation later has the same
        weights.
        """
        self._agreement.begin_stretch()
        self._evaluates = self._listens
        try:
            with _random_state_kept():
                return evaluate()
        except _EvaluationLeftError:
            return None
        finally:
            self._evaluates = False
            self._agreement.begin_stretch()

    def close(self) -> None:
        """Stop listening: from now on SIGTERM ends the ranks at once. Where it came just before, `reason` is set."""
        decision = self._agreement.last()
        if decision is not None:
            self.reason = decision.reason
        else:
            self._files.stop_listening(self._rank.local_rank)

    def stop_listening(self) -> None:
        """From now on SIGTERM ends the ranks at once, whoever asked for what before."""
        self._files.stop_listening(self._rank.local_rank)


class _EvaluationLeftError(Exception):
    """All ranks leave their evaluation, at the same batch."""


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Set the random numbers of Python, NumPy and PyTorch back to where they were before the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class _Decision(NamedTuple):
    """What all ranks do at one boundary, and why."""

    action: notice.Action
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
        self._taken: set[_Decision] = set()
        self._told: dict[Request, Asked] = {}
        self._stop: Asked | None = None
        self._stretch = -1
        self.begin_stretch()

    def begin_stretch(self) -> None:
        """Count boundaries anew: from here on they are of another kind, and take another time."""
        self._stretch += 1
        self._words = 0
        self._boundary = 0
        self._cleared = 1
        self._at_cleared: _Decision | None = None
        self._word_at = time.monotonic()
        self._passed_at: float | None = None
        """None: the first boundary of a stretch comes late, after the start or a pause of the other kind."""
        self._word_boundary = 0
        self._newest_seconds: deque[float] = deque(maxlen=_NEWEST)

    def boundary(self, *, evaluates: bool = False) -> _Decision | None:
        """Pass a boundary, and return what is to be done there; None: go on.

        `evaluates`: it is the end of a batch in an evaluation.
        """
        now = time.monotonic()
        if self._passed_at is not None:
            self._newest_seconds.append(now - self._passed_at)
        self._passed_at = now
        self._evaluates = evaluates
        if self._rank.world_size == 1:
            return self._taking(self._asked())
        self._boundary += 1
        if self._boundary > self._cleared:
            self._read_word()
        decision = self._at_cleared if self._boundary == self._cleared else None
        if self._boundary == self._cleared and self._rank.is_first:
            self._taking(decision)
            self._say_word()
        return self._taking(decision)

    def last(self) -> _Decision | None:
        """Pass the last boundary of all. Whoever asks to stop after it is too late."""
        if not self._rank.is_first:
            self._pass_on()
        self._evaluates = False
        found = self._rank.once("shutdown/last", self._asked)
        decision = _Decision(*found) if found else None
        return decision if decision is not None and decision.ends else None

    def _say_word(self) -> None:
        now = time.monotonic()
        seconds = (now - self._word_at) / max(1, self._boundary - self._word_boundary)
        self._word_at, self._word_boundary = now, self._boundary
        decision = self._asked()
        ahead = 1 if decision else min(max(1, int(_AHEAD_SECONDS / max(seconds, 1e-6))), _AHEAD_BOUNDARIES)
        self._next = (self._cleared + ahead, decision)
        self._rank.store.set(self._key(self._words), json.dumps(self._next))
        if self._words >= _WORDS_KEPT:
            self._rank.store.delete_key(self._key(self._words - _WORDS_KEPT))

    def _read_word(self) -> None:
        if self._rank.is_first:
            self._cleared, self._at_cleared = self._next
        else:
            self._pass_on()
            cleared, decision = json.loads(self._rank.store.get(self._key(self._words)))
            self._cleared, self._at_cleared = cleared, _Decision(*decision) if decision else None
        self._words += 1

    def _key(self, word: int) -> str:
        return f"shutdown/{self._stretch}/{word}"

    def _asked(self) -> _Decision | None:
        """Return, on rank 0, what is to be done by the word of any node's launcher, and was not done yet."""
        if any(decision.ends for decision in self._taken):
            return None
        self._stop = _earliest([*filter(None, [self._stop]), *self._requests("stop")])
        decisions = [_Decision("save", asked.reason) for asked in self._requests("save")]
        if self._stop is not None and (action := self._action(self._stop)) is not None:
            decisions.insert(0, _Decision(action, self._stop.reason))
        return next((decision for decision in decisions if decision not in self._taken), None)

    def _action(self, stop: Asked) -> notice.Action | None:
        if stop.by is None:
            return "stop"
        measured = notice.Measured(
            save=self._uploads.seconds,
            under_way=self._uploads.under_way_seconds,
            step=max(self._newest_seconds, default=0.0),
        )
        has_saved = _Decision("save", stop.reason) in self._taken
        return notice.action(stop.by - time.time(), measured, has_saved=has_saved, evaluates=self._evaluates)

    def _requests(self, request: Request) -> Iterator[Asked]:
        """Yield, on rank 0, what launchers ask for: first that of its own node."""
        own = self._files.asked(request)
        if own is not None:
            yield own
        # One question to the store for all nodes, as long as none has asked for anything.
        if self._rank.nnodes > 1 and self._rank.store.check([f"shutdown/asked/{request}"]):
            for node in range(1, self._rank.nnodes):
                if self._rank.store.check([f"shutdown/asked/{request}/{node}"]):
                    yield Asked(*json.loads(self._rank.store.get(f"shutdown/asked/{request}/{node}")))

    def _pass_on(self) -> None:
        """Tell rank 0, on another node's first rank, what the launcher of that node asks for."""
        if self._rank.nnodes == 1 or not self._rank.is_first_on_node:
            return
        for request in _REQUESTS:
            asked = self._files.asked(request)
            if asked is not None and asked != self._told.get(request):
                self._told[request] = asked
                self._rank.store.set(f"shutdown/asked/{request}/{self._rank.node}", json.dumps(asked))
                self._rank.store.set(f"shutdown/asked/{request}", "")

    def _taking(self, decision: _Decision | None) -> _Decision | None:
        if decision is not None:
            self._taken.add(decision)
        return decision


def _earliest(asked: Sequence[Asked]) -> Asked | None:
    """Return the first reason, with the earliest of all times."""
    if not asked:
        return None
    times = [each.by for each in asked if each.by is not None]
    return Asked(asked[0].reason, min(times) if len(times) == len(asked) else None)
