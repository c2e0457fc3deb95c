"""What tokenizing a corpus and learning its vocabulary take, beside the published tutorial's way.

python -m tests.benchmarks.tokenization                 all of it; text from Debian's documentation packages
python -m tests.benchmarks.tokenization --text a.jsonl  your own documents, in a column `text`

The tutorial's way: `datasets.map` over all cores cuts each row at 512 tokens, a second `map` joins rows in Python
lists, and the rows are shuffled. Ours is what the job `tokenize` does with each shard. Each side is a process of its
own, whose children count for its memory, without the pages of mapped files. Half of the pages are rows by themselves,
of the other half each line is one, as in a corpus of articles and sentences.
"""

import argparse
import html
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from jobs.train import corpus_files, vocabulary
from jobs.train.corpus_files import END
from jobs.train.document_pieces import At
from jobs.train.documents import Input
from jobs.train.encoders import HuggingFace, choose, first_and_last_agree, load
from jobs.train.packed_tokens import pack

PACKAGES = ("python3.11-doc", "postgresql-doc-15", "debian-handbook", "linux-doc-6.1")
LENGTH = 512
VOCABULARY = 32_000
SHARD_BYTES = 16 << 20
"""Smaller than the job's own default, so that a corpus of this size has several."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tokenization", description=__doc__)
    parser.add_argument("--text", type=Path, help="documents as JSON lines, in a column `text`")
    parser.add_argument("--repeat", type=int, default=3, help="runs of what takes seconds; the fastest counts")
    parser.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side[0]](Path(options.side[1]), *options.side[2:])))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        _write_rows(rows, _texts_of(options.text) if options.text else _debian_texts(folder))
        print(f"{rows.stat().st_size / 1e6:.0f} MB of JSON lines, {os.cpu_count()} cores", flush=True)
        _vocabularies(folder)
        _tokenizations(folder, options.repeat)
        _memory(folder)


def _vocabularies(folder: Path) -> None:
    _run("frame", folder)
    full, sampled = (_run("learn", folder, str(fraction)) for fraction in (1.0, 0.1))
    more = sampled["held_out_tokens"] / full["held_out_tokens"] - 1
    ratio = full["seconds"] / sampled["seconds"]
    print(f"vocabulary, everything   {full['seconds']:7.2f} s   {full['held_out_tokens']} held-out tokens")
    print(f"vocabulary, 10 % sample  {sampled['seconds']:7.2f} s   {more:+.2%} held-out tokens   {ratio:.1f}x faster")


def _tokenizations(folder: Path, repeat: int) -> None:
    _run("cut", folder)
    tutorial = _run("tutorial", folder)
    ours = min((_run("ours", folder, "framed") for _ in range(repeat)), key=lambda side: float(side["seconds"]))
    same = min((_run("ours", folder, "cut") for _ in range(repeat)), key=lambda side: float(side["seconds"]))
    slow = _run("ours", folder, "framed", "tokenizers")
    for name, side in (
        ("tutorial", tutorial),
        ("ours, nothing cut", ours),
        ("ours, rows cut as the tutorial's", same),
        ("ours, with tokenizers", slow),
    ):
        speed = side["tokens"] / side["seconds"]
        print(
            f"{name:<33}{side['seconds']:8.2f} s {side['tokens']:>11} tokens {speed:>12,.0f}/s"
            f" {side['peak_mb']:7.0f} MB {side['disk_mb']:6.0f} MB on disk   {side.get('encoder', '')}"
        )
    speed = (ours["tokens"] / ours["seconds"]) / (tutorial["tokens"] / tutorial["seconds"])
    print(f"same kept tokens: {tutorial['seconds'] / same['seconds']:.1f}x; tokens/s: {speed:.1f}x", end="; ")
    print(f"memory: {ours['peak_mb'] / tutorial['peak_mb']:.2f}x; lost by the tutorial: ", end="")
    print(f"{1 - tutorial['tokens'] / ours['tokens']:.0%} of the tokens")
    read, loaded = _run("read", folder), tutorial["load_seconds"]
    print(f"from JSON lines: load_dataset {loaded:.2f} s, prepare-corpus's reading {read['seconds']:.2f} s")


def _memory(folder: Path) -> None:
    for times in (1, 4, 16):
        side = _run("ours", folder, "framed", "auto", str(times))
        print(f"ours, {times:>2}x the corpus   {side['peak_mb']:5.0f} MB   {side['seconds']:6.2f} s")


def _run(side: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """One side in a process of its own; the most memory that it and its children had together."""
    command = [sys.executable, "-m", "tests.benchmarks.tokenization", "--side", side, str(folder), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "true"}
    with (folder / "answer").open("w+") as answer:
        process = subprocess.Popen(
            command, stdout=answer, stderr=subprocess.DEVNULL, env=environment, cwd=Path(__file__).parents[2]
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, _memory_of(process.pid))
            time.sleep(0.02)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
        answer.seek(0)
        result: dict[str, Any] = json.loads(answer.read().splitlines()[-1])
    return {"peak_mb": peak / 1e6, **result}


def _memory_of(pid: int) -> int:
    """Bytes of a process and its children that are theirs alone: mapped files, which the kernel may drop, left out."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            usage = process.memory_info()
            total += usage.rss - usage.shared
    except psutil.Error:
        pass
    return total


