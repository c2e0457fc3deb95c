"""The Trainer class: that of transformers or of optimum-habana, for runs that may be ended and resumed at any moment.

`trainer_class` extends either of them with the parts that its `Options` name, and with nothing else but what some
releases need (`compat`). Where several parts act in one method, its lines are their order, and say why it is that one.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.container.saving.background_save import BackgroundSave
from jobs.container.saving.resume import LossSinceLog, kept_settings
from jobs.container.trainer import tied_weights
from jobs.container.trainer.determinism import arrange_gradient_buckets
from jobs.container.trainer.epoch import Epoch
from jobs.container.trainer.heartbeat import Heartbeats

if TYPE_CHECKING:
    from torch.utils.data import Sampler


class TrainedEnoughError(Exception):
    """A training that was resumed had come to its end: there is no step left to do.

    Its callbacks raise it, for a Trainer that has begun an epoch does a step before it asks whether that is one too
    many.
    """


@dataclass(frozen=True, kw_only=True)
class Options:
    """The parts that a Trainer has. Where one is left out, the Trainer does what its base does."""

    sampler: "Callable[[Any], Sampler[int]] | None" = None
    """Makes the sampler of the training data, given the Trainer."""
    heartbeats: Heartbeats | None = None
    """Is told of each batch and of each save. It is to be the first of the callbacks, too."""
    background_save: BackgroundSave | None = None
    """Writes model and optimizer while the training goes on."""
    epoch: Epoch | None = None
    """Resumes within an epoch as if uninterrupted. It has to be the first of the callbacks, too."""
    loss_since_log: LossSinceLog | None = None
    """Keeps in each checkpoint the losses that were not logged yet."""
    keeps_settings: bool = False
    """The optimizer has the learning rate and the weight decay of this attempt, not those of the checkpoint."""
    checks_ties: bool = True
    """Refuses a model whose tied weights have come apart. That of a script may be meant so (adapters on a decoder)."""
    reseed: Callable[[int], Any] | None = None
    """Seeds the random numbers, given the step, instead of taking their state from the checkpoint."""
    makes_up: Callable[[], None] | None = None
    """Does what the last attempt did not come to after its checkpoint. It is called with the random numbers of that."""


def trainer_class(base: type[Any]) -> type[Any]:
    """Return the subclass of `base` that takes `options`, beside the arguments of `base`.

    The base is known only at run time, for it depends on the accelerator.
    """

    class ResumableTrainer(base):  # type: ignore[misc]  # the class is chosen at run time
        """A Trainer whose run may be ended at any step, and goes on as if it had not been."""

        def __init__(self, *args: Any, options: Options, **kwargs: Any) -> None:
            self.take(options)
            super().__init__(*args, **kwargs)

        def take(self, options: Options) -> None:
            """Take the parts of this Trainer; one that has become of this class was made without."""
            self._sampler = options.sampler
            self._heartbeats = options.heartbeats
            self._background_save = options.background_save
            self._epoch = options.epoch
            self._loss_since_log = options.loss_since_log
            self._keeps_settings = options.keeps_settings
            self._checks_ties = options.checks_ties
            self._reseed = options.reseed
            self._makes_up = options.makes_up
            self._has_begun = False
            self._is_save_due = False

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            started = time.time()
            self._resumed_folder = str(kwargs.get("resume_from_checkpoint"))
            try:
                return super()._inner_training_loop(*args, **kwargs)
            except TrainedEnoughError:
                pass
            # What the Trainer does after its last step.
            from transformers.trainer_utils import TrainOutput, speed_metrics

            if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
                self._load_best_model()
            metrics = speed_metrics("train", started, num_samples=0, num_steps=0)
            metrics |= {"total_flos": self.state.total_flos, "train_loss": 0.0}
            self.is_in_train = False
            self._memory_tracker.stop_and_update_metrics(metrics)
            self.log(metrics)
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            if self.neftune_noise_alpha is not None:
                self._deactivate_neftune(self.model)
            return TrainOutput(self.state.global_step, 0.0, metrics)

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            if self._sampler is None:
                return super()._get_train_sampler(*args, **kwargs)
            return self._sampler(self)

        def get_train_dataloader(self) -> Any:
            if self._epoch is None:
                return super().get_train_dataloader()
            own: Any = self.data_collator  # type: ignore[has-type]  # the base is known at run time
            self.data_collator = self._epoch.collating(own, self.args)
            try:
                loader = super().get_train_dataloader()
            finally:
                self.data_collator = own
            self._epoch.take_loader(loader, self.args.gradient_accumulation_steps)
            return loader

        def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
            values = super().set_initial_training_values(*args, **kwargs)
            if self._epoch is None:
                return values
            epochs, steps, *further = values
            return (epochs, self._epoch.steps_of_epoch(steps, self), *further)

        def _load_callback_state(self) -> None:
            super()._load_callback_state()
            # Here the state has just been loaded, and nothing was computed from it.
            if self._epoch is not None:
                self._epoch.resume(self, Path(self._resumed_folder))

        def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            if not self._keeps_settings:
                return super()._load_optimizer_and_scheduler(*args, **kwargs)
            with kept_settings(self):
                return super()._load_optimizer_and_scheduler(*args, **kwargs)

        def _load_rng_state(self, *args: Any, **kwargs: Any) -> None:
            if self._reseed is not None:
                self._reseed(self.state.global_step)
                return
            super()._load_rng_state(*args, **kwargs)
            if self._makes_up is not None:
                self._makes_up()

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # The heartbeat comes first: it says what this batch is, whatever takes long in it.
            if self._heartbeats is not None:
                self._heartbeats.batch("training", inputs)
            # After all that moves the model, before the first backward pass, which would arrange buckets its own way.
            if not self._has_begun:
                self._has_begun = True
                if self._checks_ties:
                    tied_weights.check(model)
                arrange_gradient_buckets(model)
            loss = super().training_step(model, inputs, *args, **kwargs)
            # The Trainer adds up what this returns: the first loss carries those that the checkpoint kept.
            return loss if self._loss_since_log is None else self._loss_since_log.with_kept(self, loss)

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._heartbeats is not None:
                self._heartbeats.batch("evaluating", inputs)
            return super().prediction_step(model, inputs, *args, **kwargs)

        def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_save_due = self.control.should_save
            # Before the Trainer logs, which sets the sum to zero, and saves, which needs it.
            if self._loss_since_log is not None:
                self._loss_since_log.note(tr_loss)
            done = super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
            # What was logged it takes off by subtraction, and NaN less NaN is NaN: all later lines would be it, too.
            if self._globalstep_last_logged == self.state.global_step:
                tr_loss.zero_()
            return done

        def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
            # With save_strategy=best the answer replaces what else asked for a save: a notice, the interval.
            return bool(super()._determine_best_metric(*args, **kwargs)) or self._is_save_due

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            # The heartbeat comes first: the copy of the state may wait for the save before.
            if self._heartbeats is not None:
                self._heartbeats.saving()
            # The losses are written within: their file is one of the checkpoint's, and meets the same full disk.
            save = self._background_save
            with contextlib.nullcontext() if save is None else save.copied_state(self):
                saved = self._save_with_losses(*args, **kwargs)
            if self._heartbeats is not None:
                self._heartbeats.saved()
            return saved

        def _save_with_losses(self, *args: Any, **kwargs: Any) -> Any:
            saved = super()._save_checkpoint(*args, **kwargs)
            if self._loss_since_log is not None:
                self._loss_since_log.save(self)
            if self._epoch is not None:
                self._epoch.save(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")
            return saved

        def _load_best_model(self) -> Any:
            # It may be the last one, of which a copy is being written.
            if self._background_save is not None:
                self._background_save.settle()
            return super()._load_best_model()

        def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
            if self._background_save is not None and self._background_save.has_copied:
                Path(str(output_dir)).mkdir(parents=True, exist_ok=True)  # what follows writes into it
            else:
                super().save_model(output_dir, *args, **kwargs)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if self._background_save is not None and self._background_save.has_copied:
                self._background_save.save_scheduler(self, Path(output_dir))
            else:
                super()._save_optimizer_and_scheduler(output_dir)

    return ResumableTrainer
