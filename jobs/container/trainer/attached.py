"""`trainyard.Callback` inside the platform: it gives the Trainer of a script what the Trainer of our own kinds has.

It comes as one callback, and finds its Trainer among those who call it. That one becomes of the class that
`trainer_class` makes of its own (it keeps all that the script's class does), and gets the callbacks of our kinds beside
its own.
"""

import functools
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from jobs.container.callback import Callback
from jobs.container.saving.background_save import BackgroundSave
from jobs.container.saving.resume import LossSinceLog, Resume
from jobs.container.trainer import compat
from jobs.container.trainer.accompanied import Accompanied, Saves
from jobs.container.trainer.epoch import Epoch
from jobs.container.trainer.evaluation import is_evaluation
from jobs.container.trainer.heartbeat import Heartbeats
from jobs.container.trainer.platform import Platform, at_exit, here
from jobs.container.trainer.trainer import Options, TrainedEnoughError, trainer_class
from jobs.core.errors import TrainyardError

log = logging.getLogger("trainyard")

_STATE = "trainer_state.json"


def checkpoint() -> str | None:
    """Return the folder to resume from, or None. With it comes the best checkpoint, where that is another one."""
    platform = here()
    resume = platform.resume
    _Asked.checkpoint = True
    return str(resume.folder) if resume else None


class _Asked:
    """True once the script has asked for the checkpoint."""

    checkpoint = False


class AttachedCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """The one callback that the script sees."""

    def __init__(self, saves: Saves) -> None:
        self._platform = here()
        self._saves = saves
        self._parts: _Parts | None = None
        self._came_late = False

    def on_init_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._attach()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for part in self._attach():  # where it was added later: they miss what is being called
            part.on_train_begin(args, state, control)
            self._came_late = True
        self._platform.begin()
        if not _Asked.checkpoint:
            assert self._parts is not None  # noqa: S101 - it has just been attached
            self._parts.begin_anew()
            self._platform.say_anew("trainer.train(resume_from_checkpoint=trainyard.checkpoint())")
        elif self._platform.resume and state.global_step != self._platform.resume.step:
            raise TrainyardError(
                f"the training begins at step {state.global_step}, and the checkpoint that trainyard.checkpoint() gave "
                f"is of step {self._platform.resume.step}",
                next_step="give trainer.train what trainyard.checkpoint() returns",
            )
        self._platform.say_start(state.global_step)

    def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Raise TrainedEnoughError if the checkpoint is of the training's last step, in the middle of an epoch."""
        if state.global_step < state.max_steps and not (
            self._parts and (self._parts.is_out or self._parts.has_stopped_early)
        ):
            return
        if self._came_late:  # the Trainer's own loop, which would not know the exception, had begun
            raise TrainyardError(
                f"the training has ended at step {state.global_step}, and this Trainer would do one more, for it got "
                "trainyard.Callback after it was made",
                next_step="give it the callback where it is made, Trainer(…, callbacks=[trainyard.Callback()]), then "
                "trainyard resume RUN --allow-changes",
            )
        raise TrainedEnoughError

    def _attach(self) -> list[Any]:
        """Give the Trainer its parts, once. Returns those that it has just been given."""
        if self._parts is not None:
            return []
        trainer = _calling_trainer()
        parts = self._parts = _Parts(self._platform, trainer, self._saves)
        handler = trainer.callback_handler
        own = handler.callbacks
        # Another list: the Trainer walks through the old one.
        handler.callbacks = parts.callbacks(own=[parts.epoch, *own], further=[parts])
        return [part for part in handler.callbacks if part not in own]