def _frame(folder: Path) -> dict[str, Any]:
    """The rows as shards of a corpus, whose last hundredth is held out."""
    shard = folder / "framed"
    shard.mkdir()
    held_out: list[bytes] = []
    number, size = 0, 0
    stream = (shard / "train-00000.txt").open("wb")
    for text in _texts_of(folder / "rows.jsonl"):
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


def _learn(folder: Path, fraction: str) -> dict[str, Any]:
    """Time to draw and to learn, and how many tokens the held-out text then takes."""
    started = time.perf_counter()
    sample = folder / "sample.txt"
    with sample.open("wb") as stream:
        for number, shard in enumerate(sorted((folder / "framed").iterdir())):
            stream.writelines(document + END for document in corpus_files.sample(shard, float(fraction), seed=[number]))
    tokenizer = vocabulary.learn(
        lambda: corpus_files.batches(sample, at_most_bytes=4 << 20),
        size=VOCABULARY,
        lowercase=True,
        max_characters=1000,
    )
    seconds = time.perf_counter() - started
    if float(fraction) < 1:
        tokenizer.save(str(folder / "tokenizer.json"))
    tokens = len(HuggingFace(tokenizer).encode_file(folder / "held-out.txt"))
    return {"seconds": seconds, "held_out_tokens": tokens}


def _cut(folder: Path) -> dict[str, Any]:
    """The shards once more, each document without what the tutorial would cut off."""
    tokenizer = load(folder / "tokenizer.json")
    (folder / "cut").mkdir()
    for shard in sorted((folder / "framed").iterdir()):
        with (folder / "cut" / shard.name).open("wb") as stream:
            for batch in corpus_files.batches(shard, at_most_bytes=4 << 20):
                for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
                    offsets = encoding.offsets
                    whole = len(offsets) <= LENGTH - 2
                    stream.write((text if whole else text[: offsets[LENGTH - 3][1]]).encode() + END)
    return {}


def _tutorial(folder: Path) -> dict[str, Any]:
    import datasets
    from transformers import BertTokenizerFast

    datasets.disable_progress_bars()
    tokenizer = BertTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), model_max_length=LENGTH)
    processes = os.cpu_count()

    def encode(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], return_special_tokens_mask=True, truncation=True, max_length=LENGTH)

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*rows[name])) for name in rows}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        return {name: [ids[i : i + LENGTH] for i in range(0, total, LENGTH)] for name, ids in joined.items()}

    started = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    loaded = time.perf_counter()
    encoded = rows.map(encode, batched=True, remove_columns=["text"], num_proc=processes)
    grouped = encoded.map(group, batched=True, num_proc=processes).shuffle(seed=34)
    seconds = time.perf_counter() - loaded
    written = sum(Path(file["filename"]).stat().st_size for file in grouped.cache_files)
    return {
        "seconds": seconds,
        "load_seconds": loaded - started,
        "tokens": len(grouped) * LENGTH,
        "disk_mb": written / 1e6,
    }


def _ours(folder: Path, shards: str, encoder: str = "auto", times: str = "1") -> dict[str, Any]:
    """What the job does between S3 and S3: choose the encoder, encode, check, pack; each file leaves as it would."""
    tokenizer = load(folder / "tokenizer.json")
    reference = HuggingFace(tokenizer)
    started = time.perf_counter()
    files = sorted((folder / shards).iterdir())
    first = corpus_files.sample(files[0], 0.1, seed=[0], at_most_bytes=1 << 20)
    choice = choose(tokenizer, [document.decode() for document in first]) if encoder == "auto" else None
    used = choice.encoder if choice else reference
    tokens = written = 0
    for file in files * int(times):
        ids = used.encode_file(file)
        if used is not reference and not first_and_last_agree(ids, file, reference, each_bytes=1 << 16):
            raise SystemExit(f"{file.name}: other ids")
        target = folder / "packed.npy"
        packed = pack(ids, target, sequence_length=LENGTH, vocabulary_size=tokenizer.get_vocab_size(), pad_id=0)
        tokens += packed.tokens
        written += target.stat().st_size
        target.unlink()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": tokens, "disk_mb": written / 1e6, "encoder": used.name}


def _read(folder: Path) -> dict[str, Any]:
    """What prepare-corpus does between its inputs and its shards."""

    def no_s3() -> Any:
        raise AssertionError

    source = Input(
        location=str(folder / "rows.jsonl"), column="text", paragraphs=False, max_document_bytes=8 << 20, s3=no_s3
    )
    started = time.perf_counter()
    with (folder / "corpus.txt").open("wb") as stream:
        for read in source.read(At()):
            assert isinstance(read.content, str)
            document = read.content.replace("\0", "").strip().encode()
            corpus_files.is_held_out(corpus_files.document_hash(document), 0.01)
            stream.write(document + END)
    return {"seconds": time.perf_counter() - started}


SIDES: dict[str, Any] = {
    "frame": _frame,
    "learn": _learn,
    "cut": _cut,
    "tutorial": _tutorial,
    "ours": _ours,
    "read": _read,
}


def _texts_of(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


def _debian_texts(folder: Path) -> Iterator[str]:
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


def _write_rows(path: Path, pages: Iterator[str] | Sequence[str]) -> None:
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for page in pages:
            rows = page.split("\n") if chance.random() < 0.5 else [page]
            stream.writelines(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows if row.strip())


if __name__ == "__main__":
    main()
