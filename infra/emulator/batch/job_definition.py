"""Job definitions: what RegisterJobDefinition accepts and refuses, and when a job is retried.

The emulator supports what the stacks use: `ecsProperties` with one task of one container, the same on all nodes of a
multi-node job. Source of limits: AWS Batch user guide, "Service quotas" and "Job timeouts".
"""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moto.batch.exceptions import ClientException
from moto.batch.utils import make_arn_for_task_def

from infra.emulator.settings import minimum_timeout_seconds

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
ALL_NODES = "0:"
MAX_JOB_DEFINITION_BYTES = 24 * 1024
MAX_ATTEMPTS = 10
MAX_EVALUATE_ON_EXIT = 5
_PATTERNS = {
    # Letters, digits, periods, colons and white space, with an optional asterisk at the end; exit codes: digits only.
    "onStatusReason": re.compile(r"[A-Za-z0-9.:\s]{0,512}\*?"),
    "onReason": re.compile(r"[A-Za-z0-9.:\s]{0,512}\*?"),
    "onExitCode": re.compile(r"[0-9]{0,512}\*?"),
}


class JobDefinition:
    """One revision of a job definition."""

    def __init__(self, request: Mapping[str, Any], *, revision: int, account_id: str, region: str) -> None:
        """`request` must have passed `check_request`."""
        self.name: str = request["jobDefinitionName"]
        self.revision = revision
        self.status = "ACTIVE"
        self.arn: str = make_arn_for_task_def(account_id, self.name, revision, region)
        self.properties: dict[str, Any] = copy.deepcopy(
            {name: value for name, value in request.items() if name not in ("jobDefinitionName", "tags")}
        )
        self.properties["platformCapabilities"] = request.get("platformCapabilities") or ["EC2"]
        for rule in self.properties.get("retryStrategy", {}).get("evaluateOnExit", ()):
            rule["action"] = rule["action"].lower()  # Batch returns it in lower case

    @property
    def is_multinode(self) -> bool:
        return bool(self.properties["type"] == "multinode")

    @property
    def task(self) -> Mapping[str, Any]:
        """Return the only element of taskProperties, which each node runs."""
        return _tasks(self.properties)[0]

    @property
    def retry_strategy(self) -> Mapping[str, Any]:
        return self.properties.get("retryStrategy") or {}

    @property
    def timeout(self) -> Mapping[str, Any]:
        return self.properties.get("timeout") or {}

    def describe(self, tags: Mapping[str, str]) -> dict[str, Any]:
        """Return it as DescribeJobDefinitions does."""
        return {
            **copy.deepcopy(self.properties),
            "jobDefinitionName": self.name,
            "jobDefinitionArn": self.arn,
            "revision": self.revision,
            "status": self.status,
            "containerOrchestrationType": "ECS",
            "tags": dict(tags),
        }


def check_request(request: Mapping[str, Any]) -> None:
    """Raise ClientException if Batch or the emulator refuses the definition."""
    check_name(request.get("jobDefinitionName"), "jobDefinitionName")
    size = len(json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode())
    if size > MAX_JOB_DEFINITION_BYTES:
        raise ClientException(f"Job definition is {size} bytes long, the limit is {MAX_JOB_DEFINITION_BYTES} bytes")
    if unknown := sorted(request.keys() & {"containerProperties", "eksProperties", "parameters"}):
        raise ClientException(f"{unknown[0]}: the emulator supports only ecsProperties")
    kind = request.get("type")
    if kind not in ("container", "multinode"):
        raise ClientException(f"Job definition type must be one of container, multinode, but was {kind}")
    if kind == "multinode":
        _check_nodes(request.get("nodeProperties") or {})
    _check_tasks(_tasks(request))
    check_timeout(request.get("timeout"))
    if problem := check_strategy(request.get("retryStrategy") or {}):
        raise ClientException(problem)


def check_name(name: object, what: str) -> None:
    """Raise ClientException if Batch refuses a name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ClientException(
            f"{what} {name} is invalid: up to 128 letters, numbers, hyphens and underscores are allowed"
        )


def check_timeout(timeout: Mapping[str, Any] | None) -> None:
    """Raise ClientException if attemptDurationSeconds is too short."""
    seconds = (timeout or {}).get("attemptDurationSeconds")
    if seconds is not None and seconds < minimum_timeout_seconds():
        raise ClientException(
            f"Job timeout attemptDurationSeconds must be at least {minimum_timeout_seconds():g}, but was {seconds}"
        )


def resource(container: Mapping[str, Any], kind: str) -> float | None:
    """Return a resource requirement of a container: VCPU, MEMORY (MiB) or GPU. None if not set."""
    for requirement in container.get("resourceRequirements") or ():
        if requirement["type"] == kind:
            return float(requirement["value"])
    return None


def _tasks(properties: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks of a definition, or of its only node range."""
    ranges = (properties.get("nodeProperties") or {}).get("nodeRangeProperties") or [properties]
    tasks: list[dict[str, Any]] = (ranges[0].get("ecsProperties") or {}).get("taskProperties") or []
    return tasks


