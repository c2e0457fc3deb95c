"""Watches the stage's instances: what they cost, and those that boot and never join their cluster.

EventBridge calls it when an instance changes its state, when one has joined a cluster, and every five minutes. An
instance that never joins runs no job and belongs to none, so nobody who looks at jobs sees what it costs; and where a
boot step fails, Batch starts one after the other. If one has not joined for `MINUTES`, or `LAUNCHES` in a row have
ended before they joined, the function disables their compute environment, terminates those that still run, and sends
an alert, which `trainyard why` repeats. An instance that has joined has a tag.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

JOINED_TAG = "trainyard:joined"
"""Tag of an instance that has joined a cluster; its value is when."""

RUN_TAG = "trainyard:run"
"""Who has it works for a run, so it has joined."""

NEVER_JOINED = "never-joined/"
"""Begins the names of the parameters, below the stage's path, that say why an environment was disabled here."""

MINUTES = 30
LAUNCHES = 3

_ALIVE = ("pending", "running")
_SPOT_RECLAIM = "Server.SpotInstance"
"""EC2's codes of a Spot instance that was taken away, or had no capacity, begin so: no fault of the boot."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The stage's values, which the stack hands over in the environment."""

    stage: str
    topic: str
    namespace: str
    path: str
    """Under which the stage's parameters lie."""
    log_group: str
    """Where instances send the logs of their boot, in streams that begin with their ids."""
    prices: Mapping[str, Mapping[str, float]]
    """Instance type to capacity to US dollars an hour."""

    @classmethod
    def from_environment(cls) -> "Rules":
        return cls(
            stage=os.environ["STAGE"],
            topic=os.environ["TOPIC_ARN"],
            namespace=os.environ["METRIC_NAMESPACE"],
            path=os.environ["PARAMETER_PATH"],
            log_group=os.environ["LOG_GROUP"],
            prices=json.loads(os.environ["PRICES"]),
        )


@dataclass(frozen=True, kw_only=True)
class Instance:
    """An instance of the stage, as EC2 describes it; one that has ended stays described for about an hour."""

    id: str
    type: str
    capacity: str
    environment: str
    """The tag Name, which its compute environment gives all of its instances."""
    state: str
    launched: datetime
    joined: bool
    ended_by: str = ""
    """EC2's code of why it has ended."""

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "Instance":
        tags = {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}
        return cls(
            id=described["InstanceId"],
            type=described["InstanceType"],
            capacity="spot" if described.get("InstanceLifecycle") == "spot" else "on-demand",
            environment=tags.get("Name", ""),
            state=described["State"]["Name"],
            launched=described["LaunchTime"],
            joined=JOINED_TAG in tags or RUN_TAG in tags,
            ended_by=(described.get("StateReason") or {}).get("Code", ""),
        )

    @property
    def is_alive(self) -> bool:
        return self.state in _ALIVE


def never_joined(instances: Iterable[Instance], now: datetime, since: datetime | None) -> list[Instance]:
    """Return the instances for which their compute environment is to be disabled, the newest first; none: all is well.

    `since`: when it was disabled last; what was launched before is history.
    """
    found: list[Instance] = []
    for instance in sorted(instances, key=lambda instance: instance.launched, reverse=True):
        if instance.joined or (since is not None and instance.launched <= since):
            break  # it works, or did when that one was launched
        overdue = now - instance.launched >= timedelta(minutes=MINUTES)
        if overdue if instance.is_alive else not instance.ended_by.startswith(_SPOT_RECLAIM):
            found.append(instance)
    stuck = any(instance.is_alive for instance in found)
    return found if stuck or len(found) >= LAUNCHES else []


def explain(environment: str, culprits: list[Instance], rules: Rules) -> str:
    """Return why an environment is disabled, in one sentence."""
    shown = ", ".join(
        f"{instance.id} ({instance.state}{f', {instance.ended_by}' if instance.ended_by else ''})"
        for instance in culprits[:5]
    )
    started = f"{len(culprits)} instances" if len(culprits) > 1 else "an instance"
    stuck = any(instance.is_alive for instance in culprits)
    how = f"within {MINUTES} minutes" if stuck else "before it ended"
    streams = f"{culprits[0].id}/ in log group {rules.log_group}"
    return (
        f"{environment} has started {started} of {culprits[0].type} that never joined it {how}: {shown}; the logs of "
        f"the boot are the streams {streams}"
    )


def metrics(instances: Iterable[Instance], rules: Rules) -> list[dict[str, Any]]:
    """Return lines of CloudWatch's embedded metric format: of each type and capacity what runs, and its price."""
    running = [instance for instance in instances if instance.is_alive]
    lines = []
    for name, prices in rules.prices.items():
        for capacity, usd in prices.items():
            nodes = sum(instance.type == name and instance.capacity == capacity for instance in running)
            values = {"RunningNodes": nodes, "SpendUsdPerHour": round(nodes * usd, 4)}
            directive = {
                "Namespace": rules.namespace,
                "Dimensions": [["Instances"]],
                "Metrics": [{"Name": metric} for metric in values],
            }
            lines.append(
                {
                    "_aws": {"Timestamp": int(time.time() * 1000), "CloudWatchMetrics": [directive]},
                    "Instances": f"{name} {capacity}",
                    **values,
                }
            )
    return lines


