"""Watch the stage's instances: report their number and cost, and terminate those that never join their cluster.

EventBridge calls this when an instance joins a cluster of Batch, and every five minutes. An instance that never joins
runs no job, so no job shows its cost. If a boot step fails, Batch starts one instance after another.
If an instance has not joined after `MINUTES`, or `LAUNCHES` in a row ended before they joined, the function disables
their compute environment, terminates its running instances, and sends an alert, which `trainyard why` repeats.
Instances that have joined are tagged.
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
"""Tag of instances that have joined a cluster. The value is the time."""

RUN_TAG = "trainyard:run"
"""Tag of instances that work for a run, and so have joined."""

NEVER_JOINED = "never-joined/"
"""Prefix of the parameters, below the stage's path, that record why this function disabled an environment."""

SPEND = "SpendUsdPerHour"
"""Metric: what running instances cost an hour, at their recorded prices."""

MINUTES = 30
LAUNCHES = 3

_DISABLED = "The compute environment was disabled"
_REFUSED = "Batch refused to disable the compute environment, which a deployment is updating"

_ALIVE = ("pending", "running")
_SPOT_RECLAIM = "Server.SpotInstance"
"""Prefix of EC2's codes for a Spot instance that was reclaimed or found no capacity, which are no boot failures."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings that the stack passes in the environment."""

    stage: str
    topic: str
    namespace: str
    path: str
    """Path of the stage's parameters."""
    log_group: str
    """Log group of boot logs; stream names start with the instance id."""
    prices: Mapping[str, Mapping[str, float]]
    """Instance type -> capacity -> US dollars per hour."""
    limited: tuple[str | None, ...] = ()
    """Teams whose hourly cost is limited; None is the stage."""

    @classmethod
    def from_environment(cls) -> "Rules":
        return cls(
            stage=os.environ["STAGE"],
            topic=os.environ["TOPIC_ARN"],
            namespace=os.environ["METRIC_NAMESPACE"],
            path=os.environ["PARAMETER_PATH"],
            log_group=os.environ["LOG_GROUP"],
            prices=json.loads(os.environ["PRICES"]),
            limited=tuple(json.loads(os.environ["LIMITED"])),
        )


@dataclass(frozen=True, kw_only=True)
class Instance:
    """An instance of the stage, as described by EC2, which still lists ended instances for about an hour."""

    id: str
    type: str
    capacity: str
    environment: str
    """The tag Name, which a compute environment sets on all of its instances."""
    state: str
    launched: datetime
    joined: bool
    team: str | None = None
    """The team that has the instance for itself, or that a shared instance last worked for."""
    ended_by: str = ""
    """EC2's code for why the instance ended."""

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
            team=tags.get("trainyard:team"),
            ended_by=(described.get("StateReason") or {}).get("Code", ""),
        )

    @property
    def is_alive(self) -> bool:
        return self.state in _ALIVE


def never_joined(instances: Iterable[Instance], now: datetime, since: datetime | None) -> list[Instance]:
    """Return the instances that justify disabling their environment, newest first; empty to leave it enabled.

    `since`: when the environment was last disabled; earlier launches are ignored.
    """
    found: list[Instance] = []
    for instance in sorted(instances, key=lambda instance: instance.launched, reverse=True):
        if instance.joined or (since is not None and instance.launched <= since):
            break  # the environment works, or did when this instance was launched
        overdue = now - instance.launched >= timedelta(minutes=MINUTES)
        if overdue if instance.is_alive else not instance.ended_by.startswith(_SPOT_RECLAIM):
            found.append(instance)
    stuck = any(instance.is_alive for instance in found)
    return found if stuck or len(found) >= LAUNCHES else []


def explain(environment: str, culprits: list[Instance], rules: Rules) -> str:
    """Return the reason for disabling an environment, in one sentence."""
    shown = ", ".join(
        f"{instance.id} ({instance.state}{f', {instance.ended_by}' if instance.ended_by else ''})"
        for instance in culprits[:5]
    )
    started = f"{len(culprits)} instances" if len(culprits) > 1 else "an instance"
    stuck = any(instance.is_alive for instance in culprits)
    how = f"within {MINUTES} minutes" if stuck else "before they ended"
    streams = f"{culprits[0].id}/ in log group {rules.log_group}"
    return (
        f"{environment} started {started} of {culprits[0].type} that did not join its cluster {how}: {shown}; boot "
        f"logs: streams {streams}"
    )


def metrics(instances: Iterable[Instance], rules: Rules) -> list[dict[str, Any]]:
    """Return lines of CloudWatch's embedded metric format: running instances and their cost by type and capacity, and
    the cost of each team with a limit and of the stage.
    """
    running = [instance for instance in instances if instance.is_alive]
    found: list[tuple[str, str, dict[str, float]]] = []
    for name, prices in rules.prices.items():
        for capacity, usd in prices.items():
            nodes = sum(instance.type == name and instance.capacity == capacity for instance in running)
            found.append(("Instances", f"{name} {capacity}", {"RunningNodes": nodes, SPEND: round(nodes * usd, 4)}))
    for team in rules.limited:
        those = [instance for instance in running if team in (None, instance.team)]
        usd = sum(rules.prices.get(instance.type, {}).get(instance.capacity, 0.0) for instance in those)
        found.append(("Team" if team else "Stage", team or rules.stage, {SPEND: round(usd, 4)}))
    lines = []
    for dimension, value, values in found:
        directive = {
            "Namespace": rules.namespace,
            "Dimensions": [[dimension]],
            "Metrics": [{"Name": metric} for metric in values],
        }
        aws = {"Timestamp": int(time.time() * 1000), "CloudWatchMetrics": [directive]}
        lines.append({"_aws": aws, dimension: value, **values})
    return lines


