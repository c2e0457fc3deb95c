"""Compare tokenizing a corpus and learning its vocabulary with the published tutorial.

python -m tests.benchmarks.tokenization                 text from Debian's documentation packages
python -m tests.benchmarks.tokenization --text a.jsonl  your own documents, in a column `text`

The tutorial runs `datasets.map` over all cores to cut each row at 512 tokens, joins rows in Python lists with a second
`map`, and shuffles them. Our side does the work of the job `tokenize` on each shard. Each side is a separate process.
Its memory includes its children's, without the pages of mapped files. Half of the pages are one row
each; of the other half, each line is a row, as in a corpus of articles and sentences.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

from jobs.container.data import corpus_files
from jobs.container.data.corpus_files import END
from jobs.container.data.packed_tokens import CorpusPacking
from jobs.container.data.tokenizer import HuggingFace, load_tokenizer, train_wordpiece
from tests.support.benchmarks.debian_text import debian_texts, frame, texts_of, write_rows
from tests.support.benchmarks.speed import Result, side_result, start_side

LENGTH = 512
VOCABULARY = 32_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tokenization", description=__doc__)
    parser.add_argument("--text", type=Path, help="documents as JSON lines, in a column `text`")
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of fast measurements; the fastest counts (default: 3)"
    )
    parser.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side[0]](Path(options.side[1]), *options.side[2:])))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        write_rows(rows, texts_of(options.text) if options.text else debian_texts(folder))
        print(f"{rows.stat().st_size / 1e6:.0f} MB of JSON lines, {os.cpu_count()} cores", flush=True)
        _vocabularies(folder)
        _tokenizations(folder, options.repeat)


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
            f"{name:<33}{side['seconds']:8.2f} s  CPU {side['cpu_seconds']:6.2f} s {side['tokens']:>11} tokens"
            f" {speed:>12,.0f}/s {side['peak_mb']:7.0f} MB {side['disk_mb']:6.0f} MB on disk  {side.get('encoder', '')}"
        )
    speed = (ours["tokens"] / ours["seconds"]) / (tutorial["tokens"] / tutorial["seconds"])
    print(f"same kept tokens: {tutorial['seconds'] / same['seconds']:.1f}x; tokens/s: {speed:.1f}x", end="; ")
    print(f"memory: {ours['peak_mb'] / tutorial['peak_mb']:.2f}x; lost by the tutorial: ", end="")
    print(f"{1 - tutorial['tokens'] / ours['tokens']:.0%} of the tokens")
    same_cpu = tutorial["cpu_seconds"] / same["cpu_seconds"]
    cpu = (ours["tokens"] / ours["cpu_seconds"]) / (tutorial["tokens"] / tutorial["cpu_seconds"])
    print(f"by CPU seconds: same kept tokens {same_cpu:.1f}x; tokens/s {cpu:.1f}x")


def _run(side: str, folder: Path, *arguments: str) -> Result:
    """Run one side in a separate process, and add the peak memory of it and its children to its result."""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "true"}
    process = start_side("tests.benchmarks.tokenization", "--side", side, str(folder), *arguments, **environment)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _memory_of(process.pid))
        time.sleep(0.02)
    return {"peak_mb": peak / 1e6, **side_result(process)}


def _memory_of(pid: int) -> int:
    """Return the private bytes of a process and its children, without mapped files, which the kernel may drop."""
    process = Path(f"/proc/{pid}")
    try:
        _, resident, shared, *_ = map(int, (process / "statm").read_text().split())
        children = [
            int(child) for task in (process / "task").iterdir() for child in (task / "children").read_text().split()
        ]
    except (OSError, ValueError):  # it has ended
        return 0
    return (resident - shared) * resource.getpagesize() + sum(map(_memory_of, children))


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _learn(folder: Path, fraction: str) -> dict[str, Any]:
    """Return the time to sample and to learn, and the number of tokens of the held-out text."""
    started = time.perf_counter()
    sample = folder / "sample.txt"
    with sample.open("wb") as stream:
        for number, shard in enumerate(sorted((folder / "framed").iterdir())):
            stream.writelines(document + END for document in corpus_files.sample(shard, float(fraction), seed=[number]))
    tokenizer = train_wordpiece(
        lambda: corpus_files.batches(corpus_files.documents(sample), at_most_bytes=4 << 20),
        size=VOCABULARY,
        lowercase=True,
        max_characters=1000,
    )
    seconds = time.perf_counter() - started
    if float(fraction) < 1:
        tokenizer.save(str(folder / "tokenizer.json"))
    tokens = len(HuggingFace(tokenizer).encode(list(corpus_files.documents(folder / "held-out.txt"))))
    return {"seconds": seconds, "held_out_tokens": tokens}


def _cut(folder: Path) -> dict[str, Any]:
    """Copy the shards, and cut each document where the tutorial would."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    (folder / "cut").mkdir()
    for shard in sorted((folder / "framed").iterdir()):
        with (folder / "cut" / shard.name).open("wb") as stream:
            for batch in corpus_files.batches(corpus_files.documents(shard), at_most_bytes=4 << 20):
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

    rows = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    started, cpu = time.perf_counter(), _cpu_seconds()
    encoded = rows.map(encode, batched=True, remove_columns=["text"], num_proc=processes)
    grouped = encoded.map(group, batched=True, num_proc=processes).shuffle(seed=34)
    seconds = time.perf_counter() - started
    written = sum(Path(file["filename"]).stat().st_size for file in grouped.cache_files)
    return {
        "seconds": seconds,
        "cpu_seconds": _cpu_seconds() - cpu,
        "tokens": len(grouped) * LENGTH,
        "disk_mb": written / 1e6,
    }


def _ours(folder: Path, shards: str, encoder: str = "auto") -> dict[str, Any]:
    """Do the job's work without S3: choose the encoder, encode, check, pack, and delete each file."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    started, cpu = time.perf_counter(), _cpu_seconds()
    tokens = written = 0
    target = folder / "packed.npy"
    with CorpusPacking(tokenizer, sequence_length=LENGTH, pad_id=0, only_tokenizers=encoder == "tokenizers") as packing:
        for file in sorted((folder / shards).iterdir()):
            tokens += packing.pack(file, target).tokens
            written += target.stat().st_size
            target.unlink()
    seconds = time.perf_counter() - started
    used = packing.encoder_name
    result = {"tokens": tokens, "disk_mb": written / 1e6, "encoder": used}
    return {"seconds": seconds, "cpu_seconds": _cpu_seconds() - cpu, **result}


SIDES: dict[str, Any] = {
    "frame": frame,
    "learn": _learn,
    "cut": _cut,
    "tutorial": _tutorial,
    "ours": _ours,
}


if __name__ == "__main__":
    main()
