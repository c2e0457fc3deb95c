r"""Fine-tune a pretrained encoder to put sentences, or pairs of them, into classes.

    python -m jobs.train.launch --instance-type=… --nproc-per-node=2 finetune-classification \
        --model=s3://…/minilm --train-data=s3://…/train.jsonl --eval-data=s3://…/eval.jsonl

The same file runs on HPU, CUDA and CPU. A recipe is stated by its global batch size, which is split over the ranks and
accumulated where a rank's share is more than it can hold, so that it means the same on eight HPUs and on a laptop.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jobs.catalog import FinetuneClassification
from jobs.errors import UsageError
from jobs.runs import MODEL
from jobs.train import labelled_text, sources
from jobs.train import s3 as object_store
from jobs.train.accelerator import Accelerator, of_rank
from jobs.train.labelled_text import Prepared
from jobs.train.rank import Rank, run

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from torch.utils.data import Dataset, Subset

    from jobs.train.labelled_text import TokenizedExamples

log = logging.getLogger("trainyard")


def check(arguments: FinetuneClassification, world_size: int) -> None:
    """Called by the launcher before any rank starts. Raises UsageError on what cannot work."""
    arguments.check(world_size)


def batch_of_rank(arguments: FinetuneClassification, world_size: int) -> tuple[int, int]:
    """Sequences a rank holds at once, and how many such batches make its share of the global batch.

    Raises UsageError, naming sizes that work, where the global batch does not divide over the ranks.
    """
    arguments.check(world_size)
    share = arguments.global_batch_size // world_size
    at_once = max(
        size for size in range(1, share + 1) if share % size == 0 and size <= arguments.max_batch_size_per_rank
    )
    return at_once, share // at_once


def finetune(rank: Rank, arguments: FinetuneClassification) -> None:
    """Train, evaluate, and leave model, metrics and checkpoints under the run."""
    inputs = labelled_text.inputs(arguments)
    if not any(sources.is_on_hub(place) for place in (arguments.model, inputs.train, inputs.evaluation or "")):
        # Or transformers and datasets ask the hub about local folders, and wait 24 s where it cannot be reached.
        os.environ["HF_HUB_OFFLINE"] = "1"
    s3 = object_store.connect() if rank.is_first_on_node else None
    model_folder, prepared = _prepare(rank, arguments, s3)
    if rank.is_first:
        log.info(
            "data: %s training and %s held-out examples, %s classes; sequences of %s tokens (the longest has %s)",
            prepared.train_examples,
            prepared.eval_examples,
            len(prepared.class_names),
            prepared.sequence_length,
            prepared.longest,
        )
    if prepared.train_examples < arguments.global_batch_size:
        raise UsageError(
            f"{inputs.train} has {prepared.train_examples} examples to train on, less than one global batch of "
            f"{arguments.global_batch_size}",
            next_step="set global_batch_size lower, or give more examples",
        )
    accelerator = of_rank(os.environ)
    _train(rank, arguments, model_folder=model_folder, prepared=prepared, s3=s3, accelerator=accelerator)


def _prepare(rank: Rank, arguments: FinetuneClassification, s3: "S3Client | None") -> tuple[Path, Prepared]:
    """Model and examples as local files; one rank of each node fetches and tokenizes them, the others load torch."""

    def model() -> str:
        assert s3 is not None  # noqa: S101 - it is there on the one rank that gets here
        return str(sources.model_folder(arguments.model, s3=lambda: s3, scratch=rank.scratch))

    def data() -> dict[str, Any]:
        assert s3 is not None  # noqa: S101
        names, train, held_out = labelled_text.load(arguments, s3=lambda: s3, scratch=rank.scratch)
        parts = {"train": train, "eval": held_out}
        return labelled_text.prepare(
            names,
            parts,
            tokenizer=_tokenizer(model_folder, arguments.model),
            max_length=arguments.max_length,
            folder=rank.scratch / "examples",
        ).model_dump(mode="json")

    if not rank.is_first_on_node:
        from transformers import Trainer  # noqa: F401 - takes seconds, which the first rank needs for the data
    model_folder = Path(rank.once_per_node("model", model))
    return model_folder, Prepared.model_validate(rank.once_per_node("data", data))


def _tokenizer(folder: Path, location: str) -> Any:
    from transformers import AutoTokenizer

    with _explained_loading(location, "its tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(folder)


def _model(folder: Path, location: str, names: list[str]) -> Any:
    from transformers import AutoModelForSequenceClassification

    with _explained_loading(location, "it cannot be loaded as an encoder for classification"):
        return AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
            # A head of another fine-tuning, with another number of classes, is replaced.
            ignore_mismatched_sizes=True,
        )


@contextlib.contextmanager
def _explained_loading(location: str, what: str) -> Iterator[None]:
    """Turns whatever a loader raises on damaged or foreign files into a UsageError that names the model."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UsageError(
            f"{location}: {what}: {reason}", next_step="stage the model's folder again, or name another"
        ) from error


