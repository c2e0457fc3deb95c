r"""Encode a corpus as token ids, or take the ids of a table, packed into sequences of one length, shard by shard.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=1 tokenize \
        --corpus=s3://…/artifacts/corpus-… --tokenizer=s3://…/artifacts/tokenizer-…

The ids are those of Hugging Face's tokenizer, whichever library computes them. jobs.container.data.packed_tokens
describes the files. Shards are downloaded, encoded and uploaded one by one, so that neither memory nor disk grows with
the corpus, and a restarted job produces only the missing shards.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.aws import s3 as object_store
from jobs.container.data import corpus_files, packed_tokens
from jobs.container.data.artifacts import Builder, OpenArtifact, open_artifact
from jobs.container.data.packed_tokens import CorpusPacking, Index, PackedFile
from jobs.container.data.token_table import shards
from jobs.container.data.tokenizer import SPECIAL, TokenizerFiles, load_tokenizer, tokenizer_files
from jobs.container.hub import push_artifact
from jobs.container.kinds.artifact_job import UPLOADS, JobMetrics
from jobs.container.models.pretrained import explained_loading
from jobs.container.rank import Rank, run
from jobs.core.artifact import ArtifactFile
from jobs.core.errors import UsageError
from jobs.core.words import counted
from jobs.data_checks.model_files import TOKENIZER
from jobs.spec.kinds.tokenize import Tokenize

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")


def tokenize(rank: Rank, arguments: Tokenize) -> None:
    """Produce the packed tokens, unless they exist."""
    s3 = object_store.connect()
    tokenizer = tokenizer_files(arguments.tokenizer, s3=lambda: s3, scratch=rank.scratch)
    corpus = None
    inputs: dict[str, Any] = {"tokenizer": tokenizer.identity}
    options: dict[str, Any] = {"sequence_length": arguments.sequence_length}
    if arguments.token_table is not None:
        inputs["token_table"] = corpus_files.input_identity(arguments.token_table, s3=lambda: s3)
        options["held_out_fraction"] = arguments.held_out_fraction
    else:
        corpus = open_artifact(str(arguments.corpus), kind=corpus_files.KIND, s3=lambda: s3, scratch=rank.scratch)
        inputs["corpus"] = corpus.manifest.fingerprint
    builder = Builder(
        s3, rank.run, kind=packed_tokens.KIND, version=packed_tokens.VERSION, options=options, inputs=inputs
    )
    if not builder.existing():
        if corpus is not None:
            _Tokenization(rank, arguments, corpus=corpus, tokenizer=tokenizer, builder=builder, s3=s3).make()
        else:
            _pack_table(rank, arguments, tokenizer=tokenizer, builder=builder, s3=s3)
    push_artifact(
        builder.location, kind=packed_tokens.KIND, arguments=arguments, run=rank.run, s3=s3, scratch=rank.scratch
    )


class _Tokenization:
    """Tokenizes one corpus."""

    def __init__(
        self,
        rank: Rank,
        arguments: Tokenize,
        *,
        corpus: OpenArtifact,
        tokenizer: TokenizerFiles,
        builder: Builder,
        s3: "S3Client",
    ) -> None:
        self._corpus = corpus
        self._builder = builder
        self._sequence_length = arguments.sequence_length
        self._packed = rank.scratch / "packed"
        self._packed.mkdir()
        self._tokenizer = tokenizer
        loaded, self._special_ids = _load(tokenizer.folder, arguments.tokenizer)
        self._meaning = _meaning(loaded, self._special_ids, arguments)
        self._special_tokens = {name: loaded.id_to_token(number) for name, number in self._special_ids.items()}
        self._packing = CorpusPacking(
            loaded,
            sequence_length=arguments.sequence_length,
            pad_id=self._special_ids["pad"],
            only_tokenizers=arguments.encoder == "tokenizers",
        )
        done = builder.done_shards()
        filled = [name for name, file in corpus.manifest.files.items() if file.counts["documents"]]
        self._missing = [name for name in filled if _packed_name(name) not in done]
        self._metrics = JobMetrics(rank, s3, done_steps=len(filled) - len(self._missing))
        self._files = len(filled)
        if len(self._missing) < len(filled):
            log.info("start: %s of %s exist already", len(filled) - len(self._missing), counted(len(filled), "file"))

    def make(self) -> None:
        """Produce all missing files, and the index of all files."""
        started = time.monotonic()
        tokens = text_bytes = 0
        uploads: list[Future[ArtifactFile]] = []
        with self._packing as packing, ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload") as pool:
            for number, (name, path) in enumerate(self._corpus.each_file(self._missing), start=1):
                file = packing.pack(path, self._packed / _packed_name(name))
                uploads.append(pool.submit(self._upload, file, self._corpus.manifest.files[name].counts["documents"]))
                while len(uploads) > UPLOADS:
                    uploads.pop(0).result()
                tokens += file.tokens
                text_bytes += self._corpus.manifest.files[name].counts["text_bytes"]
                speed = tokens / (time.monotonic() - started)
                step = self._files - len(self._missing) + number
                self._metrics.step(step, {"tokens": file.tokens, "tokens_per_second": speed})
                self._metrics.show(step, self._files, f"files, {speed:,.0f} tokens/s", at_once=step == self._files)
            for upload in uploads:
                upload.result()
        self._finish(tokens, text_bytes, time.monotonic() - started)

    def _upload(self, file: PackedFile, documents: int) -> ArtifactFile:
        path = self._packed / file.name
        counts = {"sequences": file.sequences, "tokens": file.tokens, "documents": documents}
        counts |= _count_special(path, file.tokens, documents, self._special_ids)
        done = self._builder.put_file(path, counts=counts)
        path.unlink()
        return done

    def _finish(self, new_tokens: int, new_bytes: int, seconds: float) -> None:
        done = self._builder.done_shards()
        result = {
            **_put_index(done, self._builder, self._tokenizer, self._packed, **self._meaning),
            "text_bytes": self._corpus.manifest.count("text_bytes"),
            "special_tokens_in_text": self._special_in_text(done),
        }
        encoder = {"encoder": self._packing.encoder_name, "encoder_reason": self._packing.reason}
        self._builder.finish({**result, **encoder})
        speeds = {
            "seconds": round(seconds, 3),
            "tokens_per_second": new_tokens / seconds if seconds else 0.0,
            "bytes_per_second": new_bytes / seconds if seconds else 0.0,
        }
        self._metrics.result(self._files, {**result, **encoder, **speeds})

    def _special_in_text(self, done: Mapping[str, ArtifactFile]) -> int:
        """Return how often the text of documents contains special tokens, and warn about them."""
        counts = {name: sum(file.counts.get(f"spelled_{name}", 0) for file in done.values()) for name in _COUNTED}
        if any(counts.values()):
            shown = ", ".join(f"{count:,} {self._special_tokens[name]}" for name, count in counts.items() if count)
            log.warning("warning: the text of the corpus contains special tokens, which are encoded as such: %s", shown)
        return sum(counts.values())


def _meaning(tokenizer: Any, special_ids: dict[str, int], arguments: Tokenize) -> dict[str, Any]:
    """Return what an index says about the ids."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return {"sequence_length": arguments.sequence_length, "vocabulary_size": size, "special_ids": special_ids}


