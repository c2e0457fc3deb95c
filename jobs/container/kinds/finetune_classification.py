r"""Fine-tune a pretrained encoder to classify or score sentences or pairs of sentences.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=2 finetune-classification \
        --model=s3://…/minilm --train-data=s3://…/train.jsonl --eval-data=s3://…/eval.jsonl

The same file runs on HPU, CUDA and CPU. A recipe sets its global batch size, which is split over the ranks and
accumulated if a rank cannot hold its share. A recipe therefore trains the same on eight HPUs as on a laptop.
"""

import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.aws import s3 as object_store
from jobs.container import versions
from jobs.container.accelerator import of_rank
from jobs.container.data import artifacts, labelled_text, sources
from jobs.container.data.labelled_tokens import (
    InBatches,
    Prepared,
    TokenizedExamples,
    in_batches,
    number_of_widths,
    prepare,
)
from jobs.container.data.predictions import metrics, positive_class, write_predictions
from jobs.container.models import pretrained
from jobs.container.rank import Rank, run
from jobs.container.saving.manifest import check_newest
from jobs.core.artifact import content_fingerprint
from jobs.core.errors import raise_all
from jobs.core.labels import Problem, unknown_classes
from jobs.core.run import DATA
from jobs.data_checks import model_files
from jobs.data_checks.data_summary import DataSummary
from jobs.spec.kinds.finetune_classification import FinetuneClassification

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from numpy.typing import NDArray

    from jobs.container.trainer.determinism import Order

log = logging.getLogger("trainyard")


def finetune(rank: Rank, arguments: FinetuneClassification) -> None:
    """Train, evaluate, and save model, metrics and checkpoints to the run."""
    if arguments.push_to_hub is None:
        inputs = arguments.inputs()
        sources.stay_offline((arguments.model, *inputs.train, *inputs.evaluation))
    s3 = object_store.connect() if rank.is_first_on_node else None
    model_folder, prepared = _prepare(rank, arguments, s3)
    train_data, order = _training_data(rank, arguments, prepared)
    weights = class_weights(arguments, prepared.class_names, train_data.labels) if arguments.has_own_loss else None
    if arguments.class_weights and weights is not None and rank.is_first:
        named = [f"{name} {weight:.3g}" for name, weight in zip(prepared.class_names, weights, strict=True)]
        log.info("class weights: %s", ", ".join(named[:10]) + (", …" if len(named) > 10 else ""))
    evaluation = _Evaluation(prepared, arguments)
    rank.start_up.done("order")
    # Imported here, because loading the Trainer takes seconds and would delay preparing the data.
    from jobs.container.trainer.training import Task, train

    rank.start_up.done("imports")

    def model(checkpoint: Path | None) -> Any:
        folder = checkpoint or Path(rank.once_per_node("weights", lambda: str(_fetched(rank, arguments, s3))))
        model, head = _model(
            folder,
            arguments.model,
            prepared.class_names,
            _tokenizer(model_folder, arguments.model),
            problem=prepared.problem,
            max_length=arguments.max_length,
            **of_rank(os.environ).model_arguments(),
        )
        if rank.is_first and checkpoint is None:
            log.info("head: %s", head)
        return model

    train(
        rank,
        arguments,
        Task(
            model=model,
            start="the pretrained weights",
            train_data=train_data,
            order=order,
            eval_data=prepared.evaluation,
            collate=train_data.collate,
            loss=class_loss(weights, arguments.label_smoothing_factor) if weights is not None else None,
            evaluate=evaluation,
            write_extras=evaluation.write,
            save_beside=lambda folder: versions.save_tokenizer(_tokenizer(model_folder, arguments.model), folder),
            schedule={"num_train_epochs": arguments.epochs},
        ),
        s3=s3,
        accelerator=of_rank(os.environ),
    )


