"""Token ids of labelled text in batches of few shapes, prepared by one rank of each node.

The ids are in .npy files that every rank maps into memory, so that eight ranks hold them once. A batch is padded to the
width of its bucket when it is read (jobs/container/data/labelled_buckets.py).
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from jobs.container.data.labelled_buckets import bucket_widths, in_batches
from jobs.container.data.labelled_text import Examples
from jobs.core.errors import UsageError
from jobs.data_checks.data_summary import Cut, DataSummary, lengths_at_shares, summary

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

MAX_UNCUT = 10_000
"""So many examples of each part are encoded a second time at most, to see what is cut off."""


_EVALUATION_TEXTS = "eval.texts.jsonl"


class Prepared(BaseModel):
    """The examples that one rank of a node prepared for all of them."""

    folder: Path
    class_names: list[str]
    train_examples: int
    eval_examples: int
    widths: list[int] = []
    """Tokens that sequences are padded to, ascending; none before they are chosen."""
    longest: int
    """Tokens of the longest example, before it is cut at max_length."""
    summary: DataSummary
    padding_token: int
    padding_type: int
    padded_on: str
    """`right` or `left`."""

    @property
    def train(self) -> "TokenizedExamples":
        return TokenizedExamples(self, "train")

    @property
    def evaluation(self) -> "TokenizedExamples":
        return TokenizedExamples(self, "eval")

    def bucketed(self, number: int, *, max_length: int) -> "Prepared":
        """Return these examples with `number` widths for all batches, chosen so that least is padded."""
        parts = ("train", "eval") if self.train_examples else ("eval",)
        lengths = np.concatenate([_lengths(self.folder, part) for part in parts])
        widths = [min(width, max_length) for width in bucket_widths(lengths, at_most=number)]
        summary = self.summary.model_copy(update={"length_buckets": len(widths)})
        return self.model_copy(update={"widths": widths, "summary": summary})

    def evaluation_texts(self) -> Iterator[dict[str, str]]:
        """Yield `text`, and `pair` where there is one, of each held-out example in their order."""
        with (self.folder / _EVALUATION_TEXTS).open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def prepare(
    names: list[str],
    parts: dict[str, Examples],
    *,
    tokenizer: Any,
    max_length: int,
    folder: Path,
) -> Prepared:
    """Tokenize the examples of both parts (`train`, `eval`), or of `eval` alone, into .npy files below `folder`."""
    if tokenizer.pad_token_id is None:
        raise UsageError("the model's tokenizer has no padding token", next_step="add one and save the tokenizer again")
    folder.mkdir(parents=True, exist_ok=True)
    # Ranks have it off (jobs.container.launch); this one works alone on its node, so all cores are its own.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    lengths, uncut = {}, {}
    spelled: Counter[str] = Counter()
    for part, examples in parts.items():
        columns, lengths[part] = _encode(examples, tokenizer, max_length)
        spelled += _spelled(columns["input_ids"], examples, tokenizer)
        uncut[part] = _uncut_lengths(examples, tokenizer, lengths[part], max_length)
        for column, flat in columns.items():
            _save(folder / f"{part}.{column}.npy", flat)
        _save(folder / f"{part}.lengths.npy", lengths[part])
        _save(folder / f"{part}.labels.npy", np.asarray(examples.labels, dtype=np.int64))
    _write_texts(parts["eval"], folder / _EVALUATION_TEXTS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    found = _summary(names, parts, uncut, max_length)
    if spelled:
        shown = ", ".join(f"{count:,} {token}" for token, count in spelled.items())
        found.table_warnings.append(f"texts spell special tokens, and the tokenizer reads them as such: {shown}")
    return Prepared(
        folder=folder,
        class_names=names,
        train_examples=len(parts.get("train", ())),
        eval_examples=len(parts["eval"]),
        longest=int(max(lengths.max() for lengths in uncut.values())),
        summary=found,
        padding_token=tokenizer.pad_token_id,
        padding_type=tokenizer.pad_token_type_id,
        padded_on=tokenizer.padding_side,
    )


_SPECIAL = ("bos_token", "eos_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Not the unknown token, which stands for unknown characters, nor tokens that were added for such texts."""


