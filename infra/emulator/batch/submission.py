"""Check a SubmitJob request and apply its overrides to the job definition.

Source of limits: AWS Batch user guide, "Service quotas" and "Array jobs".
"""

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moto.batch.exceptions import ClientException

from infra.emulator.batch.compute import JobQueue
from infra.emulator.batch.job_definition import (
    ALL_NODES,
    JobDefinition,
    check_name,
    check_strategy,
    check_timeout,
    resource,
)

MAX_OVERRIDES_CHARACTERS = 8192
"""Limit of Amazon ECS for container overrides. Batch accepts longer overrides, but the job fails when it is placed."""
MAX_DEPENDENCIES = 20
ARRAY_SIZES = range(2, 10_000 + 1)
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}\*?")
_MAX_TAGS = 50
_UNKNOWN = frozenset(
    {"containerOverrides", "eksPropertiesOverride", "parameters", "consumableResourcePropertiesOverride"}
)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """An accepted SubmitJob request."""

    name: str
    definition: JobDefinition
    queue: JobQueue
    endpoint: str
    """Address of the emulator in the request, which the job uses too."""
    task: Mapping[str, Any]
    """The task of each node, in the shape of the API, with overrides applied."""
    nodes: int | None
    """Number of nodes of a multi-node job; None for other jobs."""
    retry_strategy: Mapping[str, Any]
    timeout_seconds: float | None
    depends_on: tuple[Mapping[str, str], ...]
    array_size: int | None
    share_identifier: str | None
    scheduling_priority: int | None
    propagate_tags: bool
    overrides_too_long: bool
    """True if ECS will refuse the task when the job is placed."""

    @property
    def container(self) -> Mapping[str, Any]:
        container: Mapping[str, Any] = self.task["containers"][0]
        return container

    @property
    def vcpus(self) -> float:
        return (resource(self.container, "VCPU") or 0) * (self.nodes or 1)


def parse_submission(
    request: Mapping[str, Any],
    *,
    definition: JobDefinition,
    queue: JobQueue,
    endpoint: str,
    job_exists: Callable[[str], bool],
) -> Submission:
    """Parse a SubmitJob request. Raises ClientException if Batch or the emulator refuses it."""
    check_name(request.get("jobName"), "Job name")
    if unknown := sorted(request.keys() & _UNKNOWN):
        raise ClientException(f"{unknown[0]}: the emulator supports only ecsPropertiesOverride and nodeOverrides")
    if not queue.enabled:
        raise ClientException(f"JobQueue {queue.name} is in DISABLED state, it must be ENABLED to accept jobs.")
    strategy = request.get("retryStrategy") or definition.retry_strategy
    if problem := check_strategy(strategy):
        raise ClientException(problem)
    check_timeout(request.get("timeout"))
    timeout = request.get("timeout") or definition.timeout
    task, nodes = _overridden(definition, request)
    array_size = (request.get("arrayProperties") or {}).get("size")
    if array_size is not None and (nodes is not None or array_size not in ARRAY_SIZES):
        limits = f"{ARRAY_SIZES.start} and {ARRAY_SIZES.stop - 1}"
        raise ClientException(f"Array size must be between {limits}, but was {array_size}; nodes cannot be arrays.")
    depends_on = tuple(request.get("dependsOn") or ())
    _check_dependencies(depends_on, job_exists)
    _check_share(request, queue)
    if len(request.get("tags") or ()) > _MAX_TAGS:
        raise ClientException(f"A job can have at most {_MAX_TAGS} tags")
    propagate = request.get("propagateTags")
    return Submission(
        name=request["jobName"],
        definition=definition,
        queue=queue,
        endpoint=endpoint,
        task=task,
        nodes=nodes,
        retry_strategy=_lower_actions({"attempts": 1, **strategy}),
        timeout_seconds=timeout.get("attemptDurationSeconds"),
        depends_on=depends_on,
        array_size=array_size,
        share_identifier=request.get("shareIdentifier"),
        scheduling_priority=request.get("schedulingPriorityOverride", definition.properties.get("schedulingPriority")),
        propagate_tags=bool(definition.properties.get("propagateTags") if propagate is None else propagate),
        overrides_too_long=_overrides_length(request) > MAX_OVERRIDES_CHARACTERS,
    )


