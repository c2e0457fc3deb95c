"""Pass valid and hostile data files and model folders through a dry run of `submit`."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from jobs.aws.connection import Aws
from tests.support.fuzz import hostile
from tests.support.fuzz.findings import Nonsense, Round, draw_each
from tests.support.fuzz.specs import dry_run
from tests.support.jobs.submitting import NO_WEIGHTS

Make = Callable[[Path], object]
"""A function that creates something at a path."""

_CSV = b"text,label\ngood,1\nbad,0\n"
_BERT: Mapping[str, Any] = {"model_type": "bert", "max_position_embeddings": 512}


def _parquet() -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table({"text": ["good", "bad"], "label": [1, 0]}), content)
    return content.getvalue()


_SOUND = {
    "t.csv": _CSV,
    "t.tsv": _CSV.replace(b",", b"\t"),
    "t.jsonl": b'{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n',
    "t.parquet": _parquet(),
}

_NOT_TABLES = (b"", b"\0" * 100, b"\x1f\x8b\x08\0" + b"\xff" * 60, b"PK\3\4" + b"\xfe" * 60)
_BAD_TABLES: Mapping[str, tuple[bytes, ...]] = {
    "t.csv": (
        *(b"text,label\n", b"text\ngood\n", b"text,label\ngood,0.5\n", b'text,label\n"never closed,1\n'),
        *(b"text,label\ngood,1\nbad,no\n", b"text,label\n" + b"a" * 200_000 + b"\n", b"<!DOCTYPE html><html>\n"),
    ),
    "t.jsonl": (
        *(b"[" * 100_000 + b"\n", b'{"text": ' * 20_000 + b"\n", b'{"text": "good", "label": NaN}\n'),
        *(b'{"text": null, "label": 1}\n', b'{"text": "good"}\n', b'{"label": ' + b"9" * 10_000 + b"}\n"),
    ),
    "t.parquet": (b"PAR1" * 3, b"PAR1" + b"\x19" * 5000 + b"\x88\x13\0\0PAR1", _parquet()[:-1], _CSV),
}
"""Contents of tables that no job can learn from."""

_SPECIAL_FILES: Mapping[str, Make] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
}
"""Special files that replace an input file."""

_BAD_MODELS: tuple[bytes, ...] = (
    *(b"", b"[]", b"{}", b"{", b"\0", b'{"model_type": 1}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000),
    *(
        b'{"model_type": "bert", "trust_remote_code": true}',
        b'{"model_type": "new", "auto_map": {"AutoConfig": "o.O"}}',
    ),
    *(b'{"model_type": "bert", "max_position_embeddings": 8}', b'{"model_type": "bert", "x": "' + b"a" * (20 << 20)),
)
"""Contents of a config.json that no job may train."""


@dataclass(frozen=True)
class Case:
    """A table and a model on disk. `right` is whether a job can train on them, or None if unknown."""

    what: str
    table: str
    files: Mapping[str, bytes]
    made: Mapping[str, Make] = field(default_factory=dict)
    right: bool | None = None


def fuzz(round_: Round, aws: Aws, stage: str, folder: Path, *, count: int, number: int) -> None:
    """Pass `count` tables and models through `trainyard submit --dry-run`, first the certain cases."""

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
        (folder / name).unlink()
        make(folder / name)
    arguments = {"model": str(folder / "model"), "train_data": str(folder / case.table)}
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump({"name": "inputs", "job": "finetune-classification", "arguments": arguments}))
    code, _ = dry_run(aws, stage, spec)
    if case.right is not None and case.right != (code == 0):
        raise Nonsense(f"exit code {code}")
    return code == 0


def _files(table: str, content: bytes, **model: bytes) -> dict[str, bytes]:
    whole = {"config": json.dumps(_BERT).encode(), "tokenizer": b"{}", **model}
    return {
        table: content,
        "model/model.safetensors": NO_WEIGHTS,
        **{f"model/{name}.json": whole[name] for name in whole},
    }


def _certain() -> Iterator[Case]:
    """Yield cases that are certainly right, and cases that are certainly wrong."""
    for table, sound in _SOUND.items():
        yield Case("sound", table, _files(table, sound), right=True)
        for content in (*_NOT_TABLES, *_BAD_TABLES.get(table, ())):
            yield Case("never", table, _files(table, content), right=False)
    for what, make in _SPECIAL_FILES.items():
        for name in (*_SOUND, "model/config.json"):
            table = "t.csv" if "/" in name else name
            yield Case(what, table, _files(table, _SOUND[table]), {name: make}, right=False)
    for content in _BAD_MODELS:
        yield Case("no model", "t.csv", _files("t.csv", _CSV, config=content), right=False)


@st.composite
def _damaged(draw: DrawFn, canary: Path) -> Case:
    """Draw a table with damaged parts, or a model with odd values in its configuration."""
    table = draw(st.sampled_from(sorted(_SOUND)))
    if draw(st.booleans()):
        return Case("damaged", table, _files(table, draw(hostile.damaged(_SOUND[table], hostile.texts(canary)))))
    odd = hostile.values(canary).filter(lambda value: not isinstance(value, bytes))
    keys = ("model_type", "max_position_embeddings", "pad_token_id", "auto_map", "tokenizer_class", "pad_token", "x")
    config, tokenizer = (draw(st.dictionaries(st.sampled_from(keys), odd, max_size=3)) for _ in range(2))
    model = {"config": json.dumps({**_BERT, **config}).encode(), "tokenizer_config": json.dumps(tokenizer).encode()}
    return Case("odd model", table, _files(table, _SOUND[table], **model))
