"""The step that has an instance taken away in the middle of a training, and sees the training come back."""

from functools import partial

from jobs.cli.acceptance import fis, runs
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
"""MRPC's 3,668 pairs take the published 22 s an epoch on a Gaudi: the notice alone takes two minutes."""
_LONG_ENOUGH_EMULATED = ("arguments.epochs=4", "arguments.checkpoint_every_steps=6")

_TAG_TRIES = 30


def reclaim_step(context: Context) -> Step:
    usd = runs.usd(context, context.row, HOURS)
    return Step(name=RECLAIM, usd=usd, run=partial(_reclaim, context), undo=partial(_undo, context))


def _reclaim(context: Context, ids: Ids) -> list[Evidence]:
    """Take the instance away after the first checkpoint. Raises JobFailedError if the training does not continue."""
    stage = batch.read_stage(context.aws, context.stage)
    longer = _LONG_ENOUGH_EMULATED if context.aws.emulated else _LONG_ENOUGH
    own = ["name=acceptance-reclaim", "resources.capacity=spot", *longer]
    own += runs.limits(context, stage.instance_type, HOURS)
    runs.start(context, stage, runs.training(context, stage, own), ids)

    def has_saved(job: Job) -> bool:
        return newest_checkpoint(context.aws, runs.place_of(stage, job)) is not None

    job = runs.wait(context, stage, ids, until=has_saved)
    if job.attempt == 1 and not job.ended:
        _take_back(context, job, ids)
    ended, receipt = runs.end(context, stage, ids)
    first, *later = receipt.attempts
    if not later or later[-1].resumed_from_step <= 0:
        raise JobFailedError(
            f"{ended.run_id} did not continue from a checkpoint: {len(receipt.attempts)} attempts, the last from step "
            f"{receipt.attempts[-1].resumed_from_step}",
            next_step=f"trainyard logs {ended.run_id}",
        )
    text = (
        f"{ended.run_id}: attempt 1 came to step {first.last_step}, attempt {later[-1].number} resumed from step "
        f"{later[-1].resumed_from_step} to {later[-1].last_step}{_pause(first, later[0])}"
    )
    resumed = Evidence(claim="resumes", outcome=PROVEN, text=text, ids=runs.ids_of(ended))
    return [resumed, _spot(context, ended, ids)]


def _pause(first: Attempt, second: Attempt) -> str:
    """Return, in words, the time between two attempts, and from the second one's start to its first step."""
    seconds = (second.started_at - (first.finished_at or first.last_seen_at)).total_seconds()
    text = f"; {seconds:.0f} s passed between attempts {first.number} and {second.number}"
    if second.training_started_at:
        more = (second.training_started_at - second.started_at).total_seconds()
        text += f", and {more:.0f} s more until a step began"
    return text


def _take_back(context: Context, job: Job, ids: Ids) -> None:
    if context.aws.emulated:
        context.aws.post_to_emulator(f"/trainyard/jobs/{job.id}/reclaim", {})
        context.say(f"  {job.run_id}: the emulator took its node away")
        return
    ids["instance"] = _spot_instance(context, job)
    region = context.aws.region_name
    partition = "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"
    arn = f"arn:{partition}:ec2:{region}:{context.aws.account}:instance/{ids['instance']}"
    fis.interrupt(context.aws, arn, stage=context.stage, ids=ids, wait=context.wait)
    context.say(f"  {job.run_id}: FIS has EC2 take {ids['instance']} back")


def _spot_instance(context: Context, job: Job) -> str:
    """Return the Spot instance that runs the job, by the tag that a function of the stage gives it."""
    for _ in range(_TAG_TRIES):
        for found in context.instances(**{"tag:trainyard:run": [job.run_id], "instance_state_name": ["running"]}):
            if found.get("InstanceLifecycle") == "spot":
                return str(found["InstanceId"])
            raise TrainyardError(
                f"{job.run_id} runs On-Demand ({found['InstanceId']}), not on Spot, which had no capacity",
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
    if context.aws.emulated:
        text = f"no instance, no notice, no FIS: the emulator ended the attempt as Batch words it ({reason})"
        return Evidence(claim="spot", outcome=NOT_PROVEN, text=text)
    seen = {key: ids[key] for key in ("instance", "experiment") if key in ids}
    outcome = PROVEN if "experiment" in ids else NOT_PROVEN
    return Evidence(claim="spot", outcome=outcome, text=f"Batch: {reason}", ids=seen)


def _undo(context: Context, ids: Ids) -> None:
    """Stop the run, and delete what FIS was given."""
    runs.cancel(context, ids)
    fis.undo(context.aws, ids)
