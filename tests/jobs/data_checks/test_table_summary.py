"""Summaries of whole tables for `trainyard data show`, with unusable rows skipped and listed."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from jobs.cli.app import app
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.labels import LabelFormat
from jobs.data_checks.data_summary import DataSummary
from jobs.data_checks.table_summary import Model, summarize
from jobs.spec.arguments import Columns

COLUMNS = Columns(texts=("text",), label="label", missing_next="name it with --text-column")
ROWS: list[dict[str, Any]] = [
    {"text": "a good game", "label": "games"},
    {"text": "a good game", "label": "games "},
    {"text": "bad", "label": "films"},
]


def no_aws() -> Any:
    pytest.fail("nothing here is on S3")


def shown(*tables: Path, held_out: list[Path] | None = None) -> DataSummary:
    return summarize(no_aws, list(map(str, tables)), list(map(str, held_out or [])), COLUMNS)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["text", "label"])
        writer.writeheader()
        writer.writerows([*ROWS, {"text": "no class", "label": ""}])
    return path


def test_all_formats_have_the_same_summary(table: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({key: [row[key] for row in ROWS] for key in ("label", "text")}), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    by_csv = shown(table)
    both = shown(table, held_out=[table])
    assert (both.training, both.held_out, both.shared, both.repeated) == (3, 3, 3, 1)
    assert [(item.name, item.training) for item in by_csv.classes] == [("films", 1), ("games", 1), ("games ", 1)]
    assert {item.unit: item.at for item in by_csv.lengths} == {"characters": [11, 11, 11, 11], "words": [3, 3, 3, 3]}
    assert by_csv.named_bad_rows == [
        f"{table}, line 5: 'label' is '', which is not a class",
        "next: write each class as a name or as a whole number",
    ]
    for name in ("t.parquet", "t.jsonl"):
        found = shown(tmp_path / name)
        assert found == by_csv.model_copy(update={"bad_rows": {}, "named_bad_rows": []})


def test_codes_whole_fractions_and_parquet_names_are_classes(tmp_path: Path) -> None:
    def classes(path: Path) -> list[str]:
        return [item.name for item in shown(path).classes]

    for labels, expected in (("0110 110", ["0110", "110"]), ("10.0 9.0 9", ["9", "10"])):
        (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"a,{label}\n" for label in labels.split()))
        assert classes(tmp_path / "t.csv") == expected
    features = {"label": {"names": ["disliked", "liked"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"text": ["a", "b", "c"], "label": [1, 0, -1]}).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "t.parquet")
    assert classes(tmp_path / "t.parquet") == ["disliked", "liked"]
    assert shown(tmp_path / "t.parquet").bad_rows == {str(tmp_path / "t.parquet"): 1}, "-1 has no name"


def test_rows_joined_by_quotes_are_listed_or_warned_of(tmp_path: Path) -> None:
    for name, delimiter in (("t.csv", ","), ("t.tsv", "\t")):
        path = tmp_path / name
        rows = '"It is cold.,awful\nI left.",tasty\nbread,tasty\nrice,awful\n"Get it,one\nnow",tasty\n'
        path.write_text("text,label\n".replace(",", delimiter) + rows.replace(",", delimiter))
        found = shown(path)
        assert found.training == 3
        assert found.named_bad_rows[0] == (
            f"{path}, line 3: quotes join it with line 2 into one row, although each line has a 'label' "
            "('awful', 'tasty')"
        )
        assert found.named_bad_rows[-1].startswith("next: quote each text that contains quotes")
        [warning, *_] = found.warnings()
        assert warning.startswith(f"{path}: quotes join lines 6 to 7 into one row, although each could be a row; if")


def test_summary_with_a_model_shows_truncation(table: Path, tmp_path: Path) -> None:
    # GIVEN a tokenizer with a token per word and one more at the end
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "[SEP]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A [SEP]", pair="$A $B [SEP]", special_tokens=[("[SEP]", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = ["data", "show", str(table), "--model", str(tmp_path), "--max-length", "3"]
    result = CliRunner().invoke(app, command)
    assert result.stdout.startswith("3 training examples, 3 classes\n"), result.output
    assert f"  {table}, line 5: 'label' is '', which is not a class" in result.stdout.splitlines()
    assert "tokens: half have at most 4, 90 % 4, 99 % 4, the longest 4" in result.stdout.splitlines()
    cut = json.loads(CliRunner().invoke(app, [*command, "-o", "json"]).stdout)["cut"]
    assert (cut["texts"], cut["of_texts"], cut["tokens"], cut["of_tokens"]) == (2, 3, 2, 10)
    pairs = Columns(texts=("text", "label"), label="label", missing_next="")
    assert summarize(no_aws, [str(table)], [], pairs, Model(str(tmp_path), 5)).lengths[-1].at == [5, 5, 5, 5]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json is not a tokenizer: "):
        summarize(no_aws, [str(table)], [], COLUMNS, Model(str(tmp_path), 3))
    with pytest.raises(NotFoundError, match=r"none/tokenizer\.json does not exist"):
        summarize(no_aws, [str(table)], [], COLUMNS, Model(str(tmp_path / "none"), 3))


def test_tables_of_scores_and_of_several_classes_are_checked(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\na,red;blue\nb,red\nc,0.5\nd,\n")
    command = ["data", "show", str(tmp_path / "t.csv"), "--problem"]
    several = CliRunner().invoke(app, [*command, "multi-label", "--label-delimiter", ";"]).stdout.splitlines()
    assert several[0] == "3 training examples, 2 classes"
    assert [line.split() for line in several[2:4]] == [["red", "2"], ["blue", "1"]]
    assert any("line 4: 'label' is '0.5', which is not a list of classes" in line for line in several)
    scores = CliRunner().invoke(app, [*command, "regression"]).stdout.splitlines()
    assert scores[0] == "1 training example"
    assert any("line 2: 'label' is 'red;blue', which is not a number" in line for line in scores)
    # One class is enough for examples with any number of them, but none is not.
    for labels, warnings in (("red,red", []), (",", ["no example has a class: training refuses this data"])):
        (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "{x}", "label": "{x}"}}\n' for x in labels.split(",")))
        columns = replace(COLUMNS, labels=LabelFormat("multi-label"))
        found = [*summarize(no_aws, [str(tmp_path / "t.jsonl")], [], columns).warnings()]
        assert [line for line in found if "refuses this data" in line and "class" in line] == warnings


def test_unreadable_tables_are_refused(table: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.csv does not exist"):
        shown(tmp_path / "none.csv")
    (tmp_path / "t.parquet").write_bytes(table.read_bytes())
    with pytest.raises(UsageError, match=r"t\.parquet cannot be read as Parquet"):
        shown(tmp_path / "t.parquet")
    (tmp_path / "bad.csv").write_text("text,label\na,\n")
    with pytest.raises(
        UsageError, match=r"(?s)bad\.csv has no examples\n.*line 2: 'label' is '', which is not a class"
    ) as bad:
        shown(tmp_path / "bad.csv")
    assert bad.value.next_step == "write each class as a name or as a whole number"
