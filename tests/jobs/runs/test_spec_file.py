"""Reading spec files: values, errors, and `--set`."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.core.errors import NotFoundError, UsageError
from jobs.runs.spec_file import READY_SPECS, read_spec, read_specs
from jobs.spec.spec_yaml import dump_spec, parse_documents

GOOD = """\
name: reviews
job: finetune-classification
arguments:
  model: data://models/minilm
  train_data: data://reviews/train.jsonl
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "spec.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("path", sorted(READY_SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_spec_is_valid(path: Path) -> None:
    assert read_specs(path)[-1].name == path.stem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(GOOD + "wokers: 2\n", "spec.yaml: wokers: unknown key", id="unknown key"),
        pytest.param(
            GOOD.replace("model:", "modle:"), "arguments.modle: unknown key; did you mean 'model'?", id="misspelt"
        ),
        pytest.param(GOOD + "job: other\n", "line 6, column 1: duplicate key 'job'", id="key given twice"),
        pytest.param("name: [a\njob: b\n", "line 2, column ", id="YAML syntax"),
        pytest.param(GOOD + "timeout_hours: 1:30\n", "not '1:30'; write hours as a number: 1.5", id="hours, minutes"),
        pytest.param(GOOD + "attempts: 010\n", "line 6, column 11: '010' cannot be read as int (other", id="octal"),
        pytest.param(f"name: {'9' * 5000}\n", f"'{'9' * 40}...' cannot be read as int", id="5000 digits"),
        pytest.param("[" * 5000, "its values are nested too deeply", id="deep nesting"),
        pytest.param("", "a spec must be a mapping of keys to values, not an empty document", id="empty"),
        pytest.param('name: "\\U00110000"\n', "line 1, column 10: cannot be read (chr() arg", id="beyond Unicode"),
        pytest.param(f"%YAML 1.{'9' * 5000}\n---\n", "line 1, column 9: cannot be read (Exceeds", id="version"),
        pytest.param(b"name: caf\xe9\n", "line 1: byte 0xe9 is not UTF-8", id="Latin-1"),
    ],
)
def test_each_error_names_its_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read_spec(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_local_inputs_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = write(tmp_path, GOOD.replace("data://models/minilm", "~/models/minilm"))
    read = read_spec(path, ["arguments.train_data=[~/a.csv, b~.csv, ~nobody-of-that-name/c.csv]"])
    assert read.arguments["model"] == f"{tmp_path}/home/models/minilm"
    here = Path.cwd()
    assert read.arguments["train_data"] == [
        f"{tmp_path}/home/a.csv",
        f"{here}/b~.csv",
        f"{here}/~nobody-of-that-name/c.csv",
    ]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    read = read_spec(path, ["arguments.train_data=../train.jsonl"])
    assert read.arguments["train_data"] == str(tmp_path / "train.jsonl")


def _bomb(first: str, further: str) -> str:
    """Return a spec with 40 values, each containing the one before it twice."""
    lines = [first, *(further.format(number, number - 1) for number in range(1, 40))]
    return GOOD + "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(_bomb("k0: &k0 [x, x]", "k{0}: &k{0} [*k{1}, *k{1}]"), "more than 10000 values", id="aliases"),
        pytest.param(
            _bomb("k0: &k0 {a: 1, b: 2}", "k{0}: &k{0} {{<<: [*k{1}, *k{1}]}}"), "more than 10000 values", id="merges"
        ),
        pytest.param("a: " + "[" * 200 + "]" * 200, "nested too deeply", id="depth"),
        pytest.param(GOOD + "extra: &a [*a]\n", "line 6, column 12: 'a' contains itself", id="recursion"),
        pytest.param(f"attempts: 0x{'f' * 100_000}\n", "cannot be read as int (more than 1000", id="hexadecimal"),
        pytest.param("name: " + "x" * 1_000_000, "it is larger than 1 MB, so it is not a spec", id="too large"),
    ],
)
def test_files_that_would_take_forever_are_refused(tmp_path: Path, text: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(UsageError) as error:
        read_specs(write(tmp_path, text))
    assert message in str(error.value)
    assert len(str(error.value)) < 2000
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("plain", "value"),
    [
        *((word, word) for word in ("no", "on", "y", "1:30", "2020-01-01", "1_000", "0b11", "1e-5", "08")),
        *((word, True) for word in ("true", "True", "TRUE")),
        *((word, None) for word in ("", "~", "null")),
        ("0o10", 8),
        ("0x1F", 31),
        ("-12", -12),
        ("1.5e3", 1500.0),
        ("-.inf", float("-inf")),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(plain: str, value: object) -> None:
    [document] = parse_documents(f"{plain}: [{plain}]" if plain else "a: ", origin="here")
    [(key, found)] = document.data.items()
    assert found == ([value] if plain else value)
    assert type(key) is type(value) if plain else key == "a"


WORDS = ["no", "on", "y", "N", "1:30", "010", "1.", "0b11", "1_000", "0x1F", "2020-01-01", "=", "<<", "+1", "1.0", "08"]
WORDS += ["0o10", "1e-5", "12e3", ".5", "-", "~", "null", "true", ""]
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.sampled_from(WORDS)
)


@example({"a\x85b": "\x85\x85", "\u2028": ["c \u2029 d", "\x85"]})
@settings(deadline=None, max_examples=50)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_written_yaml_is_read_equally_by_all_readers(value: object) -> None:
    text = dump_spec({"value": value})
    assert parse_documents(text, origin="here")[0].data == yaml.safe_load(text) == {"value": value}


def test_surrogate_pairs_are_read_and_single_ones_refused(tmp_path: Path) -> None:
    written = json.dumps(
        {**yaml.safe_load(GOOD), "sweep": {"arguments.text_column": ["\N{GRINNING FACE}"]}, "max_usd": 1}
    )
    assert r"\ud83d\ude00" in written
    assert read_spec(write(tmp_path, written)).arguments["text_column"] == "\N{GRINNING FACE}"
    for half in (r"\ud83d", r"\ude00\ud83d"):
        for place in ('"arguments.text_column"', "text_column", "finetune"):
            with pytest.raises(UsageError, match=r"line 1, column \d+: a lone surrogate is not a character"):
                read_spec(write(tmp_path, written.replace(place, place[:-1] + half + place[-1])))


def test_missing_files_and_devices_are_refused(tmp_path: Path) -> None:
    (tmp_path / "reviews.yaml").write_text(GOOD)
    with pytest.raises(NotFoundError, match=r"no such file; did you mean .*reviews\.yaml\?"):
        read_spec(tmp_path / "review.yaml")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"finetune-mrpc\.yml: no such file\n") as missing:
        read_spec(tmp_path / "empty" / "finetune-mrpc.yml")
    assert missing.value.next_step == f"ready-made specs are in {os.path.relpath(READY_SPECS)}/"
    with pytest.raises(UsageError, match=r"is a folder, not a spec; the folder has .*reviews\.yaml$"):
        read_spec(tmp_path)
    for device in ("/dev/zero", "/proc/self/mem"):
        with pytest.raises(UsageError, match=f"^{device}: "):
            read_spec(Path(device))


