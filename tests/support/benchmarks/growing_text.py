"""Text of any size for benchmarks: the documentation packages of Debian, as rows and as files of a corpus.

A larger text has the same rows again and again, but in each copy every eighth of them has words of its own, because a
corpus that grows has new words.
"""

import html
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jobs.train.data import corpus_files
from jobs.train.data.corpus_files import END

PACKAGES = ("python3.11-doc", "postgresql-doc-15", "debian-handbook", "linux-doc-6.1")
SHARD_BYTES = 64 << 20
"""Half the job's own default, so that a corpus of this size has several."""


def texts_of(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


def debian_texts(folder: Path) -> Iterator[str]:
    """The pages of documentation packages, as text."""
    subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(folder / "unpacked")], check=True)
    for path in sorted((folder / "unpacked").rglob("*")):
        if path.is_file() and (path.suffix in (".html", ".xhtml") or path.name.endswith(".txt")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if path.suffix != ".txt":
                text = re.sub(r"(?s)<(script|style)\b.*?</\1>|<[^>]+>", " ", text)
                text = html.unescape(text)
            text = re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t]+", " ", text)).strip()
            if len(text) > 300:
                yield text


def write_rows(path: Path, pages: Iterator[str] | Sequence[str]) -> None:
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for page in pages:
            rows = page.split("\n") if chance.random() < 0.5 else [page]
            stream.writelines(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows if row.strip())


def frame(folder: Path) -> dict[str, Any]:
    """The rows as shards of a corpus, whose last hundredth is held out."""
    shard = folder / "framed"
    shutil.rmtree(shard, ignore_errors=True)
    shard.mkdir()
    held_out: list[bytes] = []
    number, size = 0, 0
    stream = (shard / "train-00000.txt").open("wb")
    for text in texts_of(folder / "rows.jsonl"):
        document = text.replace("\0", "").strip().encode()
        if corpus_files.is_held_out(corpus_files.document_hash(document), 0.01):
            held_out.append(document)
        if size >= SHARD_BYTES:
            stream.close()
            number, size = number + 1, 0
            stream = (shard / f"train-{number:05}.txt").open("wb")
        size += stream.write(document + END)
    stream.close()
    (folder / "held-out.txt").write_bytes(b"".join(document + END for document in held_out))
    return {}


def grow(folder: Path, times: str) -> dict[str, Any]:
    """The rows, so many times."""
    texts = list(texts_of(folder / "rows.jsonl"))
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as stream:
        for copy in range(1, int(times)):
            for number, text in enumerate(texts):
                row = {"text": _copy_of(text.encode(), number, copy).decode()}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    return {}


def copies(folder: Path, times: str) -> dict[str, Any]:
    """The shards, so many times; copies that are there already are left as they are."""
    target = folder / "copies"
    target.mkdir(exist_ok=True)
    for copy in range(int(times)):
        for shard in sorted((folder / "framed").iterdir()):
            path = target / f"{copy:02}-{shard.name}"
            if path.exists():
                continue
            with path.open("wb") as stream:
                for number, document in enumerate(corpus_files.documents(shard)):
                    stream.write(_copy_of(document, number, copy) + END)
    return {"mb": sum(path.stat().st_size for path in target.iterdir()) / 1e6}


def _copy_of(row: bytes, number: int, copy: int) -> bytes:
    """A row of the text as a later copy has it."""
    return row.translate(_other_letters(copy)) if copy and (number + copy) % 8 == 0 else row


@cache
def _other_letters(copy: int) -> bytes:
    """For `bytes.translate`: vowels become others, and so do consonants and digits."""
    chance = random.Random(copy)
    table = bytearray(range(256))
    for group in (b"aeiou", b"bcdfghjklmnpqrstvwxyz", b"AEIOU", b"BCDFGHJKLMNPQRSTVWXYZ", b"0123456789"):
        for one, other in zip(group, chance.sample(group, len(group)), strict=True):
            table[one] = other
    return bytes(table)