def _put_index(
    done: Mapping[str, ArtifactFile], builder: Builder, tokenizer: TokenizerFiles, scratch: Path, **meaning: Any
) -> dict[str, int]:
    """Upload the index and the tokenizer, which are needed to read the files. Returns the counts for the result."""
    index = Index(files={split: _packed_files(done, split) for split in packed_tokens.SPLITS}, **meaning)
    (scratch / packed_tokens.INDEX).write_text(index.model_dump_json(indent=2) + "\n")
    builder.put_file(scratch / packed_tokens.INDEX)
    for name in tokenizer.names:
        builder.put_file(tokenizer.folder / name, f"{packed_tokens.TOKENIZER}{name}")
    return {
        "tokens": index.tokens("train"),
        "sequences": index.sequences("train"),
        "held_out_tokens": index.tokens("held-out"),
        "held_out_sequences": index.sequences("held-out"),
        "sequence_length": index.sequence_length,
        "bytes": sum(file.bytes for name, file in done.items() if name.endswith(".npy")),
    }


def _pack_table(
    rank: Rank, arguments: Tokenize, *, tokenizer: TokenizerFiles, builder: Builder, s3: "S3Client"
) -> None:
    """Produce the packed tokens of a table, shard by shard. A shard is complete once its training file is uploaded."""
    loaded, special_ids = _load(tokenizer.folder, arguments.tokenizer)
    meaning = _meaning(loaded, special_ids, arguments)
    sizes = {"vocabulary_size": meaning["vocabulary_size"], "pad_id": special_ids["pad"]}
    done = {int(name[len("train-") : -len(".npy")]) for name in builder.done_shards() if name.startswith("train-")}
    metrics = JobMetrics(rank, s3, done_steps=len(done))
    fraction, length = arguments.held_out_fraction, arguments.sequence_length
    for number, parts in shards(str(arguments.token_table), done, held_out_fraction=fraction, s3=lambda: s3, **sizes):
        for split in reversed(packed_tokens.SPLITS):
            if any(map(len, parts[split])):
                path = rank.scratch / f"{split}-{number:05d}.npy"
                file = packed_tokens.pack(parts[split], path, sequence_length=length, **sizes)
                builder.put_file(path, counts={"sequences": file.sequences, "tokens": file.tokens})
                path.unlink()
        tokens = sum(map(len, parts["train"]))
        log.info("shard %s: %s training tokens", number, f"{tokens:,}")
        metrics.step(number + 1, {"tokens": tokens})
    files = builder.done_shards()
    result = _put_index(files, builder, tokenizer, rank.scratch, **meaning)
    builder.finish(result)
    metrics.result(len(files), result)