def _spelled(ids: "NDArray[np.int32]", examples: Examples, tokenizer: Any) -> Counter[str]:
    """Count the special tokens that texts spell: all but those that the tokenizer puts around each."""
    empty = Counter(tokenizer([""], None if examples.pairs is None else [""])["input_ids"][0])
    tokens = {getattr(tokenizer, name) for name in _SPECIAL} - {None, tokenizer.unk_token}
    numbers = {token: tokenizer.convert_tokens_to_ids(token) for token in sorted(tokens)}
    # `+` leaves out what is not there, and less than nothing.
    return +Counter(
        {
            token: int(np.count_nonzero(ids == number)) - len(examples) * empty[number]
            for token, number in numbers.items()
        }
    )


def _save(path: Path, values: "NDArray[np.integer[Any]]") -> None:
    """Write numbers in as few bytes as the largest needs: of BERT's vocabulary an id takes two."""
    np.save(path, values.astype(np.min_scalar_type(values.max())))


def _lengths(folder: Path, part: str) -> "NDArray[np.int64]":
    lengths: NDArray[np.int64] = np.load(folder / f"{part}.lengths.npy").astype(np.int64)
    return lengths


def _write_texts(examples: Examples, path: Path) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for number, text in enumerate(examples.texts):
            pair = {} if examples.pairs is None else {"pair": examples.pairs[number]}
            lines.write(json.dumps({"text": text, **pair}, ensure_ascii=False) + "\n")