def _check_nodes(nodes: Mapping[str, Any]) -> None:
    if nodes.get("numNodes", 0) < 1 or nodes.get("mainNode") != 0:
        raise ClientException("nodeProperties: numNodes must be at least 1; on the emulator, mainNode must be 0")
    if [item.get("targetNodes") for item in nodes.get("nodeRangeProperties") or ()] != [ALL_NODES]:
        raise ClientException(f"nodeRangeProperties: the emulator supports one range, with targetNodes {ALL_NODES}")


def _check_tasks(tasks: list[dict[str, Any]]) -> None:
    if [len(task.get("containers") or ()) for task in tasks] != [1]:
        raise ClientException("ecsProperties: the emulator supports one task with one container")
    [container] = tasks[0]["containers"]
    if not container.get("image"):
        raise ClientException("Container properties must contain image")
    if not container.get("essential", True) or container.get("dependsOn"):
        raise ClientException("All jobs must have at least one essential container")
    for kind, what in (("VCPU", "vCPU"), ("MEMORY", "Memory")):
        if resource(container, kind) is None:
            raise ClientException(f"Error executing request, Exception : {what} is not provided.")


# Retries. Sources: AWS Batch user guide, "Automated job retries"; API reference of EvaluateOnExit.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a failed attempt ended, as DescribeJobs shows it."""

    exit_code: int | None
    """None if no container reported one, for example because the host was reclaimed."""
    reason: str | None
    """The container's reason: an error of the container runtime, usually absent."""
    status_reason: str
    """The attempt's reason."""


def should_retry(strategy: Mapping[str, Any], attempt: int, outcome: Outcome) -> bool:
    """Return whether another attempt follows attempt number `attempt` (from 1).

    The first matching rule decides. If no rule matches, the job is retried, as it is without rules.
    """
    if attempt >= strategy.get("attempts", 1):
        return False
    for rule in strategy.get("evaluateOnExit", ()):
        if _rule_matches(rule, outcome):
            return bool(rule["action"].upper() == "RETRY")
    return True


def check_strategy(strategy: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a retryStrategy, or None."""
    attempts = strategy.get("attempts")
    rules = strategy.get("evaluateOnExit") or []
    if attempts is None:
        return "attempts must be specified when evaluateOnExit is specified" if rules else None
    if not 1 <= attempts <= MAX_ATTEMPTS:
        return f"RetryStrategy attempts must be between 1 and {MAX_ATTEMPTS}, but was {attempts}"
    if len(rules) > MAX_EVALUATE_ON_EXIT:
        return f"evaluateOnExit can have at most {MAX_EVALUATE_ON_EXIT} entries, but has {len(rules)}"
    for number, rule in enumerate(rules, start=1):
        if str(rule.get("action", "")).upper() not in ("RETRY", "EXIT"):
            return f"evaluateOnExit entry {number}: action must be RETRY or EXIT, but was {rule.get('action')}"
        for name, pattern in _PATTERNS.items():
            if name in rule and not pattern.fullmatch(rule[name]):
                return (
                    f"evaluateOnExit entry {number}: {name} may have letters, digits, periods, colons and white space "
                    f"(exit codes: digits), and an asterisk only at the end, but was {rule[name]}"
                )
    return None


def _rule_matches(rule: Mapping[str, str], outcome: Outcome) -> bool:
    # A missing reason counts as empty: the guide's catch-all is {"onReason": "*", "action": "EXIT"}, and a container
    # that simply exited has no reason. A missing exit code matches nothing, not even "*".
    exit_code = None if outcome.exit_code is None else str(outcome.exit_code)
    values = {"onStatusReason": outcome.status_reason, "onReason": outcome.reason or "", "onExitCode": exit_code}
    return all(_glob(rule[name], value) for name, value in values.items() if name in rule)


def _glob(pattern: str, value: str | None) -> bool:
    if value is None:
        return False
    return value.startswith(pattern[:-1]) if pattern.endswith("*") else value == pattern
