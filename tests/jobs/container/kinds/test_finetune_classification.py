"""A fine-tuning from the launcher's start to its saved files, with real ranks."""

import csv
import io
import json
import math
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from jobs.container.kinds.finetune_classification import class_loss, class_weights
from jobs.core.errors import UsageError
from jobs.core.output import Progress
from jobs.data_checks.classes import ClassReport
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from tests.support.container.launching import NewRun, Run
from tests.support.container.reviews import BAD, GOOD, reviews, write_jsonl


@pytest.mark.every_release
def test_two_ranks_train_evaluate_and_save_everything(run: Run, recipe: tuple[str, ...], tmp_path: Path) -> None:
    launched = run.attempt(*recipe, nproc=2)

    # The log during the training.
    assert "accelerator: cpu (auto: no HPU found, no CUDA device found)\n" in launched.lines
    progress = [line for line in map(Progress.parse, launched.lines) if line]
    assert [line.step for line in progress] == [0, *range(4, 49, 4)]
    assert all(line.total_steps == 48 for line in progress)
    assert "loss" in progress[-1].note
    assert "samples/s" in progress[-1].note
    assert "[rank 1]" not in launched.output, "rank 1 has nothing to say in a healthy run"
    assert "arning" not in launched.output

    # The result is that of the saved model, over each held-out example once.
    receipt = run.receipt()
    expected = _evaluated_by_hand(run.download("model/", tmp_path / "model"))
    for name, value in expected.items():
        assert receipt.result[name] == pytest.approx(value, abs=1e-5), name
    assert receipt.result["eval_accuracy"] > receipt.result["eval_majority_accuracy"] + 0.2
    assert receipt.result["eval_samples"] == 37
    assert receipt.result["train_samples_per_second"] > 0
    assert receipt.result["train_steps_per_second"] > 0
    assert receipt.result["eval_runtime"] * receipt.result["eval_samples_per_second"] == pytest.approx(37, rel=0.01)
    assert receipt.result["epoch"] == 4

    # The prediction of each of them with its text, and the metrics of each class.
    predictions = [json.loads(line) for line in run.read("predictions.jsonl").splitlines()]
    right = [line["label"] == line["predicted"] for line in predictions]
    assert sum(right) / 37 == pytest.approx(receipt.result["eval_accuracy"])
    assert [line["text"] for line in predictions] == [row["text"] for row in reviews(37, seed=2)]
    report = ClassReport.model_validate_json(run.read("classes.json"))
    assert report.confusion is not None
    assert sum(report.confusion[number][number] for number in range(2)) == sum(right)

    # Metrics: one line for each log, the result in the last, and the same in TensorBoard.
    lines = run.metrics()
    assert [line["step"] for line in lines] == [*range(4, 49, 4), 48]
    assert lines[0]["loss"] > lines[-2]["loss"], "it did not learn"
    assert receipt.result["train_loss"] == pytest.approx(fmean(line["loss"] for line in lines[:-1]))
    assert lines[-1]["eval_accuracy"] == receipt.result["eval_accuracy"]
    assert dict(run.tensorboard_losses(tmp_path / "events")) == pytest.approx(
        {line["step"]: line["loss"] for line in lines[:-1]}
    )

    # Checkpoints: the newest two.
    assert run.complete_checkpoints() == [40, 48]
    states = [
        torch.load(io.BytesIO(run.read(f"checkpoints/step-48/rng_state_{rank}.pth")), weights_only=False)["cpu"]
        for rank in range(2)
    ]
    assert not torch.equal(*states), "both ranks draw the same dropout"

    # The receipt: the cost, and what it excludes.
    assert receipt.state == "succeeded"
    assert (receipt.team, receipt.job) == ("research", "finetune-classification")
    assert run.location.key == f"research/{receipt.run_id}/"
    attempt = run.recorded_attempt(1)
    assert attempt.saving_seconds > 0
    assert attempt.compiling_seconds == 0, "no CPU compiles"
    assert receipt.attempts == [attempt]
    assert attempt.finished_at is not None
    assert (attempt.exit_code, attempt.accelerator, attempt.world_size, attempt.last_step) == (0, "cpu", 2, 48)
    assert attempt.ran_with["transformers"]
    assert attempt.training_started_at is not None
    assert attempt.started_at < attempt.training_started_at < attempt.finished_at
    seconds = (attempt.finished_at - attempt.started_at).total_seconds()
    assert receipt.duration_seconds == pytest.approx(seconds, abs=0.01)
    assert receipt.on_demand_usd == pytest.approx(seconds / 3600 * 13.10904, abs=1e-5)
    assert "for the hours on another machine (cpu)" in receipt.estimate_note

    assert not list(run.scratch.iterdir()), "files left behind on the node"
    run.wait_until_gone()


