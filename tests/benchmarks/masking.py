"""Batches of masked sequences from the memory map against Arrow and transformers' collator, without any model.

python -m tests.benchmarks.masking                     20,000 sequences of 512 tokens, 100 batches of 32 a round
python -m tests.benchmarks.masking --sequences 2000    less: seconds

Both sides read the same sequences from disk in the same random order, in one process, and end with tensors:

    Arrow         a `datasets` table of ids, attention mask and special tokens mask, as the tutorials tokenize it, and
                  DataCollatorForLanguageModeling
    memory map    packed tokens, TrainingOrder and Masking of jobs.train, which find the masked places as well

They take turns, and the median of each side's rounds counts: of the seconds on the clock, and of those of the CPU,
which say more where other work runs beside it (with OMP_NUM_THREADS=1).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_from_disk
from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

from jobs.train.data.masked_tokens import Masking, TrainingOrder
from jobs.train.data.packed_tokens import INDEX, TOKENIZER, Index, PackedFile, PackedTokens, pack

SPECIAL = ("pad", "unk", "cls", "sep", "mask")
"""Their ids are their places."""
VOCABULARY = 30522
ROUND = 100
"""Batches."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.masking", description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=20_000)
    options = parser.parse_args()
    ids = np.random.default_rng(0).integers(len(SPECIAL), VOCABULARY, (options.sequences, options.length))
    ids[:, 0], ids[:, -1] = SPECIAL.index("cls"), SPECIAL.index("sep")
    with tempfile.TemporaryDirectory() as name:
        mapped = _masked(memory_map(Path(name) / "packed", ids), length=ROUND * (options.repeat + 1) * options.batch)
        table, collate = arrow_table(Path(name) / "arrow", ids)
        rows = np.random.default_rng(1).permutation(options.sequences)

        def arrow_batch(numbers: Sequence[int]) -> Any:
            return collate(table.__getitems__(rows[np.asarray(numbers) % len(rows)].tolist()))

        sides: dict[str, Callable[[Sequence[int]], Any]] = {"Arrow": arrow_batch, "memory map": mapped.__getitems__}
        seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(options.repeat + 1):  # the first warms up
            for side, read in sides.items():
                started = time.perf_counter(), time.process_time()
                for batch in range(number * ROUND, (number + 1) * ROUND):
                    read(range(batch * options.batch, (batch + 1) * options.batch))
                seconds[side].append((time.perf_counter() - started[0], time.process_time() - started[1]))
    rates = {
        side: [ROUND * options.batch / statistics.median(kind) for kind in zip(*times[1:], strict=True)]
        for side, times in seconds.items()
    }
    print(f"{options.sequences} sequences of {options.length} tokens, {options.batch} a batch")
    for side, (clock, cpu) in rates.items():
        print(f"{side:<10} {clock:9,.0f} samples/s  of CPU time {cpu:9,.0f} samples/s")
    clock, cpu = (fast / slow for fast, slow in zip(rates["memory map"], rates["Arrow"], strict=True))
    print(f"{'speed-up':<10} x{clock:.1f}  CPU x{cpu:.1f}")


def memory_map(
    folder: Path, ids: "np.typing.NDArray[np.int64]", *, held_out: "np.typing.NDArray[np.int64] | None" = None
) -> Path:
    """Packed tokens of those sequences; their tokenizer has a word for each id."""
    folder.mkdir()

    def packed(name: str, rows: "np.typing.NDArray[np.int64]") -> PackedFile:
        return pack(
            [rows.reshape(-1).astype(np.uint32)],
            folder / name,
            sequence_length=rows.shape[1],
            vocabulary_size=VOCABULARY,
            pad_id=SPECIAL.index("pad"),
        )

    index = Index(
        sequence_length=ids.shape[1],
        vocabulary_size=VOCABULARY,
        special_ids={name: number for number, name in enumerate(SPECIAL)},
        files={
            "train": [packed("train-00000.npy", ids)],
            "held-out": [] if held_out is None else [packed("held-out-00000.npy", held_out)],
        },
    )
    (folder / INDEX).write_text(index.model_dump_json())
    _tokenizer(folder / TOKENIZER).save_pretrained(folder / TOKENIZER)
    return folder


def arrow_table(folder: Path, ids: "np.typing.NDArray[np.int64] | None" = None) -> tuple[Any, Any]:
    """A table as the tutorials make it, of `ids` or as it was saved, and the collator that they give it to."""
    if ids is not None:
        columns: dict[str, np.ndarray[Any, Any]] = {
            "input_ids": ids.astype(np.int32),
            "attention_mask": np.ones_like(ids, dtype=np.int8),
            "special_tokens_mask": (ids < len(SPECIAL)).astype(np.int8),
        }
        Dataset.from_dict({name: list(values) for name, values in columns.items()}).save_to_disk(folder)
    return load_from_disk(folder), DataCollatorForLanguageModeling(_tokenizer(folder), mlm_probability=0.15)


def _tokenizer(folder: Path) -> BertTokenizerFast:
    folder.mkdir(exist_ok=True)
    vocabulary = folder / "vocab.txt"
    words = [f"[{name.upper()}]" for name in SPECIAL]
    vocabulary.write_text("\n".join([*words, *(f"word{number}" for number in range(VOCABULARY - len(words)))]))
    return BertTokenizerFast(vocab_file=str(vocabulary))


def _masked(folder: Path, *, length: int) -> TrainingOrder:
    masking = Masking(
        fraction=0.15,
        vocabulary_size=VOCABULARY,
        mask_id=SPECIAL.index("mask"),
        pad_id=SPECIAL.index("pad"),
        special_ids=range(len(SPECIAL)),
        seed=0,
    )
    return TrainingOrder(PackedTokens(folder, "train"), masking, length=length)


if __name__ == "__main__":
    main()
