"""Find out why a job is waiting: check everything on Batch and EC2 that can keep a job from starting.

trainyard why RUN

Batch gives a reason only for the job at the head of a queue, and only for some causes. Each check here is one
request to AWS. A check that the caller may not make is "unknown" and names the missing permission; the others still
run.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code, explain
from jobs.core.instance_types import INSTANCE_TYPES, InstanceType
from jobs.core.queues import on_demand_successor, owner_of_queue, types_text
from jobs.core.stage import BudgetStop, DeployedStage, deploy_command, share_identifier
from jobs.runs.batch import most_nodes
from jobs.runs.job import Job
from jobs.spec.submit_job import SCHEDULING_PRIORITY

Verdict = Literal["cause", "fine", "unknown"]

_WAITING = ("SUBMITTED", "PENDING", "RUNNABLE")
_ABLE = ("VALID", "UPDATING")
"""Statuses of compute environments that start instances. In an update, new jobs start on new instances (AWS Batch user
guide, "Perform infrastructure updates")."""
_ON_INSTANCES = ("STARTING", "RUNNING")
_OCCUPYING = ("PENDING", *_ON_INSTANCES)
"""States of jobs that occupy instances, or whose nodes may."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    verdict: Verdict
    about: str
    text: str
    next_step: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What Batch reports about the job and about the resources it waits for."""

    detail: Mapping[str, Any]
    """The job from DescribeJobs, or its first waiting node if its nodes start separately."""
    queue: Mapping[str, Any]
    environments: tuple[Mapping[str, Any], ...]
    """Compute environments, in the order in which the queue tries them."""
    running: tuple[Mapping[str, Any], ...]
    """Summaries of the queue's jobs that have instances, or of their nodes if those start separately."""
    types: tuple[InstanceType, ...]
    """Types of the environments' instances, in the order in which Batch tries them."""
    nnodes: int
    waiting_nodes: int
    """Nodes that have no instance yet."""
    deploy_command: str
    """The command that deploys a change to the stage's settings."""
    is_shared: bool
    """Whether several teams use the queue."""
    teams: Mapping[str, str] = field(default_factory=dict)
    """Teams by share identifier."""
    never_joined: Mapping[str, str] = field(default_factory=dict)
    """Why a compute environment's instances never joined, by environment, if that is known."""
    stop: BudgetStop | None = None
    """Set if the stage has used up its budget."""
    may_use_on_demand: bool = False
    """Whether the stage has an On-Demand queue for jobs of this Spot queue."""
    hourly_stop: str | None = None
    """Why no instance starts, if the stage or the queue's team has reached its hourly limit."""

    @property
    def names(self) -> str:
        return types_text(self.types)


def is_waiting(job: Job) -> bool:
    """Return whether the job, or some of its nodes, are waiting."""
    return job.state in _WAITING or any(state in _WAITING for state in job.nodes)


def findings(aws: Aws, stage: DeployedStage, job: Job) -> list[Finding]:
    """Return all findings, causes first. At least one is a cause, if only that EC2 has not provided an instance yet."""
    facts = _facts(aws, stage, job)
    found: list[Finding] = [*_dependencies(aws, facts), *_batch_reason(facts)]
    if "RUNNABLE" in (job.state, *job.nodes):
        found += _queue(facts)
        found += _environments(facts)
        found += _instance_limit(facts)
        checks: list[tuple[str, Callable[[Aws, Facts], Iterator[Finding]]]] = [
            ("queue position", _queue_position),
            ("EC2 availability", _availability),
            ("vCPU quota", _quota),
        ]
        # The emulator has neither EC2 offerings nor quotas.
        for about, check in checks[: 1 if aws.emulated else None]:
            found += _checked(about, aws, facts, check)
    if job.state == "SUBMITTED":
        found.append(
            Finding(verdict="cause", about="state", text="it was only just submitted; Batch has not evaluated it yet")
        )
    order: tuple[Verdict, ...] = ("cause", "unknown", "fine")
    found = list(dict.fromkeys(found))  # the same of several environments
    found.sort(key=lambda finding: order.index(finding.verdict))
    if not any(finding.verdict == "cause" for finding in found):
        found.insert(0, _no_instance_yet(facts))
    return found