def test_a_resumed_attempt_ends_as_if_uninterrupted(
    run: Run,
    recipe: tuple[str, ...],
    uninterrupted: Callable[[int], Run],
    tiny_bert: Path,
    put: Callable[[Path, str], str],
) -> None:
    name = f"models/{uuid.uuid4().hex}"
    flags = (*recipe, f"--model={put(tiny_bert, name)}")
    first = run.start(*flags)
    first.wait_for_line("checkpoint: step 16,")
    first.kill()
    run.wait_until_gone()
    data = run.read("data.json")
    run.s3.put_object(Bucket="data", Key=f"{name}/model.safetensors", Body=b"of which nothing is read any more")

    second = run.attempt(*flags, attempt=2)

    assert "start: resumed from checkpoint step-" in second.output
    whole = uninterrupted(1)
    assert run.read("model/model.safetensors") == whole.read("model/model.safetensors")
    assert run.curve() == whole.curve()
    assert run.read("predictions.jsonl") == whole.read("predictions.jsonl")
    assert run.read("data.json") == data
    for launched in (first, second):
        start_up = "^start-up: .*launcher and imports .*table .*, tokens .*first step "
        assert len(re.findall(start_up, launched.output, re.M)) == 1


@pytest.mark.every_release
def test_pairs_with_numeric_labels_are_read_from_csv(run: Run, tiny_bert: Path, tmp_path: Path) -> None:
    """Also with a local model and table, warnings, and a batch of which a rank holds a quarter at once."""
    rows = [
        {"first": a["text"], "second": b["text"], "class": f"0{a['label'] + b['label']}"}
        for a, b in zip(reviews(80, seed=3, labels=(0, 1)), reviews(80, seed=4, labels=(0, 1))[20:] * 2, strict=False)
    ]
    rows[0]["first"] = "[SEP] good,plot,other\nbad"
    table = tmp_path / "pairs.csv"
    with table.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)

    launched = run.attempt(
        f"--model={tiny_bert}",
        f"--train-data={table}",
        "--text-column=first",
        "--text-pair-column=second",
        "--label-column=class",
        "--eval-fraction=0.25",
        "--epochs=2",
        "--max-length=12",
        "--global-batch-size=16",
        "--max-batch-size-per-rank=4",
    )

    assert "batch: 16 = 1 rank x 4 sequences x 4 accumulated\n" in launched.lines
    assert "data: 60 training and 20 held-out examples, 2 classes\n" in launched.lines
    longest = json.loads(run.read("data.json"))["lengths"][0]["at"][-1]
    assert longest > 12
    assert f"data: sequences of 12 tokens (the longest has {longest}, " in launched.output
    assert json.loads(run.read("data.json"))["classes"][0]["name"] == "00"
    assert f"warning: {table}: quotes join lines 2 to 3 into one row, although each could be a row; " in launched.output
    assert "warning: texts contain special tokens, which the tokenizer encodes as such: 1 [SEP]\n" in launched.output
    assert run.metrics()[-1]["step"] == 8
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(run.download("model/", tmp_path / "model"))
    assert config.id2label == {0: "00", 1: "02"}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder in which sockets have short enough names, as in a job: those of a data loader's processes."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.every_release
def test_class_weights_and_training_arguments_reach_the_training(
    new_run: NewRun, recipe: tuple[str, ...], short_folder: Path
) -> None:
    further = {"gradient_checkpointing": True, "dataloader_num_workers": 1, "warmup_steps": 8}
    short = (*recipe, "--epochs=2", f"--training-arguments={json.dumps(further)}")

    run, plain, skewed = (replace(new_run(), scratch=short_folder / name) for name in "abc")
    accumulated = "--max-batch-size-per-rank=4"

    # WHEN all classes have the same weight, THEN the loss is the model's, here on two ranks that accumulate batches
    launched = run.attempt(*short, '--class-weights={"good": 3, "bad": 3}', accumulated, nproc=2)
    assert "class weights: bad 1, good 1\n" in launched.lines
    assert "arning" not in launched.output
    plain.attempt(*short[:-1], "--warmup-ratio=0.333", accumulated, nproc=2)
    found, expected = ([(row["loss"], row["learning_rate"]) for row in each.metrics()[:-1]] for each in (run, plain))
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-4)

    # WHEN one class has almost no weight, THEN the model never predicts it
    skewed.attempt(*short, '--class-weights={"good": 0.001}', "--label-smoothing-factor=0.1")
    good = ClassReport.model_validate_json(skewed.read("classes.json")).classes[1]
    assert (good.name, good.recall) == ("good", 0)


