"""Data files and folders of models that `submit` looks into, sound ones and hostile ones, through a dry run."""

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from jobs.aws.connection import Aws
from jobs.cli.submit import How, submit
from tests.support.fuzz import hostile
from tests.support.fuzz.findings import Nonsense, Round, draw_each
from tests.support.fuzz.specs import reported

Make = Callable[[Path], object]
"""Puts something at a path."""

_CSV = b"text,label\ngood,1\nbad,0\n"
_JSONL = b'{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n'
_BERT: Mapping[str, Any] = {"model_type": "bert", "max_position_embeddings": 512}


def _parquet() -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table({"text": ["good", "bad"], "label": [1, 0]}), content)
    return content.getvalue()


_SOUND = {
    "t.csv": _CSV,
    "t.tsv": _CSV.replace(b",", b"\t"),
    "t.jsonl": _JSONL,
    "t.parquet": _parquet(),
}

_NEVER: tuple[tuple[str, bytes], ...] = (
    *((name, b"") for name in _SOUND),
    *((name, b"\0" * 100) for name in _SOUND),
    *((name, b"\x1f\x8b\x08\0" + b"\xff" * 60) for name in _SOUND),  # gzip's beginning
    *((name, b"PK\3\4" + b"\xfe" * 60) for name in _SOUND),  # a zip's
    *((name, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n") for name in _SOUND),
    ("t.csv", b"text,label\n"),
    ("t.csv", b"text\ngood\n"),
    ("t.csv", _CSV.decode().encode("utf-16")),
    ("t.csv", b"text,label\ngood,0.5\n"),
    ("t.csv", b"text,label\ngood,1\nbad,no\n"),
    ("t.csv", b"text,label\ngood,1,more,still more\n"),
    ("t.csv", b'text,label\n"never closed,1\n'),
    ("t.csv", b"text,label\n" + b"a" * 200_000 + b"\n"),
    ("t.csv", b"text,label\n\xff\xfe,1\n"),
    ("t.csv", b"<!DOCTYPE html><html><body>not found</body></html>\n"),
    ("t.jsonl", b"["),
    ("t.jsonl", b"[" * 100_000 + b"\n"),
    ("t.jsonl", b'{"text": ' * 20_000 + b"\n"),
    ("t.jsonl", b'{"text": "good", "label": 1e999}\n'),
    ("t.jsonl", b'{"text": "good", "label": NaN}\n'),
    ("t.jsonl", b'{"text": "good", "label": {}}\n'),
    ("t.jsonl", b'{"text": null, "label": 1}\n'),
    ("t.jsonl", b'{"text": "good"}\n'),
    ("t.jsonl", b'{"text": "\xed\xa0\x80", "label": 1}\n'),
    ("t.jsonl", b'{"label": ' + b"9" * 10_000 + b"}\n"),
    ("t.parquet", b"PAR1" * 3),
    ("t.parquet", b"PAR1" + b"\xff" * 200 + b"\xff\xff\xff\xffPAR1"),
    ("t.parquet", b"PAR1" + b"\x19" * 5000 + b"\x88\x13\0\0PAR1"),
    ("t.parquet", b"PAR1" + b"\x1c" * 5000 + b"\x88\x13\0\0PAR1"),
    ("t.parquet", _parquet()[:-1]),
    ("t.parquet", _CSV),
)
"""Names and contents of tables that no job can learn from."""

_NO_FILES: Mapping[str, Make] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
}
"""What stands where a file should."""

_AS_IF_THERE_WERE_NONE = ("a folder", "a link to itself", "a link to nothing")

_NO_MODELS: tuple[bytes, ...] = (
    *(b"", b"[]", b"null", b"{}", b"{", b"\xff\xfe{\0}\0", b"\0", b'{"model_type": 1}', b'{"model_type": null}'),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"model_type": "bert", "x": ' + b"[" * 100_000, b"9" * 100_000),
    *(b'{"model_type": "bert", "trust_remote_code": true}', b'{"model_type": "bert", "x": [{"trust_remote_code": 1}]}'),
    *(b'{"model_type": "new", "auto_map": {"AutoConfig": "own.Own"}}', b'{"model_type": "new", "auto_map": "x"}'),
    b'{"model_type": "bert", "attn_implementation": "org/name"}',
    b'{"model_type": "bert", "_attn_implementation": {"text": "org/name"}}',
    b'{"model_type": "bert", "max_position_embeddings": 8}',
    b'{"model_type": "bert", "x": "' + b"a" * (20 << 20) + b'"}',
)
"""Contents of a config.json that makes no model that a job may train."""


@dataclass(frozen=True)
class Case:
    """A table and a model as they lie on disk."""

    what: str
    table: str
    files: Mapping[str, bytes]
    made: Mapping[str, Make]
    is_sound: bool = False
    is_malformed: bool = False


def fuzz(round_: Round, aws: Aws, stage: str, folder: Path, *, count: int, number: int) -> None:
    """Give `count` tables and models to the code behind `trainyard submit --dry-run`, all that is never right first."""

    def look_at(case: Case) -> None:
        round_.look(f"{case.what} {case.table} {case.files}", lambda: _submit(aws, stage, folder / "inputs", case))

    certain = [*_certain()]
    for case in certain:
        look_at(case)
    if count > len(certain):
        draw_each(_damaged(round_.canary), look_at, count=count - len(certain), number=number)


def _submit(aws: Aws, stage: str, folder: Path, case: Case) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, make in case.made.items():
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
    arguments = {"model": str(folder / "model"), "train_data": str(folder / case.table)}
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump({"name": "inputs", "job": "finetune-classification", "arguments": arguments}))

    def command(_arguments: object) -> None:
        submit(aws, stage, spec, (), how=How.DRY_RUN, yes=False, output="table")

    code, _ = reported(command)
    if code == 0 and case.is_malformed:
        raise Nonsense("a job was planned that cannot learn from it")
    if code and case.is_sound:
        raise Nonsense(f"refused with exit code {code}, though nothing is wrong with it")
    return code == 0


