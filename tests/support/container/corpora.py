"""Real text that is always available, the artifacts made of it, and the three jobs that prepare pre-training."""

import json
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs.container.channel import RankStatus
from jobs.container.data.artifacts import OpenArtifact, open_artifact
from jobs.container.data.corpus_files import documents
from jobs.container.data.packed_tokens import Split
from jobs.container.kinds.prepare_corpus import prepare
from jobs.container.kinds.tokenize import tokenize
from jobs.container.kinds.train_tokenizer import train_tokenizer
from jobs.container.rank import Rank
from jobs.core.artifact import Manifest
from jobs.core.locations import S3Location
from jobs.spec.kinds.prepare_corpus import PrepareCorpus
from jobs.spec.kinds.tokenize import Tokenize
from jobs.spec.kinds.train_tokenizer import TrainTokenizer
from tests.support.container.reviews import write_jsonl
from tests.support.running_emulator import environment_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@cache
def paragraphs(count: int) -> Sequence[str]:
    """Return descriptions of installed packages: English prose, code, lists and special characters."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/METADATA")):
        text = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[2]
        found.update({part.strip(): None for part in text.split("\n\n") if len(part.strip()) > 40})
    assert len(found) >= count, "there is less text in the installed packages than the test needs"
    return list(found)[:count]


def put_jsonl(path: Path, texts: Sequence[Any], *, column: str = "text") -> Path:
    return write_jsonl(path, [{"id": number, column: text} for number, text in enumerate(texts)])


@dataclass
class Workshop:
    """Runs jobs one after the other, each as a separate run."""

    s3: "S3Client"
    endpoint: str
    folder: Path
    bucket: str = "runs"
    runs: list[S3Location] = field(default_factory=list)

    def corpus(self, **arguments: Any) -> OpenArtifact:
        self.run(prepare, PrepareCorpus(**arguments))
        return self.made("corpus")

    def tokenizer(self, corpus: OpenArtifact, **arguments: Any) -> OpenArtifact:
        self.run(train_tokenizer, TrainTokenizer(corpus=corpus.location, **arguments))
        return self.made("tokenizer")

    def packed(self, corpus: OpenArtifact, tokenizer: OpenArtifact | SimpleNamespace, **arguments: Any) -> OpenArtifact:
        self.run(tokenize, Tokenize(corpus=corpus.location, tokenizer=tokenizer.location, **arguments))
        return self.made("packed-tokens")

    def run(self, job: Callable[[Rank, Any], None], arguments: Any) -> None:
        number = len(self.runs)
        self.attempt(job, arguments, S3Location(self.bucket, f"{self.folder.name}/run{number}-20260102-030405-0a1b/"))

    def again(self, job: Callable[[Rank, Any], None], arguments: Any) -> None:
        """Run another attempt of the newest run."""
        self.attempt(job, arguments, self.runs[-1])

    def attempt(self, job: Callable[[Rank, Any], None], arguments: Any, run: S3Location) -> None:
        self.runs.append(run)
        self.scratch.mkdir()
        rank = Rank(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            node=0,
            nnodes=1,
            run=self.runs[-1],
            scratch=self.scratch,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("AWS_PROFILE", raising=False)
            # The jobs enable it.
            patch.setenv("TOKENIZERS_PARALLELISM", "false")
            for name, value in environment_of(self.endpoint).items():
                patch.setenv(name, value)
            job(rank, arguments)

    @property
    def scratch(self) -> Path:
        """Return the scratch folder of the newest run."""
        return self.folder / f"scratch-{len(self.runs)}"

    def made(self, kind: str) -> OpenArtifact:
        """Return the artifact of the newest run."""
        return open_artifact(
            str(self.runs[-1]), kind=kind, s3=lambda: self.s3, scratch=self.folder / f"read-{len(self.runs)}"
        )

    def result(self) -> Mapping[str, Any]:
        """Return the result of the newest run, as in its receipt."""
        return RankStatus.read(self.scratch).result

    def metrics(self) -> list[dict[str, Any]]:
        place = self.runs[-1] / "metrics.jsonl"
        body = self.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read()
        return [json.loads(line) for line in body.splitlines()]

    def delete(self, artifact: OpenArtifact, *names: str) -> None:
        """Delete files of an artifact, their records, and the manifest, as if the job had been interrupted."""
        place = S3Location.parse(artifact.location)
        for name in ["manifest.json", *names, *(f"done/{name}.json" for name in names)]:
            self.s3.delete_object(Bucket=place.bucket, Key=(place / name).key)

    def modified(self, artifact: OpenArtifact) -> dict[str, Any]:
        """Return the modification time of each file of an artifact."""
        place = S3Location.parse(artifact.location)
        listed = self.s3.list_objects_v2(Bucket=place.bucket, Prefix=f"{place.key.rstrip('/')}/")["Contents"]
        return {item["Key"].removeprefix(place.key).lstrip("/"): item["LastModified"] for item in listed}


def texts_of(artifact: OpenArtifact, split: Split = "train") -> list[str]:
    """Return the documents of a corpus, in order."""
    names = sorted(name for name in artifact.manifest.files if name.startswith(split))
    folder = artifact.download(names)
    return [document.decode() for name in names for document in documents(folder / name)]


def contents(manifest: Manifest) -> dict[str, str]:
    return {name: file.sha256 for name, file in manifest.files.items()}
