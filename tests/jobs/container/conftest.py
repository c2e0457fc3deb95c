"""An S3 over HTTP in a separate process, a tiny model, and runs of the real launcher."""

import functools
import itertools
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest

from jobs.aws import s3 as object_store
from jobs.container.data.artifacts import OpenArtifact
from jobs.container.data.tokenizer import ODD_TEXTS
from jobs.core.locations import S3Location
from tests.support.container import image_environment, s3_server
from tests.support.container.corpora import Workshop, paragraphs, put_jsonl
from tests.support.container.hub_server import Hub, running_hub
from tests.support.container.launching import NewRun, Run, environment_of
from tests.support.container.places import BUCKET, Place
from tests.support.container.recipes import Flags, finetuning, longer_finetuning, packed_sentences, pretraining
from tests.support.container.reviews import save_tiny_bert
from tests.support.made_once import made_once
from tests.support.running_emulator import Emulator

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server.s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3(s3_endpoint: str) -> Iterator["S3Client"]:
    with s3_server.s3_client(s3_endpoint) as client:
        yield client


@pytest.fixture(scope="session")
def put(s3: "S3Client") -> Callable[[Path, str], str]:
    return functools.partial(s3_server.put, s3)


@pytest.fixture(scope="session")
def emulated_s3(emulator: Emulator) -> "S3Client":
    """The client of jobs, connected to the S3 server, with a bucket for inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_PROFILE", raising=False)
        for name, value in {**emulator.credentials.environment, "AWS_ENDPOINT_URL": emulator.endpoint}.items():
            patch.setenv(name, value)
        patch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials that it was created with
        client = object_store.connect()
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture
def workshop(s3: "S3Client", s3_endpoint: str, tmp_path: Path) -> Workshop:
    """The jobs that prepare pre-training, run in this process."""
    return Workshop(s3, s3_endpoint, tmp_path)


@pytest.fixture(scope="session")
def real_corpus(s3: "S3Client", s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> OpenArtifact:
    """A corpus of real paragraphs, unusual texts and one long document: three shards, a tenth held out."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [*paragraphs(250), *ODD_TEXTS, *paragraphs(300)[250:], " ".join(paragraphs(100))]
    path = put_jsonl(folder / "corpus.jsonl", texts)
    return Workshop(s3, s3_endpoint, folder).corpus(data=[str(path)], held_out_fraction=0.1, shard_bytes=30_000)


@pytest.fixture(scope="session")
def real_tokenizer(
    real_corpus: OpenArtifact, s3: "S3Client", s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> OpenArtifact:
    """A vocabulary of 1,500 tokens."""
    workshop = Workshop(s3, s3_endpoint, tmp_path_factory.mktemp("tokenizer"))
    return workshop.tokenizer(real_corpus, vocabulary_size=1500, sample_fraction=1)


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(tmp_path, None, None)


@pytest.fixture
def remote(tmp_path: Path, emulated_s3: "S3Client") -> Place:
    return Place(tmp_path, tmp_path.name, emulated_s3)


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest) -> Place:
    """A local folder, then S3."""
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("model") / "tiny-bert")


@pytest.fixture(scope="session")
def recipe(tiny_bert: Path, s3: "S3Client", tmp_path_factory: pytest.TempPathFactory) -> Flags:
    return finetuning(s3, tiny_bert, tmp_path_factory.mktemp("data"))


@pytest.fixture
def long_recipe(recipe: Flags, s3: "S3Client", tmp_path: Path) -> Flags:
    return longer_finetuning(s3, recipe, tmp_path, tmp_path.name)


@pytest.fixture(scope="session")
def packed(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_sentences(tiny_bert, tmp_path_factory.mktemp("packed") / "tokens")


@pytest.fixture(scope="session", name="pretraining")
def pretraining_flags(packed: Path, s3: "S3Client") -> Flags:
    return pretraining(s3, packed)


@pytest.fixture(scope="session")
def job_python() -> Path:
    """The interpreter of jobs: the tests' own, or one with the packages of the tested release's cpu image."""
    chosen = image_environment.chosen_release()
    return image_environment.python_of(chosen) if chosen else Path(sys.executable)


@pytest.fixture(scope="session")
def gaudi_python() -> Path:
    """An interpreter with the packages of the gaudi image's lock file."""
    return image_environment.python_of(image_environment.chosen_release())


@pytest.fixture
def new_run(s3: "S3Client", s3_endpoint: str, job_python: Path, tmp_path: Path) -> Iterator[NewRun]:
    runs: list[Run] = []
    numbers = itertools.count(1)

    def new() -> Run:
        # Unique on this machine, because the location identifies the run's processes when they are killed.
        name = f"{tmp_path.name}-{next(numbers)}-{uuid.uuid4().hex}"
        location = S3Location("runs", f"research/{name}-20260102-030405-0a1b/")
        run = Run(s3, location, environment_of(s3_endpoint), tmp_path / "scratch", job_python)
        runs.append(run)
        return run

    yield new
    for run in runs:
        for process in run.processes():
            process.kill()
        run.wait_until_gone()


@pytest.fixture(scope="session")
def uninterrupted(
    recipe: Flags, s3: "S3Client", s3_endpoint: str, job_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Run]:
    """Trains once on each number of ranks and keeps all checkpoints, for tests that only read the result."""

    @functools.cache
    def trained(nproc: int) -> Run:
        def run_at(location: str) -> Run:
            return Run(s3, S3Location.parse(location), environment_of(s3_endpoint), scratch, job_python)

        def train(folder: Path) -> None:
            location = f"s3://runs/research/whole-{uuid.uuid4().hex}-20260102-030405-0a1b/"
            run = run_at(location)
            run.attempt(*recipe, "--keep-checkpoints=10", nproc=nproc)
            run.download("", folder / "files")
            (folder / "location.txt").write_text(location)

        scratch = tmp_path_factory.mktemp("whole") / "scratch"
        made = made_once(tmp_path_factory, f"training-of-{nproc}", train)
        run = run_at((made / "location.txt").read_text())
        files = made / "files"
        # Each test process has its own S3.
        for path in (path for path in files.rglob("*") if path.is_file()):
            run.write(f"{path.relative_to(files)}", path.read_bytes())
        return run

    return trained


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def run(new_run: NewRun) -> Run:
    return new_run()
