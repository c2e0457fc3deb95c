r"""Gather documents from tables and text files into one corpus, with a held-out split.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=1 prepare-corpus \
        '--data=["s3://…/articles.jsonl", "hf://org/name?split=train"]' '--text-columns=["body", "text"]'

Inputs are streamed, and each shard is uploaded when it is full, so that neither memory nor disk grows with the corpus.
Each shard records its end position in the inputs, so that a restarted job produces only the missing shards.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.container.data import corpus_files
from jobs.container.data.artifacts import Builder
from jobs.container.data.corpus_files import END, SPLITS, Input, Read, document_hash, file_name, is_held_out, split
from jobs.container.hub import push_artifact
from jobs.container.kinds.artifact_job import UPLOADS, JobMetrics
from jobs.container.rank import Rank, run
from jobs.core.artifact import ArtifactFile
from jobs.core.errors import UsageError
from jobs.data_checks.table_rows import BEGINNING, ENCODING_NEXT, At, Broken
from jobs.spec.arguments import TextFormat
from jobs.spec.kinds.prepare_corpus import PrepareCorpus

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

Place = tuple[int, At]
"""The index of an input, and a position in it."""


def prepare(rank: Rank, arguments: PrepareCorpus) -> None:
    """Produce the corpus, unless it exists. Raises UsageError if the inputs have no text."""
    s3 = object_store.connect()
    inputs = [
        Input(
            location=location,
            column=arguments.column(number),
            paragraphs=arguments.text_documents == "paragraphs",
            max_document_bytes=arguments.max_document_bytes,
            s3=lambda: s3,
            text_format=TextFormat.of(arguments),
        )
        for number, location in enumerate(arguments.data)
    ]
    options = arguments.model_dump(exclude={"data", *arguments.CHANGEABLE})
    builder = Builder(
        s3,
        rank.run,
        kind=corpus_files.KIND,
        version=corpus_files.VERSION,
        options=options,
        # A list, because the order of the inputs is the order of the documents.
        inputs={"data": [corpus_files.input_identity(location, s3=lambda: s3) for location in arguments.data]},
    )
    if not builder.existing():
        _Preparation(rank, arguments, inputs, builder, s3).make()
    push_artifact(
        builder.location, kind=corpus_files.KIND, arguments=arguments, run=rank.run, s3=s3, scratch=rank.scratch
    )


class _Preparation:
    """Produces one corpus."""

    def __init__(
        self, rank: Rank, arguments: PrepareCorpus, inputs: list[Input], builder: Builder, s3: "S3Client"
    ) -> None:
        self._arguments = arguments
        self._inputs = inputs
        self._builder = builder
        self._s3 = s3
        self._scratch = rank.scratch
        self._done = builder.done_shards()
        self._sizes = [source.size() for source in inputs]
        self._seen: set[int] | None = set() if arguments.drop_duplicates else None
        """64-bit hashes of all documents read. Any two of 100 million documents collide with a chance of 1 in 3,700."""
        complete = [number for number in range(len(self._done)) if self._recorded(number) is not None]
        self._metrics = JobMetrics(rank, s3, done_steps=len(complete))
        if complete:
            log.info("start: %s shards exist already", len(complete))

    def make(self) -> None:
        """Produce all missing shards. Raises UsageError if there is no text, or if one of the splits is empty."""
        started = time.monotonic()
        place: Place | None = (0, BEGINNING)
        number = new_bytes = 0
        reader: Iterator[tuple[Place, Read]] | None = None
        uploads: list[Future[None]] = []
        with ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload") as pool:
            while place is not None and place[0] < len(self._inputs):
                recorded = self._recorded(number)
                if recorded is not None:
                    place, reader = recorded, None
                    self._remember(number)
                else:
                    reader = reader or self._read(place)
                    place, counts = self._write_shard(number, reader)
                    if counts["read"]:
                        uploads.append(pool.submit(self._upload, number, counts))
                        new_bytes += sum(counts[f"{part} bytes"] for part in SPLITS)
                        self._report(number, place, counts)
                    while len(uploads) > UPLOADS:
                        uploads.pop(0).result()
                number += 1
            for upload in uploads:
                upload.result()
        self._finish(new_bytes, time.monotonic() - started)

    def _recorded(self, number: int) -> Place | None:
        """Return the position in the inputs after a finished shard, or None if the shard is missing."""
        files = [self._done.get(file_name(part, number)) for part in SPLITS]
        if files[0] is None or files[1] is None:
            return None
        counts = files[0].counts
        return counts["next_input"], At(counts["next_offset"], counts["next_line"])

    def _remember(self, number: int) -> None:
        """Add the hashes of a finished shard's documents, to find later duplicates."""
        if self._seen is None:
            return
        for part in SPLITS:
            path = self._scratch / file_name(part, number)
            object_store.download(self._s3, self._builder.location / path.name, path)
            self._seen.update(map(document_hash, corpus_files.documents(path)))
            path.unlink()

    def _read(self, place: Place) -> Iterator[tuple[Place, Read]]:
        for number in range(place[0], len(self._inputs)):
            for read in self._inputs[number].read(place[1] if number == place[0] else BEGINNING):
                yield (number, read.after), read

    def _write_shard(self, number: int, reader: Iterator[tuple[Place, Read]]) -> tuple[Place, Counter[str]]:
        """Write documents to two local files until they fill a shard.

        Returns the position after them, and their counts.
        """
        counts: Counter[str] = Counter()
        place: Place = (len(self._inputs), At())
        with ExitStack() as stack:
            streams = {
                part: stack.enter_context((self._scratch / file_name(part, number)).open("wb")) for part in SPLITS
            }
            for here, read in reader:
                counts["read"] += 1
                counts["cuts"] += read.continues
                for document in self._kept(read.content, counts):
                    hashed = document_hash(document)
                    if self._seen is not None:
                        if hashed in self._seen:
                            counts["duplicates"] += 1
                            continue
                        self._seen.add(hashed)
                    part = SPLITS[is_held_out(hashed, self._arguments.held_out_fraction)]
                    streams[part].write(document + END)
                    counts[f"{part} documents"] += 1
                    counts[f"{part} bytes"] += len(document)
                if (
                    sum(counts[f"{part} bytes"] for part in SPLITS) >= self._arguments.shard_bytes
                    and not read.continues
                ):
                    place = here
                    break
        counts["next_input"], counts["next_offset"], counts["next_line"] = place[0], *place[1]
        return place, counts

    def _kept(self, content: str | Broken, counts: Counter[str]) -> Iterator[bytes]:
        """Yield a document without NULs and surrounding whitespace, split if it is too long."""
        if isinstance(content, Broken):
            if self._arguments.on_broken_text == "error":
                raise UsageError(
                    content.reason,
                    next_step=f"{ENCODING_NEXT}; or set on_broken_text: skip",
                )
            counts["broken"] += 1
            return
        text = content.replace("\0", "").strip()
        if not text:
            counts["empty"] += 1
            return
        pieces = list(split(text.encode(), self._arguments.max_document_bytes))
        counts["cuts"] += len(pieces) - 1
        yield from pieces

    def _upload(self, number: int, counts: Counter[str]) -> None:
        # The training file is uploaded last, because it completes the shard.
        for part in reversed(SPLITS):
            path = self._scratch / file_name(part, number)
            recorded = {"documents": counts[f"{part} documents"], "text_bytes": counts[f"{part} bytes"]}
            if part == corpus_files.TRAIN:
                recorded |= {name: counts[name] for name in (*_DROPPED, "next_input", "next_offset", "next_line")}
            self._builder.put_file(path, counts=recorded)
            path.unlink()

    def _report(self, number: int, place: Place, counts: Counter[str]) -> None:
        documents = sum(counts[f"{part} documents"] for part in SPLITS)
        text_bytes = sum(counts[f"{part} bytes"] for part in SPLITS)
        self._metrics.step(number + 1, {"documents": documents, "bytes": text_bytes})
        done = sum(
            1.0 if index < place[0] else (min(1.0, place[1].offset / size) if index == place[0] and size else 0.0)
            for index, size in enumerate(self._sizes)
        )
        note = f"of the inputs, shard {number}: {documents} documents"
        self._metrics.show(int(100 * done / len(self._sizes)), 100, note)

    def _finish(self, new_bytes: int, seconds: float) -> None:
        files = self._builder.done_shards()
        totals = {part: _totals(files, part) for part in SPLITS}
        self._check(totals)
        train, held_out = totals[corpus_files.TRAIN], totals[corpus_files.HELD_OUT]
        result = {
            "documents": train["documents"],
            "bytes": train["text_bytes"],
            "held_out_documents": held_out["documents"],
            "held_out_bytes": held_out["text_bytes"],
            "shards": sum(name.startswith(corpus_files.TRAIN) for name in files),
            **{f"dropped_{name}" if name != "cuts" else name: train[name] for name in _DROPPED},
        }
        self._builder.finish(result)
        speed = new_bytes / seconds if seconds else 0.0
        self._metrics.show(100, 100, "of the inputs", at_once=True)
        self._metrics.result(result["shards"], {**result, "seconds": round(seconds, 3), "bytes_per_second": speed})

    def _check(self, totals: Mapping[str, Counter[str]]) -> None:
        """Raise UsageError if there is no text, or if one of the splits is empty."""
        documents = sum(counts["documents"] for counts in totals.values())
        if not documents:
            dropped = totals[corpus_files.TRAIN]
            raise UsageError(
                f"{', '.join(self._arguments.data)}: no text ({dropped['empty']} documents are empty, "
                f"{dropped['broken']} broken)",
                next_step="check the files, or the step that wrote them",
            )
        for part in SPLITS:
            if not totals[part]["documents"]:
                raise UsageError(
                    f"none of {documents} documents is in the split '{part}', with held_out_fraction "
                    f"{self._arguments.held_out_fraction}",
                    next_step=f"{'raise' if part == corpus_files.HELD_OUT else 'lower'} held_out_fraction",
                )


_DROPPED = ("empty", "broken", "duplicates", "cuts")
"""Counts of documents that were dropped, and `cuts`, the number of cuts in long documents."""


def _totals(files: Mapping[str, ArtifactFile], part: str) -> Counter[str]:
    """Return the sums of the counts of a split's files."""
    records = [file.counts for name, file in files.items() if name.startswith(part)]
    return Counter(
        {name: sum(counts.get(name, 0) for counts in records) for name in ("documents", "text_bytes", *_DROPPED)}
    )


if __name__ == "__main__":
    run(prepare, PrepareCorpus)