def test_overrides_are_yaml_and_validated_like_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    spec = read_spec(path, ["arguments.epochs=2", "resources.nproc_per_node=4", "name=other"])
    assert (spec.name, spec.arguments["epochs"], spec.resources.nproc_per_node) == ("other", 2, 4)
    with pytest.raises(UsageError, match=r"arguments\.epoch: unknown key; did you mean 'epochs'"):
        read_spec(path, ["arguments.epoch=2"])


SCRIPT = """\
name: mine
job: script
arguments:
  code: .
  command: train.py --data {inputs.data} --lr {parameters.lr}
  parameters: {lr: 0.1, data: small}
  inputs: {data: data://mine/data}
"""


def test_the_end_of_a_key_is_enough_for_an_override(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, GOOD), ["epochs=2", "nproc_per_node=4", "seed=7"])
    assert (spec.arguments["epochs"], spec.resources.nproc_per_node, spec.arguments["seed"]) == (2, 4, 7)
    script = read_spec(write(tmp_path, SCRIPT), ["lr=0.5", "parameters.data=big", "parameters.size=3"])
    assert script.arguments["parameters"] == {"lr": 0.5, "data": "big", "size": 3}
    with pytest.raises(UsageError, match=r"'data' could be arguments\.parameters\.data or arguments\.inputs\.data"):
        read_spec(write(tmp_path, SCRIPT), ["data=other"])
    # In a file with several specs, it changes those that have the key.
    first, second = read_specs(write(tmp_path, f"{GOOD}---\n{SCRIPT}"), ["epochs=2", "mine.lr=3"])
    assert (first.arguments["epochs"], second.arguments["parameters"]["lr"]) == (2, 3)
    with pytest.raises(UsageError, match=r"spec\.yaml: lr: unknown key; use arguments\.learning_rate"):
        read_spec(write(tmp_path, GOOD), ["lr=1e-4"])


