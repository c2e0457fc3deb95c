"""Make text for benchmarks from Debian's documentation packages: rows, and the files of a corpus."""

import html
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.container.data import corpus_files
from jobs.container.data.corpus_files import END

PACKAGES = ("python3.11-doc", "postgresql-doc-15", "debian-handbook", "linux-doc-6.1")
SHARD_BYTES = 64 << 20
"""Half the job's default, so that a corpus of this size has several shards."""


def texts_of(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


def debian_texts(folder: Path) -> Iterator[str]:
    """Download the documentation packages and yield their pages as text."""
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
    """Write the rows as shards of a corpus, and hold out a hundredth."""
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