def _prepare(rank: Rank, arguments: FinetuneClassification, s3: "S3Client | None") -> tuple[Path, Prepared]:
    """Return the model's tokenizer and the examples as local files.

    One rank of each node prepares them while the others import torch. The weights are downloaded later, and only if
    there is no checkpoint.
    """

    def data() -> dict[str, Any]:
        assert s3 is not None  # noqa: S101 - set on the one rank that gets here
        tokenized = _tokenized(rank, arguments, folder, s3)
        prepared = tokenized.bucketed(_length_buckets(rank, arguments, s3), max_length=arguments.max_length)
        if rank.is_first:
            _record(rank, arguments, prepared.summary, s3)
        rank.start_up.done("widths")
        return prepared.model_dump(mode="json")

    if not rank.is_first_on_node:
        of_rank(os.environ).trainer_class()  # importing it takes seconds, during which the first rank prepares the data
    folder = Path(rank.once_per_node("tokenizer", lambda: str(_fetched(rank, arguments, s3, weights=False))))
    rank.start_up.done("tokenizer")
    return folder, Prepared.model_validate(rank.once_per_node("data", data))


def _fetched(rank: Rank, arguments: FinetuneClassification, s3: "S3Client | None", *, weights: bool = True) -> Path:
    assert s3 is not None  # noqa: S101 - set on the first rank of a node
    return pretrained.model_folder(
        arguments.model, s3=lambda: s3, scratch=rank.scratch, max_length=arguments.max_length, weights=weights
    )


def _tokenized(rank: Rank, arguments: FinetuneClassification, folder: Path, s3: "S3Client") -> Prepared:
    """Read the tables and tokenize them with the tokenizer in `folder`."""
    bad = labelled_text.bad_rows(arguments)
    names, train, held_out = labelled_text.load(arguments, s3=lambda: s3, bad=bad)
    rank.start_up.done("table")
    prepared = prepare(
        names,
        {"train": train, "eval": held_out},
        tokenizer=_tokenizer(folder, arguments.model),
        max_length=arguments.max_length,
        folder=rank.scratch / "examples",
        problem=arguments.inputs().labels.problem or "single-label",
    )
    prepared.summary.table_warnings += bad.warnings
    prepared.summary.bad_rows = dict(bad.counts)
    prepared.summary.dropped = bad.duplicates
    prepared.summary.named_bad_rows = [line for location in bad.counts for line in bad.named(location)]
    rank.start_up.done("tokens")
    return prepared


def _length_buckets(rank: Rank, arguments: FinetuneClassification, s3: "S3Client") -> int:
    """Return the requested number of widths, else the number that an earlier attempt chose, else the default.

    If a later attempt chose another number, the order of an epoch's examples would change.
    """
    left = object_store.read(s3, rank.run / DATA) if arguments.length_buckets == "auto" else None
    earlier: int | None = json.loads(left).get("length_buckets") if left is not None else None
    return earlier or number_of_widths(arguments.length_buckets, compiles=of_rank(os.environ).compiles)


def _record(rank: Rank, arguments: FinetuneClassification, summary: DataSummary, s3: "S3Client") -> None:
    """Log the summary of the data, and save it to the run."""
    inputs = arguments.inputs()
    for location in dict.fromkeys([*inputs.train, *inputs.evaluation]):
        if not sources.is_on_hub(location):
            summary.fingerprints[location] = content_fingerprint(artifacts.identity_of(location, s3=lambda: s3))
    for line in summary.lines():
        log.info("data: %s", line)
    check_newest(s3, rank.run, rank.attempt)
    object_store.write(s3, rank.run / DATA, summary.model_dump_json(indent=2).encode() + b"\n")


def _training_data(
    rank: Rank, arguments: FinetuneClassification, prepared: Prepared
) -> "tuple[TokenizedExamples, Order]":
    """Return the examples and their order in an epoch, and log the shapes of the batches."""
    train_data, batch = prepared.train, arguments.global_batch_size
    if rank.is_first:
        widths, padding = train_data.shapes(batch)
        log.info(
            "data: sequences of %s tokens (the longest has %s, %.0f %% is padding)",
            ", ".join(map(str, widths)),
            prepared.longest,
            100 * padding,
        )
    return train_data, functools.partial(in_batches, train_data.buckets, batch)


