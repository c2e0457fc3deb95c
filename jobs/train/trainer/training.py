"""What every entrypoint that trains has in common: resume, train, evaluate, and leave model, metrics and checkpoints.

An entrypoint prepares its data, describes the rest as a `Task`, and calls `train`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.contract.errors import UsageError
from jobs.contract.locations import S3Location
from jobs.contract.recipe import Recipe
from jobs.contract.run import MODEL
from jobs.train import hub_push
from jobs.train.accelerator import Accelerator
from jobs.train.rank import Rank, ResumeLaterError

if TYPE_CHECKING:
    import numpy as np
    from mypy_boto3_s3.client import S3Client
    from numpy.typing import NDArray

    from jobs.train.trainer.checkpoint import CheckpointUploads

log = logging.getLogger("trainyard")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what."""

    model: Callable[[], Any]
    """Makes the model, once the seed is set. Called on every rank."""
    start: str
    """Of what it makes, for the log: `the pretrained weights`, …"""
    train_data: Any
    """A data set with `__len__` and `__getitems__`; an item is one sequence."""
    order: "Callable[[np.random.Generator], NDArray[np.int64]] | None" = None
    """What `__getitems__` of train_data is given in an epoch, in whole global batches."""
    eval_data: Any
    collate: Callable[[Any], Any]
    evaluate: Callable[[Any], Mapping[str, Any]]
    """Metrics of the Trainer's model as it is then. Called on every rank, now and then and at the end."""
    save_beside: Callable[[Path], None]
    """Saves into the model's folder what it is loaded with: its tokenizer. Called on rank 0."""
    schedule: Mapping[str, Any]
    """How long: `num_train_epochs` or `max_steps` of the training arguments."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further training arguments, on top of the recipe's and the accelerator's."""
    ordered_epoch: int | None = None
    """Without `order`: `train_data` has the items of all steps in their order, and so many of them make an epoch."""
    observers: "Callable[[CheckpointUploads], Sequence[Any]]" = lambda _: ()
    """Further callbacks of the Trainer; they hear of a checkpoint when its upload has begun."""


