"""Tokenize labelled text on one rank of each node, and serve it in batches of few shapes.

The token ids are in .npy files that every rank maps into memory, so that eight ranks share one copy. A batch is padded
to the width of its bucket when it is read.

The examples of a step have similar lengths, which keeps padding and the number of shapes low. Gaudi compiles a graph
for each new shape, and a rank gains nothing from short sequences while it waits for the rank with the longest. So
lengths are divided into a few buckets, and all ranks take all batches of a step from the same bucket. Examples that do
not fill a step of their bucket move to the next wider bucket. The last step of the widest bucket is filled with
examples that occur a second time in that epoch, fewer than one global batch. All others occur once.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel

from jobs.container.data.labelled_text import Examples
from jobs.core.errors import UsageError
from jobs.core.labels import Problem
from jobs.data_checks.data_summary import Cut, DataSummary, lengths_at_shares, summary

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


MULTIPLE = 8
"""Widths are multiples of this. With a batch of 16 or more, the number of tokens is then a multiple of 128, which suits
the HPU."""

USUAL, COMPILED = 4, 2
"""Number of widths for `auto`. COMPILED is for accelerators that compile a graph for each width."""


def number_of_widths(requested: int | Literal["auto"], *, compiles: bool) -> int:
    if requested != "auto":
        return requested
    return COMPILED if compiles else USUAL


def bucket_widths(lengths: "NDArray[np.integer[Any]]", *, at_most: int) -> list[int]:
    """Choose at most `at_most` widths, in ascending order, that minimize the padding of sequences of these lengths."""
    ends = np.unique(-(-lengths // MULTIPLE) * MULTIPLE)
    below = np.searchsorted(np.sort(lengths), ends, side="right")
    # tokens[j]: tokens with the best buckets whose widest is ends[j]. Each round adds one bucket.
    tokens = ends * below
    chosen = [[int(end)] for end in ends]
    for _ in range(min(at_most, len(ends)) - 1):
        # [i, j]: the best buckets up to ends[i], and one more from there to ends[j].
        candidates = tokens[:, None] + ends * np.maximum(below - below[:, None], 0)
        candidates[np.tril_indices(len(ends))] = np.iinfo(np.int64).max
        best = candidates.argmin(axis=0)
        better = candidates.min(axis=0) < tokens
        chosen = [[*chosen[best[j]], int(ends[j])] if better[j] else chosen[j] for j in range(len(ends))]
        tokens = np.where(better, candidates.min(axis=0), tokens)
    return chosen[-1]


def in_batches(
    buckets: "NDArray[np.integer[Any]]", batch: int, generator: "np.random.Generator | None" = None
) -> "NDArray[np.int64]":
    """Return the places of all examples in whole batches of one bucket each, shuffled if `generator` is given.

    `buckets` has each example's bucket, 0 for the shortest. A place is `bucket * len(buckets) + row`, with the bucket
    that the row's batch is padded to, which may be wider than the row's own.
    """
    count = len(buckets)
    batches: list[NDArray[np.int64]] = []
    left = np.empty(0, np.int64)
    for bucket in range(int(buckets.max()) + 1):
        rows = np.concatenate([left, np.flatnonzero(buckets == bucket)])
        if generator is not None:
            rows = generator.permutation(rows)
        whole = len(rows) - len(rows) % batch
        batches.append(rows[:whole] + bucket * count)
        left = rows[whole:]
    if len(left):
        others = np.setdiff1d(np.arange(count), left)
        if generator is not None:
            others = generator.permutation(others)
        filled = np.resize(np.concatenate([left, others]), batch)
        batches.append(filled + int(buckets.max()) * count)
    together = np.concatenate(batches).reshape(-1, batch)
    return (generator.permutation(together) if generator is not None else together).ravel()


MAX_UNCUT = 10_000
"""Maximum number of examples of each part that are encoded again, to count the tokens that truncation removes."""

_EVALUATION_TEXTS = "eval.texts.jsonl"


class Prepared(BaseModel):
    """The examples that one rank prepared for all ranks of its node."""

    folder: Path
    class_names: list[str]
    problem: Problem = "single-label"
    train_examples: int
    eval_examples: int
    widths: list[int] = []
    """Widths, in tokens, to which sequences are padded, ascending. Empty until they are chosen."""
    longest: int
    """Tokens of the longest example before truncation to max_length."""
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
        """Return these examples with `number` widths for all batches, chosen to minimize padding."""
        parts = ("train", "eval") if self.train_examples else ("eval",)
        lengths = np.concatenate([_lengths(self.folder, part) for part in parts])
        widths = [min(width, max_length) for width in bucket_widths(lengths, at_most=number)]
        summary = self.summary.model_copy(update={"length_buckets": len(widths)})
        return self.model_copy(update={"widths": widths, "summary": summary})

    def evaluation_texts(self) -> Iterator[dict[str, str]]:
        """Yield each held-out example in order: its `text`, and its `pair` if it has one."""
        with (self.folder / _EVALUATION_TEXTS).open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def prepare(
    names: list[str],
    parts: dict[str, Examples],
    *,
    tokenizer: Any,
    max_length: int,
    folder: Path,
    problem: Problem = "single-label",
) -> Prepared:
    """Tokenize the examples of both parts (`train`, `eval`), or of `eval` alone, into .npy files in `folder`."""
    if tokenizer.pad_token_id is None:
        raise UsageError("the model's tokenizer has no padding token", next_step="add one and save the tokenizer again")
    folder.mkdir(parents=True, exist_ok=True)
    # The launcher disables this for ranks (jobs.container.launch); this rank works alone and may use all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    lengths, uncut = {}, {}
    special: Counter[str] = Counter()
    for part, examples in parts.items():
        columns, lengths[part] = _encode(examples, tokenizer, max_length)
        special += _count_special(columns["input_ids"], examples, tokenizer)
        uncut[part] = _uncut_lengths(examples, tokenizer, lengths[part], max_length)
        for column, flat in columns.items():
            _save(folder / f"{part}.{column}.npy", flat)
        _save(folder / f"{part}.lengths.npy", lengths[part])
        np.save(folder / f"{part}.labels.npy", _label_array(examples.labels, names, problem))
    _write_texts(parts["eval"], folder / _EVALUATION_TEXTS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    found = _summary(names, parts, uncut, max_length)
    found.problem = problem
    if special:
        shown = ", ".join(f"{count:,} {token}" for token, count in special.items())
        found.table_warnings.append(f"texts contain special tokens, which the tokenizer encodes as such: {shown}")
    return Prepared(
        folder=folder,
        class_names=names,
        problem=problem,
        train_examples=len(parts.get("train", ())),
        eval_examples=len(parts["eval"]),
        longest=int(max(lengths.max() for lengths in uncut.values())),
        summary=found,
        padding_token=tokenizer.pad_token_id,
        padding_type=tokenizer.pad_token_type_id,
        padded_on=tokenizer.padding_side,
    )


def _label_array(labels: Sequence[Any], names: Sequence[str], problem: Problem) -> "NDArray[Any]":
    """Return class numbers, for several classes a row of zeros and ones per example, or a regression's numbers."""
    if problem == "regression":
        return np.asarray(labels, dtype=np.float64)
    if problem == "single-label":
        return np.asarray(labels, dtype=np.int64)
    rows = np.zeros((len(labels), len(names)), dtype=np.uint8)
    for row, numbers in enumerate(labels):
        rows[row, numbers] = 1
    return rows


