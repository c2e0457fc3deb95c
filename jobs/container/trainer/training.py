"""Train as every entrypoint does: resume, build, train, evaluate, and leave model and metrics.

An entrypoint prepares its data, describes the rest as a `Task`, and calls `train`. It imports this module once its data
are there, for that loads PyTorch and transformers, which takes seconds.
"""

import functools
import logging
import math
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer_callback import PrinterCallback

from jobs.aws import s3 as object_store
from jobs.container import hub
from jobs.container.accelerator import Accelerator
from jobs.container.rank import Rank, ResumeLaterError
from jobs.container.saving.background_save import BackgroundSave
from jobs.container.saving.metrics import StopOnNan
from jobs.container.saving.resume import LossSinceLog, Resume, checkpoint_of_recipe, seed_of_rank
from jobs.container.saving.stored_checkpoints import check_newest
from jobs.container.trainer import gaudi_config
from jobs.container.trainer.accompanied import Accompanied, Saves
from jobs.container.trainer.arguments import training_arguments
from jobs.container.trainer.best import BestEvaluation, take_best
from jobs.container.trainer.determinism import Order, as_it_comes, in_order
from jobs.container.trainer.evaluation import Evaluations, stretches
from jobs.container.trainer.heartbeat import Heartbeats
from jobs.container.trainer.start_up import SaidStartUp
from jobs.container.trainer.trackers import Trackers
from jobs.container.trainer.trainer import Options, trainer_class
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.run import MODEL
from jobs.core.words import counted, result_label
from jobs.spec.recipe import Recipe

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training as an entrypoint describes it: which model learns what from which data."""

    model: Callable[[Path | None], Any]
    """Makes the model, once the seed is set. Called on every rank, with the checkpoint that the attempt goes on from:
    the Trainer loads the weights that are there, whatever the model has."""
    start: str
    """What that model starts from, for the log: `the pretrained weights`, …"""
    train_data: Any
    """A data set with `__len__` and `__getitems__`; an item is one sequence."""
    order: Order | None = None
    """Gives what `__getitems__` of train_data is asked for in an epoch, in whole global batches."""
    eval_data: Any
    collate: Callable[[Any], Any]
    evaluate: Callable[[Any], Mapping[str, Any]]
    """Metrics of the Trainer's model as it is then. Called on every rank, now and then and at the end."""
    save_beside: Callable[[Path], None]
    """Saves into the model's folder what it is loaded with: its tokenizer. Called on rank 0."""
    leave: Callable[[Path], None] | None = None
    """Writes into the folder what else the run keeps. Called on rank 0, at the end."""
    schedule: Mapping[str, Any]
    """The length of the training: `num_train_epochs` or `max_steps` of the training arguments."""
    ordered_epoch: int | None = None
    """Without `order`: `train_data` has the items of all steps in their order, and so many of them make an epoch."""


def train(
    rank: Rank,
    recipe: Recipe,
    task: Task,
    *,
    s3: "S3Client | None",
    accelerator: Accelerator,
) -> None:
    """Run one attempt, from the newest checkpoint to the final metrics, on all ranks.

    The first of each node needs `s3`. Raises ResumeLaterError if the attempt was asked to stop: it has saved, and the
    next one resumes there.
    """
    transformers.logging.set_verbosity_error()  # a warning tells that a head is new, the point of a fine-tuning
    heartbeats = Heartbeats(rank, compiles=accelerator.compiles)
    _check_size(task, recipe)
    resume = checkpoint_of_recipe(rank, s3 or object_store.connect(), recipe)
    attempt = _Attempt(rank, recipe, task, s3=s3, accelerator=accelerator, heartbeats=heartbeats, resume=resume)
    attempt.say_start()
    rank.start_up.done("checkpoint")
    trainer = attempt.build()
    rank.start_up.done("model")
    trainer.train(resume_from_checkpoint=str(resume.folder) if resume else None)
    attempt.leave_model(trainer)
    attempt.leave(trainer, attempt.evaluate(trainer))


def _check_size(task: Task, recipe: Recipe) -> None:
    if len(task.train_data) < recipe.global_batch_size:
        raise UsageError(
            f"{len(task.train_data)} examples to train on are less than one global batch of {recipe.global_batch_size}",
            next_step="set global_batch_size lower, or give more examples",
        )


