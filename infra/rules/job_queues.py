"""Rules for job queues and their shares: no job may wait for ever for something that can never come."""

import re
from collections.abc import Iterable, Iterator

from infra.rules.rule import Finding, found, rule
from infra.rules.stage_templates import JOB_QUEUE, SCHEDULING_POLICY, Resource, StageTemplates
from jobs.contract.queues import QUEUES

_GUIDE = "AWS Batch User Guide"
_REMEDIED_REASONS = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
    "MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED",
}


def _multinode_queues(stage: StageTemplates) -> Iterator[Resource]:
    """Yield the queues for jobs of several nodes: those whose row says so, and those with a placement group or EFA."""
    for queue in stage.of_type(JOB_QUEUE):
        # Of a pool that retires, and of a team, the parameter has more parts.
        published = stage.published_names(queue)
        names = [re.sub("^(queue|team-queue/[^/]+)/", "", name).partition("/")[0] for name in published]
        by_row = any(QUEUES[name].several_nodes for name in names if name in QUEUES)
        if by_row or any(
            stage.efa_interfaces(environment) or environment.get("ComputeResources.PlacementGroup")
            for environment in stage.compute_environments(queue)
        ):
            yield queue


@rule(
    "TY-JobQueue-MultinodeOnDemand",
    next_step="give the queue compute environments of type EC2 only",
    source=f"{_GUIDE}, Multi-node parallel jobs: not supported on compute environments that use Spot Instances",
)
def multinode_on_demand(stage: StageTemplates) -> Iterable[Finding]:
    """Batch never starts a job of several nodes on Spot: it waits in RUNNABLE for ever and says nothing."""
    for queue in _multinode_queues(stage):
        types = [environment.get("ComputeResources.Type") for environment in stage.compute_environments(queue)]
        if any(kind != "EC2" for kind in types):
            yield found(queue, "ComputeEnvironmentOrder")


@rule(
    "TY-JobQueue-AtMostThreeEnvironments",
    next_step="keep one to three compute environments, each with an order of its own",
    source=f"{_GUIDE}, Job queue parameters: at most three compute environments",
)
def at_most_three_environments(stage: StageTemplates) -> Iterable[Finding]:
    """Batch takes one to three compute environments a queue, and refuses an order that is given twice."""
    for queue in stage.of_type(JOB_QUEUE):
        orders = [entry.get("Order") for entry in queue.get("ComputeEnvironmentOrder", [])]
        if not 1 <= len(orders) <= 3 or len(set(orders)) < len(orders):
            yield found(queue, "ComputeEnvironmentOrder")


@rule(
    "TY-JobQueue-SpotFirst",
    next_step="order the Spot environments before the On-Demand ones",
    source=f"{_GUIDE}, Job queue parameters: compute environments are tried in their order",
)
def spot_first(stage: StageTemplates) -> Iterable[Finding]:
    """Batch fills compute environments in their order: with On-Demand first nothing ever runs on Spot."""
    for queue in stage.of_type(JOB_QUEUE):
        types = [environment.get("ComputeResources.Type") for environment in stage.compute_environments(queue)]
        if types != sorted(types, key=lambda kind: kind != "SPOT"):
            yield found(queue, "ComputeEnvironmentOrder")


@rule(
    "TY-JobQueue-OneKindOfCapacity",
    next_step="keep EC2 (or SPOT) and Fargate in queues of their own",
    source=f"{_GUIDE}, Job queue parameters: EC2 and Fargate compute environments cannot be mixed",
)
def one_kind_of_capacity(stage: StageTemplates) -> Iterable[Finding]:
    """Batch refuses a queue that mixes EC2 with Fargate."""
    for queue in stage.of_type(JOB_QUEUE):
        types = {str(item.get("ComputeResources.Type")) for item in stage.compute_environments(queue)}
        if len({kind.startswith("FARGATE") for kind in types}) > 1:
            yield found(queue, "ComputeEnvironmentOrder")


@rule(
    "TY-JobQueue-FairShare",
    next_step="set schedulingPolicyArn",
    source=f"{_GUIDE}, Job queue parameters: a queue that was made without a policy can have none added",
)
def fair_share(stage: StageTemplates) -> Iterable[Finding]:
    """Without a scheduling policy from its first day a queue is first-in, first-out for good: one team's thousand jobs
    go before everyone else's.
    """
    for queue in stage.of_type(JOB_QUEUE):
        if queue.get("SchedulingPolicyArn") is None:
            yield found(queue, "SchedulingPolicyArn")


@rule(
    "TY-JobQueue-TimeLimits",
    next_step="give 600 to 86400 seconds, the state RUNNABLE, the action CANCEL and a reason that Batch acts upon",
    source=f"{_GUIDE}, Automatic remediation with jobStateTimeLimitActions",
)
def time_limits(stage: StageTemplates) -> Iterable[Finding]:
    """A limit outside what Batch takes fails the deployment; one for a reason that Batch does not act upon never
    cancels anything.
    """
    for queue in stage.of_type(JOB_QUEUE):
        for limit in queue.get("JobStateTimeLimitActions", []):
            fine = (
                600 <= int(limit.get("MaxTimeSeconds", 0)) <= 86_400
                and limit.get("Reason") in _REMEDIED_REASONS
                and (limit.get("State"), limit.get("Action")) == ("RUNNABLE", "CANCEL")
            )
            if not fine:
                yield found(queue, "JobStateTimeLimitActions")


@rule(
    "TY-SchedulingPolicy-Shares",
    next_step="give each share letters and digits, and a weight factor from 0.0001 to 999.9999",
    source="AWS Batch API Reference, ShareAttributes",
)
def shares(stage: StageTemplates) -> Iterable[Finding]:
    """Batch refuses other weight factors and other characters, and of two shares of one name only one counts."""
    for policy in stage.of_type(SCHEDULING_POLICY):
        given = policy.get("FairsharePolicy.ShareDistribution", [])
        names = [str(share.get("ShareIdentifier")) for share in given]
        fine = all(re.fullmatch(r"[A-Za-z0-9]{1,255}\*?", name) for name in names) and len(set(names)) == len(names)
        if not fine or not all(0.0001 <= float(share.get("WeightFactor", 1)) <= 999.9999 for share in given):
            yield found(policy, "FairsharePolicy.ShareDistribution")
