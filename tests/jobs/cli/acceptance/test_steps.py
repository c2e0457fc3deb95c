"""Requests of the steps to FIS, IAM and Cost Explorer, checked by botocore's models, and the report of a record."""

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import psutil
import pytest
from botocore.stub import ANY, Stubber

from jobs.aws.connection import Aws
from jobs.cli.acceptance import reclaim, watched
from jobs.cli.acceptance.command import steps_of
from jobs.cli.acceptance.context import program
from jobs.cli.acceptance.runner import LimitReachedError
from jobs.cli.acceptance.watched import bill_days, billed_by_run, compared
from jobs.core.acceptance import CLAIMS, NOT_PROVEN, PROVEN, STEPS, Evidence, StepRecord, claim_outcomes
from jobs.core.errors import TrainyardError
from jobs.report.acceptance import acceptance_page
from tests.jobs.cli.acceptance.test_runner import NEW
from tests.support.jobs.acceptance import context_of
from tests.support.jobs.recorded_runs import BEGIN, three_attempts

NOW = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)
ARN = "arn:aws:ec2:us-east-1:123456789012:instance/i-0123456789abcdef0"
ROLE_ARN = "arn:aws:iam::123456789012:role/trainyard-dev-acceptance"
ROLE = {
    "Path": "/",
    "RoleName": "trainyard-dev-acceptance",
    "RoleId": "AROA0123456789ABCDEF",
    "Arn": ROLE_ARN,
    "CreateDate": NOW,
}
RUN = three_attempts(20)
KEY = f"trainyard:run${RUN.run_id}"


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stubber]:
    """Return clients that answer only what the test has queued."""
    make: Any = boto3.client
    clients = {
        name: make(name, "us-east-1", aws_access_key_id="x", aws_secret_access_key="x") for name in ("fis", "iam", "ce")
    }
    monkeypatch.setattr(Aws, "client", lambda _self, service: clients[service])
    found = {name: Stubber(client) for name, client in clients.items()}
    for stub in found.values():
        stub.activate()
    return found


def queue(stubs: dict[str, Stubber], *states: dict[str, str]) -> None:
    """Queue answers for a role, a template, and an experiment per state, which it has from its second answer on."""
    stubs["iam"].add_response("create_role", {"Role": ROLE})
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"},
            {"Effect": "Allow", "Action": "ec2:SendSpotInstanceInterruptions", "Resource": ARN},
        ],
    }
    stubs["iam"].add_response(
        "put_role_policy", {}, {"RoleName": ANY, "PolicyName": "interrupt", "PolicyDocument": json.dumps(policy)}
    )
    stubs["iam"].add_response("get_role", {"Role": ROLE})
    action = {
        "actionId": "aws:ec2:send-spot-instance-interruptions",
        "parameters": {"durationBeforeInterruption": "PT2M"},
        "targets": {"SpotInstances": "instance"},
    }
    target = {"resourceType": "aws:ec2:spot-instance", "resourceArns": [ARN], "selectionMode": "ALL"}
    asked = {
        "clientToken": ANY,
        "description": ANY,
        "roleArn": ROLE_ARN,
        "stopConditions": [{"source": "none"}],
        "targets": {"instance": target},
        "actions": {"interrupt": action},
        "tags": {"trainyard:project": "trainyard", "trainyard:stage": "dev"},
    }
    stubs["fis"].add_response("create_experiment_template", {"experimentTemplate": {"id": "EXT1"}}, asked)
    for number, state in enumerate(states, start=1):
        begun = {"experiment": {"id": f"EXP{number}", "state": {"status": "initiating"}}}
        ended = {"experiment": {"id": f"EXP{number}", "state": state}}
        stubs["fis"].add_response("start_experiment", begun)
        stubs["fis"].add_response("get_experiment", ended, {"id": f"EXP{number}"})


@pytest.mark.parametrize("active", [True, False])
def test_a_bill_without_active_tags_is_not_proven(*, active: bool) -> None:
    budget = {"BudgetName": "monthly", "BudgetLimit": {"Amount": "500", "Unit": "USD"}}
    pages = SimpleNamespace(paginate=lambda **_: [{"Budgets": [budget]}])
    client = SimpleNamespace(get_paginator=lambda _: pages)
    context: Any = SimpleNamespace(aws=SimpleNamespace(client=lambda _: client, account="1", emulated=False))
    tags = [] if active else [{"text": "trainyard:stage is not active", "next_step": "aws ce …"}]
    found = watched._budgets(context, {"AWS::Budgets::Budget": ["monthly"]}, {"run": 3.0}, tags)
    assert found.outcome == (PROVEN if active else NOT_PROVEN)
    assert found.text.endswith("" if active else "; trainyard:stage is not active. Next: aws ce …")


def test_an_instance_is_interrupted_and_everything_is_deleted(stubs: dict[str, Stubber]) -> None:
    queue(stubs, {"status": "failed", "reason": "Unable to assume role"}, {"status": "completed"})
    waits: list[None] = []
    ids: dict[str, str] = {}
    reclaim.interrupt(Aws(), ARN, stage="dev", ids=ids, wait=lambda: waits.append(None))
    assert (ids["experiment"], len(waits)) == ("EXP2", 3)
    assert ids.keys() == {"role", "template", "experiment"}
    stubs["fis"].add_response("delete_experiment_template", {}, {"id": "EXT1"})
    stubs["iam"].add_response("delete_role_policy", {}, {"RoleName": ids["role"], "PolicyName": "interrupt"})
    stubs["iam"].add_response("delete_role", {}, {"RoleName": ids["role"]})
    reclaim.delete_experiment(Aws(), ids)
    assert ids == {"experiment": "EXP2"}
    reclaim.delete_experiment(Aws(), ids)  # the second time sends no request


