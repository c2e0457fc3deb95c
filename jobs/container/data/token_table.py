"""Read the token ids in a table's column `input_ids`, and divide its rows into shards and splits."""

from collections.abc import Callable, Collection, Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.container.data.corpus_files import document_hash, is_held_out
from jobs.container.data.packed_tokens import Split
from jobs.container.data.tables import TableReader
from jobs.core.errors import UsageError
from jobs.data_checks.table_rows import At

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from numpy.typing import NDArray

COLUMN = "input_ids"

ROWS = 50_000
"""Rows of a shard."""


def shards(
    location: str,
    done: Collection[int],
    *,
    pad_id: int,
    vocabulary_size: int,
    held_out_fraction: float,
    s3: Callable[[], "S3Client"],
) -> "Iterator[tuple[int, dict[Split, list[NDArray[np.uint32]]]]]":
    """Yield the number of each shard that is not `done`, and the ids of its rows by split, without padding.

    Raises UsageError for ids that the tokenizer lacks.
    """
    next_step = "name a table of token ids and the tokenizer that made them; for texts, use prepare-corpus"
    table = TableReader(location=location, columns=[COLUMN], missing_next=next_step, s3=s3, streamed=True)
    rows: Any = None
    for number in count():
        if number in done:
            rows = None
            continue
        rows = rows or table.rows(At(number * ROWS, number * ROWS))
        parts: dict[Split, list[NDArray[np.uint32]]] = {"train": [], "held-out": []}
        row = 0
        for values, _, row in islice(rows, ROWS):
            try:
                ids = np.asarray(values[0], dtype=np.int64).reshape(-1)
            except (TypeError, ValueError, OverflowError):
                ids = np.array([-1])
            if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary_size:
                reason = f"'{COLUMN}' has other values than the ids of a tokenizer with {vocabulary_size} tokens"
                raise UsageError(f"{table.place(row)}: {reason}", next_step=next_step)
            kept = ids[ids != pad_id].astype(np.uint32)
            parts["held-out" if is_held_out(document_hash(kept.tobytes()), held_out_fraction) else "train"].append(kept)
        if not row:
            return
        yield number, parts