_COUNTED = ("pad", "cls", "sep", "mask")
"""Special tokens whose text in a document is encoded as the token itself, as in Hugging Face's tokenizers. The unknown
token is not counted, because it also replaces unknown characters."""


def _count_special(path: Path, tokens: int, documents: int, ids: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of special tokens in a file's documents, without the two tokens around each."""
    packed = np.load(path, mmap_mode="r").reshape(-1)[:tokens]
    found = {name: int(np.count_nonzero(packed == ids[name])) for name in _COUNTED}
    return {f"spelled_{name}": max(0, n - documents * (name in ("cls", "sep"))) for name, n in found.items()}


def _packed_name(corpus_name: str) -> str:
    return corpus_name.removesuffix(".txt") + ".npy"


def _packed_files(done: Mapping[str, ArtifactFile], part: str) -> list[PackedFile]:
    return [
        PackedFile(name=name, sequences=file.counts["sequences"], tokens=file.counts["tokens"])
        for name, file in sorted(done.items())
        if name.startswith(part) and name.endswith(".npy")
    ]


def _load(folder: Path, location: str) -> tuple[Any, dict[str, int]]:
    """Return a tokenizer and the ids of its special tokens.

    If it does not have BERT's, its class in transformers decides which they are, and how texts are split.
    """
    tokenizer = load_tokenizer(folder / TOKENIZER)
    ids = {token.strip("[]").lower(): tokenizer.token_to_id(token) for token in SPECIAL}
    if None in ids.values():
        from transformers import AutoTokenizer

        with explained_loading(location, "its tokenizer cannot be loaded"):
            loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            tokenizer = loaded.backend_tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = {name: getattr(loaded, f"{name}_token_id") for name in ids}
    if missing := next((name for name in _COUNTED if ids[name] is None), None):
        raise UsageError(
            f"{location}: its tokenizer has no {missing} token",
            next_step="use a tokenizer of train-tokenizer, or of a model that pretrain-mlm takes",
        )
    return tokenizer, {name: number for name, number in ids.items() if number is not None}


if __name__ == "__main__":
    run(tokenize, Tokenize)