def _facts(aws: Aws, stage: DeployedStage, job: Job) -> Facts:
    detail: Mapping[str, Any] = aws.batch.describe_jobs(jobs=[job.id])["jobs"][0]
    if job.nodes:
        nodes = _children(aws, job.id, "RUNNABLE") if "RUNNABLE" in job.nodes else []
        detail = aws.batch.describe_jobs(jobs=[nodes[0]["jobId"]])["jobs"][0] if nodes else detail
    queue: Mapping[str, Any] = aws.batch.describe_job_queues(jobQueues=[detail["jobQueue"]])["jobQueues"][0]
    names = [
        item["computeEnvironment"] for item in sorted(queue["computeEnvironmentOrder"], key=lambda it: it["order"])
    ]
    described = aws.batch.describe_compute_environments(computeEnvironments=names)["computeEnvironments"]
    by_arn: dict[str, Mapping[str, Any]] = {item["computeEnvironmentArn"]: item for item in described}
    of_queue = {state: _summaries(aws, jobQueue=queue["jobQueueArn"], jobStatus=state) for state in _OCCUPYING}
    running = [item for state in _ON_INSTANCES for item in of_queue[state]]
    # An array's parent is PENDING while its children run, and listing the queue does not return the children.
    for parent in of_queue["PENDING"]:
        if "arrayProperties" in parent:
            children = [child for state in _ON_INSTANCES for child in _children(aws, parent["jobId"], state)]
            running += [{**child, "shareIdentifier": parent.get("shareIdentifier", "")} for child in children]
    # A sweep's workers start whenever there is room; they need not run at the same time.
    nnodes = 1 if job.points else sum(job.nodes.values()) or detail.get("nodeProperties", {}).get("numNodes", 1)
    environments = tuple(by_arn[name] for name in names if name in by_arn)
    types = dict.fromkeys(name for item in environments for name in _types(item))
    return Facts(
        detail=detail,
        queue=queue,
        environments=environments,
        running=tuple(running),
        types=tuple(INSTANCE_TYPES[name] for name in types if name in INSTANCE_TYPES),
        nnodes=nnodes,
        waiting_nodes=1 if job.points else job.nodes.get("RUNNABLE", 0) if job.nodes else nnodes,
        deploy_command=deploy_command(stage.name, emulated=aws.emulated),
        is_shared=owner_of_queue(job.queue) is None,
        teams={share_identifier(team): team for team in stage.teams},
        never_joined={name: _reason(value) for name, value in stage.never_joined.items()},
        may_use_on_demand=on_demand_successor(job.queue) in stage.queues,
        stop=stage.stage_budget_stop,
        hourly_stop=stage.hourly_stop(owner_of_queue(job.queue) or ""),
    )


def _children(aws: Aws, job_id: str, state: str) -> list[Any]:
    return _summaries(aws, arrayJobId=job_id, jobStatus=state)


def _summaries(aws: Aws, **which: Any) -> list[Any]:
    pages = aws.batch.get_paginator("list_jobs").paginate(**which)
    return [item for page in pages for item in page["jobSummaryList"]]


