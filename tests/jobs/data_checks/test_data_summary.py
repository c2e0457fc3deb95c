"""The summary of training data: counts, lengths and likely mistakes."""

import pytest

from jobs.data_checks.data_summary import Cut, DataSummary, Lengths, lengths_at_shares, summary

NAMES = ["games", "games ", "Rare", "new", "other"]
TRAINING = [("a",), ("b",), ("b",), ("c",), ("d",), ("e",), ("f",)]
HELD_OUT = [("b",), ("x",), ("y",)]


@pytest.fixture
def found() -> DataSummary:
    return summary(NAMES, (TRAINING, [0, 0, 0, 1, 2, 4, 4]), (HELD_OUT, [0, 1, 3]))


def test_summary_counts_classes_and_warns_of_likely_mistakes(found: DataSummary) -> None:
    found.lengths = [lengths_at_shares("tokens", [4] * 89 + [12] * 10 + [40])]
    found.cut = Cut(max_length=32, texts=1, of_texts=10, tokens=8, of_tokens=516)
    found.bad_rows = {"t.csv": 3}
    found.named_bad_rows = ["t.csv, line 4: 'label' is None, which is not a class", "and 2 more"]
    found.fingerprints = {"t.csv": "00ab"}
    assert list(found.lines()) == [
        "7 training and 3 held-out examples, 5 classes",
        "  class       training  held out",
        "  games              3         1",
        "  other              2         0",
        "  'games '           1         1",
        "  Rare               1         0",
        "  new                0         1",
        "tokens: half have at most 4, 90 % 12, 99 % 12, the longest 40",
        "cut at max_length 32: 1 text (10 %), 8 tokens (2 %)",
        "read: t.csv (fingerprint 00ab)",
        "warning: 'games' and 'games ' look alike, but are 2 classes; strip: true makes them one",
        "warning: 2 classes ('Rare', 'new') have only one example",
        "warning: 2 classes ('games ', 'other') have only two examples",
        "warning: class 'other' has no held-out example",
        "warning: class 'new' has no training example",
        "warning: 1 of 3 held-out examples also in the training data",
        "warning: 1 training example repeating an earlier text; drop_duplicates: true drops those of the same class",
        "warning: 3 bad rows of t.csv skipped",
        "  t.csv, line 4: 'label' is None, which is not a class",
        "  and 2 more",
    ]


def test_empty_texts_are_warned_of() -> None:
    found = summary(["no", "yes"], ([("a", "b"), ("c", " "), ("", "d")], [0, 1, 0]), ([("e", "")], [1]))
    assert "warning: 3 examples with an empty text, used like any other" in list(found.lines())
    assert "empty" not in "".join(summary(["no"], ([("a",)], [0])).lines())


def test_what_training_refuses_is_warned_of() -> None:
    found = summary(["no"], ([("",), (" ",)], [0, 0]))
    found.bad_rows, found.trained = {"t.csv": 2}, False
    assert list(found.warnings()) == [
        "class 'no' has only two examples",
        "every text is empty: training refuses this data",
        "there is only one class: training refuses this data",
        "2 bad rows of t.csv not counted: training refuses the table, or skips them with on_bad_rows: skip",
    ]


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ("good\u200b", "'good\\u200b'"),
        ("\u202egood", "'\\u202egood'"),
        ("GOOD", "'GOOD'"),
        ("go\u00adod", "'go\\xadod'"),
    ],
)
def test_classes_that_look_alike_are_warned_of(other: str, shown: str) -> None:
    [warning, *_] = summary(["good", other], ([("a",), ("b",), ("c",)] * 2, [0, 1, 1] * 2)).warnings()
    assert warning.startswith(f"'good' and {shown} look alike, but are 2 classes")
    assert warning.endswith("strip: true makes them one") == (other in ("good\u200b", "\u202egood"))


def test_only_the_largest_of_many_classes_are_listed() -> None:
    labels = [number for number in range(150) for _ in range(number + 3)]
    texts = [(str(number),) for number in range(len(labels))]
    first, _, largest, *rest = summary([f"class {number:03}" for number in range(150)], (texts, labels)).lines()
    assert first == "11,625 training examples, 150 classes"
    assert largest == "  class 149         152"
    assert rest[19:] == ["  and 130 more"]


@pytest.mark.parametrize(
    ("lengths", "at"), [([7], [7, 7, 7, 7]), ([1, 9], [1, 9, 9, 9]), (range(1, 1001), [500, 900, 990, 1000])]
)
def test_lengths_at_shares_of_the_examples(lengths: list[int], at: list[int]) -> None:
    assert lengths_at_shares("words", lengths) == Lengths(unit="words", at=at)