@pytest.mark.parametrize("short", [True, False])
def test_an_override_that_a_sweep_replaces_is_refused(tmp_path: Path, short: bool) -> None:
    values = "arguments.epochs: [1, 2]" if short else "arguments: {epochs: [1, 2]}"
    path = write(tmp_path, f"{GOOD}sweep: {{{values}}}\n")
    for override in ("epochs=3", "arguments.epochs=3"):
        with pytest.raises(UsageError, match=f"^--set {override}: it would have no effect") as refused:
            read_spec(path, [override, "seed=3"])
        assert refused.value.next_step == (
            "--set 'sweep.arguments.epochs=[VALUE, …]', or remove the argument from the sweep"
        )
    changed = read_spec(path, ["sweep.arguments.epochs=[3]", "seed=3", "sweep.arguments.max_length=[16, 32]"])
    assert [point.arguments["epochs"] for point in changed.point_specs()] == [3, 3]
    assert [point.arguments["max_length"] for point in changed.point_specs()] == [16, 32]
    assert read_spec(path, ["epochs=3", "sweep="]).arguments["epochs"] == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("arguments.epochs", "expected KEY=VALUE, e.g. --set arguments.epochs=2"),
        ("name.first=x", "leads into a value that is not a mapping"),
        ("arguments.epochs=[1", "--set arguments.epochs: line 1"),
        ("sweep.arguments.\udcff=[1]", "must not contain NUL or lone surrogates"),
        ("attempts=010", "--set attempts: line 1, column 1: '010' cannot be read as int (other YAML readers"),
    ],
)
def test_invalid_overrides(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_spec(write(tmp_path, GOOD), [override])
    assert message in str(error.value)


SEVERAL = f"""\
# What comes first.
{GOOD}---
name: second
job: finetune-classification
arguments: {{model: run://reviews/model, train_data: run://reviews/train.jsonl}}
"""


def test_several_specs_in_a_file_keep_their_order(tmp_path: Path) -> None:
    specs = read_specs(write(tmp_path, SEVERAL))
    assert [spec.name for spec in specs] == ["reviews", "second"]
    assert specs[1].arguments["model"] == "run://reviews/model"
    with pytest.raises(UsageError, match="has 2 specs; only one is allowed here"):
        read_spec(write(tmp_path, SEVERAL))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(SEVERAL + "wokers: 2\n", "document 2, line 8: wokers: unknown key", id="unknown key"),
        pytest.param(
            SEVERAL.replace("second", "reviews"),
            "document 2, line 8: name: an earlier document has the name 'reviews'",
            id="names",
        ),
        pytest.param(
            SEVERAL + "---\n", "document 3, line 12: a spec must be a mapping of keys to values, not an empty document"
        ),
    ],
)
def test_an_error_in_one_of_several_specs_names_the_document(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_specs(write(tmp_path, text))
    assert message in str(error.value)


def test_an_override_changes_one_document_or_all(tmp_path: Path) -> None:
    path = write(tmp_path, SEVERAL)
    first, second = read_specs(path, ["second.arguments.epochs=2", "team=nlp-core", "arguments.seed=1"])
    assert "epochs" not in first.arguments
    assert second.arguments["epochs"] == 2
    assert [(spec.team, spec.arguments["seed"]) for spec in (first, second)] == [("nlp-core", 1)] * 2
    with pytest.raises(
        UsageError, match=r"--set secnd.attempts=1: the file has no document 'secnd'; did you mean 'second'"
    ):
        read_specs(path, ["secnd.attempts=1"])
    # The only document of a file may be named too.
    assert read_spec(write(tmp_path, GOOD), ["reviews.attempts=1"]).attempts == 1
