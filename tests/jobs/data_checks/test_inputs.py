"""All errors in a spec's inputs are reported together, before it is submitted."""

import datetime
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.aws.connection import Aws
from jobs.core.instance_types import instance_type
from jobs.data_checks.inputs import HEAD_BYTES, check_inputs, input_errors
from jobs.spec.arguments import Arguments
from jobs.spec.kinds.evaluate import Evaluate
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.kinds.prepare_corpus import PrepareCorpus
from jobs.spec.kinds.script import Script
from jobs.spec.spec import JobSpec
from tests.jobs.conftest import point_at
from tests.support.jobs.planning import EMULATED, STAGE
from tests.support.jobs.submitting import NO_WEIGHTS
from tests.support.running_emulator import Emulator

BUCKET = "looked-at"
BERT = {"model_type": "bert", "max_position_embeddings": 512}
TABLE = b"text,label\ngood,1\nbad,0\n"


@pytest.fixture(scope="module")
def aws(emulator: Emulator) -> Iterator[Aws]:
    with pytest.MonkeyPatch.context() as patch:
        point_at(patch, emulator.endpoint)
        connected = Aws()
        connected.s3.create_bucket(Bucket=BUCKET)
        yield connected


@pytest.fixture
def put(request: pytest.FixtureRequest, aws: Aws, tmp_path: Path) -> "Put":
    """Return a function that puts a file, locally or on S3 (see ANYWHERE), and returns its location."""

    def local(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    def remote(name: str, content: bytes) -> str:
        key = f"{tmp_path.name}/{name}"
        aws.s3.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    return remote if getattr(request, "param", "local") == "s3" else local


ANYWHERE = pytest.mark.parametrize("put", ["local", "s3"], indirect=True)

Put = Callable[[str, bytes], str]


def parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def put_model(put: Put, configuration: object = BERT, **files: object) -> str:
    contents = {"config.json": configuration, "tokenizer.json": {}, "model.safetensors": NO_WEIGHTS, **files}
    for name, content in contents.items():
        if content is not None:
            put(f"model/{name}", content if isinstance(content, bytes) else json.dumps(content).encode())
    return put("model/README.md", b"").removesuffix("/README.md")


def errors_of(aws: Aws, arguments: Arguments, **options: Any) -> list[str]:
    return [str(error) for error in input_errors(aws, arguments, emulated=True, **options)]


def finetuning(put: Put, table: str | list[str], **arguments: Any) -> FinetuneClassification:
    return FinetuneClassification(**{"model": put_model(put), "train_data": table, **arguments})


@ANYWHERE
def test_valid_inputs_pass(aws: Aws, put: Put) -> None:
    parquet = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", "b"], "more": [{"x": 1}, {"x": 2}], "label": [0, 1]}), parquet)
    tables = [
        put("t.csv", TABLE),
        put("t.tsv", b"more\ttext\tlabel\n1\tgood\tyes\n"),
        put("t.jsonl", b'\xef\xbb\xbf{"text": "good", "label": "no"}\n\n'),
        put("t.parquet", parquet.getvalue()),
    ]
    assert errors_of(aws, finetuning(put, tables[0], eval_data=tables)) == []
    assert errors_of(aws, PrepareCorpus(data=[*tables, put("t.txt", b"\xff")])) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.csv",
            b"text,lable\ngood,1\n",
            "{0}, header: no column 'label'; did you mean 'lable'?\nNext: name the columns",
        ),
        (
            "t.csv",
            b"text;label\ngood, so;1\n",
            "{0}, line 1: its columns are separated by ';', not by ','\nNext: set delimiter: ';'",
        ),
        ("t.csv", b"text,label\n", "{0} has no examples"),
        (
            "t.csv",
            "text,label\nf\u00fcnf,1\n".encode("latin-1"),
            "{0}, line 2: not UTF-8 (byte 0xfc at position 2: 'f\u00fcnf' in cp1252, 'f\u00b8nf' in mac-roman)",
        ),
        ("t.csv", b"text,label\ngood,0.5\n", "{0}, line 2: 'label' is '0.5', which is not a class"),
        (
            "t.csv",
            b"text,label\ngood,1\ngood,yes\n",
            "{0}, line 3: 'label' is the name 'yes', but the number '1' in line 2",
        ),
        (
            "t.csv",
            b'text,label\n"so,1\nbad",2\nbad,1\n',
            "{0}, line 3: quotes join it with line 2 into one row, although each line has a 'label' ('1', '2')",
        ),
        ("t.jsonl", b'{"text": 5, "label": 1}\n', "{0}, line 1: 'text' is not text but 5"),
        ("t.jsonl", b'[{"text": "a"}, 1]\n', "{0}, line 1: no column 'label'"),
        ("t.json", b'[{"text": "a", "label": 1}, 1]\n', "{0}, line 1: not a JSON object but '1'"),
        (
            "t.json",
            b'[{"text": "a", "label": 1}\n,}',
            "{0}, line 2: the JSON array cannot be read from here on: Expecting v",
        ),
        ("t.json", b'{"text": "a",\n "label": 1}', "2 bad rows:\n{0}, line 1: not JSON: Expecting property name"),
        ("t.csv", b"text,label\ngood,1\nbad,1\n", "{0}: every 'label' is '1', but training needs at least two classes"),
        ("t.csv", b"text,label\ngo\0od,1\nbad,2\n", "{0}, line 2: "),
        ("t.csv", b"PK\3\4" + bytes(90), "{0} is an Excel workbook or a ZIP archive\nNext: open it in a spreadsheet"),
        (
            "t.csv",
            b"version https://git-lfs.github.com/spec/v1\n",
            "{0} is a pointer of Git LFS, not the file itself\nNext: git lfs",
        ),
        (
            "t.csv",
            TABLE.decode().encode("utf-16-le"),
            "{0} contains NUL bytes like a file in UTF-16\nNext: set encoding: utf-16-le",
        ),
        ("t.csv.gz", gzip.compress(TABLE, mtime=0)[:-9], "{0} cannot be decompressed: Truncated compressed stream"),
        (
            "t.parquet",
            parquet({"text": ["a"], "label": [datetime.date(2026, 1, 1)]}),
            "{0}: 'label' has the type date32[day], which is not a class",
        ),
        ("t.parquet", parquet({"text": [1], "label": [1]}), "{0}: 'text' has the type int64, which is not text"),
        ("t.parquet", b"PAR1" + b"\0" * 90, "{0} cannot be read as Parquet: Parquet magic bytes not found in footer"),
        ("t.parquet", b"PAR1\x29\x15\2\0\4\0\0\0PAR1", "{0} cannot be read as Parquet: Couldn't deserialize thrift"),
    ],
)
def test_first_rows_of_a_table_are_checked(aws: Aws, put: Put, name: str, content: bytes, message: str) -> None:
    table = put(name, content)
    [error] = errors_of(aws, finetuning(put, table))
    assert error.startswith(f"arguments.train_data: {message.format(table)}")
    assert errors_of(aws, finetuning(put, table), check_contents=False) == []