def _files(table: str, content: bytes, **model: bytes) -> dict[str, bytes]:
    names = {
        "config.json": json.dumps(_BERT).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": b"",
        **{name.replace("_json", ".json"): given for name, given in model.items()},
    }
    return {table: content, **{f"model/{name}": given for name, given in names.items()}}


def _certain() -> list[Case]:
    """Return what is right for certain, and what is wrong for certain."""
    cases = [Case("sound", name, _files(name, content), {}, is_sound=True) for name, content in _SOUND.items()]
    cases += [Case("never", name, _files(name, content), {}, is_malformed=True) for name, content in _NEVER]
    cases += [
        Case(what, name, _files(name, b""), {name: make}, is_malformed=True)
        for what, make in _NO_FILES.items()
        for name in _SOUND
    ]
    cases += [
        Case("no model", "t.csv", _files("t.csv", _CSV, config_json=content), {}, is_malformed=True)
        for content in _NO_MODELS
    ]
    return cases + [
        Case(f"{what} for {name}", "t.csv", _files("t.csv", _CSV), {f"model/{name}": make}, is_malformed=True)
        for what, make in _NO_FILES.items()
        for name in ("config.json", "tokenizer_config.json")
        if name == "config.json" or what not in _AS_IF_THERE_WERE_NONE
    ]


@st.composite
def _damaged(draw: DrawFn, canary: Path) -> Case:
    """Draw a table of which pieces are replaced, or a model whose configuration holds what it should not."""
    table = draw(st.sampled_from(sorted(_SOUND)))
    content = _SOUND[table]
    if draw(st.booleans()):
        for _ in range(draw(st.integers(1, 4))):
            start = draw(st.integers(0, len(content)))
            end = start + draw(st.sampled_from((0, 1, 4, 20)))
            texts = [text.encode("utf-8", "surrogatepass") for text in hostile.texts(canary)]
            content = content[:start] + draw(st.sampled_from(texts) | st.binary(max_size=12)) + content[end:]
        return Case("damaged", table, _files(table, content), {})
    odd = hostile.values(canary).filter(lambda value: not isinstance(value, bytes))
    keys = ("model_type", "max_position_embeddings", "pad_token_id", "auto_map", "tokenizer_class", "pad_token", "x")
    configuration = {**_BERT, **draw(st.dictionaries(st.sampled_from(keys), odd, max_size=3))}
    tokenizer = draw(st.dictionaries(st.sampled_from(keys), odd, max_size=3))
    model = {
        "config_json": json.dumps(configuration).encode(),
        "tokenizer_config_json": json.dumps(tokenizer).encode(),
    }
    name = draw(st.sampled_from(sorted(model)))
    if draw(st.booleans()):
        start = draw(st.integers(0, len(model[name])))
        model[name] = model[name][:start] + draw(st.binary(max_size=12)) + model[name][start + 1 :]
    return Case("odd model", table, _files(table, content, **model), {})
