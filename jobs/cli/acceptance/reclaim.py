"""The step that reclaims the Spot instance of a training, and checks that the training continues.

On AWS, the Fault Injection Service (FIS) interrupts the instance with the same notice as a real reclaim. The action,
the target and the role's permissions are those of AWS's example (awslabs/ec2-spot-workshops,
workshops/fis/fisspotinterruption.yaml; EC2 user guide, "Initiate a Spot Instance interruption").
"""

import json
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.cli.acceptance import runs
from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.runner import Ids, Step
from jobs.core.acceptance import NOT_PROVEN, PROVEN, RECLAIM, Evidence
from jobs.core.errors import JobFailedError, TrainyardError
from jobs.core.records import Attempt
from jobs.runs import batch
from jobs.runs.job import Job
from jobs.runs.storage import newest_checkpoint

HOURS = 1.0

_LONG_ENOUGH = ("arguments.epochs=40", "arguments.checkpoint_every_steps=100")
"""MRPC's 3,668 pairs take 22 s an epoch on a Gaudi (published), and the Spot notice alone takes two minutes."""
_LONG_ENOUGH_EMULATED = ("arguments.epochs=4", "arguments.checkpoint_every_steps=6")

_TAG_TRIES = 30

_ROLE_TRIES = 12
"""A new role takes some seconds to reach every region; until then, experiments that assume it fail at once."""

_POLICY = "interrupt"


def reclaim_step(context: Context) -> Step:
    """Return the step `reclaim`."""
    usd = runs.usd(context, context.row, HOURS)
    return Step(name=RECLAIM, usd=usd, run=partial(_reclaim, context), undo=partial(_undo, context))


def _reclaim(context: Context, ids: Ids) -> list[Evidence]:
    """Reclaim the instance after the first checkpoint. Raises JobFailedError if the training does not continue."""
    stage = batch.read_stage(context.aws, context.stage)
    longer = _LONG_ENOUGH_EMULATED if context.aws.emulated else _LONG_ENOUGH
    own = ["name=acceptance-reclaim", "resources.capacity=spot", *longer]
    own += runs.limits(context, stage.instance_type, HOURS)
    runs.start(context, stage, runs.training(context, stage, own), ids)

    def has_saved(job: Job) -> bool:
        return newest_checkpoint(context.aws, runs.place_of(stage, job)) is not None

    job = runs.wait(context, stage, ids, until=has_saved)
    if job.attempt == 1 and not job.ended:
        _interrupt_job(context, job, ids)
    ended, receipt = runs.end(context, stage, ids)
    first, *later = receipt.attempts
    if not later or later[-1].resumed_from_step <= 0:
        raise JobFailedError(
            f"{ended.run_id} did not continue from a checkpoint: {len(receipt.attempts)} attempts, the last from step "
            f"{receipt.attempts[-1].resumed_from_step}",
            next_step=f"trainyard logs {ended.run_id}",
        )
    text = (
        f"{ended.run_id}: attempt 1 reached step {first.last_step}, attempt {later[-1].number} resumed from step "
        f"{later[-1].resumed_from_step} to {later[-1].last_step}{_pause_text(first, later[0])}"
    )
    resumed = Evidence(claim="resumes", outcome=PROVEN, text=text, ids=runs.ids_of(ended))
    return [resumed, _spot_evidence(context, ended, ids)]


def _pause_text(first: Attempt, second: Attempt) -> str:
    """Return the time between two attempts, and from the start of the second to its first step."""
    seconds = (second.started_at - (first.finished_at or first.last_seen_at)).total_seconds()
    text = f"; {seconds:.0f} s passed between attempts {first.number} and {second.number}"
    if second.training_started_at:
        more = (second.training_started_at - second.started_at).total_seconds()
        text += f", and {more:.0f} s more until a step began"
    return text


def _interrupt_job(context: Context, job: Job, ids: Ids) -> None:
    """Have the instance of a job reclaimed."""
    if context.aws.emulated:
        context.aws.post_to_emulator(f"/trainyard/jobs/{job.id}/reclaim", {})
        context.say(f"  {job.run_id}: the emulator reclaimed its node")
        return
    ids["instance"] = _spot_instance(context, job)
    region = context.aws.region_name
    partition = "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"
    arn = f"arn:{partition}:ec2:{region}:{context.aws.account}:instance/{ids['instance']}"
    interrupt(context.aws, arn, stage=context.stage, ids=ids, wait=context.wait)
    context.say(f"  {job.run_id}: FIS made EC2 interrupt {ids['instance']}")


def _spot_instance(context: Context, job: Job) -> str:
    """Return the Spot instance that runs the job. A Lambda function of the stage tags it with the run."""
    for _ in range(_TAG_TRIES):
        for found in context.instances(**{"tag:trainyard:run": [job.run_id], "instance_state_name": ["running"]}):
            if found.get("InstanceLifecycle") == "spot":
                return str(found["InstanceId"])
            raise TrainyardError(
                f"{job.run_id} runs On-Demand ({found['InstanceId']}), because Spot had no capacity",
                next_step="run the same command later or in another region",
            )
        context.wait()
    raise TrainyardError(
        f"no instance has the tag trainyard:run={job.run_id}, so the Lambda function that sets it does not work",
        next_step="read the log group of the function tag_instances, and run trainyard why RUN",
    )