@ANYWHERE
def test_named_classes_must_be_in_the_training_tables(aws: Aws, put: Put) -> None:
    tables = [put("a.csv", b"text,label\ngood,yes\n"), put("b.csv", b"text,label\nbad,no\n")]
    assert errors_of(aws, finetuning(put, tables, positive_class="no", class_weights={"yes": 2})) == []

    found = errors_of(aws, finetuning(put, tables, positive_class="nope", class_weights={"yes": 2, 1: 3}))

    next_step = "\nNext: correct the name, or look at the classes: trainyard data show TABLE"
    assert found == [
        f"arguments.positive_class: 'nope' is none of the classes; did you mean 'no'?{next_step}",
        f"arguments.class_weights: '1' is none of the classes; available: 'no', 'yes'{next_step}",
    ]


def test_rows_of_another_encoding_are_not_skipped(aws: Aws, put: Put) -> None:
    rows = "".join(f"{number};f\u00fcnf;so\n" for number in range(20))
    table = put("t.csv", f";Text;label\n{rows}0;good;no\n".encode("cp1252"))
    given = {"text_column": "Text", "delimiter": ";", "on_bad_rows": "skip"}
    [error] = errors_of(aws, finetuning(put, table, **given))
    assert f"{table}, line 2: not UTF-8 (byte 0xfc at position 4: 'f\u00fcnf' in cp1252" in error
    assert ", and 19 more such lines\nNext: set encoding: cp1252" in error
    assert errors_of(aws, finetuning(put, table, **given, encoding="latin-1")) == []
    # Errors of the header are reported at the same time
    [error] = errors_of(aws, finetuning(put, table))
    assert re.search(
        r"not UTF-8 .*\n.*separated by ';'.*set delimiter: ';'; name the columns .*'', 'Text', 'label'", error
    )
    late = put("t.csv", ";Text;label\n0;good;no\n1;f\u00fcnf;so\n".encode("cp1252"))
    [error] = errors_of(aws, finetuning(put, late))
    assert re.search(r"line 3: not UTF-8 .*\n.*separated by ';'", error)
    # A few broken lines of a UTF-8 table are rows like others
    table = put("t.csv", b"text,label\n\xc3\xbc,1\na\xfc,1\nb,2\n")
    assert errors_of(aws, finetuning(put, table, on_bad_rows="skip")) == []
    assert "skip such rows with on_bad_rows: skip" in errors_of(aws, finetuning(put, table))[0]


