import re
import subprocess
import sys
from typing import Annotated, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from jobs.core.errors import UsageError
from jobs.spec.arguments import Arguments, Artifact, Model, OfKind, Table, Tables, parse_flags
from jobs.spec.catalog import CATALOG
from jobs.spec.kinds.finetune_classification import FinetuneClassification


class Example(Arguments):
    """An example of arguments."""

    model: Model
    """Weights."""
    table: Table | None = None
    """Examples, 100 % of them."""
    steps: int = Field(default=10, ge=1)
    rate: float = 0.5
    mode: Literal["fast", "good"] | None = None
    note: str = ""
    label: str | None = None
    flag: bool = False


def test_flags_include_defaults() -> None:
    assert Example(model="hf://a/b", steps=3).to_flags() == [
        "--model=hf://a/b",
        "--steps=3",
        "--rate=0.5",
        "--note=",
        "--flag=false",
    ]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(
    arguments=st.builds(
        Example,
        model=st.sampled_from(["hf://a/b", "s3://bucket/k", "1", "null", "a b"]),
        table=st.none() | st.just("s3://bucket/t.jsonl"),
        steps=st.integers(1, 2**53),
        rate=st.floats(-1e15, 1e15),
        mode=st.sampled_from([None, "fast", "good"]),
        note=TEXT,
        label=st.none() | TEXT,
        flag=st.booleans(),
    )
)
@example(arguments=Example(model="a b", note="--steps=3", label='{"a": 1}'))
def test_flags_are_parsed_to_the_same_arguments(arguments: Example) -> None:
    assert parse_flags(Example, arguments.to_flags(), program="test") == arguments


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=m", "--stepps=3"], "unrecognized arguments: --stepps=3"),
        (["--model=m", "--step=3"], "unrecognized arguments: --step=3"),  # no abbreviations
        (["--steps=3"], "the following arguments are required: --model"),
        (["--model"], "argument --model: expected one argument"),
    ],
)
def test_invalid_flags_print_the_usage(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(Example, flags, program="launch example")
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("usage: launch example")


@pytest.mark.parametrize(("flag", "message"), [("--steps=1.5", "valid integer"), ("--mode=slow", "'fast' or 'good'")])
def test_invalid_values_are_rejected(flag: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse_flags(Example, ["--model=m", flag], program="test")


def test_sources_are_the_inputs_that_are_set() -> None:
    assert list(Example(model="m", table="t.csv").sources()) == [
        ("model", "m", "a pretrained model's folder"),
        ("table", "t.csv", "a table of examples"),
    ]
    assert [name for name, _, _ in Example(model="m", note="s3://not/a/source").sources()] == ["model"]


def test_every_entrypoint_exists() -> None:
    # In a separate process, because finding a submodule imports its parents, which must not be broken.
    names = [kind.entrypoint for kind in CATALOG.values()]
    code = f"import importlib.util; print([name for name in {names!r} if importlib.util.find_spec(name) is None])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("global_batch_size", "world_sizes", "sizes"),
    [(3, [8], "8"), (30, [8], "24 or 32"), (9, [3, 2], "6 or 12"), (8, [3, 2], "6 or 12")],
)
def test_indivisible_global_batch_is_rejected_with_valid_sizes(
    global_batch_size: int, world_sizes: list[int], sizes: str
) -> None:
    arguments = FinetuneClassification(model="m", train_data="t.csv", global_batch_size=global_batch_size)
    with pytest.raises(UsageError, match=f"global_batch_size {global_batch_size} is not divisible by ") as error:
        arguments.check(*world_sizes)
    assert error.value.next_step == f"set it to {sizes}"


class Several(Arguments):
    """Many inputs in one field."""

    texts: list[Table]
    more: list[Table] | None = None
    corpus: Artifact | None = None
    tokenizer: Annotated[Artifact, OfKind("tokenizer")] | None = None
    tokens: Annotated[Artifact, OfKind("packed-tokens")] = "run://tokenize"


def test_each_input_of_a_list_is_a_separate_source() -> None:
    several = Several(texts=["hf://a/b", "data://c.jsonl"], corpus="run://corpus")
    assert [(name, location) for name, location, _ in several.sources()] == [
        ("texts.0", "hf://a/b"),
        ("texts.1", "data://c.jsonl"),
        ("corpus", "run://corpus"),
        ("tokens", "run://tokenize"),
    ]
    moved = several.with_sources(**{"texts.1": "s3://bucket/c.jsonl", "corpus": "s3://bucket/corpus"})
    assert (moved.texts, moved.corpus) == (["hf://a/b", "s3://bucket/c.jsonl"], "s3://bucket/corpus")
    assert several.texts[1] == "data://c.jsonl"
    with_more = Several(texts=["a.csv"], more=["b.csv"])
    for arguments in (moved, with_more):
        assert parse_flags(Several, arguments.to_flags(), program="test") == arguments
    assert [name for name, _, _ in with_more.sources()] == ["texts.0", "more.0", "tokens"]


class Wide(Arguments):
    """One table or several."""

    tables: Tables


def test_tables_field_accepts_one_table_or_a_list() -> None:
    for table, names in (("t.csv", ["tables"]), (["a.csv", "hf://b/c"], ["tables.0", "tables.1"])):
        wide = Wide(tables=table)
        assert [name for name, _, _ in wide.sources()] == names
        assert parse_flags(Wide, wide.to_flags(), program="test") == wide
    for wrong, message in (
        ([], "a table, or a list of tables, not []"),
        (["a.csv", 7], "a table, or a list of tables, not ['a.csv', 7]"),
        (["a.csv", "b.txt"], "b.txt is not a table"),
    ):
        with pytest.raises(ValidationError, match=re.escape(message)) as refused:
            Wide.model_validate({"tables": wrong})
        assert [error["loc"] for error in refused.value.errors()] == [("tables",)]


def test_artifact_kind_of_an_argument() -> None:
    several = Several(texts=["hf://a/b"], tokenizer="run://tokenizer")
    kinds = {name: several.artifact_kind(name) for name in ("texts.0", "corpus", "tokenizer", "tokens")}
    assert kinds == {"texts.0": None, "corpus": None, "tokenizer": "tokenizer", "tokens": "packed-tokens"}
