"""The predictions of a classifier for a table: the same as with transformers, in the table's order."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from jobs.container.data import labelled_text
from jobs.container.data.labelled_text import Table, read_to_evaluate
from jobs.core.errors import UsageError
from jobs.data_checks.classes import ClassReport
from jobs.data_checks.model_files import class_names
from jobs.data_checks.table_rows import BadRows
from jobs.spec.kinds.evaluate import Evaluate
from tests.support.container.launching import Run
from tests.support.container.reviews import reviews

NAMES = ["bad", "fine", "good"]


@pytest.fixture(scope="module")
def classifier(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained classifier with three classes."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    names = dict(enumerate(NAMES))
    numbers = {name: number for number, name in names.items()}
    folder = tmp_path_factory.mktemp("model") / "classifier"
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_bert, num_labels=3, id2label=names, label2id=numbers
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    # Untrained, it gives nearly equal logits for all texts, so each text is judged by its difference from their mean
    encoded = tokenizer([row["text"] for row in reviews(45, seed=5)], padding=True, return_tensors="pt")
    with torch.no_grad():
        mean = model.eval().bert(**encoded).pooler_output.mean(dim=0)
        torch.nn.init.normal_(model.classifier.weight, std=3.0)
        model.classifier.bias.copy_(-model.classifier.weight @ mean)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_two_ranks_predict_like_one_and_write_tables(
    run: Run, classifier: Path, put: Callable[[Path, str], str], tmp_path: Path
) -> None:
    rows = reviews(45, seed=5)
    table = tmp_path / "reviews.csv"
    rows[0]["text"] += " \u2013 \u201ef\u00fcnf\u201c; na ja"
    with table.open("w", newline="", encoding="cp1252") as stream:
        writer = csv.writer(stream, delimiter=";")
        writer.writerow(("", "stars", "review"))
        writer.writerows((number, row["label"], row["text"]) for number, row in enumerate(rows))
        writer.writerow((45, "awful", "no class"))

    launched = run.attempt(
        f"--model={put(classifier, 'models/three-classes')}",
        f"--data={put(table, 'evaluated/reviews.csv')}",
        *("--text-column=review", "--label-column=stars", "--max-length=16", "--batch-size=4", "--on-bad-rows=skip"),
        *("--positive-class=good", "--delimiter=;", "--encoding=cp1252"),
        kind="evaluate",
        nproc=2,
    )

    assert "warning: 1 bad row of s3://" in launched.output
    found = pq.read_table(io.BytesIO(run.read("output/predictions.parquet"))).to_pydict()
    assert list(found) == ["review", "stars", "predicted", "confidence", "probabilities"]
    assert found["review"] == [row["text"] for row in rows]
    assert found["stars"] == [row["label"] for row in rows]
    shares = _by_hand(classifier, found["review"])
    assert list(found["probabilities"][0]) == NAMES
    assert torch.allclose(torch.tensor([list(row.values()) for row in found["probabilities"]]), shares, atol=1e-5)
    guesses = [NAMES[number] for number in shares.argmax(-1).tolist()]
    assert found["predicted"] == guesses
    assert len({*guesses}) > 1, "a model that always says the same shows little"
    right = sum(guess == row["label"] for guess, row in zip(guesses, rows, strict=True))
    result = run.receipt().result
    assert result["eval_accuracy"] == pytest.approx(right / 45)
    assert result["eval_samples"] == 45
    assert run.metrics()[-1]["step"] == 1
    [metrics] = pq.read_table(io.BytesIO(run.read("output/metrics.parquet"))).to_pylist()
    assert metrics == {name: result[name] for name in metrics}
    report = ClassReport.model_validate_json(run.read("classes.json"))
    assert report.confusion
    [score] = [score for score in report.classes if score.name == "good"]
    assert result["eval_f1"] == pytest.approx(score.f1) != pytest.approx(result["eval_f1_macro"])
    read = json.loads(run.read("inputs.json"))["fingerprints"]
    assert {location.rpartition("/")[2] for location in read} == {"three-classes", "reviews.csv"}
    assert all(re.fullmatch("[0-9a-f]{16}", digits) for digits in read.values())


def test_texts_without_labels_are_predicted_too(
    run: Run, classifier: Path, put: Callable[[Path, str], str], tmp_path: Path
) -> None:
    table = tmp_path / "pairs.jsonl"
    table.write_text(
        "".join(json.dumps({"a": f"the film {word}", "b": "it"}) + "\n" for word in ("is good", "was bad"))
    )
    run.attempt(
        f"--model={classifier}",
        f"--data={table}",
        *("--predict-only=true", "--text-column=a", "--text-pair-column=b", "--max-length=16"),
        kind="evaluate",
    )
    found = pq.read_table(io.BytesIO(run.read("output/predictions.parquet"))).to_pydict()
    assert list(found) == ["a", "b", "predicted", "confidence", "probabilities"]
    assert found["a"] == ["the film is good", "the film was bad"]
    assert "eval_accuracy" not in run.receipt().result
    assert run.keys("output/") == ["output/predictions.parquet"]
    assert not run.keys("classes.json")


def _by_hand(folder: Path, texts: list[str]) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoded = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=16, return_tensors="pt"
    )
    with torch.no_grad():
        return torch.softmax(model(**encoded).logits, dim=-1)


@pytest.mark.parametrize(
    ("names", "of_table", "labels", "expected"),
    [
        (["0", "2"], None, [2, 0], [1, 0]),
        (["LABEL_0", "LABEL_1"], None, [1, 0], [1, 0]),
        (NAMES, ["good", "bad"], [0, 1], [2, 0]),
        (["LABEL_0", "LABEL_1"], ["no", "yes"], [1, 0], [1, 0]),
        (NAMES, None, ["god", "bad"], "label 'god' is not one of the model's classes; did you mean 'good'"),
        (
            NAMES,
            ["bad", "awful"],
            [0, 1],
            "has the class 'awful', but the model's classes are 'bad', 'fine', 'good'\nNext: ",
        ),
    ],
)
def test_labels_must_be_class_names_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    of_table: list[str] | None,
    labels: list[Any],
    expected: list[int] | str,
) -> None:
    """The table is a hub data set with class names, or a file."""
    bad = BadRows()
    columns: dict[str, list[Any]] = {"text": ["one", "two"], "label": labels}
    table = Table(location="t", columns=columns, lines=[1, 2], unit="line", class_names=of_table, bad=bad)
    monkeypatch.setattr(labelled_text, "read_table", lambda *_, **__: table)
    arguments = Evaluate(model="m", data="t.csv")

    def read() -> list[int]:
        return read_to_evaluate(arguments, names, s3=lambda: pytest.fail("nothing is read"), bad=bad).labels

    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            read()
    else:
        assert read() == expected


def test_a_model_that_is_not_a_classifier_is_refused(classifier: Path) -> None:
    config = json.loads((classifier / "config.json").read_bytes())
    assert class_names(config, "m") == NAMES
    with pytest.raises(
        UsageError, match=r"m is not a classifier: its config\.json names BertForMaskedLM\nNext: fine-tune it"
    ):
        class_names({**config, "architectures": ["BertForMaskedLM"]}, "m")


def test_column_names_of_the_predictions_are_refused() -> None:
    with pytest.raises(ValidationError, match="'confidence' is a column of the predictions"):
        Evaluate(model="m", data="t.csv", text_column="confidence")
