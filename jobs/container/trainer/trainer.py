"""The Trainer class: a Trainer of transformers or optimum-habana that can be interrupted and resumed at any step.

`trainer_class` extends either base with the parts named in its `Options`. If several parts act in one method, the order
of the lines matters, and comments explain it.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.container import versions
from jobs.container.saving.resume import LossSinceLog, kept_settings
from jobs.container.saving.shards import load as load_shards
from jobs.container.saving.snapshot import FSDP_FOLDERS, BackgroundSave, saves_shards
from jobs.container.trainer.determinism import Epoch, arrange_gradient_buckets
from jobs.container.trainer.heartbeat import Heartbeats
from jobs.core.errors import TrainyardError

if TYPE_CHECKING:
    from torch.utils.data import Sampler


def check_tied_weights(model: Any) -> None:
    """Raise TrainyardError if embeddings and decoder should share weights but do not. `model` may be wrapped.

    When a model moves to another kind of device, PyTorch makes a new parameter for each place of a tied weight
    (torch.nn.Module.to). The two would then learn separately, but only one is saved, so the reported loss would not be
    the saved model's.
    """
    while hasattr(model, "module"):
        model = model.module
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    decoder = model.get_output_embeddings()
    if decoder is not None and decoder.weight is not model.get_input_embeddings().weight:
        raise TrainyardError(
            "the model's decoder does not share the weights of its embeddings, although its configuration ties them: "
            "its losses would not be the saved model's",
            next_step="report this with the release of the image",
        )


class TrainedEnoughError(Exception):
    """A resumed training has no step left.

    Callbacks raise it, because a Trainer does the first step of an epoch before it checks whether any is left.
    """


@dataclass(frozen=True, kw_only=True)
class Options:
    """The parts of a Trainer. Without a part, the Trainer behaves as its base does."""

    loss: Callable[[Any, Any], Any] | None = None
    """Computes the loss of a batch from logits and labels, in place of the model."""
    sampler: "Callable[[Any], Sampler[int]] | None" = None
    """Takes a Trainer and returns the sampler of its training data."""
    heartbeats: Heartbeats | None = None
    """Called for each batch and save. Must also be the first of the callbacks."""
    background_save: BackgroundSave | None = None
    """Writes model and optimizer while the training continues."""
    epoch: Epoch | None = None
    """Resumes within an epoch as if uninterrupted. Must also be the first of the callbacks."""
    loss_since_log: LossSinceLog | None = None
    """Keeps the losses since the last log line in each checkpoint."""
    keeps_settings: bool = False
    """Use this attempt's learning rate and weight decay instead of the checkpoint's."""
    checks_ties: bool = True
    """Refuse a model whose tied weights have separated. Scripts may intend this (adapters on a decoder)."""
    reseed: Callable[[int], Any] | None = None
    """Seeds the random state, given the step, instead of restoring it from the checkpoint."""
    catch_up: Callable[[], None] | None = None
    """Makes up for work that the last attempt missed after its checkpoint. Runs with the checkpoint's random state."""


