"""Run one attempt of any recipe: resume, build, train, upload the model, evaluate.

An entrypoint prepares its data, describes the training as a `Task`, and calls `train`. It imports this module after its
data are ready, because PyTorch and transformers take seconds to load.
"""

import functools
import logging
import math
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers.trainer_callback import PrinterCallback

from jobs.aws import s3 as object_store
from jobs.container import hub
from jobs.container.accelerator import Accelerator
from jobs.container.hub_saves import SavePushes
from jobs.container.rank import Callback, Rank, ResumeLaterError
from jobs.container.saving.interval import RegularSaves
from jobs.container.saving.manifest import check_newest
from jobs.container.saving.metrics import StopOnNan
from jobs.container.saving.resume import LossSinceLog, Resume, checkpoint_of_recipe, seed_of_rank
from jobs.container.saving.snapshot import BackgroundSave
from jobs.container.trainer.arguments import gaudi_arguments, training_arguments
from jobs.container.trainer.components import Components, Saves
from jobs.container.trainer.determinism import Order, ordered_sampler, sequential_sampler
from jobs.container.trainer.evaluation import BestEvaluation, Evaluations, due_every, load_best_weights
from jobs.container.trainer.heartbeat import Heartbeats
from jobs.container.trainer.trackers import Trackers
from jobs.container.trainer.trainer import Options, trainer_class
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.run import MODEL
from jobs.core.words import counted, result_label
from jobs.spec.recipe import Recipe

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


log = logging.getLogger("trainyard")


class StartUpLog(Callback):
    """Measures the last two parts of the start, and logs all parts on rank 0."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._is_logged = False

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._rank.start_up.done("state loaded")

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        self._rank.start_up.done("first step")
        if self._rank.is_first:
            log.info("%s", self._rank.start_up.line(state.global_step))


@dataclass(frozen=True, kw_only=True)
class Task:
    """An entrypoint's description of a training: model, data, evaluation, and what to save at the end."""

    model: Callable[[Path | None], Any]
    """Makes the model after the seed is set. Called on every rank, with the checkpoint's folder if the attempt resumes.
    The Trainer then replaces the model's weights with the checkpoint's."""
    start: str
    """The model's start for the log, for instance `the pretrained weights`."""
    train_data: Any
    """A data set with `__len__` and `__getitems__`; each item is one sequence."""
    order: Order | None = None
    """Returns the positions of an epoch for `__getitems__` of train_data, in whole global batches."""
    eval_data: Any
    collate: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any] | None = None
    """Computes a batch's mean loss from logits and labels. Default: the model's own loss."""
    evaluate: Callable[[Any], Mapping[str, Any]]
    """Takes the Trainer and returns the metrics of its current model. Called on every rank, also during training."""
    save_beside: Callable[[Path], None]
    """Saves the model's tokenizer into its folder. Called on rank 0."""
    write_extras: Callable[[Path], None] | None = None
    """Writes further results of the run into a folder. Called on rank 0, at the end."""
    schedule: Mapping[str, Any]
    """The length of the training: `num_train_epochs` or `max_steps` of the training arguments."""
    ordered_epoch: int | None = None
    """Number of items in an epoch, if `order` is None and `train_data` has the items of all steps in order."""


def train(
    rank: Rank,
    recipe: Recipe,
    task: Task,
    *,
    s3: "S3Client | None",
    accelerator: Accelerator,
) -> None:
    """Run one attempt, from the newest checkpoint to the final metrics. All ranks call it.

    The first rank of each node needs `s3`. Raises ResumeLaterError if the attempt was asked to stop: it has saved, and
    the next attempt resumes there.
    """
    transformers.logging.set_verbosity_error()  # it would warn that a head is new, which fine-tuning intends
    transformers.logging.disable_progress_bar()  # the log consists of lines
    heartbeats = Heartbeats(rank, compiles=accelerator.compiles)
    _check_size(task, recipe)
    resume = checkpoint_of_recipe(rank, s3 or object_store.connect(), recipe)
    attempt = _Attempt(rank, recipe, task, s3=s3, accelerator=accelerator, heartbeats=heartbeats, resume=resume)
    attempt.log_start()
    rank.start_up.done("checkpoint")
    trainer = attempt.build()
    rank.start_up.done("model")
    trainer.train(resume_from_checkpoint=str(resume.folder) if resume else None)
    attempt.upload_model(trainer)
    attempt.finish(trainer, attempt.evaluate(trainer))


