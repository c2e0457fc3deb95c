"""The step that has an instance taken away in the middle of a training, and sees the training come back."""

from collections.abc import MutableMapping
from functools import partial
from typing import Any

from jobs.cli.acceptance import fis, runs
from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.runner import Step
from jobs.client import batch
from jobs.client.job import Job
from jobs.client.storage import newest_checkpoint
from jobs.contract.acceptance import NOT_PROVEN, PROVEN, RECLAIM, Evidence
from jobs.contract.errors import JobFailedError, TrainyardError
from jobs.contract.locations import S3Location
from jobs.contract.records import Attempt
from jobs.contract.run import run_prefix
from jobs.contract.stage import DeployedStage

HOURS = 1.0

_LONG_ENOUGH = ("arguments.epochs=40", "arguments.checkpoint_every_steps=100")
"""MRPC's 3,668 pairs take the published 22 s an epoch on a Gaudi: the notice alone takes two minutes."""

_LONG_ENOUGH_EMBEDDED = ("arguments.epochs=8", "arguments.checkpoint_every_steps=12")

Ids = MutableMapping[str, str]


def reclaim_step(context: Context) -> Step:
    usd = runs.usd(context, context.known.row, HOURS)
    return Step(name=RECLAIM, usd=usd, run=partial(reclaim, context), undo=partial(undo, context))


def reclaim(context: Context, ids: Ids) -> list[Evidence]:
    """Take the instance away after the first checkpoint. Raises JobFailedError where the training does not go on."""
    stage = batch.read_stage(context.aws, context.stage)
    longer = _LONG_ENOUGH_EMBEDDED if context.aws.embedded else _LONG_ENOUGH
    own = ["name=acceptance-reclaim", "resources.capacity=spot", *longer]
    own += runs.limits(context, stage.instance_type, HOURS)
    runs.start(context, stage, runs.training(context, stage, own), ids)
    job = _saved(context, stage, ids)
    how = _take_back(context, job, ids) if job.attempt == 1 and not job.ended else "it had been taken away before"
    context.say(f"  {job.run_id}: {how}")
    ended, receipt = runs.end(context, stage, ids)
    first, *later = receipt.attempts
    if not later or later[-1].resumed_from_step <= 0:
        raise JobFailedError(
            f"{ended.run_id} did not go on from a checkpoint: {len(receipt.attempts)} attempts, the last from step "
            f"{receipt.attempts[-1].resumed_from_step}",
            next_step=f"trainyard logs {ended.run_id}",
        )
    text = (
        f"{ended.run_id}: attempt 1 came to step {first.last_step}, attempt {later[-1].number} went on from step "
        f"{later[-1].resumed_from_step} to {later[-1].last_step}{_pause(first, later[0])}"
    )
    resumed = Evidence(claim="resumes", outcome=PROVEN, text=text, ids=runs.ids_of(ended))
    return [resumed, _spot(context, ended, ids)]


def _pause(first: Attempt, second: Attempt) -> str:
    """Return, in words, the time between two attempts, and from the second one's start to its first step."""
    seconds = (second.started_at - (first.finished_at or first.last_seen_at)).total_seconds()
    text = f"; {seconds:.0f} s passed between attempts {first.number} and {second.number}"
    if second.training_started_at:
        text += (
            f", and {(second.training_started_at - second.started_at).total_seconds():.0f} s more until a step began"
        )
    return text


def _saved(context: Context, stage: DeployedStage, ids: Ids) -> Job:
    """Return the job once its run has a complete checkpoint."""
    while True:
        context.wait()
        job = runs.find(context, stage, ids)
        if job is None:
            continue
        if newest_checkpoint(context.aws, S3Location(stage.run_bucket, run_prefix(job.team, job.run_id))):
            return job
        if job.ended:
            raise JobFailedError(
                f"{job.run_id} ended ({job.state}) before it had saved", next_step=f"trainyard logs {job.run_id}"
            )


def _take_back(context: Context, job: Job, ids: Ids) -> str:
    if context.aws.embedded:
        context.aws.ask_embedded(f"/trainyard/jobs/{job.id}/reclaim", {})
        return "the embedded AWS took its node away"
    instance = _instance(context, job)
    arn = f"arn:{_partition(context)}:ec2:{context.aws.region_name}:{context.aws.account}:instance/{instance}"
    ids["instance"] = instance
    fis.interrupt(context.aws, arn, stage=context.stage, ids=ids, wait=context.wait)
    return f"FIS has EC2 take {instance} back"


def _partition(context: Context) -> str:
    region = context.aws.region_name
    return "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"


def _instance(context: Context, job: Job) -> str:
    """Return the Spot instance that runs the job, by the tag that a function of the stage gives it."""
    filters: list[Any] = [
        {"Name": "tag:trainyard:run", "Values": [job.run_id]},
        {"Name": "instance-state-name", "Values": ["running"]},
    ]
    for _ in range(30):
        pages = context.aws.ec2.get_paginator("describe_instances").paginate(Filters=filters)
        found = [one for page in pages for reservation in page["Reservations"] for one in reservation["Instances"]]
        if found and found[0].get("InstanceLifecycle") == "spot":
            return str(found[0]["InstanceId"])
        if found:
            raise TrainyardError(
                f"{job.run_id} runs On-Demand ({found[0]['InstanceId']}), not on Spot, which had no capacity",
                next_step="the same command, later or in another region",
            )
        context.wait()
    raise TrainyardError(
        f"no instance has the tag trainyard:run={job.run_id}: the function that gives it does not work",
        next_step="its log group, of tag_instances; and trainyard why RUN",
    )


def _spot(context: Context, job: Job, ids: Ids) -> Evidence:
    """Return what Batch says of the first attempt's end."""
    reason = job.attempts[0].reason if job.attempts else ""
    if context.aws.embedded:
        text = f"no instance, no notice, no FIS: the embedded AWS ended the attempt as Batch words it ({reason})"
        return Evidence(claim="spot", outcome=NOT_PROVEN, text=text)
    seen = {key: ids[key] for key in ("instance", "experiment") if key in ids}
    taken = "experiment" in ids
    return Evidence(claim="spot", outcome=PROVEN if taken else NOT_PROVEN, text=f"Batch: {reason}", ids=seen)


def undo(context: Context, ids: Ids) -> None:
    """Stop the run, and delete what FIS was given."""
    runs.cancel(context, ids)
    fis.undo(context.aws, ids)