def _train(
    rank: Rank,
    arguments: FinetuneClassification,
    *,
    model_folder: Path,
    prepared: Prepared,
    s3: "S3Client | None",
    accelerator: Accelerator,
) -> None:
    import transformers
    from transformers.trainer_callback import PrinterCallback

    from jobs.train.checkpoint import CheckpointUploads, checkpointing, newest_complete
    from jobs.train.metrics import RunMetrics, Throughput, classification_metrics
    from jobs.train.release_mends import mended

    # Its warnings tell that the classification head is new, which is the point of a fine-tuning.
    transformers.logging.set_verbosity_error()
    per_rank, accumulation = batch_of_rank(arguments, rank.world_size)
    resume = newest_complete(rank, s3 or object_store.connect(), arguments)
    metrics = RunMetrics(
        rank,
        s3 if rank.is_first else None,
        resumed_from_step=resume.step if resume else 0,
        throughput=resume.throughput if resume else Throughput(),
        samples_per_step=arguments.global_batch_size,
        warmup_steps=accelerator.warmup_steps,
    )
    uploads = CheckpointUploads(rank, s3, arguments, metrics)
    if rank.is_first:
        log.info(
            "batch: %s = %s ranks x %s sequences x %s accumulated",
            arguments.global_batch_size,
            rank.world_size,
            per_rank,
            accumulation,
        )
        log.info(
            "start: %s", f"resumed from checkpoint step-{resume.step}" if resume else "from the pretrained weights"
        )

    accelerator.prepare()
    transformers.set_seed(arguments.seed)
    trainer = checkpointing(mended(accelerator.trainer_class()), rank.run)(
        model=_model(model_folder, arguments.model, prepared.class_names),
        args=accelerator.training_arguments_class()(
            output_dir=str(rank.scratch / "checkpoints"),
            seed=arguments.seed,
            num_train_epochs=arguments.epochs,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="linear",
            warmup_ratio=arguments.warmup_ratio,
            weight_decay=arguments.weight_decay,
            per_device_train_batch_size=per_rank,
            gradient_accumulation_steps=accumulation,
            per_device_eval_batch_size=arguments.eval_batch_size,
            logging_steps=arguments.log_every_steps,
            save_steps=arguments.checkpoint_every_steps,
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to=[],
            **accelerator.training_arguments(),
        ),
        train_dataset=_whole_batches(prepared.train, arguments) if accumulation > 1 else prepared.train,
        eval_dataset=prepared.evaluation,
        data_collator=prepared.train.collate,
        callbacks=[metrics, uploads],
        **accelerator.trainer_arguments(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume.folder) if resume else None)

    evaluation_started = time.monotonic()
    predictions = trainer.predict(prepared.evaluation)
    result = {
        **classification_metrics(predictions.predictions, predictions.label_ids),
        "eval_samples": len(predictions.label_ids),
        "train_samples_per_second": round(metrics.throughput.samples_per_second, 3),
        "train_runtime_seconds": round(metrics.throughput.train_seconds, 3),
    }
    if rank.is_first:
        log.info("evaluation: %s examples in %.1f s", result["eval_samples"], time.monotonic() - evaluation_started)
    _save_model(rank, trainer, model_folder, s3)
    uploads.finish()
    metrics.result(trainer.state.global_step, result)
    metrics.close()
    if rank.is_first:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in result.items())
        log.info("result: %s", shown)
    # Nobody leaves before rank 0 has everything on S3: the launcher would take the node for done.
    rank.once("finished", lambda: True)


def _whole_batches(examples: "TokenizedExamples", arguments: FinetuneClassification) -> "Subset[Any]":
    """The examples, some of them twice, so that they fill whole global batches.

    transformers 4.51 counts the steps of an epoch without the last, incomplete accumulation but takes it: the schedule
    ends too early, and a resumed run continues at the wrong example.
    """
    from torch.utils.data import Subset

    missing = -len(examples) % arguments.global_batch_size
    twice = np.random.default_rng(arguments.seed).permutation(len(examples))[:missing]
    return Subset(cast("Dataset[Any]", examples), [*range(len(examples)), *twice.tolist()])


def _save_model(rank: Rank, trainer: Any, model_folder: Path, s3: "S3Client | None") -> None:
    """Weights, configuration and tokenizer under the run's model/, config.json last: none is loaded without."""
    folder = rank.scratch / "final"
    trainer.save_model(str(folder))
    if not rank.is_first:
        return
    assert s3 is not None  # noqa: S101 - rank 0 is the first of its node
    _tokenizer(model_folder, str(model_folder)).save_pretrained(folder)
    (folder / "training_args.bin").unlink()  # a pickle of this machine's paths
    names = object_store.files_below(folder)
    object_store.upload_all(s3, folder, [name for name in names if name != "config.json"], rank.run / MODEL)
    object_store.upload_all(s3, folder, ["config.json"], rank.run / MODEL)


if __name__ == "__main__":
    run(finetune, FinetuneClassification)