def test_corpus_rows_that_quotes_may_have_joined_are_noted(aws: Aws, put: Put) -> None:
    table = put("t.csv", b'text,source\n"so,web\nbad",books\n')
    notes: list[str] = []
    arguments = PrepareCorpus(data=[table])
    assert input_errors(aws, arguments, emulated=True, note=notes.append) == []
    assert [note.partition("; ")[0] for note in notes] == [
        f"warning: {table}: quotes join lines 2 to 3 into one row, although each could be a row"
    ]


def test_pipes_devices_and_unreadable_files_are_refused(aws: Aws, put: Put, tmp_path: Path) -> None:
    model = put_model(put)
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "endless.csv").symlink_to("/dev/zero")
    for name in ("pipe.csv", "endless.csv"):
        [error] = errors_of(aws, FinetuneClassification(model=model, train_data=str(tmp_path / name)))
        assert "which is a pipe or a device, not a file or a folder" in error
    (tmp_path / "memory.csv").symlink_to("/proc/self/mem")
    [error] = errors_of(aws, FinetuneClassification(model=model, train_data=str(tmp_path / "memory.csv")))
    assert error.startswith(f"arguments.train_data: {tmp_path / 'memory.csv'} cannot be read: Input/output error")

    table = put("t.csv", TABLE)
    (tmp_path / "model/config.json").unlink()
    os.mkfifo(tmp_path / "model/config.json")
    [error] = errors_of(aws, FinetuneClassification(model=model, train_data=table))
    assert error.startswith(f"arguments.model: {model}: its config.json is not a file but a pipe or a device")
    (tmp_path / "model/config.json").unlink()
    put("model/config.json", b" " * (17 << 20))
    [error] = errors_of(aws, FinetuneClassification(model=model, train_data=table))
    assert error.startswith(f"arguments.model: {model}: its config.json has 17,825,792 bytes")


@pytest.mark.parametrize("put", ["s3"], indirect=True)
def test_parquet_table_is_checked_by_its_footer(aws: Aws, put: Put) -> None:
    many = io.BytesIO()
    pq.write_table(pa.table({f"column {number}": ["1"] for number in range(2000)}), many)
    table = put("many.parquet", many.getvalue())
    assert errors_of(aws, PrepareCorpus(data=[table], text_columns=["column 1999"])) == []
    [error] = errors_of(aws, PrepareCorpus(data=[table], text_columns=["text"]))
    assert error.startswith(f"arguments.data.0: {table}, schema: no column 'text'")
    empty = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), empty)
    [error] = errors_of(aws, PrepareCorpus(data=[put("empty.parquet", empty.getvalue())]))
    assert "has no examples" in error


@pytest.mark.parametrize("put", ["s3"], indirect=True)
def test_only_the_beginning_of_a_large_table_is_read(aws: Aws, put: Put) -> None:
    row = b'"' + b"good\n" * 100 + b'",1\n'
    rows = HEAD_BYTES // len(row)
    table = put("t.csv", b"text,label\n" + row * (rows + 5) + b"late,\n")
    assert errors_of(aws, finetuning(put, table)) == [], "the last row is cut off, not bad"
    compressed = gzip.compress(
        b"text,label\n" + b"".join(b"%s,1\n" % os.urandom(99).hex().encode() for _ in range(50_000))
    )
    assert len(compressed) > HEAD_BYTES
    assert errors_of(aws, finetuning(put, put("t.csv.gz", compressed))) == [], "also within a compressed block"
    early = put("early.csv", b"text,label\nbad,\n" + row * (rows + 5))
    [error] = errors_of(aws, finetuning(put, early))
    assert "line 2: 'label' is '', which is not a class" in error
    notes: list[str] = []
    assert errors_of(aws, finetuning(put, early, on_bad_rows="skip"), note=notes.append) == []
    assert notes == [
        f"warning: the job will skip at least 1 bad row, such as {early}, line 2: 'label' is '', which is not a class"
    ]
    [error] = errors_of(aws, finetuning(put, early, on_bad_rows="skip", max_bad_rows=0))
    assert "more bad rows than max_bad_rows allows (0)" in error


