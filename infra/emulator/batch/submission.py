"""SubmitJob's request, checked: what Batch refuses is refused here, before there is a job."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moto.batch.exceptions import ClientException

from infra.emulator.batch.compute import JobQueue
from infra.emulator.batch.job_definition import JobDefinition, check_timeout
from infra.emulator.batch.overrides import Node, resolve_nodes
from infra.emulator.batch.quotas import MAX_ARRAY_SIZE, MAX_DEPENDENCIES, MAX_OVERRIDES_CHARACTERS, MIN_ARRAY_SIZE
from infra.emulator.batch.retry import check_strategy

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}\*?")
_MAX_TAGS = 50


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One accepted SubmitJob."""

    name: str
    definition: JobDefinition
    queue: JobQueue
    endpoint: str
    """Where the request came in, which is where the job finds the embedded AWS."""
    nodes: tuple[Node, ...]
    node_properties: Mapping[str, Any] | None
    """The node properties of a multi-node job, with overrides applied."""
    parameters: Mapping[str, str]
    retry_strategy: Mapping[str, Any]
    timeout_seconds: float | None
    depends_on: tuple[Mapping[str, str], ...]
    array_size: int | None
    share_identifier: str | None
    scheduling_priority: int | None
    propagate_tags: bool
    overrides_too_long: bool
    """Accepted all the same: ECS refuses the task when the job is placed."""

    @property
    def vcpus(self) -> float:
        return sum(node.vcpus for node in self.nodes)

    @property
    def is_multinode(self) -> bool:
        return self.node_properties is not None

    @property
    def main_node(self) -> int:
        return int(self.node_properties["mainNode"]) if self.node_properties else 0


def parse_submission(
    request: Mapping[str, Any],
    *,
    definition: JobDefinition,
    queue: JobQueue,
    endpoint: str,
    job_exists: Callable[[str], bool],
    array_size_of: Callable[[str], int | None],
) -> Submission:
    """Read a request of SubmitJob. Raises ClientException where Batch refuses it."""
    name = request.get("jobName")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClientException(
            f"Job name {name} should match valid pattern: up to 128 letters, numbers, hyphens and underscores, "
            "the first a letter or a number"
        )
    if not queue.enabled:
        raise ClientException(f"JobQueue {queue.name} is in DISABLED state, it must be ENABLED to accept jobs.")
    _check_capability(definition, queue)
    strategy = request.get("retryStrategy") or definition.retry_strategy
    problem = check_strategy(strategy)
    if problem:
        raise ClientException(problem)
    check_timeout(request.get("timeout"))
    timeout = request.get("timeout") or definition.timeout
    parameters = {**definition.properties["parameters"], **(request.get("parameters") or {})}
    nodes, node_properties = resolve_nodes(definition, request, parameters)
    array_size = (request.get("arrayProperties") or {}).get("size")
    if array_size is not None:
        if node_properties is not None:
            raise ClientException("Multi-node parallel jobs can't be array jobs.")
        if not MIN_ARRAY_SIZE <= array_size <= MAX_ARRAY_SIZE:
            raise ClientException(
                f"Array size must be between {MIN_ARRAY_SIZE} and {MAX_ARRAY_SIZE}, but was {array_size}"
            )
    depends_on = tuple(request.get("dependsOn") or ())
    _check_dependencies(depends_on, array_size, job_exists, array_size_of)
    _check_share(request, queue)
    if len(request.get("tags") or ()) > _MAX_TAGS:
        raise ClientException(f"A job can have at most {_MAX_TAGS} tags")
    propagate = request.get("propagateTags")
    return Submission(
        name=name,
        definition=definition,
        queue=queue,
        endpoint=endpoint,
        nodes=nodes,
        node_properties=node_properties,
        parameters=parameters,
        retry_strategy=_lower_actions({"attempts": 1, **strategy}),
        timeout_seconds=timeout.get("attemptDurationSeconds"),
        depends_on=depends_on,
        array_size=array_size,
        share_identifier=request.get("shareIdentifier"),
        scheduling_priority=request.get("schedulingPriorityOverride", definition.properties.get("schedulingPriority")),
        propagate_tags=bool(definition.properties.get("propagateTags") if propagate is None else propagate),
        overrides_too_long=_overrides_length(request) > MAX_OVERRIDES_CHARACTERS,
    )


def _check_capability(definition: JobDefinition, queue: JobQueue) -> None:
    fargate = any(str(item.resources.get("type", "")).startswith("FARGATE") for item in queue.environments)
    for capability in definition.properties["platformCapabilities"]:
        if (capability == "FARGATE") != fargate:
            raise ClientException(
                f"Job Queue is attached to Compute Environment that can not run Jobs with capability {capability}."
            )


def _check_dependencies(
    depends_on: tuple[Mapping[str, str], ...],
    array_size: int | None,
    job_exists: Callable[[str], bool],
    array_size_of: Callable[[str], int | None],
) -> None:
    if len(depends_on) > MAX_DEPENDENCIES:
        raise ClientException(
            f"A job can depend on at most {MAX_DEPENDENCIES} jobs, but dependsOn has {len(depends_on)}"
        )
    for dependency in depends_on:
        job_id, kind = dependency.get("jobId"), dependency.get("type")
        if kind in ("SEQUENTIAL", "N_TO_N") and array_size is None:
            raise ClientException(f"Dependency type {kind} is for array jobs only.")
        if kind == "SEQUENTIAL" and job_id is None:
            continue
        if job_id is None:
            raise ClientException("dependsOn: jobId must be given, except for type SEQUENTIAL.")
        if not job_exists(job_id):
            raise ClientException(f"Job {job_id} in dependsOn does not exist.")
        if kind == "N_TO_N" and array_size_of(job_id) != array_size:
            raise ClientException(f"N_TO_N dependency: job {job_id} must be an array job of size {array_size}.")


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
    names = ("containerOverrides", "ecsPropertiesOverride", "nodeOverrides")
    given = {name: request[name] for name in names if request.get(name)}
    return len(json.dumps(given, separators=(",", ":"), ensure_ascii=False)) if given else 0


def _lower_actions(strategy: Mapping[str, Any]) -> dict[str, Any]:
    rules = [{**rule, "action": rule["action"].lower()} for rule in strategy.get("evaluateOnExit") or ()]
    return {"attempts": strategy["attempts"], **({"evaluateOnExit": rules} if rules else {})}
