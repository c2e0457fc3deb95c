r"""Train a WordPiece vocabulary on a sample of a corpus, and save a tokenizer for `AutoTokenizer.from_pretrained`.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=1 train-tokenizer --corpus=s3://…/artifacts/corpus-…

The same corpus, options and seed give the same vocabulary. Its fit is measured on held-out text: with fewer tokens per
byte, a sequence holds more text.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.data import corpus_files
from jobs.container.data.artifacts import TOKENIZER_KIND, Builder, OpenArtifact, open_artifact
from jobs.container.data.tokenizer import SPECIAL, HuggingFace, train_wordpiece
from jobs.container.hub import push_artifact
from jobs.container.kinds.artifact_job import JobMetrics
from jobs.container.rank import Rank, run
from jobs.core.errors import UsageError
from jobs.spec.kinds.train_tokenizer import TrainTokenizer

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

KIND = TOKENIZER_KIND
VERSION = 1

MEASURED_BYTES = 16 << 20
"""Maximum held-out text to measure a vocabulary on, in equal parts from all shards."""

AUTO_FRACTION = 0.1
AUTO_LEAST_BYTES = 16_000_000
"""`sample_fraction: auto` takes this fraction of a corpus, but at least this many bytes. Held-out text then needs 0.48
% more tokens than with a vocabulary from all of 125 MB, and 0.18 % more than with one from all of 27 MB. With a tenth
of the 27 MB it needed 3.13 % more (python -m tests.benchmarks.vocabulary_sample)."""

_BATCH_BYTES = 4 << 20


def train_tokenizer(rank: Rank, arguments: TrainTokenizer) -> None:
    """Produce the tokenizer, unless it exists."""
    s3 = object_store.connect()
    corpus = open_artifact(arguments.corpus, kind=corpus_files.KIND, s3=lambda: s3, scratch=rank.scratch)
    builder = Builder(
        s3,
        rank.run,
        kind=KIND,
        version=VERSION,
        options=arguments.model_dump(exclude={"corpus", *arguments.CHANGEABLE}),
        inputs={"corpus": corpus.manifest.fingerprint},
    )
    if not builder.existing():
        _produce(rank, arguments, corpus, builder, s3)
    push_artifact(builder.location, kind=KIND, arguments=arguments, run=rank.run, s3=s3, scratch=rank.scratch)


def _produce(rank: Rank, arguments: TrainTokenizer, corpus: OpenArtifact, builder: Builder, s3: "S3Client") -> None:
    metrics = JobMetrics(rank, s3)
    started = time.monotonic()
    sample = _sampled(rank, arguments, corpus, metrics)
    sampled_at = time.monotonic()
    tokenizer = train_wordpiece(
        lambda: corpus_files.batches(corpus_files.documents(sample.path), at_most_bytes=_BATCH_BYTES),
        size=arguments.vocabulary_size,
        lowercase=arguments.lowercase,
        max_characters=arguments.max_characters,
    )
    trained_at = time.monotonic()
    size = tokenizer.get_vocab_size()
    if size < arguments.vocabulary_size:
        log.warning(
            "warning: the sample yields only %s tokens, not %s; a larger sample_fraction may yield more",
            size,
            arguments.vocabulary_size,
        )
    result = {
        "vocabulary_size": size,
        "sample_documents": sample.documents,
        "sample_bytes": sample.text_bytes,
        **_measured(tokenizer, sample.held_out),
    }
    folder = rank.scratch / "tokenizer"
    _save(tokenizer, folder, arguments)
    for name in object_store.files_below(folder):
        builder.put_file(folder / name, name)
    builder.finish(result)
    seconds = {
        "sampling_seconds": round(sampled_at - started, 3),
        "training_seconds": round(trained_at - sampled_at, 3),
    }
    metrics.result(1, {**result, **seconds})


def sample_fraction(arguments: TrainTokenizer, text_bytes: int) -> float:
    """Return the fraction of a corpus of `text_bytes` that the vocabulary is trained on."""
    if arguments.sample_fraction != "auto":
        return arguments.sample_fraction
    return min(1.0, max(AUTO_FRACTION, AUTO_LEAST_BYTES / max(1, text_bytes)))


@dataclass(frozen=True)
class _Sample:
    """The sample to train a vocabulary on, and the held-out text to measure it on."""

    path: Path
    documents: int
    text_bytes: int
    held_out: list[str]


def _sampled(rank: Rank, arguments: TrainTokenizer, corpus: OpenArtifact, metrics: JobMetrics) -> _Sample:
    """Sample every shard into one local file, and held-out texts. Raises UsageError if the sample is empty."""
    path = rank.scratch / "sample.txt"
    fraction = sample_fraction(arguments, corpus.manifest.count("text_bytes"))
    held_out: list[str] = []
    documents = text_bytes = 0
    shards = corpus_files.shards(corpus.manifest.files)
    with path.open("wb") as stream:
        names = [corpus_files.file_name(part, shard) for shard in shards for part in corpus_files.SPLITS]
        for number, (name, file) in enumerate(corpus.each_file(names)):
            if name.startswith(corpus_files.HELD_OUT):
                some = corpus_files.sample(file, 1.0, seed=[0], at_most_bytes=max(1, MEASURED_BYTES // len(shards)))
                held_out += [document.decode() for document in some]
                continue
            for document in corpus_files.sample(file, fraction, seed=[arguments.seed, number]):
                stream.write(document + corpus_files.END)
                documents += 1
                text_bytes += len(document)
            metrics.show(number // 2 + 1, len(shards), f"shards, {text_bytes} bytes sampled")
    if not documents:
        raise UsageError(
            f"none of the corpus's {corpus.manifest.count('documents')} documents was sampled with sample_fraction "
            f"{fraction:g}",
            next_step="raise sample_fraction",
        )
    log.info(
        "sample: %s documents, %s bytes, from %s shards (%.1f %% of the corpus%s)",
        documents,
        text_bytes,
        len(shards),
        100 * fraction,
        ", by sample_fraction: auto" if arguments.sample_fraction == "auto" else "",
    )
    return _Sample(path, documents, text_bytes, held_out)


def _measured(tokenizer: Any, texts: list[str]) -> dict[str, Any]:
    """Return how well the vocabulary fits held-out text."""
    ids = HuggingFace(tokenizer).encode([text.encode() for text in texts])
    tokens = len(ids) - 2 * len(texts)  # without [CLS] and [SEP]
    text_bytes = sum(len(text.encode()) for text in texts)
    return {
        "held_out_bytes": text_bytes,
        "held_out_tokens": tokens,
        "held_out_tokens_per_byte": tokens / text_bytes,
        "held_out_unknown_fraction": float((ids == SPECIAL.index("[UNK]")).sum()) / max(1, tokens),
    }


def _save(tokenizer: Any, folder: Path, arguments: TrainTokenizer) -> None:
    """Save the tokenizer with `save_pretrained`, and check that the saved tokenizer gives the same ids."""
    from transformers import AutoTokenizer, BertTokenizerFast

    BertTokenizerFast(
        tokenizer_object=tokenizer,
        do_lower_case=arguments.lowercase,
        model_max_length=arguments.model_max_length,
    ).save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in ("Some text, Ünïcode 漢字 [MASK].", "café İstanbul ΟΔΟΣ"):
        if tokenizer.encode(text).ids != loaded.backend_tokenizer.encode(text).ids:
            raise AssertionError(f"the saved tokenizer gives different ids for {text!r}")


if __name__ == "__main__":
    run(train_tokenizer, TrainTokenizer)
