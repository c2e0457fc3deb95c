r"""Predict the classes or numbers of a table with a fine-tuned model, and compare them with the table's labels.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=1 evaluate --model=s3://…/model --data=s3://…/eval.jsonl

Writes output/predictions.parquet, with the texts in the order of the table. If the table has labels, also writes
output/metrics.parquet, and for classes classes.json. There are no checkpoints, so the job starts over after an
interruption.
"""

import functools
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.aws import s3 as object_store
from jobs.container import versions
from jobs.container.accelerator import Accelerator, of_rank
from jobs.container.data import artifacts, labelled_text, sources
from jobs.container.data.labelled_tokens import InBatches, Prepared, TokenizedExamples, number_of_widths, prepare
from jobs.container.data.predictions import (
    label_values,
    metrics,
    positive_class,
    predicted_columns,
    write_class_scores,
    write_report,
)
from jobs.container.kinds.artifact_job import JobMetrics
from jobs.container.models import pretrained
from jobs.container.rank import Rank, run
from jobs.container.saving.manifest import check_newest
from jobs.core.words import counted
from jobs.data_checks import model_files
from jobs.spec.kinds.evaluate import Evaluate

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from numpy.typing import NDArray

    from jobs.container.trainer.heartbeat import Heartbeats

log = logging.getLogger("trainyard")

OUTPUT = "output"
PREDICTIONS = "predictions.parquet"
METRICS = "metrics.parquet"


def evaluate(rank: Rank, arguments: Evaluate) -> None:
    """Predict, measure, and upload the results to the run."""
    sources.stay_offline((arguments.model, *arguments.tables()))
    accelerator = of_rank(os.environ)
    s3 = object_store.connect() if rank.is_first_on_node else None
    if not rank.is_first_on_node:
        accelerator.trainer_class()  # importing it takes seconds, during which the first rank prepares the data
    folder, prepared = _prepare(rank, arguments, s3)
    job_metrics = JobMetrics(rank, s3) if rank.is_first and s3 is not None else None
    started = time.monotonic()
    examples = prepared.evaluation
    batches = InBatches(examples, arguments.batch_size)
    trainer, heartbeats = _trainer(rank, arguments, folder, accelerator, job_metrics)
    logits = batches.in_order(trainer.predict(batches).predictions)
    heartbeats.end()
    if job_metrics is not None and s3 is not None:
        result = _upload(rank, arguments, prepared, logits, s3)
        seconds = time.monotonic() - started
        speed = {"samples_per_second": round(len(examples) / seconds, 3), "runtime_seconds": round(seconds, 3)}
        job_metrics.result(1, {**result, "eval_samples": len(examples), **speed})
    # All ranks wait until rank 0 has uploaded everything. Otherwise the launcher would consider their node done.
    rank.once("finished", lambda: True)


def _prepare(rank: Rank, arguments: Evaluate, s3: "S3Client | None") -> tuple[Path, Prepared]:
    """Return the model and the tokenized texts as local files, which one rank of each node prepares."""

    def model() -> str:
        assert s3 is not None  # noqa: S101 - set on the one rank that gets here
        return str(
            pretrained.model_folder(
                arguments.model, s3=lambda: s3, scratch=rank.scratch, max_length=arguments.max_length
            )
        )

    def data() -> dict[str, Any]:
        assert s3 is not None  # noqa: S101
        configuration = json.loads((folder / model_files.CONFIGURATION).read_bytes())
        problem = model_files.problem_of(configuration)
        outputs = model_files.class_names(configuration, arguments.model)
        names = [] if problem == "regression" else outputs
        positive_class(names, arguments.positive_class)
        bad = labelled_text.bad_rows(arguments)
        examples = labelled_text.read_to_evaluate(arguments, names, problem=problem, s3=lambda: s3, bad=bad)
        for location, count in bad.counts.items():
            log.warning("warning: %s of %s skipped", counted(count, "bad row"), location)
        with pretrained.explained_loading(arguments.model, "its tokenizer cannot be loaded"):
            tokenizer = versions.load_tokenizer(folder)
        prepared = prepare(
            names,
            {"eval": examples},
            tokenizer=tokenizer,
            max_length=arguments.max_length,
            folder=rank.scratch / "examples",
            problem=problem,
        ).bucketed(
            number_of_widths(arguments.length_buckets, compiles=of_rank(os.environ).compiles),
            max_length=arguments.max_length,
        )
        if rank.is_first:
            for warning in (*bad.warnings, *prepared.summary.table_warnings):
                log.warning("warning: %s", warning)
            artifacts.record_inputs(rank.run, (arguments.model, *arguments.tables()), s3=s3)
            log.info(
                "data: %s texts, the longest has %s tokens, %s",
                len(examples),
                prepared.longest,
                "a number for each" if problem == "regression" else counted(len(names), "class", "classes"),
            )
        return prepared.model_dump(mode="json")

    folder = Path(rank.once_per_node("model", model))
    return folder, Prepared.model_validate(rank.once_per_node("data", data))