def _check_size(task: Task, recipe: Recipe) -> None:
    if len(task.train_data) < recipe.global_batch_size:
        raise UsageError(
            f"{len(task.train_data)} training examples are fewer than one global batch of {recipe.global_batch_size}",
            next_step="set a lower global_batch_size, or provide more examples",
        )


class _Attempt(Components):
    """One rank's part of an attempt: its components, its Trainer, and its results."""

    def __init__(
        self,
        rank: Rank,
        recipe: Recipe,
        task: Task,
        *,
        s3: "S3Client | None",
        accelerator: Accelerator,
        heartbeats: Heartbeats,
        resume: Resume | None,
    ) -> None:
        self.recipe, self.task = recipe, task
        self.trackers = Trackers(recipe.report_to or (), rank, s3)
        metric = recipe.metric_for_best_model
        self.best = BestEvaluation(metric, patience=recipe.early_stopping_patience) if metric else None
        self.best_step: int | None = None
        """The step whose weights the final model has, or None if it is the last step."""
        self._trainer: Any = None
        self.pushes: SavePushes | None = None
        if recipe.push_to_hub is not None and recipe.push_to_hub.each_save and rank.is_first:
            self.pushes = SavePushes(
                recipe.push_to_hub.repository,
                run=rank.run,
                scratch=rank.scratch,
                complete=self._complete_push,
                stops=lambda: self.shutdown.is_requested,
            )
        super().__init__(
            rank,
            s3,
            recipe,
            accelerator=accelerator,
            resume=resume,
            saves=Saves(
                # If the recipe sets a number of steps, the Trainer itself saves.
                every_steps="auto" if recipe.checkpoint_every_steps == "auto" else None,
                mean_hours_between_reclaims=recipe.mean_hours_between_reclaims,
                keep=recipe.keep_checkpoints,
                keep_every_steps=recipe.keep_every_steps,
            ),
            heartbeats=heartbeats,
            samples_per_step=recipe.global_batch_size,
            samples_per_epoch=task.ordered_epoch,
            report=self.trackers.log,
            best=lambda: self.best.step(self._trainer.state.log_history) if self.best else None,
            saved=self._push_save,
        )
        if recipe.checkpoint_every_steps == "epoch":
            self.saves = [RegularSaves(self._due("epoch"))]

    def log_start(self) -> None:
        """Log how the global batch is split and where the training starts."""
        if not self.rank.is_first:
            return
        ranks = counted(self.rank.world_size, "rank")
        split = (self.recipe.global_batch_size, ranks, *self.recipe.batch_of_rank(self.rank.world_size))
        log.info("batch: %s = %s x %s sequences x %s accumulated", *split)
        start = f"resumed from checkpoint step-{self.resume.step}" if self.resume else f"from {self.task.start}"
        log.info("start: %s", start)

    def build(self) -> Any:
        """Return the Trainer, with a model whose random weights follow from the seed."""
        task, accelerator = self.task, self.accelerator
        alone = self.rank.world_size == 1
        accelerator.prepare(alone=alone)
        # PyTorch 2.13 has renamed this argument, and transformers does not know the new name.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        accelerator.set_seed(self.recipe.seed)
        model = task.model(self.resume.folder if self.resume else None)
        arguments = {
            **training_arguments(self.recipe, self.rank),
            # Buffers that no step changes need not be sent at each step; only running statistics change.
            "ddp_broadcast_buffers": any(getattr(part, "track_running_stats", False) for part in model.modules()),
            **accelerator.training_arguments(alone=alone),
            # Each accelerator has its own AdamW kernel; for other optimizers only the Trainer's exists.
            **({} if self.recipe.optimizer == "adamw" else {"optim": self.recipe.optimizer}),
            **task.schedule,
        }
        self._trainer = trainer_class(accelerator.trainer_class())(
            model=model,
            args=accelerator.training_arguments_class()(**arguments),
            train_dataset=task.train_data,
            eval_dataset=task.eval_data,
            data_collator=task.collate,
            callbacks=self.callbacks(further=self._further_callbacks()),
            options=self._options(),
            **gaudi_arguments(self.recipe, accelerator, self.rank, self.s3),
        )
        self._trainer.remove_callback(PrinterCallback)
        # All ranks drew their weights from one seed, and the Trainer has set it again. Dropout must not draw the same
        # masks on every rank, so each rank gets its own seed. A resume restores each rank's state.
        if self.rank.world_size > 1:
            accelerator.set_seed(seed_of_rank(self.recipe.seed, 0, self.rank.rank))
        return self._trainer

    def _options(self) -> Options:
        rank, task, resume, seed = self.rank, self.task, self.resume, self.recipe.seed
        reseed = None
        if resume and resume.world_size != rank.world_size:

            def reseed(step: int) -> None:
                self.accelerator.set_seed(seed_of_rank(seed, step, rank.rank))

        batch = self.recipe.global_batch_size
        length = -(-len(task.train_data) // batch) * batch
        return Options(
            loss=task.loss,
            sampler=sequential_sampler if task.order is None else ordered_sampler(task.order, length),
            heartbeats=self.heartbeats,
            background_save=BackgroundSave(rank.run, self.uploads),
            loss_since_log=LossSinceLog(rank, resume),
            keeps_settings=bool(resume and resume.changed),
            reseed=reseed,
        )

    def _due(self, every: int | Literal["epoch"]) -> Callable[[int], bool]:
        batch = self.recipe.global_batch_size
        epoch = self.task.ordered_epoch or -(-len(self.task.train_data) // batch) * batch
        return due_every(every, batch=batch, epoch=epoch)

    def _further_callbacks(self) -> list[Any]:
        """Return the other callbacks. They may use the Trainer only once it calls them."""
        recipe = self.recipe
        further: list[Any] = [self.trackers, StartUpLog(self.rank), *([StopOnNan()] if recipe.stop_on_nan else [])]
        if recipe.evaluate_every_steps:
            further.append(
                Evaluations(
                    self.rank,
                    self._due(recipe.evaluate_every_steps),
                    lambda: self.task.evaluate(self._trainer),
                    self.metrics,
                    self.shutdown,
                    best=self.best,
                    rungs=self.rungs,
                )
            )
        return further

    def _push_save(self, step: int, checkpoint: Path) -> None:
        # After the last step the final model is pushed.
        if self.pushes is not None and step < self._trainer.state.max_steps:
            self.pushes.saved(step, checkpoint)

    def _complete_push(self, folder: Path, step: int) -> None:
        self.task.save_beside(folder)
        self._write_card(folder, {"step": step})

    def upload_model(self, trainer: Any) -> None:
        """Upload the model after the last checkpoint, before steps that may still fail."""
        if self.shutdown.reason:
            return
        self.uploads.finish()
        if self.best is not None:
            self.heartbeats.keep_alive()
            self.best_step = load_best_weights(trainer, self.best, self.rank, self.s3)
        _check_finite(trainer)
        self.heartbeats.saving()
        folder = self._final_folder
        trainer.save_model(str(folder))
        if self.s3 is not None and self.rank.is_first:
            self.task.save_beside(folder)
            _upload_model(folder, self.rank, self.s3)
        self.heartbeats.saved()

    def evaluate(self, trainer: Any) -> dict[str, Any]:
        """Return the final metrics once all checkpoints are on S3. Afterwards, nothing interrupts the attempt."""
        shutdown = self.shutdown
        values = None if shutdown.reason else self._last_evaluation(trainer)
        self.heartbeats.end()
        self.uploads.finish()
        if not shutdown.reason:
            shutdown.close()
        if values is None or shutdown.reason:
            self.metrics.close()
            self.trackers.finish()
            # No rank leaves before rank 0 has uploaded everything: the launcher would stop the ranks that remain.
            self.rank.once("saved", lambda: True)
            raise ResumeLaterError(f"{shutdown.reason}; saved step {shutdown.saved_step}")
        result = {
            **values,
            **({} if self.best_step is None else {"best_step": self.best_step}),
            **_mean_loss(trainer.state.log_history),
            "epoch": self.metrics.epoch(trainer.state),
            **self.metrics.throughput.figures,
            "train_steps_per_second": round(
                self.metrics.throughput.samples_per_second / self.recipe.global_batch_size, 3
            ),
        }
        if values and self.rank.is_first:
            log.info("evaluation: %s examples in %.1f s", result["eval_samples"], result["eval_runtime"])
        return result

    def _last_evaluation(self, trainer: Any) -> dict[str, Any] | None:
        """Return the final evaluation's metrics, empty if the recipe omits it, or None if the attempt is stopping."""
        if not self.recipe.final_evaluation:
            return {}
        started = time.monotonic()
        try:
            values = self.shutdown.evaluated(lambda: self.task.evaluate(trainer))
        except TrainyardError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise TrainyardError(
                f"the evaluation after the last step failed: {type(error).__name__}: {error}; the model is complete in "
                f"{self.rank.run / MODEL}",
                next_step="trainyard resume RUN --set arguments.final_evaluation=false ends the run without it",
            ) from error
        if values is None:
            return None
        if bad := [f"{name} {value}" for name, value in values.items() if not math.isfinite(value)]:
            raise TrainyardError(
                f"the evaluation after the last step has values that are not finite: {', '.join(bad)}; the model is "
                f"complete in {self.rank.run / MODEL}",
                next_step="submit again with a lower learning_rate or more warm-up, and look at the data",
            )
        samples, seconds = len(self.task.eval_data), time.monotonic() - started
        speed = {"eval_runtime": round(seconds, 3), "eval_samples_per_second": round(samples / seconds, 3)}
        return {**values, "eval_samples": samples, **speed}

    def finish(self, trainer: Any, result: Mapping[str, Any]) -> None:
        """Upload metrics and result, and push the model to the hub if the recipe asks for it."""
        rank = self.rank
        if rank.is_first and self.s3 is not None:
            check_newest(self.s3, rank.run, rank.attempt)
        if rank.is_first and self.recipe.push_to_hub is not None and self.s3 is not None:
            self._write_card(self._final_folder, result)
            object_store.upload_all(self.s3, self._final_folder, [hub.CARD], rank.run / MODEL)
        if rank.is_first and "eval_samples" in result:
            self._upload_extras(rank.scratch / "result")
        self.metrics.result(trainer.state.global_step, result)
        self.metrics.close()
        self.trackers.finish()
        if rank.is_first:
            log.info("result: %s", ", ".join(f"{result_label(name)} {value:.4g}" for name, value in result.items()))
            if self.pushes is not None:
                self.pushes.close()
            if self.recipe.push_to_hub is not None:
                hub.push(self._final_folder, run=rank.run, repository=self.recipe.push_to_hub.repository)
        # No rank leaves before rank 0 has uploaded everything: the launcher would consider the node done.
        rank.once("finished", lambda: True)

    @property
    def _final_folder(self) -> Path:
        return self.rank.scratch / "final"

    def _write_card(self, folder: Path, result: Mapping[str, Any]) -> None:
        hub.write_card(
            folder,
            run=self.rank.run,
            recipe=self.recipe,
            result=result,
            world_size=self.rank.world_size,
            accelerator=self.accelerator.name,
        )

    def _upload_extras(self, folder: Path) -> None:
        assert self.s3 is not None  # noqa: S101 - rank 0 is the first of its node
        if self.task.write_extras is not None:
            folder.mkdir()
            self.task.write_extras(folder)
            object_store.upload_all(self.s3, folder, object_store.files_below(folder), self.rank.run)


def _mean_loss(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean loss of all logged steps of all attempts as `train_loss`; empty if none was logged."""
    logged = [
        (entry["step"], math.nan if entry["loss"] is None else entry["loss"]) for entry in history if "loss" in entry
    ]
    before = [0, *(step for step, _ in logged)]
    total = sum((step - since) * loss for since, (step, loss) in zip(before, logged, strict=False))
    return {"train_loss": total / logged[-1][0]} if logged else {}


def _check_finite(trainer: Any) -> None:
    """Raise TrainyardError if the model has diverged: not all of its weights are finite numbers."""
    weights = [values for values in trainer.model.parameters() if values.is_floating_point()]
    if bool(torch.stack([values.detach().isfinite().all() for values in weights]).all()):  # one wait for the device
        return
    losses = ((entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    first = next((step for step, loss in losses if loss is None or not math.isfinite(loss)), None)
    raise TrainyardError(
        f"the training diverged: after step {trainer.state.global_step} the model has weights that are NaN or infinite"
        + (f"; the first loss that is not finite was logged at step {first}" if first is not None else ""),
        next_step="submit again with a lower learning_rate or more warm-up, and look at the data; stop_on_nan: true "
        "ends such a training early",
    )


def _upload_model(folder: Path, rank: Rank, s3: "S3Client") -> None:
    """Upload the model to the run's model/, config.json last, because no loader accepts a folder without it.

    Raises SupersededError if a newer attempt of the run has begun, which now owns the model.
    """
    (folder / "training_args.bin").unlink()  # a pickle of this machine's paths
    names = object_store.files_below(folder)
    remote = rank.run / MODEL
    check = functools.partial(check_newest, s3, rank.run, rank.attempt)
    for group in ([name for name in names if name != "config.json"], ["config.json"]):
        object_store.upload_all(s3, folder, group, remote, before_each=check)
