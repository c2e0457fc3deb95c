"""The emulator with the project's own stacks deployed to it, as the modules under test see it; and a browser."""

import shutil
from collections.abc import Iterator, Mapping, Sequence

import boto3
import pytest
from playwright.sync_api import Browser, sync_playwright

from jobs.aws.connection import Aws
from jobs.core.stage import DEFAULT_STAGE, DeployedStage
from jobs.runs import batch
from jobs.runs.job import Job
from jobs.runs.submit import send
from jobs.spec.plan import Plan
from tests.support.jobs.pages import OpenedPage
from tests.support.jobs.proxies import FaultyProxy
from tests.support.jobs.submitting import (
    DATA,
    DATA_KEY,
    MODEL_FILES,
    MODEL_KEY,
    Begin,
    Run,
    RunCommand,
    planned_to_run,
    wait_for,
)
from tests.support.running_emulator import Emulator, environment_of


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in environment_of(endpoint).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials that it was made with


@pytest.fixture
def refusing_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A service whose answers are the `faults` of the test and nothing else; the environment points at it."""
    with FaultyProxy("http://localhost:9") as proxy:
        point_at(monkeypatch, proxy.url)
        yield proxy


@pytest.fixture
def refusing_aws(refusing_service: FaultyProxy) -> Aws:
    return Aws()


@pytest.fixture
def deployed_environment(deployed_aws: Emulator) -> Mapping[str, str]:
    """What points a process at the emulator that the stage `dev` is deployed to."""
    return environment_of(deployed_aws.endpoint)


@pytest.fixture(scope="session")
def connected(deployed_aws: Emulator) -> Aws:
    """One connection for all tests, its clients made: making them takes longer than most of what they are used for."""
    with pytest.MonkeyPatch.context() as patch:
        point_at(patch, deployed_aws.endpoint)
        aws = Aws()
        assert all((aws.batch, aws.batch_without_retries, aws.s3, aws.ssm, aws.logs))
    data_bucket = batch.read_stage(aws, DEFAULT_STAGE).data_bucket
    for name, content in MODEL_FILES.items():
        aws.s3.put_object(Bucket=data_bucket, Key=f"{MODEL_KEY}/{name}", Body=content)
    aws.s3.put_object(Bucket=data_bucket, Key=DATA_KEY, Body=DATA)
    return aws


@pytest.fixture
def emulated(connected: Aws, deployed_aws: Emulator, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """The emulator with stage `dev` deployed; the environment points at it, and what the specs read is there."""
    point_at(monkeypatch, deployed_aws.endpoint)
    return connected


@pytest.fixture(scope="session")
def stage(connected: Aws) -> DeployedStage:
    return batch.read_stage(connected, DEFAULT_STAGE)


@pytest.fixture
def faulty(connected: Aws, deployed_aws: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the emulator, to which the environment points; it does as its `faults` say."""
    with FaultyProxy(deployed_aws.endpoint) as proxy:
        point_at(monkeypatch, proxy.url)
        yield proxy


@pytest.fixture
def run_command(emulated: Aws, stage: DeployedStage) -> RunCommand:
    def run(command: Sequence[str], *, name: str = "probe") -> Run:
        plan = planned_to_run(emulated, stage, command, name=name)
        return Run(plan, wait_for(emulated, stage, send(emulated, plan)))

    return run


@pytest.fixture
def begin(emulated: Aws, stage: DeployedStage) -> Iterator[Begin]:
    """Submits a plan, and returns its job once it is in `state`; the job ends when the test is over."""
    submitted: list[str] = []

    def submit(plan: Plan, *, state: str | None = "RUNNING") -> Job:
        submitted.append(send(emulated, plan))
        return wait_for(emulated, stage, submitted[-1], state=state)

    yield submit
    for job in batch.describe(emulated, stage, submitted[::-1]):
        batch.terminate(emulated, job.id, reason="the test is over")
    for job_id in submitted:
        wait_for(emulated, stage, job_id)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The machine's own, until the file's tests are over: Playwright can be started once at a time in a process."""
    program = shutil.which("chromium")
    assert program, "no chromium on PATH. Next: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Browser) -> Iterator[OpenedPage]:
    page = OpenedPage(chromium)
    yield page
    page.close()
