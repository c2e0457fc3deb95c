"""`trainyard.Callback` inside the platform: makes the Trainer of a script resumable, like the Trainer of our own kinds.

The script adds one callback, which finds its Trainer in the call stack. It replaces the Trainer's class with a subclass
(`trainer_class`) that keeps everything the script's class does, and adds our callbacks to the script's.
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

from jobs.container.rank import Callback, Rank
from jobs.container.saving.resume import LossSinceLog, Resume
from jobs.container.saving.shards import ShardWriter
from jobs.container.saving.snapshot import BackgroundSave
from jobs.container.trainer.components import Components, Saves
from jobs.container.trainer.determinism import Epoch
from jobs.container.trainer.evaluation import is_evaluation
from jobs.container.trainer.heartbeat import Heartbeats
from jobs.container.trainer.script_platform import Platform, at_exit, current_platform
from jobs.container.trainer.trainer import Options, TrainedEnoughError, trainer_class
from jobs.container.versions import keep_epoch
from jobs.core.errors import TrainyardError
from jobs.core.words import counted

log = logging.getLogger("trainyard")

_STATE = "trainer_state.json"


def checkpoint() -> str | None:
    """Return the folder to resume from, or None. Also downloads the best checkpoint if it differs from the newest."""
    resume = current_platform().resume
    _CheckpointRequest.was_made = True
    return str(resume.folder) if resume else None


class _CheckpointRequest:
    """Records whether the script has called `trainyard.checkpoint()`."""

    was_made = False


class AttachedCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """The one callback that the script sees."""

    def __init__(self, saves: Saves) -> None:
        self._platform = current_platform()
        self._saves = saves
        self._parts: _Parts | None = None
        self._is_late = False

    def on_init_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._attach()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for part in self._attach():  # the script added us after on_init_end; new parts would miss this event
            part.on_train_begin(args, state, control)
            self._is_late = True
        self._platform.begin()
        if not _CheckpointRequest.was_made:
            assert self._parts is not None  # noqa: S101 - just attached
            self._parts.start_over()
            self._platform.warn_starts_over("trainer.train(resume_from_checkpoint=trainyard.checkpoint())")
        elif self._platform.resume and state.global_step != self._platform.resume.step:
            raise TrainyardError(
                f"the training begins at step {state.global_step}, but the checkpoint that trainyard.checkpoint() "
                f"returned is of step {self._platform.resume.step}",
                next_step="pass the return value of trainyard.checkpoint() to trainer.train",
            )
        self._platform.log_start(state.global_step)

    def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Raise TrainedEnoughError if the checkpoint is of the last step of the training, even within an epoch."""
        if state.global_step < state.max_steps and not (
            self._parts and (self._parts.is_stopped or self._parts.has_stopped_early)
        ):
            return
        if self._is_late:  # the loop that has begun is the Trainer's own, which does not handle the exception
            raise TrainyardError(
                f"the training ended at step {state.global_step}, and this Trainer would do another step, because "
                "trainyard.Callback was added after it was created",
                next_step="pass the callback to the constructor, Trainer(…, callbacks=[trainyard.Callback()]), then "
                "trainyard resume RUN --allow-changes",
            )
        raise TrainedEnoughError

    def _attach(self) -> list[Any]:
        """Attach our parts to the Trainer, once. Return the callbacks that were added."""
        if self._parts is not None:
            return []
        trainer = _calling_trainer()
        parts = self._parts = _Parts(self._platform, trainer, self._saves)
        handler = trainer.callback_handler
        own = handler.callbacks
        # A new list, because the Trainer is iterating over the old one.
        handler.callbacks = parts.callbacks(own=[parts.epoch, *own], further=[parts])
        return [part for part in handler.callbacks if part not in own]