def environments_of(batch: Any, stage: str) -> dict[str, dict[str, Any]]:
    """Return a stage's compute environments by the name that their instances carry."""
    return {
        name: environment
        for page in batch.get_paginator("describe_compute_environments").paginate()
        for environment in page["computeEnvironments"]
        if environment.get("tags", {}).get("trainyard:stage") == stage
        and (name := environment.get("computeResources", {}).get("tags", {}).get("Name"))
    }


class Account:
    """The calls to AWS."""

    def __init__(self, rules: Rules) -> None:
        import boto3  # noqa: PLC0415 - the judgements above are used and tested without it

        self._rules = rules
        self._ec2: Any = boto3.client("ec2")
        self._batch: Any = boto3.client("batch")
        self._ssm: Any = boto3.client("ssm")
        self._sns: Any = boto3.client("sns")

    def environments(self) -> dict[str, dict[str, Any]]:
        return environments_of(self._batch, self._rules.stage)

    def instances(self, **which: Any) -> list[Instance]:
        """Return the stage's instances, or those of them that are asked for."""
        of_stage = {"Name": "tag:trainyard:stage", "Values": [self._rules.stage]}
        filters = [of_stage, *which.pop("Filters", [])]
        pages = self._ec2.get_paginator("describe_instances").paginate(Filters=filters, **which)
        return [
            Instance.of(described)
            for page in pages
            for reservation in page["Reservations"]
            for described in reservation["Instances"]
        ]

    def has_joined(self, instance: Instance, now: datetime) -> None:
        tag = {"Key": JOINED_TAG, "Value": now.isoformat(timespec="seconds")}
        self._ec2.create_tags(Resources=[instance.id], Tags=[tag])

    def record(self, environment: str) -> dict[str, Any] | None:
        """Return what was written when the environment was disabled here; None: it was not."""
        try:
            name = self._rules.path + NEVER_JOINED + environment
            found: dict[str, Any] = json.loads(self._ssm.get_parameter(Name=name)["Parameter"]["Value"])
        except self._ssm.exceptions.ParameterNotFound:
            return None
        return found

    def forget(self, environment: str) -> None:
        with contextlib.suppress(self._ssm.exceptions.ParameterNotFound):
            self._ssm.delete_parameter(Name=self._rules.path + NEVER_JOINED + environment)

    def write(self, environment: str, record: dict[str, Any]) -> None:
        name = self._rules.path + NEVER_JOINED + environment
        self._ssm.put_parameter(Name=name, Value=json.dumps(record), Type="String", Overwrite=True)

    def disable(self, environment: str) -> None:
        self._batch.update_compute_environment(computeEnvironment=environment, state="DISABLED")

    def terminate(self, instances: list[Instance]) -> None:
        if ids := [instance.id for instance in instances if instance.is_alive]:
            self._ec2.terminate_instances(InstanceIds=ids)

    def say(self, text: str) -> None:
        self._sns.publish(TopicArn=self._rules.topic, Message=text)


def look(account: Account, rules: Rules, now: datetime) -> list[Instance]:
    """Disable the environments whose instances never join; return the instances of all."""
    environments = account.environments()
    instances = [found for found in account.instances() if found.environment in environments]
    for name, environment in environments.items():
        own = [instance for instance in instances if instance.environment == name]
        if not own:
            continue
        batch_name = environment["computeEnvironmentName"]
        record = account.record(batch_name)
        if record and environment["state"] == "ENABLED" and max(own, key=lambda found: found.launched).joined:
            account.forget(batch_name)
            continue
        since = datetime.fromisoformat(record["since"]) if record else None
        culprits = never_joined(own, now, since)
        if not culprits:
            continue
        if environment["state"] == "ENABLED":
            account.disable(batch_name)
            reason = explain(name, culprits, rules)
            account.write(batch_name, {"since": now.isoformat(timespec="seconds"), "reason": reason})
            account.say(
                f"Stage {rules.stage}: {reason}. The compute environment was disabled, and what ran of them was "
                f"terminated. Look: aws logs tail {rules.log_group} --since 1d --log-stream-name-prefix "
                f"{culprits[0].id}/, or aws ec2 get-console-output --instance-id {culprits[0].id}. Once the reason "
                f"is gone: aws batch update-compute-environment --compute-environment {batch_name} --state ENABLED"
            )
        account.terminate(culprits)
    return instances


def handler(event: dict[str, Any], _context: object) -> None:
    """Lambda's entry; `event` is EC2's of a state, ECS's of a container instance, or the schedule's."""
    rules = Rules.from_environment()
    account, now = Account(rules), datetime.now(timezone.utc)
    detail = event.get("detail", {})
    named = detail.get("ec2InstanceId") or detail.get("instance-id")
    if named:
        # The account's other instances change their states as well.
        own = account.instances(Filters=[{"Name": "instance-id", "Values": [named]}])
        if not own:
            return
        if event["source"] == "aws.ecs" and not own[0].joined:
            account.has_joined(own[0], now)
    for line in metrics(look(account, rules, now), rules):
        print(json.dumps(line))