@pytest.mark.parametrize(
    ("configuration", "files", "max_length", "message"),
    [
        ([], {}, 128, "is not a model: its config.json has no model_type"),
        (BERT, {"model.safetensors": None}, 128, "is not a model: it has no weights"),
        (BERT, {"tokenizer.json": None}, 128, "is not a model: it has no tokenizer"),
        (BERT, {}, 513, "max_length 513 is more than the 512 tokens that {0} has positions for, special tokens"),
        (
            {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1},
            {},
            513,
            "max_length 513 is more than the 512 tokens",
        ),
        (
            {"model_type": "gpt2", "n_positions": 1024},
            {"special_tokens_map.json": {"pad_token": "<pad>"}},
            1025,
            "max_length 1025 is more than the 1024 tokens",
        ),
        (
            {"model_type": "new", "auto_map": {"AutoConfig": "own.Own"}},
            {},
            128,
            "{0} needs custom code (own.Own), which jobs do not run: trust_remote_code is off",
        ),
        ({"model_type": "gpt2"}, {}, 128, "{0}: the model's tokenizer has no padding token"),
        (BERT, {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}, 128, "no padding token"),
    ],
)
def test_files_and_configuration_of_a_model_are_checked(
    *, aws: Aws, put: Put, configuration: object, files: dict[str, object], max_length: int, message: str
) -> None:
    model = put_model(put, configuration, **files)
    [error] = errors_of(aws, FinetuneClassification(model=model, train_data=put("t.csv", TABLE), max_length=max_length))
    assert error.startswith("arguments.model: ")
    assert message.format(model) in error


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 438007537\n"
WEIGHTS = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}})
SAFETENSORS = len(WEIGHTS).to_bytes(8, "little") + WEIGHTS.encode() + bytes(8)
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
UNIGRAM = {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": [{"id": 2}]}


@ANYWHERE
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": LFS}, "its model.safetensors is a pointer of Git LFS"),
        ({"tokenizer.json": LFS}, "its tokenizer.json is a pointer of Git LFS"),
        (
            {"model.safetensors": SAFETENSORS[:-3]},
            f"has {len(SAFETENSORS) - 3} bytes, but its header describes {len(SAFETENSORS)}; the file was probably",
        ),
        ({"model.safetensors": SAFETENSORS[:50]}, "has 50 bytes, but no complete header of a safetensors file"),
        ({"model.safetensors": b"<html>"}, "has 6 bytes, but no complete header"),
        (
            {
                "model.safetensors": None,
                "model-1.safetensors": NO_WEIGHTS,
                "model.safetensors.index.json": INDEX,
            },
            "1 of the 2 files in its model.safetensors.index.json are missing: model-2.safetensors",
        ),
        ({"tokenizer.json": UNIGRAM}, "its tokenizer has 3 tokens, but the model has embeddings for 2 (vocab_size)"),
        ({"model.safetensors": SAFETENSORS}, None),
        ({"model.safetensors.index.json": INDEX}, None),
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}}}, None),
    ],
)
def test_model_files_that_are_incomplete_are_refused(
    aws: Aws, put: Put, files: dict[str, object], message: str | None
) -> None:
    model = put_model(put, {**BERT, "vocab_size": 2}, **files)
    errors = errors_of(aws, FinetuneClassification(model=model, train_data=put("t.csv", TABLE)))
    assert [message in error for error in errors] == [True] if message else errors == []


TALK = b'{"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]}\n'