def _trainer(
    rank: Rank, arguments: Evaluate, folder: Path, accelerator: Accelerator, job_metrics: JobMetrics | None
) -> "tuple[Any, Heartbeats]":
    """Return a Trainer that predicts on the rank's device, and its heartbeats, one for each batch."""
    from transformers import AutoModelForSequenceClassification
    from transformers import logging as transformers_logging
    from transformers.trainer_callback import PrinterCallback

    from jobs.container.models import fitting
    from jobs.container.rank import Callback
    from jobs.container.trainer.heartbeat import Heartbeats
    from jobs.container.trainer.trainer import Options, trainer_class

    class PrintProgress(Callback):
        """Prints the progress of the evaluation."""

        done = 0

        def on_prediction_step(self, _args: Any, _state: Any, _control: Any, eval_dataloader: Any, **_: Any) -> None:
            self.done += 1
            if job_metrics is not None:
                job_metrics.show(
                    self.done, len(eval_dataloader), "evaluating", at_once=self.done == len(eval_dataloader)
                )

    transformers_logging.disable_progress_bar()  # the log consists of lines
    heartbeats = Heartbeats(rank, compiles=accelerator.compiles)
    alone = rank.world_size == 1
    accelerator.prepare(alone=alone)
    model = fitting.load_model(
        AutoModelForSequenceClassification,
        folder,
        arguments.model,
        "it cannot be loaded as a classifier",
        settings=fitting.OUTPUT_SETTINGS,
        new_head=False,
        **accelerator.model_arguments(),
    ).model
    with pretrained.explained_loading(arguments.model, "its tokenizer cannot be loaded"):
        fitting.set_padding_token(model, versions.load_tokenizer(folder))
    trainer = trainer_class(accelerator.trainer_class())(
        model=model,
        args=accelerator.training_arguments_class()(
            output_dir=str(rank.scratch / "trainer"),
            per_device_eval_batch_size=arguments.batch_size,
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to=[],
            **accelerator.training_arguments(alone=alone),
        ),
        data_collator=TokenizedExamples.collate,
        callbacks=[heartbeats, PrintProgress()],
        options=Options(heartbeats=heartbeats),
        **accelerator.trainer_arguments(),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, heartbeats


def _upload(
    rank: Rank, arguments: Evaluate, prepared: Prepared, logits: "NDArray[Any]", s3: "S3Client"
) -> Mapping[str, float]:
    """Upload the predictions and metrics, and return the metrics."""
    folder = rank.scratch / "result"
    (folder / OUTPUT).mkdir(parents=True)
    labels, names = prepared.evaluation.labels, prepared.class_names
    result: dict[str, float] = {}
    if not arguments.predict_only:
        result = metrics(prepared.problem, logits, labels, positive=positive_class(names, arguments.positive_class))
        if prepared.problem == "single-label":
            write_report(folder, logits, labels, names, prepared.evaluation_texts())
        elif prepared.problem == "multi-label":
            write_class_scores(folder, logits, labels, names)
        _write_parquet(folder / OUTPUT / METRICS, {name: [value] for name, value in result.items()})
    _write_parquet(folder / OUTPUT / PREDICTIONS, _predictions(arguments, prepared, logits))
    check = functools.partial(check_newest, s3, rank.run, rank.attempt)
    object_store.upload_all(s3, folder, object_store.files_below(folder), rank.run, before_each=check)
    log.info("predictions: %s", rank.run / f"{OUTPUT}/{PREDICTIONS}")
    return result


def _predictions(arguments: Evaluate, prepared: Prepared, logits: "NDArray[Any]") -> dict[str, Any]:
    """Return the columns of predictions.parquet: the table's columns and the model's predictions."""
    import pyarrow as pa

    names = prepared.class_names
    columns = {"text": arguments.text_column, "pair": arguments.text_pair_column}
    given: dict[str, list[Any]] = {}
    for row in prepared.evaluation_texts():
        for part, text in row.items():
            given.setdefault(str(columns[part]), []).append(text)
    if not arguments.predict_only:
        given[arguments.label_column] = label_values(prepared.problem, prepared.evaluation.labels, names)
    predicted: dict[str, Any] = predicted_columns(prepared.problem, logits, names)
    if (shares := predicted.get("probabilities")) is not None:
        by_class = [pa.array(column) for column in np.ascontiguousarray(shares.T, dtype=np.float32)]
        predicted["probabilities"] = pa.StructArray.from_arrays(by_class, names=names)
    return {**given, **predicted}


def _write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(dict(columns)), path)


if __name__ == "__main__":
    run(evaluate, Evaluate)