def _uncut_lengths(
    examples: Examples, tokenizer: Any, lengths: "NDArray[np.int64]", max_length: int, *, chunk: int = 1000
) -> "NDArray[np.int64]":
    """Return the tokens that each example has before it is cut.

    Only those are encoded a second time that may have been cut, and of more than MAX_UNCUT a sample, which stands for
    the others.
    """
    full = np.flatnonzero(lengths >= max_length)
    rows = full[:: -(-len(full) // MAX_UNCUT)] if len(full) else full
    found: list[int] = []
    for start in range(0, len(rows), chunk):
        some = examples.take(rows[start : start + chunk].tolist())
        encoded = tokenizer(some.texts, some.pairs, truncation=False, return_attention_mask=False, verbose=False)
        found.extend(len(row) for row in encoded["input_ids"])
    uncut: NDArray[np.int64] = lengths.copy()
    if found:
        uncut[full] = np.resize(found, len(full))
    return uncut


def _summary(
    names: list[str], parts: dict[str, Examples], uncut: "dict[str, NDArray[np.int64]]", max_length: int
) -> DataSummary:
    together = np.concatenate(list(uncut.values()))
    is_cut = together > max_length
    found = summary(names, *((examples.together(), examples.labels) for examples in parts.values()))
    return found.model_copy(
        update={
            "lengths": [lengths_at_shares("tokens", together.tolist())],
            "cut": Cut(
                max_length=max_length,
                texts=int(is_cut.sum()),
                of_texts=len(together),
                tokens=int((together[is_cut] - max_length).sum()),
                of_tokens=int(together.sum()),
                estimated=any(int((part >= max_length).sum()) > MAX_UNCUT for part in uncut.values()),
            ),
        }
    )


def _encode(
    examples: Examples, tokenizer: Any, max_length: int, *, chunk: int = 10_000
) -> tuple[dict[str, "NDArray[np.int32]"], "NDArray[np.int64]"]:
    """Return token ids (and types) of all examples one after the other, and the length of each."""
    wanted = [name for name in ("input_ids", "token_type_ids") if name in tokenizer.model_input_names]
    flat: dict[str, list[NDArray[np.int32]]] = {name: [] for name in wanted}
    lengths: list[int] = []
    for start in range(0, len(examples), chunk):
        stop = start + chunk
        encoded = tokenizer(
            examples.texts[start:stop],
            examples.pairs[start:stop] if examples.pairs is not None else None,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
        )
        for name in wanted:
            flat[name].append(np.concatenate([np.asarray(row, dtype=np.int32) for row in encoded[name]]))
        lengths.extend(len(row) for row in encoded["input_ids"])
    return {name: np.concatenate(chunks) for name, chunks in flat.items()}, np.asarray(lengths)


class TokenizedExamples:
    """A part of the prepared examples, as DataLoader reads it: whole batches at a time, straight from the files.

    It is read by places (jobs/container/data/labelled_buckets.py), which say to what width a batch is padded.
    """

    def __init__(self, prepared: Prepared, part: str) -> None:
        self._prepared = prepared
        self._flat = {
            column: np.load(path, mmap_mode="r")
            for column in ("input_ids", "token_type_ids")
            if (path := prepared.folder / f"{part}.{column}.npy").exists()
        }
        self.labels = np.load(prepared.folder / f"{part}.labels.npy").astype(np.int64)
        self.lengths = _lengths(prepared.folder, part)
        self._starts = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def buckets(self) -> "NDArray[np.int64]":
        """For each example, the number of the narrowest width that holds it."""
        buckets: NDArray[np.int64] = np.searchsorted(np.asarray(self._prepared.widths), self.lengths)
        return buckets

    @property
    def padding(self) -> dict[str, int]:
        """The value of each column where there is no token."""
        return {"input_ids": self._prepared.padding_token, "token_type_ids": self._prepared.padding_type}

    def tokens(self, rows: "NDArray[np.int64]") -> dict[str, "NDArray[np.integer[Any]]"]:
        """Each column's values of these examples, one after the other."""
        spans = [
            slice(start, start + length) for start, length in zip(self._starts[rows], self.lengths[rows], strict=True)
        ]
        return {column: np.concatenate([flat[span] for span in spans]) for column, flat in self._flat.items()}

    def shapes(self, batch: int) -> tuple[list[int], float]:
        """Return the widths that batches of this size have, and the share of their tokens that only fills up."""
        buckets, rows = np.divmod(in_batches(self.buckets, batch), len(self))
        widths = np.asarray(self._prepared.widths)[buckets]
        return np.unique(widths).tolist(), 1 - float(self.lengths[rows].sum() / widths.sum())

    def __getitem__(self, place: int) -> dict[str, "torch.Tensor"]:
        return {name: values[0] for name, values in self.__getitems__([place]).items()}

    def __getitems__(self, places: Sequence[int]) -> dict[str, "torch.Tensor"]:
        import torch

        prepared = self._prepared
        buckets, rows = np.divmod(np.asarray(places), len(self))
        width = prepared.widths[buckets.max()]
        positions = np.arange(width) if prepared.padded_on == "right" else np.arange(width)[::-1]
        mask = positions < self.lengths[rows, None]
        batch = {"attention_mask": mask.astype(np.int64), "labels": self.labels[rows]}
        for column, tokens in self.tokens(rows).items():
            batch[column] = np.full(mask.shape, self.padding[column])
            batch[column][mask] = tokens
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    @staticmethod
    def collate(batch: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """`__getitems__` has made the batch already."""
        return batch


class InBatches:
    """Examples in batches of one width each, for an evaluation: the last batch is filled, with some a second time."""

    def __init__(self, examples: TokenizedExamples, batch: int) -> None:
        self._examples = examples
        self._places = in_batches(examples.buckets, batch)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> dict[str, "torch.Tensor"]:
        return self._examples[int(self._places[number])]

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, "torch.Tensor"]:
        return self._examples.__getitems__(self._places[numbers].tolist())

    def in_order(self, results: "NDArray[Any]") -> "NDArray[Any]":
        """Put the results of an evaluation into the examples' own order, one for each example."""
        _, first = np.unique(self._places % len(self._examples), return_index=True)
        return results[first]