@ANYWHERE
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf" + TALK + b"\n" + TALK.replace(b"why", "a\u2028b\x85".encode()) + b"\n", None),
        (
            b'{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}\n'
            * 2,
            None,
        ),
        (TALK.replace(b'"why"', b'[{"type": "text", "text": "why"}]') * 2, None),
        (TALK + b'{"messages": []}\n' + TALK, None),
        (
            TALK + b'{"messages": [\n' + TALK.replace(b'"so"', b"null"),
            "2 bad lines:\n{0}, line 2: not JSON: Expecting value at position",
        ),
        (TALK + b'{"text": "a"}\n', "{0}, line 2: only one of this line and line 1 has `text`"),
        (
            b'{"conversations": []}\n' * 9,
            "{0}, line 1: has neither `messages` nor `prompt` and `completion` nor `text`; it has",
        ),
        (b"1\n" + TALK, "{0}, line 1: not a JSON object but '1'"),
        (b"", "{0} has 0 examples\nNext: add examples: a training needs at least 2"),
        (TALK + TALK.replace(b"assistant", b"user"), "{0} has 1 example, and 1 conversation without an answer"),
        (LFS, "{0} is a pointer of Git LFS"),
        # A script has no key for an encoding.
        (
            TALK.decode().encode("utf-16-le"),
            "{0} contains NUL bytes like a file in UTF-16\nNext: convert it to UTF-8: iconv -f utf-16-le -t utf-8",
        ),
        (TALK.replace(b"why", b"\xfc") * 2, "{0}, line 1: not UTF-8 (byte 0xfc at position 44: "),
    ],
)
def test_conversations_are_checked(aws: Aws, put: Put, content: bytes, message: str | None) -> None:
    data = put("talks.jsonl", content)
    arguments = Script(code="s3://c/x.tar.gz", command="train.py", inputs={"data": data}, conversations=["data"])
    errors = errors_of(aws, arguments)
    if message is None:
        assert errors == []
    else:
        [error] = errors
        assert error.startswith(f"arguments.inputs.data: {message.format(data)}")
        assert "set encoding" not in error
    assert errors_of(aws, arguments.model_copy(update={"conversations": []})) == []


def test_pointers_of_lfs_in_place_of_tables_are_refused(aws: Aws, put: Put) -> None:
    for name in ("t.csv", "t.jsonl", "t.parquet"):
        [error] = errors_of(aws, finetuning(put, put(name, LFS)))
        assert f"{name} is a pointer of Git LFS, not the file itself\nNext: git lfs pull" in error


def test_pickles_are_refused_for_images_with_an_old_pytorch(aws: Aws) -> None:
    for name, content in {"config.json": json.dumps(BERT), "tokenizer.json": "{}", "pytorch_model.bin": ""}.items():
        aws.s3.put_object(Bucket=BUCKET, Key=f"pickled/{name}", Body=content.encode())
    aws.s3.put_object(Bucket=BUCKET, Key="t.csv", Body=TABLE)
    arguments = {"model": f"s3://{BUCKET}/pickled", "train_data": f"s3://{BUCKET}/t.csv"}
    spec = JobSpec(name="reviews", job="finetune-classification", arguments=arguments)
    stage = replace(STAGE, releases={"gaudi": "1.21.0", "cuda": "cuda-2026.11"})
    [error] = check_inputs(aws, stage, spec)
    assert "its weights only in pytorch_model.bin, a pickle, and PyTorch 2.6.0 may run code" in str(error)
    assert "\nNext: save the model again" in str(error)
    # The other images have later versions, and so does the environment in which the emulator runs jobs
    assert check_inputs(aws, replace(stage, instance_types=(instance_type("g5.4xlarge"),)), spec) == []
    assert check_inputs(aws, replace(EMULATED, releases={"gaudi": "1.21.0"}), spec) == []
    aws.s3.put_object(Bucket=BUCKET, Key="pickled/model.safetensors", Body=NO_WEIGHTS)
    assert check_inputs(aws, stage, spec) == []


@pytest.mark.parametrize(
    ("configuration", "files"),
    [
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, {}),
        ({"model_type": "deberta-v2", "max_position_embeddings": 64, "position_biased_input": False}, {}),
        ({"model_type": "gpt2"}, {"tokenizer_config.json": {"pad_token": "<pad>"}}),
        (
            BERT,
            {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": {"content": "_"}}},
        ),
        ({"model_type": "gpt2"}, {"special_tokens_map.json": {"pad_token": "<pad>"}}),
    ],
)
def test_model_that_can_be_trained_on_512_tokens_passes(
    aws: Aws, put: Put, configuration: object, files: dict[str, object]
) -> None:
    model = put_model(put, configuration, **files)
    assert errors_of(aws, FinetuneClassification(model=model, train_data=put("t.csv", TABLE), max_length=512)) == []


@ANYWHERE
def test_file_for_a_folder_and_folder_for_a_file_are_refused(aws: Aws, put: Put) -> None:
    weights = put("model.safetensors", b"")
    folder = put("table.csv/part.csv", TABLE).removesuffix("/part.csv")
    errors = errors_of(aws, FinetuneClassification(model=weights, train_data=folder))
    assert [error.partition("\n")[0] for error in errors] == [
        f"arguments.model: a pretrained model's folder was expected at {weights}, which is a file",
        f"arguments.train_data: a table of examples was expected at {folder}, which is a folder",
    ]


