"""An S3 over HTTP in a process of its own, a tiny model, and runs of the real launcher."""

import itertools
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest

from infra.emulator import CREDENTIALS
from jobs.runs import S3Location
from jobs.train import s3 as object_store
from jobs.train.artifacts import OpenArtifact
from jobs.train.odd_texts import ODD_TEXTS
from tests.conftest import EmbeddedAws
from tests.jobs.train import image_environment
from tests.jobs.train.corpora import Workshop, paragraphs, put_jsonl
from tests.jobs.train.launching import NewRun, Run, environment_of
from tests.jobs.train.packing import publish, save_packed, sentences
from tests.jobs.train.places import BUCKET, Place
from tests.jobs.train.reviews import reviews, save_tiny_bert, write_jsonl

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

SERVER = """
import signal
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
signal.sigwait({signal.SIGTERM})
"""


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    # The log goes nowhere: a pipe that nobody reads would stop the server when it is full.
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    yield f"http://localhost:{port}"
    server.terminate()
    server.wait(30)
    server.stdout.close()


@pytest.fixture(scope="session")
def s3(s3_endpoint: str) -> Iterator["S3Client"]:
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    for bucket in ("data", "runs"):
        client.create_bucket(Bucket=bucket)
    yield client
    client.close()


@pytest.fixture(scope="session")
def put(s3: "S3Client") -> Callable[[Path, str], str]:
    """Uploads a file, or a folder's files, to the data bucket; gives its s3:// location."""

    def upload(path: Path, key: str) -> str:
        for file in path.iterdir() if path.is_dir() else [path]:
            s3.upload_file(str(file), "data", f"{key}/{file.name}" if path.is_dir() else key)
        return f"s3://data/{key}"

    return upload


@pytest.fixture(scope="session")
def embedded_s3(embedded_aws: EmbeddedAws) -> "S3Client":
    """The client that jobs use, connected to the embedded AWS, with a bucket for inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_PROFILE", raising=False)
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": embedded_aws.endpoint}.items():
            patch.setenv(name, value)
        client = object_store.connect()
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture
def workshop(s3: "S3Client", s3_endpoint: str, tmp_path: Path) -> Workshop:
    """Jobs that prepare pre-training, run in this process."""
    return Workshop(s3, s3_endpoint, tmp_path)


@pytest.fixture(scope="session")
def real_corpus(s3: "S3Client", s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> OpenArtifact:
    """Of real paragraphs, odd texts and one long document: three shards, a tenth held out."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [*paragraphs(250), *ODD_TEXTS, *paragraphs(300)[250:], " ".join(paragraphs(100))]
    path = put_jsonl(folder / "corpus.jsonl", texts)
    return Workshop(s3, s3_endpoint, folder).corpus(data=[str(path)], held_out_fraction=0.1, shard_bytes=30_000)


@pytest.fixture(scope="session")
def real_tokenizer(
    real_corpus: OpenArtifact, s3: "S3Client", s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> OpenArtifact:
    """Of 1,500 tokens."""
    workshop = Workshop(s3, s3_endpoint, tmp_path_factory.mktemp("tokenizer"))
    return workshop.tokenizer(real_corpus, vocabulary_size=1500, sample_fraction=1)


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(tmp_path, None, None)


@pytest.fixture
def remote(tmp_path: Path, embedded_s3: "S3Client") -> Place:
    return Place(tmp_path, tmp_path.name, embedded_s3)


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest) -> Place:
    """Here, then on S3."""
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("model") / "tiny-bert")


@pytest.fixture(scope="session")
def recipe(
    tiny_bert: Path, put: Callable[[Path, str], str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    """Flags of a fine-tuning of 48 steps with a checkpoint every 8, on S3's model and data.

    The held-out examples divide by neither the batch nor the ranks, the epochs (of 12 steps) end in the middle of a
    batch, and most checkpoints lie in the middle of an epoch.
    """
    folder = tmp_path_factory.mktemp("data")
    train = put(write_jsonl(folder / "train.jsonl", reviews(188, seed=1)), "reviews/train.jsonl")
    held_out = put(write_jsonl(folder / "eval.jsonl", reviews(37, seed=2)), "reviews/eval.jsonl")
    return (
        f"--model={put(tiny_bert, 'models/tiny-bert')}",
        f"--train-data={train}",
        f"--eval-data={held_out}",
        "--max-length=16",
        "--epochs=4",
        "--learning-rate=0.003",
        "--global-batch-size=16",
        "--eval-batch-size=4",
        "--checkpoint-every-steps=8",
        "--log-every-steps=4",
    )


@pytest.fixture(scope="session")
def packed(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files; neither they nor the held-out sequences divide by the batch or the ranks."""
    train = [sentences(130, seed=1), sentences(37, seed=2)]
    return save_packed(tmp_path_factory.mktemp("packed") / "tokens", tiny_bert, train, sentences(29, seed=3))


@pytest.fixture(scope="session")
def pretraining(packed: Path, s3: "S3Client") -> tuple[str, ...]:
    """Flags of a pre-training of 48 steps on S3's data, with a checkpoint and an evaluation every 16."""
    publish(packed, s3, S3Location("runs", "research/tokenize-20260102-030405-0a1b/"))
    return (
        "--data=s3://runs/research/tokenize-20260102-030405-0a1b/",
        "--hidden-size=32",
        "--layers=2",
        "--heads=2",
        "--intermediate-size=64",
        "--max-steps=48",
        "--learning-rate=0.01",
        "--global-batch-size=16",
        "--eval-batch-size=4",
        "--evaluate-every-steps=16",
        "--checkpoint-every-steps=16",
        "--log-every-steps=4",
    )


@pytest.fixture(scope="session")
def job_python() -> Path:
    """Jobs run in the tests' own environment, or with the packages of the cpu image of the release that is tested."""
    chosen = image_environment.chosen_release()
    return image_environment.python_of("cpu", chosen) if chosen else Path(sys.executable)


@pytest.fixture
def new_run(s3: "S3Client", s3_endpoint: str, job_python: Path, tmp_path: Path) -> Iterator[NewRun]:
    runs: list[Run] = []
    numbers = itertools.count(1)

    def new() -> Run:
        # Unlike any other on this machine: by its location a run's processes are told, and killed.
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


@pytest.fixture
def run(new_run: NewRun) -> Run:
    return new_run()
