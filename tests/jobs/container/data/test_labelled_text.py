"""Labelled text: from tables to classes and held-out examples; invalid labels are refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.container.data import labelled_text
from jobs.container.data.labelled_text import Examples
from jobs.core.errors import UsageError
from jobs.data_checks.table_rows import BadRows
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from tests.support.container.hub import Splits, save_data_set
from tests.support.container.reviews import write_jsonl

Rows = list[dict[str, Any]]
Loaded = tuple[list[str], Examples, Examples]
Load = Callable[..., Loaded]


def no_s3() -> Any:
    pytest.fail("nothing here lies on S3")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load the rows as a job with these arguments would, from train.jsonl and eval.jsonl."""

    def load(train: Rows, held_out: Rows | None = None, **arguments: Any) -> Loaded:
        arguments["train_data"] = str(write_jsonl(tmp_path / "train.jsonl", train))
        if held_out is not None:
            arguments["eval_data"] = str(write_jsonl(tmp_path / "eval.jsonl", held_out))
        given = FinetuneClassification.model_validate({"model": "unused", **arguments})
        return labelled_text.load(given, s3=no_s3)

    return load


def labelled(*labels: Any) -> Rows:
    return [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]


def test_named_columns_override_those_of_a_glue_task(load: Load) -> None:
    rows = [
        {"first": f"text {number}", "sentence1": "no", "sentence2": f"other {number}", "label": 7, "same": number}
        for number in range(2)
    ]
    names, train, _ = load(rows, rows, glue_task="mrpc", text_column="first", label_column="same")
    assert names == ["0", "1"]
    assert train.texts == ["text 0", "text 1"]
    assert train.pairs == ["other 0", "other 1"]


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["neutral", "bad", "good", "bad"], ["bad", "good", "neutral"], [2, 0, 1, 0]),
        ([10, 9, -1, 9], ["-1", "9", "10"], [2, 1, 0, 1]),
        (["10", " 9", 9.0, 9], ["9", "10"], [1, 0, 0, 0]),
        ([True, False, "True"], ["False", "True"], [1, 0, 1]),
        (["9" * 5000, "b", "b"], ["9" * 5000, "b"], [0, 1, 1]),
        (["0110", "110", 110, 110.0], ["0110", "110"], [0, 1, 1, 1]),
        (["10.0", "9.0", "9", 9], ["9", "10"], [1, 0, 0, 0]),
    ],
)
def test_labels_become_classes_in_a_fixed_order(
    load: Load, labels: list[Any], names: list[str], numbers: list[int]
) -> None:
    found, train, held_out = load(labelled(*labels), labelled(labels[0]))
    assert found == names
    assert train == Examples(texts=[f"text {row}" for row in range(len(labels))], pairs=None, labels=numbers)
    assert held_out.labels == numbers[:1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, "bad"], "train.jsonl, line 3: 'label' is the name 'bad', but the number 0 in line 1\nNext: write all"),
        (["bad", "2"], "train.jsonl, line 2: 'label' is the number '2', but the name 'bad' in line 1\nNext: write all"),
        (["bad", "good", None], "train.jsonl, line 3: 'label' is None, which is not a class"),
        ([1, 0.5], "train.jsonl, line 2: 'label' is 0.5, which is not a class"),
        *((["1", text], f"line 2: 'label' is '{text}', which is not a class") for text in ("0,5", " 1.5E-3 ", "nan")),
        ([1, 2.0**54], "train.jsonl, line 2: 'label' is 1.8014398509481984e+16, which is not a class"),
        (["bad", ["good"]], "train.jsonl, line 2: 'label' is ['good'], which is not a class"),
        (["bad", "bad"], "train.jsonl: every 'label' is 'bad', but training needs at least two"),
    ],
)
def test_invalid_labels_are_refused_with_their_line(load: Load, labels: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load(labelled(*labels))


def test_unknown_classes_and_non_texts_are_refused_with_line(load: Load) -> None:
    for label, problem in (
        ("god", "'god' is not one of the training data's classes; did you mean 'good'?"),
        (None, "None is not one of"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"eval.jsonl, line 2: label {problem}")):
            load(labelled("bad", "good"), labelled("bad", label))
    for text, problem in (("a \ud83d b", "contains a lone surrogate"), (None, "is not text but None")):
        with pytest.raises(UsageError, match=re.escape(f"train.jsonl, line 3: 'text' {problem}")):
            load([*labelled("bad", "good"), {"text": text, "label": "bad"}])


def test_pairs_keep_both_sides_together(load: Load) -> None:
    rows = [{"first": f"a{number}", "second": f"b{number}", "class": number % 2} for number in range(20)]
    columns = {"text_column": "first", "text_pair_column": "second", "label_column": "class"}
    names, train, held_out = load(rows, **columns, eval_fraction=0.25)
    assert names == ["0", "1"]
    assert (len(train), len(held_out)) == (15, 5)
    seen = []
    for part in (train, held_out):
        assert part.pairs is not None
        seen += [
            {"first": text, "second": pair, "class": label}
            for text, pair, label in zip(part.texts, part.pairs, part.labels, strict=True)
        ]
    assert sorted(seen, key=rows.index) == rows


def several(tmp_path: Path, *tables: Rows) -> list[str]:
    return [str(write_jsonl(tmp_path / f"part{number}.jsonl", rows)) for number, rows in enumerate(tables)]


def test_tables_are_joined_and_errors_name_their_table(tmp_path: Path) -> None:
    first, second = labelled("good", "bad"), labelled("so-so", "good")
    arguments = FinetuneClassification(
        model="unused", train_data=several(tmp_path, first, second), eval_data=several(tmp_path, first)
    )
    names, together, alone = labelled_text.load(arguments, s3=no_s3)
    assert names == ["bad", "good", "so-so"]
    assert [names[label] for label in together.labels] == ["good", "bad", "so-so", "good"]
    assert [names[label] for label in alone.labels] == ["good", "bad"]

    tables = several(tmp_path, labelled("good", "bad"), labelled("bad", None))
    for arguments, problem in (
        (FinetuneClassification(model="unused", train_data=tables), "'label' is None, which is not a class"),
        (
            FinetuneClassification(model="unused", train_data=tables[:1], eval_data=tables),
            "label None is not one of the ",
        ),
    ):
        with pytest.raises(UsageError, match=rf"part1\.jsonl, line 2: {problem}"):
            labelled_text.load(arguments, s3=no_s3)


def test_seed_decides_which_examples_are_held_out(load: Load) -> None:
    rows = labelled(*[number % 2 for number in range(50)])
    splits = {}
    for seed in (1, 2, 3):
        _, train, held_out = load(rows, seed=seed, eval_fraction=0.2)
        assert (_, train, held_out) == load(rows, seed=seed, eval_fraction=0.2)
        assert len(held_out) == 10
        assert sorted(train.texts + held_out.texts) == sorted(row["text"] for row in rows), "lost or duplicated"
        splits[seed] = frozenset(held_out.texts)
    assert len(set(splits.values())) == 3


def test_too_few_examples_to_hold_some_out_are_refused(load: Load) -> None:
    with pytest.raises(UsageError, match=r"train\.jsonl has 2 examples, too few to hold some out; set eval_data"):
        load(labelled(0, 1), eval_fraction=0.9)
    _, train, held_out = load(labelled(0, 1, 0), eval_fraction=0.01)
    assert (len(train), len(held_out)) == (2, 1)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory stands in for the hub and holds its cache."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("datasets_cache")
def test_glue_task_uses_its_columns_and_validation_split(tmp_path: Path) -> None:
    columns = {"sst2": ["sentence"], "mnli": ["premise", "hypothesis"]}
    held_out = {"sst2": "validation", "mnli": "validation_matched"}
    configurations: dict[str, Splits] = {
        task: {
            split: [{**{name: f"{task} {split} {name}" for name in columns[task]}, "label": 1, "idx": 0}]
            for split in ("train", held_out[task])
        }
        for task in columns
    }
    save_data_set(tmp_path / "nyu-mll" / "glue", configurations, class_names=["no", "yes"])
    for task, own in columns.items():
        arguments = FinetuneClassification.model_validate({"model": "unused", "glue_task": task})
        names, *parts = labelled_text.load(arguments, s3=no_s3)
        assert names == ["no", "yes"], "the data set's names, although only one occurs"
        for part, split in zip(parts, ("train", held_out[task]), strict=True):
            text, *pair = [f"{task} {split} {name}" for name in own]
            assert part == Examples(texts=[text], pairs=pair or None, labels=[1])


def write_parquet(path: Path, names: list[str], numbers: list[int]) -> str:
    """Write a table as `datasets` does, with names for its label numbers."""
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    rows = {"text": [f"text {number}" for number in range(len(numbers))], "label": numbers}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return str(path)


@pytest.mark.usefixtures("datasets_cache")
def test_parquet_file_provides_class_names(tmp_path: Path) -> None:
    train = write_parquet(tmp_path / "train.parquet", ["liked", "disliked"], [0, 1, 1])
    held_out = write_parquet(tmp_path / "eval.parquet", ["disliked", "liked"], [0, 1])
    arguments = FinetuneClassification(model="unused", train_data=train, eval_data=held_out)
    names, trained, evaluated = labelled_text.load(arguments, s3=no_s3)
    assert names == ["liked", "disliked"]
    assert trained.labels == [0, 1, 1]
    assert evaluated.labels == [1, 0], "the same classes, numbered differently in the other file"

    of_numbers = str(write_jsonl(tmp_path / "n.jsonl", labelled(1, 0, 1)))
    arguments = FinetuneClassification(model="unused", train_data=of_numbers, eval_data=held_out)
    assert labelled_text.load(arguments, s3=no_s3)[2].labels == [0, 1], "trained on numbers"


def test_split_keeps_shares_and_has_rare_classes_on_both_sides(load: Load) -> None:
    rows = labelled(*["often"] * 60, *["seldom"] * 38, *["rare"] * 2, "once")
    names, train, held_out = load(rows, eval_fraction=0.1)
    counts = {name: (train.labels.count(number), held_out.labels.count(number)) for number, name in enumerate(names)}
    assert counts == {"often": (54, 6), "once": (1, 0), "rare": (1, 1), "seldom": (35, 3)}
    assert sorted(train.texts + held_out.texts) == sorted(row["text"] for row in rows), "lost or duplicated"


@pytest.mark.parametrize("count", [1, 8, 40, 99])
def test_split_has_the_requested_size_if_classes_allow_it(count: int) -> None:
    labels = [number // 2 for number in range(20)] + [10] * 80
    drawn = labelled_text.stratified(labels, count, seed=3)
    assert len(set(drawn.tolist())) == len(drawn) == min(count, 89)
    left = {labels[row] for row in set(range(100)) - set(drawn.tolist())}
    assert left == set(range(11)), "each class is trained on"


def test_duplicates_are_dropped_from_the_training_data_only(load: Load) -> None:
    rows = [*labelled("bad", "good", "good"), *labelled("bad", "bad"), {"text": "held out", "label": "good"}]
    held_out = [{"text": "held out", "label": "good"}] * 2
    _, train, evaluated = load(rows, held_out, drop_duplicates=True)
    assert train == Examples(texts=["text 0", "text 1", "text 2", "text 1"], pairs=None, labels=[0, 1, 1, 0])
    assert evaluated.texts == ["held out"] * 2
    _, train, evaluated = load(labelled("bad", "good", "bad", "good") * 3, drop_duplicates=True, eval_fraction=0.5)
    assert sorted(train.texts + evaluated.texts) == [f"text {number}" for number in range(4)]
    with pytest.raises(UsageError, match="every text is also held out"):
        load(labelled("bad", "good"), labelled("bad", "good"), drop_duplicates=True)


BAD: Rows = [
    {"text": None, "label": "bad"},
    {"text": "x", "label": None},
    {"text": "y"},
    {"text": "\ud83d", "label": "bad"},
]


def test_up_to_ten_bad_rows_are_reported_together(load: Load, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load([*labelled("bad", "good"), *BAD * 3], labelled("bad", None))
    first, *lines = str(caught.value).splitlines()
    assert first == "13 bad rows:"
    of_train = [line for line in lines if line.startswith(f"{tmp_path}/train.jsonl, line ")]
    assert len(of_train) == 10
    assert f"{tmp_path}/train.jsonl, line 5: no column 'label'; available: 'text'" in of_train
    assert f"{tmp_path}/train.jsonl, line 3: 'text' is not text but None" in of_train
    assert f"{tmp_path}/train.jsonl, line 4: 'label' is None, which is not a class" in of_train
    assert "and 2 more" in lines
    reason = "label None is not one of the training data's classes; available: 'bad', 'good'"
    assert lines[-2] == f"{tmp_path}/eval.jsonl, line 2: {reason}"
    assert lines[-1].endswith("; or skip them with on_bad_rows: skip")


def test_bad_rows_are_skipped_and_counted_on_request(load: Load, tmp_path: Path) -> None:
    bad = BadRows(skip=True, at_most=5)
    train = [*BAD, *labelled("bad", "good")]
    write_jsonl(tmp_path / "train.jsonl", train)
    write_jsonl(tmp_path / "eval.jsonl", [*labelled("good", "ugly")])
    arguments = FinetuneClassification(
        model="unused", train_data=f"{tmp_path}/train.jsonl", eval_data=f"{tmp_path}/eval.jsonl"
    )
    names, examples, held_out = labelled_text.load(arguments, s3=no_s3, bad=bad)
    assert names == ["bad", "good"]
    assert examples == Examples(texts=["text 0", "text 1"], pairs=None, labels=[0, 1])
    assert held_out == Examples(texts=["text 0"], pairs=None, labels=[1])
    assert bad.counts == {f"{tmp_path}/train.jsonl": 4, f"{tmp_path}/eval.jsonl": 1}

    more = {"on_bad_rows": "skip", "max_bad_rows": 4}
    with pytest.raises(UsageError, match=r"(?s)more bad rows than max_bad_rows .* \(4\); among them:\n.*'ugly'"):
        load(train, labelled("good", "ugly"), **more)
    assert load(train, labelled("good"), **more)[1] == examples