def train(rank: Rank, recipe: Recipe, task: Task, *, s3: "S3Client | None", accelerator: Accelerator) -> None:
    """One attempt, from the newest checkpoint to the final metrics. All ranks call it.

    `s3` is needed on the first rank of each node.
    """
    import transformers
    from transformers.trainer_callback import PrinterCallback

    from jobs.train.trainer.batch_order import as_it_comes, ordered
    from jobs.train.trainer.changed_settings import with_own_settings
    from jobs.train.trainer.checkpoint import CheckpointUploads, Retention, newest_complete
    from jobs.train.trainer.checkpoint_interval import ChosenSaves
    from jobs.train.trainer.compat import mended
    from jobs.train.trainer.gradient_order import adding_in_one_order
    from jobs.train.trainer.loss_since_log import keeping_loss_since_log
    from jobs.train.trainer.metrics import RunMetrics, Throughput
    from jobs.train.trainer.other_ranks import on_other_ranks, with_batch_of_rank
    from jobs.train.trainer.saving import saving_meanwhile
    from jobs.train.trainer.signs import Heartbeats, watched
    from jobs.train.trainer.stopping import Evaluations, StopOnNan, Stopping

    # Its warnings tell that a head is new, which is the point of a fine-tuning.
    transformers.logging.set_verbosity_error()
    signs = Heartbeats(rank, compiles=accelerator.name == "hpu")
    per_rank, accumulation = recipe.batch_of_rank(rank.world_size)
    _check_size(task, recipe)
    resume = newest_complete(rank, s3 or object_store.connect(), recipe)
    if resume:
        folder = resume.folder
        rank.once_per_node("resume/batch", lambda: with_batch_of_rank(folder, per_rank))
    metrics = RunMetrics(
        rank,
        s3 if rank.is_first else None,
        resumed_from_step=resume.step if resume else 0,
        throughput=resume.throughput if resume else Throughput(),
        samples_per_step=recipe.global_batch_size,
        samples_per_epoch=task.ordered_epoch,
        warmup_steps=accelerator.warmup_steps,
        changed=resume.changed if resume else None,
    )
    retention = Retention(newest=recipe.keep_checkpoints, every_steps=recipe.keep_every_steps)
    uploads = CheckpointUploads(rank, s3, recipe, metrics, retention, waits=signs.still)
    stopping = Stopping(rank)
    if rank.is_first:
        log.info(
            "batch: %s = %s ranks x %s sequences x %s accumulated",
            recipe.global_batch_size,
            rank.world_size,
            per_rank,
            accumulation,
        )
        log.info("start: %s", f"resumed from checkpoint step-{resume.step}" if resume else f"from {task.start}")

    accelerator.prepare()
    transformers.set_seed(recipe.seed)
    trainer_class = adding_in_one_order(mended(accelerator.trainer_class()))
    if task.order is None:
        trainer_class = as_it_comes(trainer_class)
    else:
        steps = -(-len(task.train_data) // recipe.global_batch_size)
        trainer_class = ordered(trainer_class, task.order, steps * recipe.global_batch_size)
    if resume and resume.changed:
        trainer_class = with_own_settings(trainer_class)
    if resume and resume.world_size != rank.world_size:
        trainer_class = on_other_ranks(trainer_class, rank=rank.rank, seed=recipe.seed, set_seed=accelerator.set_seed)
    trainer_class = keeping_loss_since_log(trainer_class, rank, resume)
    trainer_class = watched(saving_meanwhile(trainer_class, rank.run, uploads), signs)
    trainer = trainer_class(
        model=task.model(),
        args=accelerator.training_arguments_class()(
            output_dir=str(rank.scratch / "checkpoints"),
            seed=recipe.seed,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="linear",
            warmup_ratio=recipe.warmup_ratio,
            weight_decay=recipe.weight_decay,
            per_device_train_batch_size=per_rank,
            gradient_accumulation_steps=accumulation,
            per_device_eval_batch_size=recipe.eval_batch_size,
            logging_steps=recipe.log_every_steps,
            **_saving(recipe),
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to=[],
            # The Trainer would log the mean of the other steps instead of a loss that is no number.
            **({"logging_nan_inf_filter": False} if recipe.stop_on_nan else {}),
            **{**accelerator.training_arguments(), **task.schedule, **task.settings},
        ),
        train_dataset=task.train_data,
        eval_dataset=task.eval_data,
        data_collator=task.collate,
        callbacks=[
            signs,
            metrics,
            uploads,
            *task.observers(uploads),
            stopping,
            *([StopOnNan()] if recipe.stop_on_nan else []),
        ],
        **accelerator.trainer_arguments(),
    )
    trainer.remove_callback(PrinterCallback)
    if recipe.evaluate_every_steps:
        every = recipe.evaluate_every_steps
        trainer.add_callback(Evaluations(rank, every, lambda: task.evaluate(trainer), metrics, stopping))
    if recipe.checkpoint_every_steps == "auto":
        trainer.add_callback(
            ChosenSaves(
                rank,
                mean_hours_between_reclaims=recipe.mean_hours_between_reclaims,
                warmup_steps=accelerator.warmup_steps,
                complete_seconds=lambda: uploads.seconds,
            )
        )
    trainer.train(resume_from_checkpoint=str(resume.folder) if resume else None)

    evaluation_started = time.monotonic()
    values = None if stopping.reason else stopping.evaluated(lambda: task.evaluate(trainer))
    signs.end()
    uploads.finish()
    if not stopping.reason:
        stopping.close()
    if values is None or stopping.reason:
        metrics.close()
        # Nobody leaves before rank 0 has everything on S3: the launcher would stop those that are left.
        rank.once("saved", lambda: True)
        raise ResumeLaterError(f"{stopping.reason}; saved step {trainer.state.global_step}")
    result = {
        **values,
        "eval_samples": len(task.eval_data),
        "train_samples_per_second": round(metrics.throughput.samples_per_second, 3),
        "train_runtime_seconds": round(metrics.throughput.train_seconds, 3),
    }
    if rank.is_first:
        log.info("evaluation: %s examples in %.1f s", result["eval_samples"], time.monotonic() - evaluation_started)
    folder = rank.scratch / "final"
    trainer.save_model(str(folder))
    if rank.is_first:
        assert s3 is not None  # noqa: S101 - rank 0 is the first of its node
        task.save_beside(folder)
        if recipe.push_to_hub is not None:
            hub_push.write_card(
                folder,
                run=rank.run,
                recipe=recipe,
                result=result,
                world_size=rank.world_size,
                accelerator=accelerator.name,
            )
        _upload_model(folder, rank.run / MODEL, s3)
    metrics.result(trainer.state.global_step, result)
    metrics.close()
    if rank.is_first:
        log.info("result: %s", ", ".join(f"{name} {value:.4g}" for name, value in result.items()))
        if recipe.push_to_hub is not None:
            hub_push.push(folder, run=rank.run, repository=recipe.push_to_hub)
    # Nobody leaves before rank 0 has everything on S3: the launcher would take the node for done.
    rank.once("finished", lambda: True)


def _saving(recipe: Recipe) -> dict[str, Any]:
    """When the Trainer saves by itself."""
    if recipe.checkpoint_every_steps == "auto":
        return {"save_strategy": "no"}
    return {"save_strategy": "steps", "save_steps": recipe.checkpoint_every_steps}


def _check_size(task: Task, recipe: Recipe) -> None:
    if len(task.train_data) < recipe.global_batch_size:
        raise UsageError(
            f"there are {len(task.train_data)} examples to train on, less than one global batch of "
            f"{recipe.global_batch_size}",
            next_step="set global_batch_size lower, or give more examples",
        )


def _upload_model(folder: Path, remote: S3Location, s3: "S3Client") -> None:
    """Weights, configuration and tokenizer under the run's model/, config.json last: none is loaded without."""
    (folder / "training_args.bin").unlink()  # a pickle of this machine's paths
    names = object_store.files_below(folder)
    object_store.upload_all(s3, folder, [name for name in names if name != "config.json"], remote)
    object_store.upload_all(s3, folder, ["config.json"], remote)