class _Attempt(Accompanied):
    """One rank's part of an attempt, and the callbacks that accompany it."""

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
        """The step whose model the run leaves; None: the last one's."""
        self._trainer: Any = None
        super().__init__(
            rank,
            s3,
            recipe,
            accelerator=accelerator,
            resume=resume,
            saves=Saves(
                # The Trainer itself saves every so many steps.
                every_steps="auto" if recipe.checkpoint_every_steps == "auto" else None,
                mean_hours_between_reclaims=recipe.mean_hours_between_reclaims,
                keep=recipe.keep_checkpoints,
                keep_every_steps=recipe.keep_every_steps,
            ),
            heartbeats=heartbeats,
            samples_per_step=recipe.global_batch_size,
            samples_per_epoch=task.ordered_epoch,
            also=self.trackers.log,
            best=lambda: self.best.step(self._trainer.state.log_history) if self.best else None,
        )

    def say_start(self) -> None:
        """Log how the global batch is split, and what the training starts from."""
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
        # PyTorch 2.13 has another name for it, which transformers does not know.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        accelerator.set_seed(self.recipe.seed)
        model = task.model(self.resume.folder if self.resume else None)
        arguments = {
            **training_arguments(self.recipe, self.rank),
            # What no step changes need not be sent at each; running statistics are all that one changes.
            "ddp_broadcast_buffers": any(getattr(part, "track_running_stats", False) for part in model.modules()),
            **accelerator.training_arguments(alone=alone),
            # Of AdamW each accelerator has its own kernel; of the others there is the Trainer's alone.
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
            **gaudi_config.trainer_arguments(self.recipe, accelerator, self.rank, self.s3),
        )
        self._trainer.remove_callback(PrinterCallback)
        # The weights were drawn from one seed on every rank, and the Trainer has set it again. Dropout is not to draw
        # the same masks on every rank. A resume restores each rank's state.
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
            sampler=as_it_comes if task.order is None else in_order(task.order, length),
            heartbeats=self.heartbeats,
            background_save=BackgroundSave(rank.run, self.uploads),
            loss_since_log=LossSinceLog(rank, resume),
            keeps_settings=bool(resume and resume.changed),
            reseed=reseed,
        )

    def _further_callbacks(self) -> list[Any]:
        """Return what else accompanies the training; it needs the Trainer no earlier than the Trainer calls it."""
        recipe = self.recipe
        further: list[Any] = [self.trackers, SaidStartUp(self.rank), *([StopOnNan()] if recipe.stop_on_nan else [])]
        if recipe.evaluate_every_steps:
            batch = recipe.global_batch_size
            epoch = self.task.ordered_epoch or -(-len(self.task.train_data) // batch) * batch
            further.append(
                Evaluations(
                    self.rank,
                    stretches(recipe.evaluate_every_steps, batch=batch, epoch=epoch),
                    lambda: self.task.evaluate(self._trainer),
                    self.metrics,
                    self.shutdown,
                    best=self.best,
                    rungs=self.rungs,
                )
            )
        return further

    def leave_model(self, trainer: Any) -> None:
        """Leave the model on S3 once its training is over, after its last checkpoint: before what may yet fail."""
        if self.shutdown.reason:
            return
        self.uploads.finish()
        if self.best is not None:
            self.heartbeats.still()
            self.best_step = take_best(trainer, self.best, self.rank, self.s3)
        _check_finite(trainer)
        self.heartbeats.saving()
        folder = self._final_folder
        trainer.save_model(str(folder))
        if self.s3 is not None and self.rank.is_first:
            self.task.save_beside(folder)
            _upload_model(folder, self.rank, self.s3)
        self.heartbeats.saved()

    def evaluate(self, trainer: Any) -> dict[str, Any]:
        """Return the final metrics, once all checkpoints are complete on S3. From then on nothing interrupts."""
        started = time.monotonic()
        shutdown = self.shutdown
        values = None if shutdown.reason else self._last_evaluation(trainer)
        self.heartbeats.end()
        self.uploads.finish()
        if not shutdown.reason:
            shutdown.close()
        if values is None or shutdown.reason:
            self.metrics.close()
            self.trackers.finish()
            # Nobody leaves before rank 0 has everything on S3: the launcher would stop those that are left.
            self.rank.once("saved", lambda: True)
            raise ResumeLaterError(f"{shutdown.reason}; saved step {shutdown.saved_step}")
        result = {
            **values,
            **({} if self.best_step is None else {"best_step": self.best_step}),
            **self.metrics.throughput.figures,
        }
        if values and self.rank.is_first:
            log.info("evaluation: %s examples in %.1f s", result["eval_samples"], time.monotonic() - started)
        return result

    def _last_evaluation(self, trainer: Any) -> dict[str, Any] | None:
        """Return its metrics: none where the recipe leaves it out, None where it was left because the attempt ends."""
        if not self.recipe.final_evaluation:
            return {}
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
                f"the evaluation after the last step is no finite number: {', '.join(bad)}; the model is complete in "
                f"{self.rank.run / MODEL}",
                next_step="submit again with a lower learning_rate or more warm-up, and look at the data",
            )
        return {**values, "eval_samples": len(self.task.eval_data)}

    def leave(self, trainer: Any, result: Mapping[str, Any]) -> None:
        """Leave metrics and result on S3, and the model on the hub where that is asked for."""
        rank = self.rank
        if rank.is_first and self.s3 is not None:
            check_newest(self.s3, rank.run, rank.attempt)
        if rank.is_first and self.recipe.push_to_hub is not None:
            self._leave_card(self._final_folder, result)
        if rank.is_first and "eval_samples" in result:
            self._leave_further(rank.scratch / "result")
        self.metrics.result(trainer.state.global_step, result)
        self.metrics.close()
        self.trackers.finish()
        if rank.is_first:
            log.info("result: %s", ", ".join(f"{result_label(name)} {value:.4g}" for name, value in result.items()))
            if self.recipe.push_to_hub is not None:
                hub.push(self._final_folder, run=rank.run, repository=self.recipe.push_to_hub)
        # Nobody leaves before rank 0 has everything on S3: the launcher would take the node for done.
        rank.once("finished", lambda: True)

    @property
    def _final_folder(self) -> Path:
        return self.rank.scratch / "final"

    def _leave_card(self, folder: Path, result: Mapping[str, Any]) -> None:
        assert self.s3 is not None  # noqa: S101 - rank 0 is the first of its node
        hub.write_card(
            folder,
            run=self.rank.run,
            recipe=self.recipe,
            result=result,
            world_size=self.rank.world_size,
            accelerator=self.accelerator.name,
        )
        object_store.upload_all(self.s3, folder, [hub.CARD], self.rank.run / MODEL)

    def _leave_further(self, folder: Path) -> None:
        assert self.s3 is not None  # noqa: S101 - rank 0 is the first of its node
        if self.task.leave is not None:
            folder.mkdir()
            self.task.leave(folder)
            object_store.upload_all(self.s3, folder, object_store.files_below(folder), self.rank.run)