_SPECIAL = ("bos_token", "eos_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Excludes the unknown token, which replaces unknown characters, and added tokens, which texts contain on purpose."""


def _count_special(ids: "NDArray[np.int32]", examples: Examples, tokenizer: Any) -> Counter[str]:
    """Count the special tokens within texts, without those that the tokenizer puts around each text."""
    empty = Counter(tokenizer([""], None if examples.pairs is None else [""])["input_ids"][0])
    tokens = {getattr(tokenizer, name) for name in _SPECIAL} - {None, tokenizer.unk_token}
    numbers = {token: tokenizer.convert_tokens_to_ids(token) for token in sorted(tokens)}
    # Unary `+` drops counts of zero and less.
    return +Counter(
        {
            token: int(np.count_nonzero(ids == number)) - len(examples) * empty[number]
            for token, number in numbers.items()
        }
    )


def _save(path: Path, values: "NDArray[np.integer[Any]]") -> None:
    """Save numbers in the smallest type that holds them: two bytes for an id of BERT's vocabulary."""
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
    """Return each example's number of tokens before truncation.

    Only examples that may have been truncated are encoded again. If there are more than MAX_UNCUT, a sample of them
    stands for all.
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
    """Return the token ids (and types) of all examples, concatenated, and the length of each example."""
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
    """A part of the prepared examples, from which a DataLoader reads whole batches directly from the files.

    Items are addressed by the places that `in_batches` returns. A place includes the width of its batch.
    """

    def __init__(self, prepared: Prepared, part: str) -> None:
        self._prepared = prepared
        self._flat = {
            column: np.load(path, mmap_mode="r")
            for column in ("input_ids", "token_type_ids")
            if (path := prepared.folder / f"{part}.{column}.npy").exists()
        }
        self.labels = np.load(prepared.folder / f"{part}.labels.npy")
        # A loss of several classes or of a number needs labels of the logits' type.
        self._label_type = np.int64 if prepared.problem == "single-label" else np.float32
        self.lengths = _lengths(prepared.folder, part)
        self._starts = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def buckets(self) -> "NDArray[np.int64]":
        """For each example, the index of the narrowest width that holds it."""
        buckets: NDArray[np.int64] = np.searchsorted(np.asarray(self._prepared.widths), self.lengths)
        return buckets

    @property
    def padding(self) -> dict[str, int]:
        """The padding value of each column."""
        return {"input_ids": self._prepared.padding_token, "token_type_ids": self._prepared.padding_type}

    def tokens(self, rows: "NDArray[np.int64]") -> dict[str, "NDArray[np.integer[Any]]"]:
        """Return each column's values of these examples, concatenated."""
        spans = [
            slice(start, start + length) for start, length in zip(self._starts[rows], self.lengths[rows], strict=True)
        ]
        return {column: np.concatenate([flat[span] for span in spans]) for column, flat in self._flat.items()}

    def shapes(self, batch: int) -> tuple[list[int], float]:
        """Return the widths of batches of this size, and the share of their tokens that is padding."""
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
        batch = {"attention_mask": mask.astype(np.int64), "labels": self.labels[rows].astype(self._label_type)}
        for column, tokens in self.tokens(rows).items():
            batch[column] = np.full(mask.shape, self.padding[column])
            batch[column][mask] = tokens
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    @staticmethod
    def collate(batch: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return the batch as `__getitems__` made it."""
        return batch


class InBatches:
    """Examples for evaluation, each batch of one width. Some examples occur twice to fill the last batch."""

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
        """Return the results of an evaluation in the order of the examples, one for each."""
        _, first = np.unique(self._places % len(self._examples), return_index=True)
        return results[first]