def _checked(about: str, aws: Aws, facts: Facts, check: Callable[[Aws, Facts], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from list(check(aws, facts))
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        operation = getattr(error, "operation_name", "")
        reason = f"{operation} failed with {error_code(error)}" if operation else str(explained).splitlines()[0]
        yield Finding(verdict="unknown", about=about, text=f"AWS refused to answer: {reason}")


def _dependencies(aws: Aws, facts: Facts) -> Iterator[Finding]:
    ids = [item["jobId"] for item in facts.detail.get("dependsOn", []) if "jobId" in item]
    if not ids or facts.detail["status"] == "RUNNABLE":
        return
    for other in aws.batch.describe_jobs(jobs=ids)["jobs"]:
        if other["status"] != "SUCCEEDED":
            name, state = other["jobName"], other["status"]
            next_step = f"trainyard why {name}" if state in _WAITING else f"trainyard logs {name}"
            text = f"it depends on {name}, which is {state}"
            yield Finding(verdict="cause", about="dependency", text=text, next_step=next_step)


def _batch_reason(facts: Facts) -> Iterator[Finding]:
    reason = facts.detail.get("statusReason", "")
    if not reason or facts.detail["status"] not in _WAITING:
        return
    # Batch prefixes its reason with a code: user guide, "Jobs stuck in a RUNNABLE status".
    if reason.startswith("MISCONFIGURATION"):
        next_step = (
            f"change the queue's instances in infra/settings.py so that the job fits, then {facts.deploy_command}"
        )
    elif reason.startswith("CAPACITY"):
        next_step = "wait, or submit with resources.capacity: on-demand" if facts.may_use_on_demand else "wait"
    else:
        next_step = ""
    yield Finding(verdict="cause", about="Batch's reason", text=reason, next_step=next_step)


def _queue(facts: Facts) -> Iterator[Finding]:
    queue = facts.queue
    state, status = queue["state"], queue["status"]
    if (state, status) == ("ENABLED", "VALID"):
        yield Finding(verdict="fine", about="queue", text="enabled and valid")
    elif state != "ENABLED":
        text = "the queue is disabled, so none of its jobs start"
        yield Finding(verdict="cause", about="queue", text=text, next_step=_enable("job-queue", queue["jobQueueName"]))
    else:
        text = f"the queue is {status}: {queue.get('statusReason', 'no reason given')}"
        yield Finding(verdict="cause", about="queue", text=text)


def _environments(facts: Facts) -> Iterator[Finding]:
    able = [item for item in facts.environments if item["state"] == "ENABLED" and item["status"] in _ABLE]
    kinds = Counter(map(_kind, facts.environments))
    for item in facts.environments:
        kind = _kind(item)
        about = f"{kind} instances" if kinds[kind] == 1 else f"{kind} {', '.join(_types(item))}"
        verdict: Verdict = "fine" if able else "cause"
        if item["state"] != "ENABLED" and facts.stop is not None:
            text = f"they are switched off: the stage has used up its budget of {facts.stop.budget_usd:g} USD a month"
            next_step = f"wait until {facts.stop.until[:10]}, or ask for a higher monthly_budget_usd of the stage"
            yield Finding(verdict=verdict, about=about, text=text, next_step=next_step)
        elif item["state"] != "ENABLED" and facts.hourly_stop is not None:
            text = f"they are switched off: {facts.hourly_stop}"
            next_step = "wait until running jobs end, or ask for a higher max_usd_per_hour"
            yield Finding(verdict=verdict, about=about, text=text, next_step=next_step)
        elif item["state"] != "ENABLED" and (reason := facts.never_joined.get(item["computeEnvironmentName"])):
            text = f"they were switched off: {reason}"
            next_step = _enable("compute-environment", item["computeEnvironmentName"])
            yield Finding(verdict=verdict, about=about, text=text, next_step=next_step)
        elif item["state"] != "ENABLED":
            text = "their compute environment was disabled by hand"
            next_step = _enable("compute-environment", item["computeEnvironmentName"])
            yield Finding(verdict=verdict, about=about, text=text, next_step=next_step)
        elif item["status"] == "UPDATING":
            text = "a deployment is replacing them: running jobs keep the old ones, and new jobs start on new ones"
            yield Finding(verdict="fine", about=about, text=text)
        elif item["status"] != "VALID":
            text = f"their compute environment is {item['status']}: {item.get('statusReason', 'no reason given')}"
            next_step = "AWS Batch user guide, 'INVALID compute environment': usually a role or a launch template"
            if item["status"] != "INVALID":
                next_step = "wait until the deployment has ended, then run trainyard why again"
            yield Finding(verdict=verdict, about=about, text=text, next_step=next_step)
        else:
            yield Finding(verdict="fine", about=about, text="their compute environment is enabled and valid")
    if "nodeProperties" in facts.detail and able and all("SPOT" in item["computeResources"]["type"] for item in able):
        text = "the job has several nodes, which Batch never starts on Spot, so it would wait forever"
        next_step = "cancel it with trainyard cancel, and set max_multinode_nodes in infra/settings.py"
        yield Finding(verdict="cause", about="several nodes", text=text, next_step=next_step)


def _instance_limit(facts: Facts) -> Iterator[Finding]:
    """Compare the instances in use with the stage's limit. Jobs share no instance; Batch itself counts vCPUs."""
    enabled = [item for item in facts.environments if item["state"] == "ENABLED"]
    if not enabled:
        return  # a stop or a person disabled all, as _environments reports; the limit does not matter
    used = sum(item.get("nodeProperties", {}).get("numNodes", 1) for item in facts.running)
    rooms = [most_nodes(item) for item in enabled]
    most, start_together = sum(rooms), "nodeProperties" in facts.detail
    largest = max(rooms) if start_together else most
    counted = f"{used} of at most {most} instances of {facts.names} are in use"
    if used + facts.waiting_nodes <= most and facts.nnodes <= largest:
        # Nodes that start together need room in one environment. Batch does not report those of running jobs.
        able = [room for room in rooms if room >= facts.nnodes]
        sure = not start_together or len(facts.running) < len(able) or used < sum(able) - (facts.nnodes - 1) * len(able)
        text = counted if sure else f"{counted}; the job needs {facts.nnodes} in one zone, which allows {largest}"
        yield Finding(verdict="fine" if sure else "unknown", about="instance limit", text=text)
        return
    shares = Counter(item.get("shareIdentifier", "") for item in facts.running)
    by_team = ", ".join(f"{facts.teams.get(share, share) or 'no team'} {n}" for share, n in shares.most_common())
    if facts.nnodes > largest:
        text = f"the job needs {facts.nnodes} instances of {facts.names}, but the stage allows {largest}"
    else:
        text = f"{counted}{f' (jobs: {by_team})' if by_team else ''}"
    limit = "raise the limit in infra/settings.py (max_nodes and similar)"
    next_step = f"wait for a job to end, or {limit}, then {facts.deploy_command}"
    yield Finding(verdict="cause", about="instance limit", text=text, next_step=next_step)


def _queue_position(aws: Aws, facts: Facts) -> Iterator[Finding]:
    snapshot = aws.batch.get_job_queue_snapshot(jobQueue=facts.queue["jobQueueArn"])
    front = [item["jobArn"].rsplit("/", 1)[-1] for item in snapshot.get("frontOfQueue", {}).get("jobs", [])]
    if facts.detail["jobId"] not in front:
        if front:
            text = f"it is behind the first {len(front)} waiting jobs"
            yield Finding(verdict="cause", about="queue position", text=text)
        return
    ahead = front.index(facts.detail["jobId"])
    if not ahead:
        yield Finding(verdict="fine", about="queue position", text="it is the first waiting job")
        return
    first = aws.batch.describe_jobs(jobs=front[:1])["jobs"]
    share = first[0].get("shareIdentifier", "") if first and facts.is_shared else ""
    whose = f", the first of team {facts.teams.get(share, share)}" if share else ""
    if first and first[0].get("shareIdentifier") == facts.detail.get("shareIdentifier"):
        whose += _priorities(facts.detail, first[0])
    turns = ": teams take turns by their recent use" if facts.is_shared else ""
    waiting = "jobs wait" if ahead > 1 else "job waits"
    text = f"{ahead} {waiting} ahead of it{whose}{turns}"
    next_step = f"trainyard why {first[0]['jobName']}" if first else ""
    yield Finding(verdict="cause", about="queue position", text=text, next_step=next_step)


def _priorities(waiting: Mapping[str, Any], ahead: Mapping[str, Any]) -> str:
    """Return the priorities of a waiting job and of the one ahead of it, if they differ."""
    own, other = (job.get("schedulingPriority", SCHEDULING_PRIORITY) - SCHEDULING_PRIORITY for job in (waiting, ahead))
    return f" (priority {other}, this run has {own})" if own != other else ""


def _availability(aws: Aws, facts: Facts) -> Iterator[Finding]:
    subnets = sorted({subnet for item in facts.environments for subnet in item["computeResources"].get("subnets", [])})
    zones = {item["AvailabilityZoneId"] for item in aws.ec2.describe_subnets(SubnetIds=subnets)["Subnets"]}
    offered = {
        item["Location"]
        for page in aws.ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone-id",
            Filters=[{"Name": "instance-type", "Values": [row.name for row in facts.types]}],
        )
        for item in page["InstanceTypeOfferings"]
    }
    here = ", ".join(sorted(zones))
    if not offered:
        text = f"EC2 does not offer {facts.names} in this region"
        next_step = "python -m infra.preflight lists what it offers; then set instance_types in infra/settings.py"
        yield Finding(verdict="cause", about="EC2 availability", text=text, next_step=next_step)
    elif not zones & offered:
        text = f"EC2 offers {facts.names} in {', '.join(sorted(offered))}; the stage's subnets are in {here}"
        next_step = "set availability_zone_ids in infra/settings.py"
        yield Finding(verdict="cause", about="EC2 availability", text=text, next_step=next_step)
    else:
        text = f"EC2 offers {facts.names} in {', '.join(sorted(zones & offered))}"
        yield Finding(verdict="fine", about="EC2 availability", text=text)


def _quota(aws: Aws, facts: Facts) -> Iterator[Finding]:
    for item in facts.environments:
        spot = "SPOT" in item["computeResources"]["type"]
        row = min((row for row in facts.types if row.name in _types(item)), key=lambda row: row.vcpus)
        needed = facts.nnodes * row.vcpus
        code = row.spot_quota_code if spot else row.on_demand_quota_code
        if code is None:
            text = f"the code of the quota is not known; the job needs {needed} vCPUs"
            yield Finding(verdict="unknown", about=f"{_kind(item)} quota", text=text)
            continue
        answer = aws.quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
        value = answer["Value"]
        text = f"{value:g} vCPUs of {answer.get('QuotaName', code)} ({code}); the job needs {needed}"
        if value < needed:
            next_step = (
                f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
                f"--desired-value {item['computeResources']['maxvCpus']}"
            )
            yield Finding(verdict="cause", about=f"{_kind(item)} quota", text=text, next_step=next_step)
        else:
            yield Finding(verdict="fine", about=f"{_kind(item)} quota", text=text)


def _no_instance_yet(facts: Facts) -> Finding:
    kinds = " and ".join(dict.fromkeys(_kind(item) for item in facts.environments))
    text = f"nothing blocks the job: EC2 has not provided {kinds} instances of {facts.names} yet"
    if facts.nnodes > 1:
        text += f", for {facts.waiting_nodes} of its {facts.nnodes} nodes"
    next_step = "wait: an instance takes minutes if there is capacity, and Spot sometimes has none"
    if not any("SPOT" not in item["computeResources"]["type"] for item in facts.environments):
        next_step += "; resources.capacity: on-demand costs more but skips the wait, if the stage allows it"
    return Finding(verdict="cause", about="capacity", text=text, next_step=next_step)


def _reason(record: str) -> str:
    try:
        return str(json.loads(record)["reason"])
    except (ValueError, KeyError, TypeError):
        return "their instances started and never joined"


def _types(environment: Mapping[str, Any]) -> list[str]:
    return environment["computeResources"].get("instanceTypes") or []


def _kind(environment: Mapping[str, Any]) -> str:
    return "Spot" if "SPOT" in environment["computeResources"]["type"] else "On-Demand"


def _enable(what: str, name: str) -> str:
    return f"once the cause is fixed: aws batch update-{what} --{what} {name} --state ENABLED"