def environments_of(batch: Any, stage: str) -> dict[str, dict[str, Any]]:
    """Return a stage's compute environments, by the Name tag of their instances."""
    return {
        name: environment
        for page in batch.get_paginator("describe_compute_environments").paginate()
        for environment in page["computeEnvironments"]
        if environment.get("tags", {}).get("trainyard:stage") == stage
        and (name := environment.get("computeResources", {}).get("tags", {}).get("Name"))
    }


class Account:
    """The AWS calls."""

    def __init__(self, rules: Rules) -> None:
        import boto3  # noqa: PLC0415 - the functions above are used and tested without it

        self._rules = rules
        self._ec2: Any = boto3.client("ec2")
        self._batch: Any = boto3.client("batch")
        self._ssm: Any = boto3.client("ssm")
        self._sns: Any = boto3.client("sns")

    def environments(self) -> dict[str, dict[str, Any]]:
        return environments_of(self._batch, self._rules.stage)

    def instances(self, *filters: dict[str, Any]) -> list[Instance]:
        """Return the stage's instances that match all of EC2's `filters`."""
        of_stage = {"Name": "tag:trainyard:stage", "Values": [self._rules.stage]}
        pages = self._ec2.get_paginator("describe_instances").paginate(Filters=[of_stage, *filters])
        return [
            Instance.of(described)
            for page in pages
            for reservation in page["Reservations"]
            for described in reservation["Instances"]
        ]

    def mark_joined(self, instance: Instance, now: datetime) -> None:
        tag = {"Key": JOINED_TAG, "Value": now.isoformat(timespec="seconds")}
        self._ec2.create_tags(Resources=[instance.id], Tags=[tag])

    def record(self, environment: str) -> dict[str, Any] | None:
        """Return the record of disabling the environment, or None if this function did not disable it."""
        try:
            name = self._rules.path + NEVER_JOINED + environment
            found: dict[str, Any] = json.loads(self._ssm.get_parameter(Name=name)["Parameter"]["Value"])
        except self._ssm.exceptions.ParameterNotFound:
            return None
        return found

    def delete_record(self, environment: str) -> None:
        with contextlib.suppress(self._ssm.exceptions.ParameterNotFound):
            self._ssm.delete_parameter(Name=self._rules.path + NEVER_JOINED + environment)

    def write_record(self, environment: str, record: dict[str, Any]) -> None:
        name = self._rules.path + NEVER_JOINED + environment
        self._ssm.put_parameter(Name=name, Value=json.dumps(record), Type="String", Overwrite=True)

    def disable(self, environment: str) -> bool:
        """Disable an environment. Return whether Batch did: it may refuse while a deployment replaces the instances."""
        try:
            self._batch.update_compute_environment(computeEnvironment=environment, state="DISABLED")
        except self._batch.exceptions.ClientException as error:
            print(f"{environment}: {error}")
            return False
        return True

    def terminate(self, instances: list[Instance]) -> None:
        if ids := [instance.id for instance in instances if instance.is_alive]:
            self._ec2.terminate_instances(InstanceIds=ids)

    def alert(self, text: str) -> None:
        self._sns.publish(TopicArn=self._rules.topic, Message=text)


def disable_failing(account: Account, rules: Rules, now: datetime) -> list[Instance]:
    """Disable environments whose instances never join. Return the instances of all environments."""
    environments = account.environments()
    instances = [found for found in account.instances() if found.environment in environments]
    for name, environment in environments.items():
        own = [instance for instance in instances if instance.environment == name]
        if not own:
            continue
        batch_name = environment["computeEnvironmentName"]
        record = account.record(batch_name)
        if record and environment["state"] == "ENABLED" and max(own, key=lambda found: found.launched).joined:
            account.delete_record(batch_name)
            continue
        since = datetime.fromisoformat(record["since"]) if record else None
        culprits = never_joined(own, now, since)
        if not culprits:
            continue
        if environment["state"] == "ENABLED":
            disabled = account.disable(batch_name)
            reason = explain(name, culprits, rules)
            account.write_record(batch_name, {"since": now.isoformat(timespec="seconds"), "reason": reason})
            account.alert(
                f"Stage {rules.stage}: {reason}. {_DISABLED if disabled else _REFUSED}, and its running instances were "
                f"terminated. Next: aws logs tail {rules.log_group} --since 1d --log-stream-name-prefix "
                f"{culprits[0].id}/, or aws ec2 get-console-output --instance-id {culprits[0].id}. Once the cause is "
                f"fixed: aws batch update-compute-environment --compute-environment {batch_name} --state ENABLED"
            )
        account.terminate(culprits)
    return instances


def handler(event: dict[str, Any], _context: object) -> None:
    """Handle an event of ECS (container instance), or of the schedule."""
    rules = Rules.from_environment()
    account, now = Account(rules), datetime.now(timezone.utc)
    instance_id = event.get("detail", {}).get("ec2InstanceId")
    if instance_id:
        # Events also come from other stages of the account, and whenever a task starts or ends.
        found = account.instances({"Name": "instance-id", "Values": [instance_id]})
        if not found or found[0].joined:
            return
        account.mark_joined(found[0], now)
    for line in metrics(disable_failing(account, rules, now), rules):
        print(json.dumps(line))