class _Parts(Accompanied, Callback):
    """What one Trainer has been given, and the end of its training."""

    def __init__(self, platform: Platform, trainer: Any, saves: Saves) -> None:
        rank, args, resume = platform.rank, trainer.args, platform.resume
        self._platform, self._trainer = platform, trainer
        self._is_over = False
        args.save_only_model = False  # a checkpoint without the optimizer is none to resume from
        # The Trainer would make new callbacks, in another order. _restore_state keeps those that there are.
        args.restore_callback_states_from_checkpoint = False
        platform.accelerator.prepare()
        super().__init__(
            rank,
            platform.s3,
            platform.arguments,
            accelerator=platform.accelerator,
            resume=resume,
            saves=saves,
            heartbeats=Heartbeats(rank, compiles=platform.accelerator.compiles, is_patient=True),
            samples_per_step=args.train_batch_size * args.gradient_accumulation_steps * rank.world_size,
            logs_all=True,
            best=functools.partial(_best_step, trainer),
        )
        self.epoch = Epoch(rank)
        # An attempt that comes after the last evaluation makes none, and its result is that of the run.
        self._values = self.metrics.evaluated_before()
        self.has_stopped_early = False
        """True if early stopping had ended the training before this attempt."""
        self.is_out = False
        """True if the run is a point of a sweep that stops here, because the others are better."""
        self._loss_since_log = LossSinceLog(rank, resume)
        _become_resumable(
            trainer,
            Options(
                heartbeats=self.heartbeats,
                background_save=BackgroundSave(rank.run, self.uploads),
                epoch=self.epoch,
                loss_since_log=self._loss_since_log,
                checks_ties=False,
                makes_up=self._make_up,
            ),
        )
        if resume:
            _bring_best(platform, resume)
        at_exit(self._close)

    def begin_anew(self) -> None:
        """Forget what earlier attempts have left: the script has not loaded its checkpoint."""
        self._values = {}
        self._loss_since_log.forget()
        self.metrics.begin_anew()

    def on_train_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        _check_resumable(args)
        resume = self.resume
        self.epoch.check(self._trainer, resume.folder if resume and state.global_step else None)
        self.has_stopped_early = state.global_step > 0 and _restore_state(
            self._trainer.callback_handler.callbacks, state
        )
        self.is_out = self.rungs is not None and self.rungs.was_out(state.global_step)
        if state.global_step >= state.max_steps:  # the Trainer does no epoch, and loads no random numbers, either
            self._make_up()

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Leave what is due at an epoch's end to the next attempt where this one has saved, and is to stop."""
        if self.shutdown.reason:
            control.should_evaluate = control.should_save = False

    def _make_up(self) -> None:
        """Evaluate where the last attempt ended between an epoch's last step, which it had saved, and its evaluation.

        Raises TrainedEnoughError where a callback of the script's stops the training for what was found.
        """
        trainer = self._trainer
        args, state, control = trainer.args, trainer.state, trainer.control
        is_over = state.global_step >= state.max_steps
        if args.eval_strategy != "epoch" or state.epoch < args.eval_delay or not (is_over or state.epoch % 1 == 0):
            return
        if any(is_evaluation(entry, state.global_step) for entry in state.log_history):
            return
        found = trainer._evaluate(None, None)  # noqa: SLF001 - what it does at an epoch's end
        self._note_best(found)
        if control.should_training_stop and not is_over:
            raise TrainedEnoughError

    def _note_best(self, found: Mapping[str, Any]) -> None:
        """Have the Trainer take the checkpoint that it goes on from for the best one, where it is."""
        args, state = self._trainer.args, self._trainer.state
        name, resume = args.metric_for_best_model, self.resume
        if name is None or resume is None:
            return
        value = found[name if name.startswith("eval_") else f"eval_{name}"]
        best = state.best_metric
        if best is None or (value > best if args.greater_is_better else value < best):
            state.best_metric, state.best_model_checkpoint = value, str(resume.folder)
            if hasattr(state, "best_global_step"):  # from transformers 4.51 on
                state.best_global_step = state.global_step

    def on_evaluate(self, _args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **_: Any) -> None:
        self._values = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        self.metrics.evaluated(state.global_step, self._values)
        self._compare(state, control, self._values)

    def _compare(self, state: Any, control: Any, values: Mapping[str, Any]) -> None:
        """Stop here where the run is a point of a sweep, and the others are better."""
        if self.rungs is None or state.global_step >= state.max_steps:
            return
        if self.rungs.is_out(state.global_step, values):
            self.is_out = control.should_save = control.should_training_stop = True

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Have all checkpoints complete; where the attempt was asked to stop, end this process."""
        self.heartbeats.end()
        self.uploads.finish()
        if not self.shutdown.reason:
            self.shutdown.close()
        if self.shutdown.reason:
            self.metrics.close()
            self._platform.leave_stopped(f"{self.shutdown.reason}; saved step {self.shutdown.saved_step}")
            # Nobody leaves before rank 0 has everything on S3: the launcher would stop those that are left.
            self.rank.once("saved", lambda: True)
            raise SystemExit(0)  # the launcher knows by the word just left that the work is not done
        if self.rungs is not None and self.is_out:
            self.rungs.leave()
        self._is_over = True

    def _close(self) -> None:
        if self.shutdown.reason:
            return
        self.uploads.finish()
        if self._is_over:
            result = {**self._values, **self.metrics.throughput.figures}
            self.metrics.result(self._trainer.state.global_step, result)
        self.metrics.close()


def _check_resumable(args: Any) -> None:
    """Raise TrainyardError if a resumed attempt would not continue as an uninterrupted run, whatever we restore."""
    settings = {
        "auto_find_batch_size": (args.auto_find_batch_size, "set per_device_train_batch_size to a batch that fits"),
        "ignore_data_skip": (args.ignore_data_skip, "leave it out: a resumed epoch would begin from its first batch"),
        "accelerator_config.use_seedable_sampler: false": (
            not getattr(args.accelerator_config, "use_seedable_sampler", True) and args.world_size > 1,
            "leave it out: on several ranks the order of an epoch could not be restored",
        ),
    }
    for name, (is_set, next_step) in settings.items():
        if is_set:
            raise TrainyardError(
                f"the Trainer has {name}, with which trainyard.Callback cannot resume a training as if uninterrupted",
                next_step=next_step,
            )


def _restore_state(callbacks: Sequence[Any], state: Any) -> bool:
    """Give the script's callbacks the state that the Trainer has saved of them, which it does not restore by itself.

    Returns whether early stopping had already ended the training.
    """
    saved: dict[str, Any] = getattr(state, "stateful_callbacks", {})
    by_name: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            by_name.setdefault(type(callback).__name__, []).append(callback)
    for name, same in by_name.items():
        found = saved.get(name, [])
        # Several of one class are a list, to which each save has added theirs: the newest are the last.
        newest = found[-len(same) :] if isinstance(found, list) else [found]
        for callback, values in zip(same, newest):  # noqa: B905 - a callback that is new has none
            vars(callback).update(values.get("attributes", {}))
        if name not in saved:
            saved[name] = same[0].state()  # the Trainer adds its state there
    return any(
        callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in callbacks
        if isinstance(callback, EarlyStoppingCallback)
    )


def _become_resumable(trainer: Any, options: Options) -> None:
    own = type(trainer)
    compat.keep_epoch(own)
    resumable = trainer_class(own)
    # What prints the class, a model's card for instance, shows the script's own.
    resumable.__name__, resumable.__qualname__, resumable.__module__ = own.__name__, own.__qualname__, own.__module__
    trainer.__class__ = resumable
    trainer.take(options)


def _calling_trainer() -> Any:
    """Return the Trainer that is calling its callbacks: it hands itself to none of them."""
    frame = sys._getframe(1)  # noqa: SLF001 - there is no other way to it from one line of a script
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(found, "callback_handler") and hasattr(found, "training_step"):
            return found
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none
    raise TrainyardError(
        "trainyard.Callback was called by nobody that is a Trainer of transformers",
        next_step="give it to a Trainer's callbacks; for a loop of your own use trainyard.Run",
    )


def _best_step(trainer: Any) -> int | None:
    """Return the step of the checkpoint that the Trainer loads at its end; None where it loads none."""
    best = trainer.state.best_model_checkpoint
    if not (trainer.args.load_best_model_at_end and best):
        return None
    return int(Path(best).name.rpartition("-")[2])


def _bring_best(platform: Platform, resume: Resume) -> None:
    """Put the best checkpoint beside the newest, and have the Trainer look for it there."""
    path = resume.folder / _STATE
    state = json.loads(path.read_bytes())
    best = state.get("best_model_checkpoint")
    if not best:
        return
    step = int(Path(best).name.rpartition("-")[2])
    folder = resume.folder if step == resume.step else platform.fetch_beside(resume, step)

    def write() -> bool:
        path.write_text(json.dumps({**state, "best_model_checkpoint": str(folder) if folder else None}))
        return True

    platform.rank.once_per_node("resume/best", write)