def test_a_refused_experiment_is_an_error_and_is_undone(stubs: dict[str, Stubber]) -> None:
    queue(stubs, {"status": "failed", "reason": "Target resolution returned empty set"})
    ids: dict[str, str] = {}
    with pytest.raises(TrainyardError, match="Target resolution returned empty set"):
        reclaim.interrupt(Aws(), ARN, stage="dev", ids=ids, wait=lambda: None)
    assert ids.keys() == {"role", "template", "experiment"}
    stubs["fis"].add_client_error("delete_experiment_template", "ResourceNotFoundException")
    stubs["iam"].add_client_error("delete_role_policy", "NoSuchEntity")
    stubs["iam"].add_client_error("delete_role", "AccessDenied")
    with pytest.raises(Exception, match="AccessDenied"):
        reclaim.delete_experiment(Aws(), ids)
    assert ids.keys() == {"role", "experiment"}


def day(**usd: float) -> dict[str, Any]:
    groups = [
        {"Keys": [key], "Metrics": {"UnblendedCost": {"Amount": str(amount), "Unit": "USD"}}}
        for key, amount in usd.items()
    ]
    return {"Groups": groups, "Estimated": False}


def test_cost_explorer_is_read_by_run_and_page(stubs: dict[str, Stubber]) -> None:
    request = {
        "TimePeriod": {"Start": "2026-10-20", "End": "2026-11-02"},
        "Granularity": "DAILY",
        "Metrics": ["UnblendedCost"],
        "Filter": {
            "And": [
                {"Tags": {"Key": "trainyard:stage", "Values": ["dev"]}},
                {"Dimensions": {"Key": "SERVICE", "Values": ["Amazon Elastic Compute Cloud - Compute"]}},
            ]
        },
        "GroupBy": [{"Type": "TAG", "Key": "trainyard:run"}],
    }
    # Costs without a run are of a NAT gateway, or of an instance that was tagged late.
    first = {"ResultsByTime": [day(**{KEY: 0.7, "trainyard:run$": 9})], "NextPageToken": "2"}
    stubs["ce"].add_response("get_cost_and_usage", first, request)
    rest = {"ResultsByTime": [day(**{KEY: 0.4})]}
    stubs["ce"].add_response("get_cost_and_usage", rest, {**request, "NextPageToken": "2"})
    days = bill_days(BEGIN.replace(day=3))
    assert billed_by_run(context_of(), days) == {RUN.run_id: pytest.approx(1.1), "": 9}
    stubs["ce"].add_response("get_cost_and_usage", {"ResultsByTime": [day()]})
    stubs["ce"].add_client_error("get_cost_and_usage", "AccessDeniedException")
    assert str(billed_by_run(context_of(), days)).startswith("the bill has no tagged run yet")
    assert billed_by_run(context_of(), days) == "Cost Explorer did not answer (AccessDeniedException)"


@pytest.mark.parametrize(
    ("more", "outcome", "text"),
    [
        ({RUN.run_id: 1.1}, "proven", "receipts of 1 of 1 runs add up to"),
        ({RUN.run_id: 1.5}, "not proven here", "receipts of 1 of 1 runs add up to"),
        ({"": 9.0}, "not proven here", "unknown: the bill has no tagged run yet"),
    ],
)
def test_receipts_are_compared_with_the_bill(more: dict[str, float], outcome: str, text: str) -> None:
    assert RUN.receipt is not None
    bill = {run: factor * (RUN.receipt.estimated_usd or 0) for run, factor in more.items()}
    found = compared([RUN.receipt], bill, bill_days(BEGIN.replace(day=3)))
    assert (found.outcome, text in found.text) == (outcome, True)
    nothing = compared([], bill, bill_days(BEGIN.replace(day=3)))
    assert nothing.text.startswith("unknown: no run in the 14 days up to 2026-11-02")


def test_evidence_of_a_failed_step_does_not_count() -> None:
    found = NEW.model_copy(update={"steps": [StepRecord(name=name) for name in STEPS]})
    deploy = found.step("deploy")
    deploy.evidence = [Evidence(claim="templates", outcome="proven", text="8 stacks")]
    deploy.outcome, deploy.error = "failed", "<script>alert(1)</script> no such role"
    outcomes = {claim.name: outcome for claim, outcome, _ in claim_outcomes(found)}
    assert outcomes["templates"] == outcomes["images"] == "failed"
    assert outcomes["resumes"] == "not reached"
    page = acceptance_page(found, now=NOW)
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; no such role" in page


def test_the_steps_are_complete_and_within_the_default_limit() -> None:
    steps = steps_of(context_of())
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert [step.name for step in steps] == list(STEPS)
    assert 10 < sum(step.usd for step in steps) < 40
    spot, hours = 3.93, 1.25
    assert next(step for step in steps if step.name == "reclaim").usd == spot * hours


def test_a_program_fails_with_its_last_lines_or_at_the_limit(tmp_path: Path) -> None:
    fails = [sys.executable, "-c", "import sys; print('[]'); print('no such role', file=sys.stderr); sys.exit(3)"]
    aws = Aws(region="us-east-1")
    assert program(fails, tmp_path / "it", aws=aws, codes=(0, 3)) == "[]\n"
    with pytest.raises(TrainyardError, match=r"(?s)failed with exit code 3:\nno such role.*see .*it\.log"):
        program(fails, tmp_path / "it", aws=aws)

    def stop() -> None:
        if pid := (tmp_path / "it.out").read_text():
            started.append(int(pid))
            raise LimitReachedError("39.00 USD are spent")

    started: list[int] = []
    waits = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    with pytest.raises(LimitReachedError):
        program(waits, tmp_path / "it", aws=aws, check=stop)
    assert not psutil.pid_exists(started[0])