def _overridden(definition: JobDefinition, request: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Return the task of each node, and the number of nodes of a multi-node job."""
    task = copy.deepcopy(dict(definition.task))
    if not definition.is_multinode:
        if request.get("nodeOverrides"):
            raise ClientException("Node overrides should not be set for jobs that are not multi-node parallel jobs.")
        _override(task, request.get("ecsPropertiesOverride"))
        return task, None
    if request.get("ecsPropertiesOverride"):
        raise ClientException(
            "ecsPropertiesOverride should not be set for multi-node parallel jobs, use nodeOverrides."
        )
    overrides = request.get("nodeOverrides") or {}
    for item in overrides.get("nodePropertyOverrides") or ():
        if item.get("targetNodes") != ALL_NODES:
            raise ClientException(
                f"NodeOverride targets should match job definition. Non matching targets - {item.get('targetNodes')}"
            )
        _override(task, item.get("ecsPropertiesOverride"))
    return task, overrides.get("numNodes") or definition.properties["nodeProperties"]["numNodes"]


def _override(task: Mapping[str, Any], ecs: Mapping[str, Any] | None) -> None:
    [container] = task["containers"]
    for override in (item for part in (ecs or {}).get("taskProperties") or () for item in part.get("containers") or ()):
        if override.get("name") != container.get("name"):
            raise ClientException(
                f"ecsPropertiesOverride: container {override.get('name')} does not exist in the job definition. "
                f"It has: {container.get('name')}."
            )
        _override_container(container, override)


def _override_container(container: dict[str, Any], override: Mapping[str, Any]) -> None:
    if override.get("command"):
        if "" in override["command"]:
            raise ClientException("Container overrides: command can't contain an empty string.")
        container["command"] = list(override["command"])
    environment = {item["name"]: item.get("value", "") for item in container.get("environment") or ()}
    for item in override.get("environment") or ():
        if item.get("name", "").startswith("AWS_BATCH"):
            raise ClientException(
                f"Environment variable {item['name']}: names that start with AWS_BATCH are reserved for Batch."
            )
        environment[item["name"]] = item.get("value", "")
    container["environment"] = [{"name": name, "value": value} for name, value in environment.items()]
    requirements = {item["type"]: item["value"] for item in container["resourceRequirements"]}
    requirements |= {item["type"]: item["value"] for item in override.get("resourceRequirements") or ()}
    container["resourceRequirements"] = [{"type": kind, "value": value} for kind, value in requirements.items()]


def _check_dependencies(depends_on: tuple[Mapping[str, str], ...], job_exists: Callable[[str], bool]) -> None:
    if len(depends_on) > MAX_DEPENDENCIES:
        raise ClientException(
            f"A job can depend on at most {MAX_DEPENDENCIES} jobs, but dependsOn has {len(depends_on)}"
        )
    for dependency in depends_on:
        if dependency.keys() != {"jobId"}:
            raise ClientException("dependsOn: the emulator supports only jobId")
        if not job_exists(dependency["jobId"]):
            raise ClientException(f"Job {dependency['jobId']} in dependsOn does not exist.")


def _check_share(request: Mapping[str, Any], queue: JobQueue) -> None:
    share = request.get("shareIdentifier")
    if queue.scheduling_policy_arn is None:
        if share is not None or request.get("schedulingPriorityOverride") is not None:
            raise ClientException(
                "Job with shareIdentifier or schedulingPriority can only be submitted to job queue with fair share "
                "scheduling policy."
            )
    elif share is None:
        raise ClientException(
            f"shareIdentifier must be specified: JobQueue {queue.name} has a fair share scheduling policy."
        )
    elif not _SHARE.fullmatch(share):
        raise ClientException(f"shareIdentifier {share} is invalid: up to 255 letters and numbers are allowed.")


def _overrides_length(request: Mapping[str, Any]) -> int:
    given = {name: request[name] for name in ("ecsPropertiesOverride", "nodeOverrides") if request.get(name)}
    return len(json.dumps(given, separators=(",", ":"), ensure_ascii=False)) if given else 0


def _lower_actions(strategy: Mapping[str, Any]) -> dict[str, Any]:
    rules = [{**rule, "action": rule["action"].lower()} for rule in strategy.get("evaluateOnExit") or ()]
    return {"attempts": strategy["attempts"], **({"evaluateOnExit": rules} if rules else {})}
