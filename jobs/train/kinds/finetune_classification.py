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

import numpy as np

from jobs.aws import s3 as object_store
from jobs.contract.errors import UsageError
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.train.accelerator import of_rank
from jobs.train.data import labelled_text, sources
from jobs.train.data.labelled_buckets import in_batches
from jobs.train.data.labelled_packing import PackedExamples
from jobs.train.data.labelled_tokens import InBatches, Prepared, TokenizedExamples, prepare
from jobs.train.models import pretrained
from jobs.train.rank import Rank, run

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from numpy.typing import NDArray

    from jobs.train.trainer.checkpoint import CheckpointUploads
    from jobs.train.trainer.determinism import Order

log = logging.getLogger("trainyard")


def check(arguments: FinetuneClassification, world_size: int) -> None:
    """Check the arguments before any rank starts; the launcher calls it. Raises UsageError on what cannot work."""
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
    train_data, order = _training_data(rank, arguments, prepared)
    # Now, not above: it loads the Trainer, which takes seconds that the data need first.
    from jobs.train.trainer.training import Task, train

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
    """Return model and examples as local files. One rank of a node fetches and tokenizes, the others load torch."""

    def model() -> str:
        assert s3 is not None  # noqa: S101 - it is there on the one rank that gets here
        folder = pretrained.model_folder(arguments.model, s3=lambda: s3, scratch=rank.scratch)
        if arguments.packing:
            from jobs.train.models import packed_classifiers

            packed_classifiers.model_class(folder, arguments.model)
        return str(folder)

    def data() -> dict[str, Any]:
        assert s3 is not None  # noqa: S101
        names, train, held_out = labelled_text.load(arguments, s3=lambda: s3)
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


def _training_data(
    rank: Rank, arguments: FinetuneClassification, prepared: Prepared
) -> "tuple[TokenizedExamples | PackedExamples, Order]":
    """Return the examples, padded or packed, and the order in which an epoch takes them; say so in the log."""
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
    return train_data, order


def _tokenizer(folder: Path, location: str) -> Any:
    from transformers import AutoTokenizer

    with _explained_loading(location, "its tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _model(folder: Path, location: str, names: list[str], *, packing: bool = False, **further: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    model_class: Any = AutoModelForSequenceClassification
    if packing:
        from jobs.train.models import packed_classifiers

        model_class = packed_classifiers.model_class(folder, location)
    with _explained_loading(location, "it cannot be loaded as an encoder for classification"):
        return model_class.from_pretrained(
            folder,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
            # A head of another fine-tuning, with another number of classes, is replaced.
            ignore_mismatched_sizes=True,
            # Where it is not said, transformers asks on standard input whether to run the model's own code.
            trust_remote_code=False,
            **further,
        )


@contextlib.contextmanager
def _explained_loading(location: str, what: str) -> Iterator[None]:
    """Turn whatever a loader raises on damaged or foreign files into a UsageError that names the model."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UsageError(
            f"{location}: {what}: {reason}", next_step="stage the model's folder again, or name another"
        ) from error


def _evaluate(trainer: Any, prepared: Prepared, arguments: FinetuneClassification) -> dict[str, float]:
    examples = prepared.evaluation
    batches = InBatches(examples, arguments.eval_batch_size)
    logits = batches.in_order(trainer.predict(batches).predictions)
    return classification_metrics(logits, examples.labels, glue_task=arguments.glue_task)


def classification_metrics(
    logits: "NDArray[np.floating[Any]]", labels: "NDArray[np.integer[Any]]", *, glue_task: str | None = None
) -> dict[str, float]:
    """Return accuracy, F1 and cross-entropy of held-out examples, and the accuracy of always naming the top class.

    F1 is that of class 1 where there are two (GLUE's definition for MRPC and QQP), else the mean over the classes. A
    class that is neither there nor predicted is left out of the mean. GLUE scores MRPC and QQP by the mean of accuracy
    and F1, CoLA by Matthews' correlation, and the others by accuracy alone.
    """
    predicted = logits.argmax(axis=-1)
    classes = logits.shape[-1]
    true_positives = np.bincount(labels[predicted == labels], minlength=classes)
    support = np.bincount(labels, minlength=classes)
    relevant = support + np.bincount(predicted, minlength=classes)
    f1 = 2 * true_positives / np.maximum(relevant, 1)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    log_likelihood = shifted[np.arange(len(labels)), labels] - np.log(np.exp(shifted).sum(axis=-1))
    accuracy = float((predicted == labels).mean())
    metrics = {
        "eval_accuracy": accuracy,
        "eval_f1": float(f1[1] if classes == 2 else f1[relevant > 0].mean()),
        "eval_majority_accuracy": float(support.max() / len(labels)),
        "eval_loss": float(-log_likelihood.mean()),
    }
    if glue_task in ("mrpc", "qqp"):
        metrics["eval_combined_score"] = (accuracy + metrics["eval_f1"]) / 2
    if glue_task == "cola":
        metrics["eval_matthews_correlation"] = _matthews_correlation(predicted == 1, labels == 1)
    return metrics


def _matthews_correlation(predicted: "NDArray[np.bool_]", true: "NDArray[np.bool_]") -> float:
    """Return 0 where all are of one class, or predicted to be."""
    if predicted.all() or true.all() or not (predicted.any() and true.any()):
        return 0.0
    return float(np.corrcoef(predicted, true)[0, 1])


if __name__ == "__main__":
    run(finetune, FinetuneClassification)
