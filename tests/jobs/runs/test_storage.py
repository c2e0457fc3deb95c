"""Runs in the run bucket, under a team's role, which S3 restricts to the team's own runs."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler

import pytest
import yaml

from jobs.aws.connection import CONNECTIONS, Aws
from jobs.aws.errors import error_code
from jobs.container.launcher.request import parse
from jobs.core.errors import NotFoundError, TrainyardError
from jobs.core.locations import S3Location
from jobs.core.run import RECEIPT, new_run_id
from jobs.core.stage import DeployedStage
from jobs.runs import storage
from jobs.runs.submit import delete_spec, put_spec, send
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.plan import ResumedRun, plan
from tests.jobs.conftest import point_at
from tests.support.jobs.planning import ARGUMENTS, RUN_ID, command_of, environment_of, spec
from tests.support.jobs.proxies import FaultyProxy, LimitedRole
from tests.support.running_emulator import Emulator

OURS, THEIRS = "team-files-20260101-000000-0001", "team-files-20260101-000000-0002"


@pytest.fixture
def limited(
    emulated: Aws, stage: DeployedStage, deployed_aws: Emulator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Aws]:
    """A connection with the role of one team. Two teams have runs."""
    for team, run in (("research", OURS), ("product", THEIRS)):
        emulated.s3.put_object(Bucket=stage.run_bucket, Key=f"{team}/{run}/spec.yaml", Body=b"{}")
    with LimitedRole(deployed_aws.endpoint) as proxy:
        point_at(monkeypatch, proxy.url)
        yield Aws()


def test_only_runs_that_may_be_listed_are_found(limited: Aws, stage: DeployedStage, emulated: Aws) -> None:
    assert {"research", "product"} <= set(stage.teams)
    assert [run.run_id for run in storage.stored_runs(limited, stage, prefix="team-files-")] == [OURS]
    assert storage.find_run(limited, stage, "team-files").run_id == OURS


def test_arguments_too_long_for_a_command_line_reach_the_launcher(
    limited: Aws, stage: DeployedStage, emulated: Aws
) -> None:
    tables = [f"data://shared/{'t' * 60}-{number}.jsonl" for number in range(200)]
    planned = plan(spec(arguments={**ARGUMENTS, "train_data": tables}), stage, run_id=RUN_ID)
    put_spec(limited, planned)
    launch = parse(command_of(planned)[3:], environment_of(planned))
    assert isinstance(launch.arguments, FinetuneClassification)
    assert launch.arguments.train_data == [table.replace("data://", f"s3://{stage.data_bucket}/") for table in tables]
    # WHEN Batch refuses the job, THEN its files are deleted, and a launcher would report that
    delete_spec(emulated, planned)
    with pytest.raises(NotFoundError, match="the file of the job's arguments, is missing"):
        parse(command_of(planned)[3:], environment_of(planned))


def test_first_of_two_submissions_gets_the_run_id(
    limited: Aws, stage: DeployedStage, emulated: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = new_run_id("twice", now=datetime.now(timezone.utc))
    first, second = (plan(spec(arguments={**ARGUMENTS, "seed": seed}), stage, run_id=run_id) for seed in (1, 2))
    submission = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: submission)
    put_spec(limited, first)
    put_spec(limited, first)  # boto3 repeats a request whose answer was lost
    monkeypatch.undo()
    point_at(monkeypatch, limited.s3.meta.endpoint_url)
    for planned in (second, first):
        with pytest.raises(TrainyardError, match=f"another run was submitted as {run_id} in the same second"):
            send(limited, planned)
    text = storage.read_spec_text(emulated, first.run_location)
    assert text is not None
    assert yaml.safe_load(text)["arguments"]["seed"] == 1
    # WHEN the run is resumed, THEN its spec is overwritten
    put_spec(limited, replace(second, resumed=ResumedRun(job_ids=("a",), at=datetime.now(timezone.utc))))
    text = storage.read_spec_text(emulated, first.run_location)
    assert text is not None
    assert yaml.safe_load(text)["arguments"]["seed"] == 2


def test_denied_listing_of_all_teams_raises_s3s_error(limited: Aws, stage: DeployedStage) -> None:
    others = {key: arn for key, arn in stage.job_definitions.items() if key[0] != "research"}
    with pytest.raises(Exception, match="AccessDenied") as caught:
        storage.stored_runs(limited, replace(stage, job_definitions=others))
    assert error_code(caught.value) == "AccessDenied"


def test_missing_receipt_is_none_although_s3_answers_403(limited: Aws, stage: DeployedStage) -> None:
    run = S3Location(stage.run_bucket, f"research/{OURS}/")
    # A key with the same beginning must not be taken for the receipt.
    limited.s3.put_object(Bucket=run.bucket, Key=(run / f"{RECEIPT}.bak").key, Body=b"{}")
    assert storage.read_receipt(limited, run) is None
    assert storage.read_metrics(limited, run) == []


def test_another_teams_receipt_is_denied_not_missing(limited: Aws, stage: DeployedStage) -> None:
    with pytest.raises(Exception, match="AccessDenied"):
        storage.read_receipt(limited, S3Location(stage.run_bucket, f"product/{THEIRS}/"))


class CountingProxy(FaultyProxy):
    """Counts the connections of clients."""

    def __init__(self, upstream: str) -> None:
        self.clients: set[object] = set()
        super().__init__(upstream)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.clients.add(request.client_address)
        super().handle(request)


def test_many_receipts_are_read_over_few_connections(
    stage: DeployedStage, deployed_aws: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CountingProxy(deployed_aws.endpoint) as proxy:
        point_at(monkeypatch, proxy.url)
        aws = Aws()
        _ = aws.s3
        places = [S3Location(stage.run_bucket, f"research/{OURS}-{number}/") for number in range(150)]
        assert storage.in_parallel(lambda place: storage.read_receipt(aws, place), places) == [None] * 150
    assert len(proxy.clients) <= CONNECTIONS