def _check_finite(trainer: Any) -> None:
    """Raise TrainyardError if the model's weights are not all finite numbers: it has diverged."""
    weights = [values for values in trainer.model.parameters() if values.is_floating_point()]
    if bool(torch.stack([values.detach().isfinite().all() for values in weights]).all()):  # one wait for the device
        return
    losses = ((entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    first = next((step for step, loss in losses if loss is None or not math.isfinite(loss)), None)
    raise TrainyardError(
        f"the training diverged: after step {trainer.state.global_step} the model has weights that are NaN or infinite"
        + (f"; the first loss that is no finite number was logged at step {first}" if first is not None else ""),
        next_step="submit again with a lower learning_rate or more warm-up, and look at the data; stop_on_nan: true "
        "ends such a training at once",
    )


def _upload_model(folder: Path, rank: Rank, s3: "S3Client") -> None:
    """Put weights, configuration and tokenizer under the run's model/, config.json last: none is loaded without.

    Raises SupersededError where a newer attempt of the run has begun, to which the model is left.
    """
    (folder / "training_args.bin").unlink()  # a pickle of this machine's paths
    names = object_store.files_below(folder)
    remote = rank.run / MODEL
    check = functools.partial(check_newest, s3, rank.run, rank.attempt)
    for group in ([name for name in names if name != "config.json"], ["config.json"]):
        object_store.upload_all(s3, folder, group, remote, before_each=check)