def trainer_class(base: type[Any]) -> type[Any]:
    """Return the subclass of `base` that takes `options` in addition to the arguments of `base`.

    The base is known only at run time, because it depends on the accelerator.
    """

    class ResumableTrainer(base):  # type: ignore[misc]  # the class is chosen at run time
        """A Trainer that can be interrupted at any step and continues as if it had not been."""

        def __init__(self, *args: Any, options: Options, **kwargs: Any) -> None:
            self.attach(options)
            super().__init__(*args, **kwargs)

        def attach(self, options: Options) -> None:
            """Attach our parts. A Trainer that was converted to this class has none yet."""
            self._options = options
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
            if self._options.sampler is None:
                return super()._get_train_sampler(*args, **kwargs)
            return self._options.sampler(self)

        def get_train_dataloader(self) -> Any:
            if self._options.epoch is None:
                return super().get_train_dataloader()
            own: Any = self.data_collator  # type: ignore[has-type]  # the base is known at run time
            self.data_collator = self._options.epoch.collating(own, self.args)
            try:
                loader = super().get_train_dataloader()
            finally:
                self.data_collator = own
            self._options.epoch.set_loader(loader, self.args.gradient_accumulation_steps)
            return loader

        def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
            values = super().set_initial_training_values(*args, **kwargs)
            if self._options.epoch is None:
                return values
            epochs, steps, *further = values
            return (epochs, self._options.epoch.steps_of_epoch(steps, self), *further)

        def _load_callback_state(self) -> None:
            super()._load_callback_state()
            # The Trainer's state has just been loaded, and nothing has been computed from it yet.
            if self._options.epoch is not None:
                self._options.epoch.resume(self, Path(self._resumed_folder))

        def _load_optimizer_and_scheduler(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
            if self._options.keeps_settings:
                with kept_settings(self):
                    return super()._load_optimizer_and_scheduler(checkpoint, *args, **kwargs)
            loaded = super()._load_optimizer_and_scheduler(checkpoint, *args, **kwargs)
            if checkpoint is not None and versions.LOSES_SHARDED_OPTIMIZER and saves_shards(self):
                objects = {"model": self.model, "optimizer": self.optimizer}
                load_shards(Path(checkpoint) / FSDP_FOLDERS["optimizer"], objects, ["optimizer"])
            return loaded

        def _load_rng_state(self, *args: Any, **kwargs: Any) -> None:
            if self._options.reseed is not None:
                self._options.reseed(self.state.global_step)
                return
            super()._load_rng_state(*args, **kwargs)
            if self._options.catch_up is not None:
                self._options.catch_up()

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # The heartbeat comes first, because anything in the batch may take long.
            if self._options.heartbeats is not None:
                self._options.heartbeats.batch("training", inputs)
            # After the model has reached its device, and before the first backward pass arranges the buckets.
            if not self._has_begun:
                self._has_begun = True
                if self._options.checks_ties:
                    check_tied_weights(model)
                arrange_gradient_buckets(model)
            loss = super().training_step(model, inputs, *args, **kwargs)
            # The Trainer sums up the returned losses, so the first one carries the restored sum.
            return (
                loss if self._options.loss_since_log is None else self._options.loss_since_log.add_restored(self, loss)
            )

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if self._options.loss is None or "labels" not in inputs:
                return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            loss = self._options.loss(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._options.heartbeats is not None:
                self._options.heartbeats.batch("evaluating", inputs)
            return super().prediction_step(model, inputs, *args, **kwargs)

        def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_save_due = self.control.should_save
            # Before the Trainer logs, which resets the sum, and saves, which needs it.
            if self._options.loss_since_log is not None:
                self._options.loss_since_log.note(tr_loss)
            done = super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
            # The Trainer subtracts the logged sum. NaN minus NaN is NaN, which would spoil all later lines.
            if self._globalstep_last_logged == self.state.global_step:
                tr_loss.zero_()
            return done

        def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
            # With save_strategy=best the return value replaces other requests for a save: a notice, the interval.
            return bool(super()._determine_best_metric(*args, **kwargs)) or self._is_save_due

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            # The heartbeat comes first: copying the state may wait for the previous save.
            if self._options.heartbeats is not None:
                self._options.heartbeats.saving()
            # The block includes the losses' file, which belongs to the checkpoint and may meet the same full disk.
            save = self._options.background_save
            with contextlib.nullcontext() if save is None else save.copied_state(self):
                saved = self._save_with_losses(*args, **kwargs)
            if self._options.heartbeats is not None:
                self._options.heartbeats.saved()
            return saved

        def _save_with_losses(self, *args: Any, **kwargs: Any) -> Any:
            saved = super()._save_checkpoint(*args, **kwargs)
            if self._options.loss_since_log is not None:
                self._options.loss_since_log.save(self)
            if self._options.epoch is not None:
                self._options.epoch.save(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")
            return saved

        def _load_best_model(self) -> Any:
            # The best checkpoint may be the last one, which may still be being written.
            if self._options.background_save is not None:
                self._options.background_save.settle()
            return super()._load_best_model()

        def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
            if self._options.background_save is not None and self._options.background_save.has_copied:
                Path(str(output_dir)).mkdir(parents=True, exist_ok=True)  # the Trainer writes other files there next
            else:
                super().save_model(output_dir, *args, **kwargs)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if self._options.background_save is not None and self._options.background_save.has_copied:
                self._options.background_save.save_scheduler(self, Path(output_dir))
            else:
                super()._save_optimizer_and_scheduler(output_dir)

    return ResumableTrainer
