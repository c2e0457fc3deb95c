"""A job from submission to result on a real Docker engine, with the stage's stacks, an image that was pushed to a
registry and pulled by its digest, two ranks in a container, and a Spot reclaim.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from infra.image.stack import PROGRAM
from jobs.core.git import REVISION_VARIABLE
from jobs.core.images import release
from jobs.core.stage import image_parameter, image_repository_parameter, job_image_parameter
from tests.images.conftest import Built
from tests.support.container.reviews import reviews, save_tiny_bert, write_jsonl
from tests.support.images.registry import Registry, running_registry
from tests.support.images.source_tree import ROOT, SourceTree, rows_of
from tests.support.jobs.terminal import TRAINYARD
from tests.support.running_emulator import DEPLOY_SECONDS, Emulator, run_emulator

# Time for two deployments and, if no earlier test built it, the cpu image.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

KIND = "finetune-classification"
WAIT_SECONDS = 300
FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Laptop:
    """An emulator that runs containers, with stage `dev` deployed, and the command line for it."""

    aws: Emulator
    registry: Registry
    folder: Path

    def deploy(self) -> None:
        command = [sys.executable, "-m", "infra.emulator", "deploy", "--endpoint", self.aws.endpoint]
        done = subprocess.run(
            command,
            env=dict(self.aws.environment),
            capture_output=True,
            text=True,
            timeout=DEPLOY_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def trainyard(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [TRAINYARD, *map(str, arguments)],
            cwd=self.folder,
            env=dict(self.aws.environment),
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )

    def parameter(self, name: str) -> str:
        value = self.aws.client("ssm").get_parameter(Name=f"/trainyard/dev/{name}")["Parameter"]["Value"]
        assert isinstance(value, str)
        return value

    def upload(self, path: Path, key: str) -> None:
        self.aws.client("s3").put_object(Bucket=self.parameter("bucket/data"), Key=key, Body=path.read_bytes())

    def keys(self, prefix: str) -> list[str]:
        listed = self.aws.client("s3").list_objects_v2(Bucket=self.parameter("bucket/run"), Prefix=prefix)
        return [item["Key"].removeprefix(prefix) for item in listed.get("Contents", [])]

    def read(self, key: str) -> bytes:
        content = self.aws.client("s3").get_object(Bucket=self.parameter("bucket/run"), Key=key)["Body"].read()
        assert isinstance(content, bytes)
        return content

    def job(self, run_id: str) -> Mapping[str, Any]:
        batch = self.aws.client("batch")
        found = batch.list_jobs(
            jobQueue=self.parameter("team-queue/research/spot"), filters=[{"name": "JOB_NAME", "values": [run_id]}]
        )["jobSummaryList"]
        (detail,) = batch.describe_jobs(jobs=[found[0]["jobId"]])["jobs"]
        assert isinstance(detail, dict)
        return detail

    def reclaim(self, job_id: str) -> None:
        self.aws.reclaim(job_id)


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    folder = tmp_path_factory.mktemp("laptop")
    with (
        running_registry(folder) as registry,
        run_emulator(folder, "--executor", "docker", "--registry", registry.address) as aws,
    ):
        made = Laptop(aws, registry, folder)
        made.deploy()
        yield made
        assert aws.health()["server_errors"] == []


@pytest.fixture
def spec(laptop: Laptop, tmp_path: Path) -> Path:
    """A tiny BERT on made-up reviews, with enough steps for a reclaim between two checkpoints."""
    model = save_tiny_bert(tmp_path / "model")
    for path in model.iterdir():
        laptop.upload(path, f"shared/tiny/{path.name}")
    laptop.upload(write_jsonl(tmp_path / "train.jsonl", reviews(1600, seed=1)), "shared/reviews.jsonl")
    arguments = {
        "model": "data://shared/tiny",
        "train_data": "data://shared/reviews.jsonl",
        "max_length": 16,
        "epochs": 2,
        "learning_rate": 1e-2,
        "global_batch_size": 16,
        "checkpoint_every_steps": 20,
        "log_every_steps": 10,
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": "boxed", "job": KIND, "team": "research", "arguments": arguments}))
    return path


def until(look: Callable[[], FoundT | None], what: str) -> FoundT:
    give_up_at = time.monotonic() + WAIT_SECONDS
    while (found := look()) is None:
        assert time.monotonic() < give_up_at, f"no {what} appeared"
        time.sleep(0.2)
    return found


def test_job_trains_in_the_pushed_image_and_survives_a_reclaim(
    laptop: Laptop, spec: Path, built: Built, docker_engine: Any
) -> None:
    # GIVEN a stage without a pushed image: submission is refused
    refused = laptop.trainyard("submit", spec, "--detach")
    assert refused.returncode == 3, refused.stderr
    assert f"the image of '{KIND}' jobs had not been pushed" in refused.stderr
    assert "next: trainyard --stage dev images push cpu, then trainyard --stage dev local up" in refused.stderr

    # WHEN the image is pushed
    pushed = built.tree.images("push", "cpu", "-o", "json", environment=laptop.aws.environment)
    assert pushed.returncode == 0, pushed.stderr
    [row] = json.loads(pushed.stdout)
    repository = laptop.parameter(image_repository_parameter("cpu"))
    name = repository.partition("/")[2]
    digest = laptop.registry.digest(name, row["tag"])
    assert row["uri"] == f"{repository}@{digest}"
    assert laptop.parameter(image_parameter("gaudi", release().name)) == row["uri"]
    # AND the stage deployed again, which is needed although the templates are the same
    waiting = laptop.trainyard("submit", spec, "--detach")
    assert "next: trainyard --stage dev local up\n" in waiting.stderr
    laptop.deploy()
    assert laptop.parameter(job_image_parameter(KIND)) == row["uri"]

    # THEN a job's container has the registry's image
    forget(docker_engine, f"{laptop.registry.address}/{name}", row["tag"], digest)
    submitted = laptop.trainyard("submit", spec, "--detach")
    assert submitted.returncode == 0, submitted.stderr
    run_id = submitted.stdout.strip()
    prefix = f"research/{run_id}/"
    until(lambda: "checkpoints/step-20/manifest.json" in laptop.keys(prefix) or None, "checkpoint")
    job = laptop.job(run_id)
    (container,) = docker_engine.containers.list(filters={"label": f"trainyard.job-id={job['jobId']}"})
    assert container.attrs["Config"]["Image"] == f"{laptop.registry.address}/{name}@{digest}"
    assert container.attrs["Config"]["User"] == "1000:1000"
    # AND `exec` runs a command in it as root, whatever the image's user
    entered = laptop.trainyard("exec", run_id, "sh", "-c", "id -u; echo $AWS_BATCH_JOB_ID")
    assert entered.stdout.split() == ["0", job["jobId"]], entered.stderr
    # AND the job continues from its checkpoint after a reclaim
    laptop.reclaim(job["jobId"])
    ended = until(lambda: found if (found := laptop.job(run_id))["status"] in ("SUCCEEDED", "FAILED") else None, "end")
    logs = laptop.trainyard("logs", run_id).stdout
    assert ended["status"] == "SUCCEEDED", logs
    first, _ = ended["attempts"]
    assert first["statusReason"].startswith("Host EC2 (instance i-")
    assert "2 ranks on 1 node over gloo" in logs
    assert "start: resumed from checkpoint step-" in logs
    # AND has its results in S3, and leaves nothing on this machine
    assert {"receipt.json", "metrics.jsonl", "model/model.safetensors"} <= set(laptop.keys(prefix))
    receipt = json.loads(laptop.read(f"{prefix}receipt.json"))
    assert len(receipt["attempts"]) == 2
    assert receipt["result"]["eval_accuracy"] > 0.7
    assert not docker_engine.containers.list(all=True, filters={"label": f"trainyard.job-id={job['jobId']}"})


def forget(engine: Any, repository: str, tag: str, digest: str | None) -> None:
    """Remove the engine's tags of a registry's image, so that the engine has to pull it."""
    engine.images.remove(f"{repository}:{tag}", force=True)
    names: Sequence[str] = [name for image in engine.images.list() for name in image.attrs["RepoDigests"] or ()]
    assert f"{repository}@{digest}" not in names


def test_child_is_built_on_the_pushed_parent_as_in_codebuild(
    laptop: Laptop, tree: SourceTree, base_image: str, docker_engine: Any, tmp_path: Path
) -> None:
    # GIVEN small images, whose parent is only in the registry
    tree.write("images/cpu/Dockerfile", "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nARG REVISION\nRUN touch /begun\n")
    tree.write("images/notebook/Dockerfile", "ARG PARENT_IMAGE\nFROM ${PARENT_IMAGE}\nLABEL is=child\n")
    tree.commit()
    home = tmp_path / "home"
    home.mkdir()
    environment = {**laptop.aws.environment, "HOME": str(home)}
    [parent] = rows_of(
        tree.images("push", "cpu", "-o", "json", "--build-arg", f"BASE_IMAGE={base_image}", environment=environment)
    )
    assert parent["recorded"] == ["cpu", "gaudi"]
    repository = f"{laptop.registry.address}/{parent['uri'].partition('/')[2].partition('@')[0]}"
    for name in (f"trainyard/cpu:{parent['tag']}", f"{repository}:{parent['tag']}"):
        docker_engine.images.remove(name, force=True)
    # WHEN its child is pushed
    done = tree.images("push", "cpu-notebook", environment=environment)
    # THEN it is built on the pushed parent
    assert "cpu: pulling the pushed image, to build on it" in done.stderr
    assert "next: trainyard --stage dev local up, so that jobs run in the pushed images" in done.stderr
    child = docker_engine.images.get(f"trainyard/cpu-notebook:{parent['tag']}")
    assert child.labels["is"] == "child"
    pulled = docker_engine.images.get(f"trainyard/cpu:{parent['tag']}")
    assert child.attrs["RootFS"]["Layers"] == pulled.attrs["RootFS"]["Layers"]
    assert done.stdout == f"{laptop.parameter(image_parameter('gaudi-notebook', release().name))}\n"
    # AND the sign-in token is in no file
    password = laptop.aws.client("ecr").get_authorization_token()["authorizationData"][0]["authorizationToken"]
    assert not [path for path in home.rglob("*") if path.is_file() and password in path.read_text(errors="replace")]

    # GIVEN the source as in CodeBuild: without git, and with the revision in a variable
    source = tmp_path / "source"
    shutil.copytree(tree.root, source, ignore=shutil.ignore_patterns(".git"))
    for name in PROGRAM:
        shutil.copy(ROOT / name, source)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").symlink_to(sys.executable)
    # WHEN the CodeBuild project's commands run
    variables = {"ARGUMENTS": "cpu -o json", "TRAINYARD_STAGE": "dev", REVISION_VARIABLE: tree.revision}
    done = subprocess.run(
        ["bash", str(ROOT / "infra" / "image" / "image_build.sh")],
        cwd=source,
        env={**environment, "PATH": f"{programs}:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    # THEN the image already pushed for this revision is used
    [row] = rows_of(done)
    assert (row["uri"], row["was_there"]) == (parent["uri"], True)