def _tokenizer(folder: Path, location: str) -> Any:
    with pretrained.explained_loading(location, "its tokenizer cannot be loaded"):
        return versions.load_tokenizer(folder)


def _model(
    folder: Path,
    location: str,
    names: list[str],
    tokenizer: Any,
    *,
    problem: Problem = "single-label",
    max_length: int,
    **further: Any,
) -> tuple[Any, str]:
    """Return the model with the data's classes, or one output for a regression, and a note about its head."""
    from transformers import AutoModelForSequenceClassification

    from jobs.container.models import fitting

    start = fitting.load_model(
        AutoModelForSequenceClassification,
        folder,
        location,
        "it cannot be loaded as an encoder for classification",
        settings={**fitting.TRAINING_SETTINGS, "problem_type": fitting.PROBLEM_TYPES[problem]},
        new_head=True,
        **further,
    )
    head = fitting.set_classes(start, names, location)
    fitting.set_padding_token(start.model, tokenizer)
    pretrained.copy_weights(start.model)
    most = pretrained.positions(start.model)
    if most is not None and max_length > most:
        raise model_files.too_long(location, max_length, most)
    return start.model, head


def class_weights(
    arguments: FinetuneClassification, names: Sequence[str], labels: "NDArray[np.integer[Any]]"
) -> "NDArray[np.float32]":
    """Return the weight of each class in the loss, scaled to a mean of 1 over the examples with these labels.

    The scale keeps learning rates comparable. PyTorch divides by the weights of each batch instead, so that the result
    would depend on how the global batch is split over ranks. Raises UsageError for an unknown class.
    """
    raise_all([*unknown_classes(arguments.named_classes(), names)])
    counts = np.bincount(labels, minlength=len(names))
    if arguments.class_weights == "balanced":
        weights = 1 / np.maximum(counts, 1)
    else:
        weights = np.array([(arguments.class_weights or {}).get(name, 1.0) for name in names])
    return np.asarray(weights * (counts.sum() / (weights * counts).sum()), np.float32)


def class_loss(weights: "NDArray[np.float32]", smoothing: float) -> "Callable[[Any, Any], Any]":
    """Return the loss of a batch's logits and labels with these weights of the classes."""
    import torch

    of_class = torch.from_numpy(weights)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal of_class
        of_class = of_class.to(logits.device)  # copied at the first batch
        losses = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)
        return (losses * of_class[labels]).mean()

    return loss


class _Evaluation:
    """Evaluates on every rank, and keeps the predictions of the last evaluation."""

    def __init__(self, prepared: Prepared, arguments: FinetuneClassification) -> None:
        self._prepared = prepared
        self._arguments = arguments
        self._positive = positive_class(prepared.class_names, arguments.positive_class, glue_task=arguments.glue_task)
        self._logits: NDArray[np.floating[Any]] | None = None

    def __call__(self, trainer: Any) -> dict[str, float]:
        examples = self._prepared.evaluation
        batches = InBatches(examples, self._arguments.eval_batch_size)
        self._logits = logits = batches.in_order(trainer.predict(batches).predictions)
        return metrics(
            self._prepared.problem,
            logits,
            examples.labels,
            positive=self._positive,
            glue_task=self._arguments.glue_task,
        )

    def write(self, folder: Path) -> None:
        """Write the last predictions and the metrics of each class."""
        assert self._logits is not None  # noqa: S101 - set by the last evaluation
        prepared = self._prepared
        write_predictions(
            folder,
            self._logits,
            prepared.evaluation.labels,
            prepared.class_names,
            prepared.evaluation_texts(),
            problem=prepared.problem,
        )


if __name__ == "__main__":
    run(finetune, FinetuneClassification)