def test_all_errors_are_reported_together(aws: Aws, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    arguments = FinetuneClassification(
        model=put_model(put, {**BERT, "auto_map": {"AutoConfig": "own.Own"}}, **{"model.safetensors": None}),
        train_data=[put("a.csv", b"text,lable\na,1\n"), put("b.csv", b"text,label\n,\n,0.5\n")],
        eval_data=put("gone.csv", TABLE).replace("gone", "nowhere"),
        max_length=1000,
    )
    errors = errors_of(aws, arguments)
    for number, start in enumerate(
        [
            "arguments.model: .* is not a model: it has no weights",
            "arguments.model: .* needs custom code",
            "arguments.model: max_length 1000 is more than the 512 tokens",
            "arguments.train_data.0: .*no column 'label'",
            "arguments.train_data.1: 2 bad rows:\n.*line 2: 'label' is ''.*\n.*line 3: 'label' is '0.5'",
            "arguments.eval_data: .* but nothing is there",
        ]
    ):
        assert re.match(start, errors[number])
    assert len(errors) == 6


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, bytes]]]:
    """A hub that answers as https://huggingface.co/docs/hub/api describes, by path; 401 for unknown names."""
    answers: dict[str, tuple[int, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answers.get(self.path, (401, b'{"error": "Invalid username or password."}'))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield answers
        server.shutdown()


def test_inputs_on_the_hub_are_checked_if_it_answers(hub: dict[str, tuple[int, bytes]], aws: Aws) -> None:
    arguments = FinetuneClassification(
        model="hf://acme/long?revision=v1", train_data="hf://acme/films?split=train", max_length=600
    )
    notes: list[str] = []
    assert errors_of(aws, arguments, note=notes.append) == [], (
        "401 may mean a private repository, which the team's token can read"
    )
    assert notes == [
        f"{location} was not checked: the hub answered 401 Unauthorized"
        for location in (arguments.model, arguments.train_data)
    ]
    siblings = [{"rfilename": name} for name in ("config.json", "model.safetensors", "vocab.txt")]
    hub["/api/models/acme/long/revision/v1"] = (200, json.dumps({"siblings": siblings}).encode())
    hub["/acme/long/resolve/v1/config.json"] = (200, json.dumps(BERT).encode())
    hub["/api/datasets/acme/films/revision/main"] = (404, b"{}")
    model, table = errors_of(aws, arguments)
    assert model.startswith(
        "arguments.model: max_length 600 is more than the 512 tokens that hf://acme/long?revision=v1"
    )
    assert table.startswith("arguments.train_data: hf://acme/films?split=train: data set not found on the hub")


@pytest.mark.parametrize(
    ("problem", "label", "error"),
    [
        ("multi-label", "", None),
        ("multi-label", ["a", "b"], None),
        (
            "multi-label",
            "['a', 'b']",
            "which is not a list of classes\nNext: write a list in JSON lines or Parquet, or",
        ),
        ("multi-label", None, "'label' is None, which is not a list of classes"),
        ("regression", "-0.5", None),
        ("regression", "3,5", "'label' is '3,5', which is not a number\nNext: write it with a decimal point"),
        (
            "single-label",
            0.5,
            "which is not a class\nNext: write each class as a name or as a whole number, or train with",
        ),
        (
            "single-label",
            ["a"],
            "which is not a class\nNext: for examples with several classes, train with problem: mul",
        ),
    ],
)
def test_labels_are_checked_by_what_the_model_learns(
    aws: Aws, put: Put, problem: str, label: object, error: str | None
) -> None:
    rows = [{"text": "one", "label": "1" if problem == "regression" else "a"}, {"text": "two", "label": label}]
    table = put("t.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    training = FinetuneClassification(model=put_model(put), train_data=table, problem=problem)
    types = {"multi-label": "multi_label_classification", "regression": "regression"}
    model = {**BERT, "architectures": ["BertForSequenceClassification"], "problem_type": types.get(problem)}
    if problem == "regression":
        model["id2label"] = {"0": "LABEL_0"}
    for arguments in (training, Evaluate(model=put_model(put, model), data=table)):
        found = errors_of(aws, arguments)
        if error is None:
            assert found == []
        else:
            [line] = found
            assert error in line
