"""Inputs from S3, the hub and local paths; each way in which one can be bad is told with its place."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.emulator import CREDENTIALS
from jobs.errors import NotFoundError, UsageError
from jobs.locations import hub_parts
from jobs.train import finetune_classification, sources
from jobs.train import s3 as object_store
from jobs.train.sources import Table
from tests.conftest import EmbeddedAws
from tests.jobs.train.hub import save_data_set
from tests.jobs.train.launching import Run
from tests.jobs.train.reviews import reviews, write_jsonl

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

BUCKET = "inputs"

ROWS = [
    {"text": 'a "quoted", tab\tand comma', "label": "good", "more": "1"},
    {"text": "two\nlines", "label": "bad", "more": "2"},
    {"text": "f\u00fcnf \U0001f600", "label": "good", "more": "3"},
]


@dataclass(frozen=True)
class Place:
    """Where a test's inputs lie."""

    folder: Path
    prefix: str | None
    """None: they are local."""
    s3: "S3Client | None"

    def at(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.prefix is None else f"s3://{BUCKET}/{self.prefix}/{name}"

    def put(self, name: str, content: bytes) -> str:
        if self.s3 is not None:
            self.s3.put_object(Bucket=BUCKET, Key=f"{self.prefix}/{name}", Body=content)
        else:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return self.at(name)

    def read(self, location: str, *columns: str) -> Table:
        return sources.read_table(location, columns or ("text", "label"), s3=self._client, scratch=self.folder / "tmp")

    def model(self, location: str) -> Path:
        return sources.model_folder(location, s3=self._client, scratch=self.folder / "tmp")

    def _client(self) -> "S3Client":
        assert self.s3 is not None, "a local input needs no S3"
        return self.s3


@pytest.fixture(scope="session")
def embedded_s3(embedded_aws: EmbeddedAws) -> "S3Client":
    """The client that jobs use, connected to the embedded AWS, with a bucket for inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_PROFILE", raising=False)
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": embedded_aws.endpoint}.items():
            patch.setenv(name, value)
        client = object_store.connect()
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(tmp_path, None, None)


@pytest.fixture
def remote(tmp_path: Path, embedded_s3: "S3Client") -> Place:
    return Place(tmp_path, tmp_path.name, embedded_s3)


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest) -> Place:
    """Here, then on S3."""
    found: Place = request.getfixturevalue(request.param)
    return found


def delimited(delimiter: str, **options: Any) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(ROWS[0]), delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows(ROWS)
    return stream.getvalue().encode()


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "unit", "lines"),
    [
        ("table.jsonl", json_lines(ROWS), "line", [1, 2, 3]),
        ("table.ndjson", b"\xef\xbb\xbf" + json_lines(ROWS[:1]) + b"\n \r\n" + json_lines(ROWS[1:]), "line", [1, 4, 5]),
        # The second row ends on the line after the one it starts on.
        ("table.csv", delimited(","), "line", [2, 4, 5]),
        ("table.csv", b"\xef\xbb\xbf" + delimited(",", lineterminator="\n"), "line", [2, 4, 5]),
        ("TABLE.TSV", delimited("\t"), "line", [2, 4, 5]),
        ("table.parquet", parquet({key: [row[key] for row in ROWS] for key in ROWS[0]}), "row", [1, 2, 3]),
    ],
    ids=["jsonl", "with a mark and empty lines", "csv", "csv with a mark", "tsv", "parquet"],
)
def test_a_table_is_read_with_the_place_of_each_row(
    place: Place, name: str, content: bytes, unit: str, lines: list[int]
) -> None:
    table = place.read(place.put(name, content))
    assert table.columns == {key: [row[key] for row in ROWS] for key in ("text", "label")}
    assert list(table.lines) == lines
    assert table.place(1) == f"{place.at(name)}, {unit} {lines[1]}"


def test_a_field_longer_than_the_csv_modules_own_limit_is_read(local: Place) -> None:
    text = "word " * 100_000
    assert local.read(local.put("t.csv", f"text,label\n{text},1\n".encode())).columns["text"] == [text]


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.parquet"])
def test_a_column_that_is_asked_for_twice_is_read_once(local: Place, name: str) -> None:
    content = {
        "t.jsonl": b'{"text": "a"}\n{"text": "b"}\n',
        "t.csv": b"text\na\nb\n",
        "t.parquet": parquet({"text": ["a", "b"]}),
    }
    table = local.read(local.put(name, content[name]), "text", "text")
    assert (table.columns, len(table)) == ({"text": ["a", "b"]}, 2)


def test_a_missing_table_is_told_with_where_to_look(local: Place, remote: Place) -> None:
    with pytest.raises(NotFoundError, match=re.escape(f"{local.at('t.csv')} does not exist\nNext: check the path")):
        local.read(local.at("t.csv"))
    missing = remote.at("no/t.csv")
    listing = f"aws s3 ls {missing.removesuffix('t.csv')}"
    with pytest.raises(NotFoundError, match=re.escape(f"{missing} does not exist\nNext: {listing}")):
        remote.read(missing)


def test_a_bucket_that_does_not_exist_is_named(remote: Place) -> None:
    for read in (lambda: remote.read("s3://no-such-bucket/t.csv"), lambda: remote.model("s3://no-such-bucket/model")):
        with pytest.raises(NotFoundError, match=r"no-such-bucket"):
            read()


def test_the_stages_own_data_bucket_is_resolved_by_submit_only(local: Place) -> None:
    for read in (lambda: local.read("data://team/t.csv"), lambda: local.model("data://team/model")):
        with pytest.raises(UsageError, match="which only `trainyard submit` can resolve"):
            read()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", b""),
        ("t.jsonl", b"\n \n"),
        ("t.csv", b""),
        ("t.csv", b"text,label\n\n"),
        ("t.parquet", parquet({"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())})),
    ],
    ids=["jsonl", "jsonl of blank lines", "csv", "csv with a header only", "parquet"],
)
def test_a_table_without_examples_is_refused(place: Place, name: str, content: bytes) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{place.at(name)} holds no examples")):
        place.read(place.put(name, content))


GOOD_LINE = b'{"text": "a", "label": 1}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", GOOD_LINE + b'{"text": "a", "lab', ", line 2: not JSON: Unterminated string starting at"),
        ("t.jsonl", b"\n" + b"<html>\n", ", line 2: not JSON: Expecting value at position 1"),
        ("t.jsonl", GOOD_LINE + b'["a", 1]\n', """, line 2: not a JSON object but '["a", 1]'"""),
        ("t.jsonl", GOOD_LINE + b'{"label": ' + b"1" * 5000 + b"}\n", ", line 2: JSON that Python cannot read"),
        ("t.jsonl", GOOD_LINE + b"[" * 200_000 + b"\n", ", line 2: JSON that Python cannot read"),
        ("t.jsonl", GOOD_LINE + b'{"text": "\xfcber"}\n', ", line 2: not UTF-8 (byte 0xfc at position 11)"),
        ("t.jsonl", b"\xef\xbb\xbf{}\xe9\n", ", line 1: not UTF-8 (byte 0xe9 at position 3)"),
        ("t.csv", "text,label\nüber,1\n".encode("utf-16"), ", line 1: not UTF-8 (byte 0xff at position 1)"),
        ("t.csv", b'text,label\n"two\nlines",1\ncaf\xe9,1\n', ", line 4: not UTF-8 (byte 0xe9 at position 4)"),
        ("t.csv", b"text,label\na,1\nb,2,3\n", ", line 3: 3 fields, but the header has 2"),
        ("t.tsv", b"text\tlabel\na\t1\nb\n", ", line 3: 1 fields, but the header has 2"),
        ("t.csv", b'text,label\na,1\n"b,2\n', ", line 3: unexpected end of data"),
        ("t.csv", b'text,label\n"a"b,1\n', ", line 2: ',' expected after '\"'"),
        ("t.csv", b"text,label,text\na,1,b\n", ", line 1: two columns are called 'text'"),
        ("t.parquet", parquet({"text": ["a"], "label": [1]})[:-20], " cannot be read as Parquet: "),
        ("t.parquet", GOOD_LINE, " cannot be read as Parquet: "),
        ("t.parquet", b"", " cannot be read as Parquet: "),
        (
            "t.parquet",
            parquet({"text": pa.array([b"a", b"\xfcber"]).view(pa.string()), "label": [1, 2]}),
            " cannot be read as Parquet: Column 0: In chunk 0: Invalid: Invalid UTF8 sequence at string index 1",
        ),
    ],
    ids=[
        "jsonl: cut off",
        "jsonl: another format",
        "jsonl: no object",
        "jsonl: endless number",
        "jsonl: endless nesting",
        "jsonl: not UTF-8",
        "jsonl: not UTF-8 after a mark",
        "csv: UTF-16",
        "csv: not UTF-8",
        "csv: a field too many",
        "tsv: a field too few",
        "csv: a quote never closed",
        "csv: text after a quote",
        "csv: a column twice",
        "parquet: cut off",
        "parquet: another format",
        "parquet: empty",
        "parquet: not UTF-8",
    ],
)
def test_a_damaged_table_is_refused_with_the_place_of_the_damage(
    place: Place, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(place.at(name) + message)}"):
        place.read(place.put(name, content))


def test_text_in_another_encoding_comes_with_the_command_that_converts_it(local: Place) -> None:
    with pytest.raises(UsageError, match=r"\nNext: iconv -f LATIN1 -t UTF-8 t\.csv, if that is its encoding$"):
        local.read(local.put("t.csv", b"text,label\ncaf\xe9,1\n"))


@pytest.mark.parametrize(
    ("name", "content", "at"),
    [
        ("t.jsonl", GOOD_LINE + b'{"txt": "b", "label": 1}\n', ", line 2"),
        ("t.csv", b"txt,label\na,1\n", ", line 2"),
        ("t.parquet", parquet({"txt": ["a"], "label": [1]}), ""),
    ],
    ids=["jsonl", "csv", "parquet"],
)
def test_a_missing_column_is_told_with_the_closest_there_is(place: Place, name: str, content: bytes, at: str) -> None:
    message = f"{place.at(name)}{at}: no column 'text'; did you mean 'txt'?\nNext: name the columns with text_column"
    with pytest.raises(UsageError, match=re.escape(message)):
        place.read(place.put(name, content))


def test_where_no_column_is_close_all_are_listed(local: Place) -> None:
    location = local.put("t.csv", b"text,stars\na,1\n")
    with pytest.raises(UsageError, match=r"no column 'label'; there is 'stars', 'text'"):
        local.read(location)


def put_model(place: Place, tiny_bert: Path, *left_out: str, more: tuple[str, ...] = ()) -> str:
    for file in tiny_bert.iterdir():
        if file.name not in left_out:
            place.put(f"model/{file.name}", file.read_bytes())
    for name in more:
        place.put(f"model/{name}", b"\0" * 10)
    return place.at("model")


def test_a_model_is_read_from_where_it_lies(local: Place, tiny_bert: Path) -> None:
    assert local.model(put_model(local, tiny_bert)) == Path(local.at("model"))


@pytest.mark.parametrize("slash", ["", "/"])
def test_of_a_model_on_s3_only_what_from_pretrained_reads_is_downloaded(
    remote: Place, tiny_bert: Path, slash: str
) -> None:
    more = ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "training_args.bin")
    folder = remote.model(put_model(remote, tiny_bert, more=more) + slash)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in tiny_bert.iterdir()
    }


def test_weights_as_pickles_are_taken_where_there_are_no_others(remote: Place, tiny_bert: Path) -> None:
    location = put_model(remote, tiny_bert, "model.safetensors", more=("pytorch_model.bin",))
    assert (remote.model(location) / "pytorch_model.bin").stat().st_size == 10


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        (["config.json"], "config.json"),
        (["model.safetensors"], "weights (model.safetensors or pytorch_model.bin)"),
        (["tokenizer.json", "tokenizer_config.json", "vocab.txt"], "tokenizer (tokenizer.json or a vocabulary)"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_with_what_it_lacks_and_what_is_there(
    place: Place, tiny_bert: Path, missing: list[str], what: str
) -> None:
    location = put_model(place, tiny_bert, *missing)
    there = ", ".join(sorted(file.name for file in tiny_bert.iterdir() if file.name not in missing))
    with pytest.raises(UsageError, match=re.escape(f"{location} is no model: it has no {what}; there is {there}")):
        place.model(location)


def test_a_missing_model_is_told(local: Place, remote: Place) -> None:
    with pytest.raises(NotFoundError, match=re.escape(f"model folder {local.at('none')} does not exist")):
        local.model(local.at("none"))
    missing = remote.at("none")
    with pytest.raises(NotFoundError, match=re.escape(f"{missing} does not exist: no object lies below it")):
        remote.model(missing)
    remote.put("none-such/config.json", b"{}")  # only the start of its name is the same
    with pytest.raises(NotFoundError, match="no object lies below it"):
        remote.model(missing)


@pytest.mark.parametrize(
    ("location", "name", "options"),
    [
        ("hf://gpt2", "gpt2", {}),
        ("hf://acme/reviews", "acme/reviews", {}),
        ("hf://acme/reviews?config=en&split=test", "acme/reviews", {"config": "en", "split": "test"}),
        (
            "hf://acme/reviews?split=train%5B:9%25%5D&revision=v1",
            "acme/reviews",
            {"split": "train[:9%]", "revision": "v1"},
        ),
    ],
)
def test_the_options_of_a_hub_location_are_parsed(location: str, name: str, options: dict[str, str]) -> None:
    assert hub_parts(location) == (name, options)


@pytest.fixture
def reviews_on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`acme/reviews` with configurations en and de, each with the splits train and test."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    configurations = {
        language: {
            split: [{"text": f"{language} {split} {number}", "label": number % 2} for number in range(3)]
            for split in ("train", "test")
        }
        for language in ("en", "de")
    }
    save_data_set(tmp_path / "acme" / "reviews", configurations, class_names=["bad", "good"])


@pytest.mark.usefixtures("reviews_on_hub")
@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ("config=en", ["en train 0", "en train 1", "en train 2"]),
        ("config=de&split=test", ["de test 0", "de test 1", "de test 2"]),
        ("split=train%5B1:%5D&config=de", ["de train 1", "de train 2"]),
    ],
)
def test_a_hub_data_set_is_read_with_its_options_and_its_class_names(
    local: Place, options: str, texts: list[str]
) -> None:
    table = local.read(f"hf://acme/reviews?{options}")
    assert table.columns["text"] == texts
    assert table.columns["label"] == [int(text[-1]) % 2 for text in texts]
    assert table.class_names == ["bad", "good"]
    assert table.place(1) == f"hf://acme/reviews?{options}, row 2"


@pytest.mark.usefixtures("reviews_on_hub")
@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ("config=fr", ["text", "label"], " cannot be loaded: BuilderConfig 'fr' not found. Available: ['en', 'de']"),
        ("config=en&split=dev", ["text", "label"], ' cannot be loaded: Unknown split "dev"'),
        ("config=en", ["txt", "label"], ": no column 'txt'; did you mean 'text'?"),
    ],
)
def test_what_a_hub_data_set_does_not_have_is_named(
    local: Place, options: str, columns: list[str], message: str
) -> None:
    location = f"hf://acme/reviews?{options}"
    with pytest.raises(UsageError, match=re.escape(location + message)):
        local.read(location, *columns)


@pytest.mark.usefixtures("reviews_on_hub")
def test_a_hub_data_set_that_is_damaged_or_a_script_is_refused(local: Place) -> None:
    Path("acme/reviews/en/train.jsonl").write_text('{"text": "a", "label": 0}\n{"text": ')
    with pytest.raises(UsageError, match=r"^hf://acme/reviews\?config=en cannot be loaded: "):
        local.read("hf://acme/reviews?config=en")
    Path("acme/old").mkdir()
    Path("acme/old/old.py").write_text("")
    with pytest.raises(UsageError, match=r"^hf://acme/old cannot be loaded: Dataset scripts are no longer supported"):
        local.read("hf://acme/old")


READ_FROM_HUB = """
from pathlib import Path
from jobs.errors import TrainyardError
from jobs.train import sources
for read in (
    lambda: sources.read_table("hf://acme/none?config=en", ["text", "label"], s3=None, scratch=Path()),
    lambda: sources.model_folder("hf://acme/none", s3=None, scratch=Path()),
):
    try:
        print(read())
    except TrainyardError as error:
        print(type(error).__name__, str(error).replace("\\n", " | "))
"""


@pytest.fixture
def from_hub(tmp_path: Path) -> Callable[..., list[str]]:
    """Errors of a table and of a model of the hub, read in a process with this environment: both libraries look at it
    when they are imported only."""

    def read(**environment: str) -> list[str]:
        ended = subprocess.run(
            [sys.executable, "-c", READ_FROM_HUB],
            env={"PYTHONPATH": str(Path(__file__).parents[3]), "HF_HOME": str(tmp_path / "hf"), **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=20,  # the retries without a network alone would take longer
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout.splitlines()

    return read


def test_a_hub_that_is_switched_off_is_told_at_once(from_hub: Callable[..., list[str]]) -> None:
    table, model = from_hub(HF_HUB_OFFLINE="1")
    assert table.startswith(
        "UsageError hf://acme/none?config=en cannot be loaded: Couldn't reach 'acme/none' on the Hub"
    )
    assert model.startswith("TrainyardError hf://acme/none: the Hugging Face Hub could not be reached: ")
    assert "HF_HUB_OFFLINE" in model


class NoSuchRepository(BaseHTTPRequestHandler):
    """What the hub answers about a repository that is not there."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def empty_hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), NoSuchRepository) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_the_hub_does_not_have_is_not_found(from_hub: Callable[..., list[str]], empty_hub: str) -> None:
    table, model = from_hub(HF_ENDPOINT=empty_hub)
    assert table == (
        "NotFoundError hf://acme/none?config=en: Dataset 'acme/none' doesn't exist on the Hub or cannot be accessed. | "
        "Next: check the name; a gated one needs HF_TOKEN"
    )
    assert model.startswith("NotFoundError hf://acme/none: 404 Client Error. Repository Not Found for url: ")
    assert model.endswith(" | Next: check the name; a private or gated model needs HF_TOKEN")


def refused(run: Run, model: Path, table: Path) -> str:
    """The one line with which a job that cannot use its inputs ends."""
    launched = run.attempt(f"--model={model}", f"--train-data={table}", expect=1)
    assert "Traceback" not in launched.output
    errors = [line for line in launched.lines if "rror" in line]
    assert errors == launched.lines[-1:], launched.output
    return errors[0]


def test_a_job_ends_with_one_line_on_a_damaged_table(run: Run, tiny_bert: Path, tmp_path: Path) -> None:
    table = write_jsonl(tmp_path / "train.jsonl", reviews(40, seed=1))
    table.write_text(table.read_text() + '{"text": "the film is\n')
    line = refused(run, tiny_bert, table)
    assert line == f"error: {table}, line 41: not JSON: Invalid control character at at position 22\n"


def test_a_job_ends_with_one_line_on_truncated_weights(run: Run, tiny_bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    line = refused(run, model, write_jsonl(tmp_path / "train.jsonl", reviews(40, seed=1)))
    assert line.startswith(f"error: {model}: it cannot be loaded as an encoder for classification: ")
    assert line.endswith(". Next: stage the model's folder again, or name another\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "its config.json has no model_type"),
        (b'{"hidden_size": 32}', "its config.json has no model_type"),
        (b'{"model_type": ', "its config.json is not JSON: Expecting value: line 1 column 16"),
        (b"\xff\x00", "its config.json is not JSON: "),
    ],
    ids=["a list", "no model_type", "truncated", "not text"],
)
def test_a_configuration_that_is_none_is_refused(place: Place, tiny_bert: Path, content: bytes, message: str) -> None:
    location = put_model(place, tiny_bert, "config.json")
    place.put("model/config.json", content)
    with pytest.raises(UsageError, match=re.escape(f"{location} is no model: {message}")):
        place.model(location)


def load_model(folder: Path) -> None:
    finetune_classification._tokenizer(folder, "s3://models/m")
    finetune_classification._model(folder, "s3://models/m", ["bad", "good"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b'{"version": ', "its tokenizer cannot be loaded: EOF while parsing"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "it cannot be loaded as an encoder"),
    ],
    ids=["truncated tokenizer", "a pointer in place of weights"],
)
def test_a_damaged_file_of_a_model_is_a_mistake_that_names_the_model(
    tiny_bert: Path, tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    model = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    load_model(model)
    (model / file).write_bytes(content)
    with pytest.raises(UsageError, match=f"^s3://models/m: {message}"):
        load_model(model)
