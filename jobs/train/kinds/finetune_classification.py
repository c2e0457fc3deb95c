r"""Fine-tune a pretrained encoder to put sentences, or pairs of them, into classes.

    python -m jobs.train.launch --instance-type=… --nproc-per-node=2 finetune-classification \
        --model=s3://…/minilm --train-data=s3://…/train.jsonl --eval-data=s3://…/eval.jsonl

The same file runs on HPU, CUDA and CPU. A recipe is stated by its global batch size, which is split over the ranks and
accumulated where a rank's share is more than it can hold, so that it means the same on eight HPUs and on a laptop.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.contract.errors import UsageError
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.train.accelerator import of_rank
from jobs.train.data import labelled_text, sources
from jobs.train.data.length_buckets import in_batches
from jobs.train.data.packed_examples import PackedExamples, check_model, model_type
from jobs.train.data.tokenized_text import InBatches, Prepared, TokenizedExamples, prepare
from jobs.train.rank import Rank, run
from jobs.train.trainer.training import Task, train

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.train.trainer.checkpoint import CheckpointUploads

log = logging.getLogger("trainyard")


def check(arguments: FinetuneClassification, world_size: int) -> None:
    """Called by the launcher before any rank starts. Raises UsageError on what cannot work."""
    arguments.check(world_size)


def finetune(
    rank: Rank,
    arguments: FinetuneClassification,
    *,
    observers: "Callable[[CheckpointUploads], Sequence[Any]]" = lambda _: (),
) -> None:
    """Train, evaluate, and leave model, metrics and checkpoints under the run. `observers` are those of a `Task`."""
    inputs = labelled_text.inputs(arguments)
    places = (arguments.model, *inputs.train, *inputs.evaluation)
    if arguments.push_to_hub is None and not any(map(sources.is_on_hub, places)):
        # Or transformers and datasets ask the hub about local folders, and wait 24 s where it cannot be reached.
        os.environ["HF_HUB_OFFLINE"] = "1"
    s3 = object_store.connect() if rank.is_first_on_node else None
    model_folder, prepared = _prepare(rank, arguments, s3)
    batch, (at_once, _) = arguments.global_batch_size, arguments.batch_of_rank(rank.world_size)
    train_data: TokenizedExamples | PackedExamples
    if arguments.packing:
        train_data = packed = PackedExamples(prepared.train, at_once)
        order = functools.partial(packed.order, batch)
        shapes, padding = f"{at_once} packed into {packed.rows} x {packed.width} tokens", packed.padding
    else:
        train_data = prepared.train
        order = functools.partial(in_batches, train_data.buckets, batch)
        widths, padding = train_data.shapes(batch)
        shapes = f"sequences of {', '.join(map(str, widths))} tokens"
    if rank.is_first:
        log.info(
            "data: %s training and %s held-out examples, %s classes; %s (the longest has %s, %.0f %% is padding)",
            prepared.train_examples,
            prepared.eval_examples,
            len(prepared.class_names),
            shapes,
            prepared.longest,
            100 * padding,
        )
    train(
        rank,
        arguments,
        Task(
            model=lambda: _model(
                model_folder,
                arguments.model,
                prepared.class_names,
                packing=arguments.packing,
                **of_rank(os.environ).model_arguments(),
            ),
            start="the pretrained weights",
            train_data=train_data,
            order=order,
            eval_data=prepared.evaluation,
            collate=train_data.collate,
            evaluate=lambda trainer: _evaluate(trainer, prepared, arguments),
            save_beside=lambda folder: _tokenizer(model_folder, arguments.model).save_pretrained(folder),
            schedule={"num_train_epochs": arguments.epochs},
            observers=observers,
        ),
        s3=s3,
        accelerator=of_rank(os.environ),
    )


def _prepare(rank: Rank, arguments: FinetuneClassification, s3: "S3Client | None") -> tuple[Path, Prepared]:
    """Model and examples as local files; one rank of each node fetches and tokenizes them, the others load torch."""

    def model() -> str:
        assert s3 is not None  # noqa: S101 - it is there on the one rank that gets here
        folder = sources.model_folder(arguments.model, s3=lambda: s3, scratch=rank.scratch)
        if arguments.packing:
            check_model(folder, arguments.model)
        return str(folder)

    def data() -> dict[str, Any]:
        assert s3 is not None  # noqa: S101
        names, train, held_out = labelled_text.load(arguments, s3=lambda: s3, scratch=rank.scratch)
        parts = {"train": train, "eval": held_out}
        return prepare(
            names,
            parts,
            tokenizer=_tokenizer(model_folder, arguments.model),
            max_length=arguments.max_length,
            length_buckets=arguments.length_buckets,
            folder=rank.scratch / "examples",
        ).model_dump(mode="json")

    if not rank.is_first_on_node:
        of_rank(os.environ).trainer_class()  # loading it takes seconds, which the first rank needs for the data
    model_folder = Path(rank.once_per_node("model", model))
    return model_folder, Prepared.model_validate(rank.once_per_node("data", data))


def _tokenizer(folder: Path, location: str) -> Any:
    from transformers import AutoTokenizer

    with _explained_loading(location, "its tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(folder)


def _model(folder: Path, location: str, names: list[str], *, packing: bool = False, **further: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    model_class: Any = AutoModelForSequenceClassification
    if packing:
        from jobs.train.models import packed_classifiers

        model_class = packed_classifiers.CLASSES[model_type(folder)]
    with _explained_loading(location, "it cannot be loaded as an encoder for classification"):
        return model_class.from_pretrained(
            folder,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
            # A head of another fine-tuning, with another number of classes, is replaced.
            ignore_mismatched_sizes=True,
            **further,
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


def _evaluate(trainer: Any, prepared: Prepared, arguments: FinetuneClassification) -> dict[str, float]:
    from jobs.train.trainer.metrics import classification_metrics

    examples = prepared.evaluation
    batches = InBatches(examples, arguments.eval_batch_size)
    logits = batches.in_order(trainer.predict(batches).predictions)
    return classification_metrics(logits, examples.labels, glue_task=arguments.glue_task)


if __name__ == "__main__":
    run(finetune, FinetuneClassification)