def _spot_evidence(context: Context, job: Job, ids: Ids) -> Evidence:
    """Return Batch's reason for the end of the first attempt as evidence."""
    reason = job.attempts[0].reason if job.attempts else ""
    if context.aws.emulated:
        text = f"no instance, notice or FIS: the emulator ended the attempt with Batch's wording ({reason})"
        return Evidence(claim="spot", outcome=NOT_PROVEN, text=text)
    seen = {key: ids[key] for key in ("instance", "experiment") if key in ids}
    outcome = PROVEN if "experiment" in ids else NOT_PROVEN
    return Evidence(claim="spot", outcome=outcome, text=f"Batch: {reason}", ids=seen)


def _undo(context: Context, ids: Ids) -> None:
    """Stop the run, and delete the experiment template and the role."""
    runs.cancel(context, ids)
    delete_experiment(context.aws, ids)


def interrupt(
    aws: Aws, instance_arn: str, *, stage: str, ids: MutableMapping[str, str], wait: Callable[[], None]
) -> None:
    """Interrupt a Spot instance with FIS. Returns once FIS reports that the notice was sent.

    Ids are stored in `ids` before they are used, for `delete_experiment`. Raises TrainyardError if FIS refuses.
    """
    fis, tags = aws.client("fis"), {"trainyard:project": "trainyard", "trainyard:stage": stage}
    role_arn = _role(aws, instance_arn, stage=stage, tags=tags, ids=ids)
    if "template" not in ids:
        instances = {"resourceType": "aws:ec2:spot-instance", "resourceArns": [instance_arn], "selectionMode": "ALL"}
        action = {
            "actionId": "aws:ec2:send-spot-instance-interruptions",
            "parameters": {"durationBeforeInterruption": "PT2M"},
            "targets": {"SpotInstances": "instance"},
        }
        template = fis.create_experiment_template(
            clientToken=str(uuid.uuid4()),
            description=f"trainyard acceptance of stage {stage}: interrupt one Spot instance",
            roleArn=role_arn,
            stopConditions=[{"source": "none"}],
            targets={"instance": instances},
            actions={"interrupt": action},
            tags=tags,
        )
        ids["template"] = template["experimentTemplate"]["id"]
    for _ in range(_ROLE_TRIES):
        started = fis.start_experiment(clientToken=str(uuid.uuid4()), experimentTemplateId=ids["template"], tags=tags)
        experiment: dict[str, Any] = started["experiment"]
        ids["experiment"] = experiment["id"]
        while experiment["state"]["status"] not in ("completed", "stopped", "failed", "cancelled"):
            wait()
            experiment = fis.get_experiment(id=experiment["id"])["experiment"]
        if experiment["state"]["status"] == "completed":
            return
        reason = experiment["state"].get("reason", experiment["state"]["status"])
        if "role" not in reason.lower():
            break
        wait()
    raise TrainyardError(
        f"FIS did not interrupt {instance_arn}: {reason}", next_step=f"aws fis get-experiment --id {ids['experiment']}"
    )


def _role(aws: Aws, instance_arn: str, *, stage: str, tags: dict[str, str], ids: MutableMapping[str, str]) -> str:
    """Create the role with which FIS may interrupt this one instance, and return its ARN."""
    iam = aws.client("iam")
    trusted = {"Effect": "Allow", "Principal": {"Service": "fis.amazonaws.com"}, "Action": "sts:AssumeRole"}
    if "role" not in ids:
        ids["role"] = f"trainyard-{stage}-acceptance-{uuid.uuid4().hex[:8]}"
        iam.create_role(
            RoleName=ids["role"],
            AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [trusted]}),
            Description="Lets FIS interrupt one Spot instance; trainyard acceptance deletes it",
            Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
        )
    allowed = [
        {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"},
        {"Effect": "Allow", "Action": "ec2:SendSpotInstanceInterruptions", "Resource": instance_arn},
    ]
    document = json.dumps({"Version": "2012-10-17", "Statement": allowed})
    iam.put_role_policy(RoleName=ids["role"], PolicyName=_POLICY, PolicyDocument=document)
    arn: str = iam.get_role(RoleName=ids["role"])["Role"]["Arn"]
    return arn


def delete_experiment(aws: Aws, ids: MutableMapping[str, str]) -> None:
    """Delete the template and the role if they exist. A running experiment ends by itself after two minutes."""
    if "template" in ids:
        with _ignoring_missing():
            aws.client("fis").delete_experiment_template(id=ids["template"])
        del ids["template"]
    if "role" in ids:
        iam = aws.client("iam")
        with _ignoring_missing():
            iam.delete_role_policy(RoleName=ids["role"], PolicyName=_POLICY)
        with _ignoring_missing():
            iam.delete_role(RoleName=ids["role"])
        del ids["role"]


@contextmanager
def _ignoring_missing() -> Iterator[None]:
    """Ignore AWS's error for a resource that does not exist."""
    try:
        yield
    except Exception as error:
        if error_code(error) not in ("NoSuchEntity", "ResourceNotFoundException"):
            raise