class _Parts(Components, Callback):
    """The components attached to one Trainer, which also handle the end of its training."""

    def __init__(self, platform: Platform, trainer: Any, saves: Saves) -> None:
        rank, args, resume = platform.rank, trainer.args, platform.resume
        self._platform, self._trainer = platform, trainer
        self._is_over = False
        _check_ranks(trainer, rank, resume)
        args.save_only_model = False  # without the optimizer a checkpoint cannot be resumed
        # The Trainer would create new callbacks in another order. _restore_state keeps the existing ones.
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
        # An attempt that resumes after the last evaluation runs none, but its result is the run's result.
        self._values = self.metrics.evaluated_before()
        self.has_stopped_early = False
        """True if early stopping had ended the training before this attempt."""
        self.is_stopped = False
        """True if the run is a point of a sweep that stops here because others are better."""
        self._loss_since_log = LossSinceLog(rank, resume)
        _make_resumable(
            trainer,
            Options(
                heartbeats=self.heartbeats,
                background_save=BackgroundSave(rank.run, self.uploads, ShardWriter(rank)),
                epoch=self.epoch,
                loss_since_log=self._loss_since_log,
                checks_ties=False,
                catch_up=self._evaluate_missed,
            ),
        )
        if resume:
            _fetch_best(platform, resume)
        at_exit(self._close)

    def start_over(self) -> None:
        """Discard the values of earlier attempts, because the script has not loaded its checkpoint."""
        self._values = {}
        self._loss_since_log.forget()
        self.metrics.start_over()

    def on_train_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        _check_resumable(args)
        resume = self.resume
        self.epoch.check(self._trainer, resume.folder if resume and state.global_step else None)
        self.has_stopped_early = state.global_step > 0 and _restore_state(
            self._trainer.callback_handler.callbacks, state
        )
        self.is_stopped = self.rungs is not None and self.rungs.was_stopped(state.global_step)
        if state.global_step >= state.max_steps:  # the Trainer runs no epoch and restores no random state either
            self._evaluate_missed()

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Skip the evaluation and save at an epoch's end if this attempt is stopping. The next attempt does both."""
        if self.shutdown.reason:
            control.should_evaluate = control.should_save = False

    def _evaluate_missed(self) -> None:
        """Evaluate if the last attempt ended between an epoch's last step, which it saved, and the evaluation.

        Raises TrainedEnoughError if a callback of the script stops the training because of the result.
        """
        trainer = self._trainer
        args, state, control = trainer.args, trainer.state, trainer.control
        is_over = state.global_step >= state.max_steps
        if args.eval_strategy != "epoch" or state.epoch < args.eval_delay or not (is_over or state.epoch % 1 == 0):
            return
        if any(is_evaluation(entry, state.global_step) for entry in state.log_history):
            return
        found = trainer._evaluate(None, None)  # noqa: SLF001 - the Trainer calls it at an epoch's end
        self._note_best(found)
        if control.should_training_stop and not is_over:
            raise TrainedEnoughError

    def _note_best(self, found: Mapping[str, Any]) -> None:
        """Record the resumed checkpoint as the best one if its evaluation is the best."""
        args, state = self._trainer.args, self._trainer.state
        name, resume = args.metric_for_best_model, self.resume
        if name is None or resume is None:
            return
        value = found[name if name.startswith("eval_") else f"eval_{name}"]
        best = state.best_metric
        if best is None or (value > best if args.greater_is_better else value < best):
            state.best_metric, state.best_model_checkpoint = value, str(resume.folder)
            state.best_global_step = state.global_step

    def on_evaluate(self, _args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **_: Any) -> None:
        self._values = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        self.metrics.evaluated(state.global_step, self._values)
        if self.rungs is None or state.global_step >= state.max_steps:
            return
        if self.rungs.is_stopped(state.global_step, self._values):
            self.is_stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Wait until all checkpoints are complete. If the attempt was asked to stop, end this process."""
        self.heartbeats.end()
        self.uploads.finish()
        if not self.shutdown.reason:
            self.shutdown.close()
        if self.shutdown.reason:
            self.metrics.close()
            self._platform.report_stopped(f"{self.shutdown.reason}; saved step {self.shutdown.saved_step}")
            # No rank leaves before rank 0 has uploaded everything: the launcher would stop the ranks that remain.
            self.rank.once("saved", lambda: True)
            raise SystemExit(0)  # report_stopped has informed the launcher that the work is not done
        if self.rungs is not None and self.is_stopped:
            self.rungs.report_stop()
        self._is_over = True

    def _close(self) -> None:
        if self.shutdown.reason:
            return
        self.uploads.finish()
        if self._is_over:
            result = {**self._values, **self.metrics.throughput.figures}
            self.metrics.result(self._trainer.state.global_step, result)
        self.metrics.close()


def _check_ranks(trainer: Any, rank: Rank, resume: Resume | None) -> None:
    """Raise TrainyardError if DeepSpeed would resume on another number of ranks, for which it has no parts."""
    if resume and resume.world_size != rank.world_size and trainer.is_deepspeed_enabled:
        ranks = counted(resume.world_size, "rank")
        raise TrainyardError(
            f"checkpoint step-{resume.step} has DeepSpeed's parts of {ranks}, and DeepSpeed cannot resume it on "
            f"{rank.world_size}",
            next_step=f"resume the run on {ranks}; or fetch the checkpoint, convert it with DeepSpeed's "
            "ds_to_universal.py, and submit a new run that loads it",
        )


def _check_resumable(args: Any) -> None:
    """Raise TrainyardError for settings with which a resumed training would differ from an uninterrupted one."""
    settings = {
        "auto_find_batch_size": (args.auto_find_batch_size, "set per_device_train_batch_size to a batch that fits"),
        "ignore_data_skip": (args.ignore_data_skip, "remove it: a resumed epoch would begin from its first batch"),
        "accelerator_config.use_seedable_sampler: false": (
            not getattr(args.accelerator_config, "use_seedable_sampler", True) and args.world_size > 1,
            "remove it: on several ranks the order of an epoch could not be restored",
        ),
    }
    for name, (is_set, next_step) in settings.items():
        if is_set:
            raise TrainyardError(
                f"the Trainer has {name}, so trainyard.Callback could not resume its training as if uninterrupted",
                next_step=next_step,
            )


def _restore_state(callbacks: Sequence[Any], state: Any) -> bool:
    """Restore the state of the script's callbacks, which the Trainer saves but does not restore itself.

    Returns whether early stopping had already ended the training.
    """
    saved: dict[str, Any] = getattr(state, "stateful_callbacks", {})
    by_name: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            by_name.setdefault(type(callback).__name__, []).append(callback)
    for name, same in by_name.items():
        found = saved.get(name, [])
        # Several callbacks of one class are saved as a list, to which each save appends. The newest are at the end.
        newest = found[-len(same) :] if isinstance(found, list) else [found]
        for callback, values in zip(same, newest):  # noqa: B905 - a new callback has no saved state
            vars(callback).update(values.get("attributes", {}))
        if name not in saved:
            saved[name] = same[0].state()  # the Trainer appends to this entry
    return any(
        callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in callbacks
        if isinstance(callback, EarlyStoppingCallback)
    )


def _make_resumable(trainer: Any, options: Options) -> None:
    own = type(trainer)
    keep_epoch(own)
    resumable = trainer_class(own)
    # Model cards and messages should show the name of the script's class.
    resumable.__name__, resumable.__qualname__, resumable.__module__ = own.__name__, own.__qualname__, own.__module__
    trainer.__class__ = resumable
    trainer.attach(options)


def _calling_trainer() -> Any:
    """Return the Trainer that is calling its callbacks, because it does not pass itself to them."""
    frame = sys._getframe(1)  # noqa: SLF001 - a callback has no other way to its Trainer
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(found, "callback_handler") and hasattr(found, "training_step"):
            return found
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none
    raise TrainyardError(
        "trainyard.Callback was not called by a Trainer of transformers",
        next_step="add it to a Trainer's callbacks; for a custom loop use trainyard.Run",
    )


def _best_step(trainer: Any) -> int | None:
    """Return the step of the checkpoint that the Trainer loads at its end, or None if it loads none."""
    best = trainer.state.best_model_checkpoint
    if not (trainer.args.load_best_model_at_end and best):
        return None
    return int(Path(best).name.rpartition("-")[2])


def _fetch_best(platform: Platform, resume: Resume) -> None:
    """Download the best checkpoint beside the newest, and set its path in the Trainer's state."""
    path = resume.folder / _STATE
    state = json.loads(path.read_bytes())
    best = state.get("best_model_checkpoint")
    if not best:
        return
    step = int(Path(best).name.rpartition("-")[2])
    folder = resume.folder if step == resume.step else platform.fetch_other(resume, step)

    def write() -> bool:
        path.write_text(json.dumps({**state, "best_model_checkpoint": str(folder) if folder else None}))
        return True

    platform.rank.once_per_node("resume/best", write)
