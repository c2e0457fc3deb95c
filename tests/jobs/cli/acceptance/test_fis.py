"""What FIS and IAM are asked, against botocore's models of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from jobs.aws.connection import Aws
from jobs.cli.acceptance import fis
from jobs.contract.errors import TrainyardError

ARN = "arn:aws:ec2:us-east-1:123456789012:instance/i-0123456789abcdef0"
ROLE_ARN = "arn:aws:iam::123456789012:role/trainyard-dev-acceptance"
TAGS = {"trainyard:project": "trainyard", "trainyard:stage": "dev"}


@dataclass
class Services:
    """Clients of FIS and IAM that answer what the test has queued, and nothing else."""

    clients: dict[str, Any] = field(default_factory=dict)
    stubs: dict[str, Stubber] = field(default_factory=dict)

    def answer(self, service: str, operation: str, said: dict[str, Any], asked: dict[str, Any] | None = None) -> None:
        self.stubs[service].add_response(operation, said, asked)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    found = Services()
    for name in ("fis", "iam"):
        make: Any = boto3.client
        found.clients[name] = make(name, "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
        found.stubs[name] = Stubber(found.clients[name])
        found.stubs[name].activate()
    monkeypatch.setattr(Aws, "client", lambda _self, service: found.clients[service])
    yield found
    for stub in found.stubs.values():
        stub.assert_no_pending_responses()


def role() -> dict[str, Any]:
    return {
        "Role": {
            "Path": "/",
            "RoleName": "trainyard-dev-acceptance",
            "RoleId": "AROA0123456789ABCDEF",
            "Arn": ROLE_ARN,
            "CreateDate": datetime.now(timezone.utc),
        }
    }


def queue_role(services: Services) -> None:
    services.answer("iam", "create_role", role())
    services.answer("iam", "put_role_policy", {}, {"RoleName": ANY, "PolicyName": "interrupt", "PolicyDocument": ANY})
    services.answer("iam", "get_role", role())


def queue_template(services: Services) -> None:
    services.answer(
        "fis",
        "create_experiment_template",
        {"experimentTemplate": {"id": "EXT1"}},
        {
            "clientToken": ANY,
            "description": ANY,
            "roleArn": ROLE_ARN,
            "stopConditions": [{"source": "none"}],
            "targets": {
                "instance": {
                    "resourceType": "aws:ec2:spot-instance",
                    "resourceArns": [ARN],
                    "selectionMode": "ALL",
                }
            },
            "actions": {
                "interrupt": {
                    "actionId": "aws:ec2:send-spot-instance-interruptions",
                    "parameters": {"durationBeforeInterruption": "PT2M"},
                    "targets": {"SpotInstances": "instance"},
                }
            },
            "tags": TAGS,
        },
    )


def queue_experiment(services: Services, name: str, *states: dict[str, str]) -> None:
    first, *later = states
    services.answer("fis", "start_experiment", {"experiment": {"id": name, "state": first}})
    for state in later:
        services.answer("fis", "get_experiment", {"experiment": {"id": name, "state": state}}, {"id": name})


def test_one_instance_is_taken_back_and_nothing_stays(services: Services) -> None:
    queue_role(services)
    queue_template(services)
    queue_experiment(services, "EXP1", {"status": "initiating"}, {"status": "running"}, {"status": "completed"})
    ids: dict[str, str] = {}
    assert fis.interrupt(Aws(), ARN, stage="dev", ids=ids, wait=lambda: None) == "EXP1"
    assert ids.keys() == {"role", "template", "experiment"}

    services.answer("fis", "delete_experiment_template", {}, {"id": "EXT1"})
    services.answer("iam", "delete_role_policy", {}, {"RoleName": ids["role"], "PolicyName": "interrupt"})
    services.answer("iam", "delete_role", {}, {"RoleName": ids["role"]})
    fis.undo(Aws(), ids)
    assert ids == {"experiment": "EXP1"}
    fis.undo(Aws(), ids)  # and a second time asks for nothing


def test_its_role_may_interrupt_that_instance_and_no_other(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    queue_role(services)
    queue_template(services)
    queue_experiment(services, "EXP1", {"status": "completed"})
    sent: list[dict[str, Any]] = []
    services.clients["iam"].meta.events.register(
        "provide-client-params.iam.PutRolePolicy", lambda params, **_: sent.append(params)
    )
    fis.interrupt(Aws(), ARN, stage="dev", ids={}, wait=lambda: None)
    statements = json.loads(sent[0]["PolicyDocument"])["Statement"]
    assert {one["Action"]: one["Resource"] for one in statements} == {
        "ec2:DescribeInstances": "*",
        "ec2:SendSpotInstanceInterruptions": ARN,
    }


def test_a_role_that_is_not_known_yet_is_waited_for(services: Services) -> None:
    queue_role(services)
    queue_template(services)
    queue_experiment(services, "EXP1", {"status": "failed", "reason": "Unable to assume role"})
    queue_experiment(services, "EXP2", {"status": "completed"})
    waits: list[None] = []
    assert fis.interrupt(Aws(), ARN, stage="dev", ids={}, wait=lambda: waits.append(None)) == "EXP2"
    assert len(waits) == 1


def test_a_refusal_is_told_and_what_was_made_is_known_for_the_undo(services: Services) -> None:
    queue_role(services)
    queue_template(services)
    queue_experiment(services, "EXP1", {"status": "failed", "reason": "Target resolution returned empty set"})
    ids: dict[str, str] = {}
    with pytest.raises(TrainyardError, match="Target resolution returned empty set"):
        fis.interrupt(Aws(), ARN, stage="dev", ids=ids, wait=lambda: None)
    assert {"role", "template"} <= ids.keys()


def test_what_is_gone_already_does_not_keep_the_rest_from_going(services: Services) -> None:
    services.stubs["fis"].add_client_error("delete_experiment_template", "ResourceNotFoundException")
    services.stubs["iam"].add_client_error("delete_role_policy", "NoSuchEntity")
    services.answer("iam", "delete_role", {}, {"RoleName": "made"})
    fis.undo(Aws(), ids := {"template": "EXT1", "role": "made"})
    assert ids == {}


def test_a_role_that_may_not_be_deleted_stays_known(services: Services) -> None:
    services.stubs["iam"].add_client_error("delete_role_policy", "AccessDenied")
    ids = {"role": "made"}
    with pytest.raises(Exception, match="AccessDenied"):
        fis.undo(Aws(), ids)
    assert ids == {"role": "made"}