def test_loss_counts_an_example_by_the_weight_of_its_class() -> None:
    arguments: dict[str, Any] = {"model": "m", "train_data": "t.jsonl"}
    labels = np.array([0, 0, 0, 1])
    logits = torch.tensor([[1.0, -1.0], [0.5, 0.25], [-2.0, 0.0], [0.0, 3.0]])
    for given, often in (({"b": 2}, [1, 2]), ("balanced", [1, 3]), ({"b": 0.5, "a": 2}, [4, 1])):
        arguments["class_weights"] = given
        weights = class_weights(FinetuneClassification(**arguments), ["a", "b"], labels)
        assert weights[labels].mean() == pytest.approx(1)
        rows = [row for row, label in enumerate(labels) for _ in range(often[label])]
        for smoothing in (0, 0.1):
            expected = torch.nn.functional.cross_entropy(
                logits[rows], torch.tensor(labels)[rows], label_smoothing=smoothing
            )
            found = class_loss(weights, smoothing)(logits, torch.tensor(labels))
            assert found.item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("global_batch_size", "at_most", "world_size", "expected"),
    [(32, 32, 1, (32, 1)), (256, 32, 2, (32, 4)), (24, 16, 1, (12, 2)), (30, 32, 8, "24 or 32"), (4, 32, 8, "8")],
)
def test_the_global_batch_is_split_over_ranks_and_accumulated(
    global_batch_size: int, at_most: int, world_size: int, expected: tuple[int, int] | str
) -> None:
    arguments = FinetuneClassification(
        model="m", train_data="t.jsonl", global_batch_size=global_batch_size, max_batch_size_per_rank=at_most
    )
    if isinstance(expected, tuple):
        assert arguments.batch_of_rank(world_size) == expected
    else:
        with pytest.raises(UsageError, match=f"is not divisible by 8 ranks\nNext: set it to {expected}$"):
            arguments.batch_of_rank(world_size)


def _evaluated_by_hand(folder: Path) -> dict[str, float]:
    """The metrics of the model in `folder` on the recipe's held-out examples, without our code."""
    import torch

    rows = reviews(37, seed=2)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.id2label == {0: "bad", 1: "good"}
    encoded = AutoTokenizer.from_pretrained(folder)(
        [row["text"] for row in rows], padding=True, truncation=True, max_length=16, return_tensors="pt"
    )
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    with torch.no_grad():
        logits = model(**encoded).logits
    predicted = logits.argmax(-1)
    right = (predicted == labels).numpy()
    both = [((predicted == number).sum() + (labels == number).sum()).item() for number in range(2)]
    f1 = [2 * (right & (labels == number).numpy()).sum() / both[number] for number in range(2)]
    return {
        "eval_accuracy": float(right.mean()),
        "eval_f1": sum(f1) / 2,
        "eval_f1_macro": sum(f1) / 2,
        "eval_loss": float(torch.nn.functional.cross_entropy(logits, labels)),
        "eval_majority_accuracy": 19 / 37,
    }


@pytest.mark.parametrize("problem", ["multi-label", "regression"])
def test_several_classes_and_numbers_are_learned_and_evaluated(
    run: Run, new_run: NewRun, tiny_bert: Path, problem: str, tmp_path: Path
) -> None:
    """The start model has a head of another problem, which is replaced."""
    start, data = tmp_path / "start", tmp_path / "data.jsonl"
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_bert, num_labels=2, problem_type="regression" if problem == "multi-label" else "multi_label_classification"
    )
    model.save_pretrained(start)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(start)
    texts = [row["text"] for row in reviews(160, seed=1)]
    kinds = {"praise": GOOD, "criticism": BAD, "plot": ("plot", "story"), "cast": ("cast",)}
    classes = [[name for name, words in kinds.items() if {*words} & {*text.split()}] for text in texts]
    labels: list[Any] = [",".join(found) for found in classes]
    if problem == "regression":
        labels = [4.5 if "praise" in found else 1 for found in classes]
    write_jsonl(data, [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)])

    run.attempt(
        *(f"--model={start}", f"--train-data={data}", f"--problem={problem}", "--max-length=16", "--epochs=16"),
        *("--learning-rate=0.005", "--global-batch-size=16"),
    )

    result = run.receipt().result
    predictions = [json.loads(line) for line in run.read("predictions.jsonl").splitlines()]
    assert len(predictions) == result["eval_samples"] == 16
    if problem == "regression":
        assert result["eval_pearson"] > 0.9
        errors = [line["label"] - line["predicted"] for line in predictions]
        assert result["eval_rmse"] == pytest.approx(math.sqrt(sum(error**2 for error in errors) / 16))
        assert result["eval_loss"] == pytest.approx(result["eval_rmse"] ** 2)
    else:
        assert result["eval_f1_micro"] > 0.8
        right = [{*line["label"]} == {*line["predicted"]} for line in predictions]
        assert result["eval_accuracy"] == pytest.approx(sum(right) / 16)
        report = ClassReport.model_validate_json(run.read("classes.json"))
        assert [score.name for score in report.classes] == ["cast", "criticism", "plot", "praise"]

    evaluation = new_run()
    trained = run.download("model/", tmp_path / "trained")
    evaluation.attempt(f"--model={trained}", f"--data={data}", "--max-length=16", kind="evaluate")
    found = pq.read_table(io.BytesIO(evaluation.read("output/predictions.parquet"))).to_pydict()
    columns = ["text", "label", "predicted", *(["probabilities"] if problem == "multi-label" else [])]
    assert list(found) == columns
    expected = labels if problem == "regression" else [sorted(names) for names in classes]
    assert found["label"] == expected
    main = "eval_pearson" if problem == "regression" else "eval_f1_micro"
    assert evaluation.receipt().result[main] > 0.8
