"""The step that deploys another AMI of CPU instances while a job runs on one, and checks that the job continues."""

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jobs.cli.acceptance import runs
from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.runner import Ids, Step
from jobs.core.acceptance import NOT_PROVEN, PROVEN, UPDATE, Evidence
from jobs.core.errors import JobFailedError
from jobs.runs import batch
from jobs.runs.canary import first_environment
from jobs.spec.plan import Plan

_SLEEP_SECONDS = 900
"""Time for the deployment, which may wait until no job is left on the old instances."""
_HOURS = 0.5
_RUNNING = "RUNNING in attempt 1"
_DATE = re.compile(r"20\d{6}")
"""The date in the name of an AMI for ECS, such as al2023-ami-ecs-hvm-2023.0.20260922-kernel-6.1-x86_64."""


def update_step(context: Context) -> Step:
    """Return the step `update`."""
    usd = runs.usd(context, context.cpu_row, _HOURS)
    return Step(name=UPDATE, usd=usd, run=partial(_update, context), undo=partial(runs.cancel, context))


def _update(context: Context, ids: Ids) -> list[Evidence]:
    """Deploy during a job. Raises JobFailedError if the deployment ended or restarted the job."""
    if context.keep:
        return [Evidence(claim="update", outcome=NOT_PROVEN, text="--keep leaves the AMIs of the stage unchanged")]
    stage = batch.read_stage(context.aws, context.stage)
    queue = stage.queue(stage.queue_of(stage.default_team, "cpu-spot"))

    def environment() -> Mapping[str, Any]:
        return first_environment(context.aws, queue)

    def ami() -> str:
        return str(environment()["computeResources"]["ec2Configuration"][0]["imageIdOverride"])

    def state() -> str:
        [found] = batch.describe(context.aws, stage, [job.id])
        return f"{found.state} in attempt {found.attempt}"

    before = ami()
    other = _other_ami(context, before)
    if other is None:
        return [Evidence(claim="update", outcome=NOT_PROVEN, text=f"{before} is the only AMI of its family")]
    runs.put_corpus(context.aws, stage, stage.default_team)
    runs.start(context, stage, runs.corpus_job(context, stage, name="acceptance-update"), ids, change=_sleep)
    job = runs.wait(context, stage, ids, until=lambda job: job.state == "RUNNING")
    seen: dict[str, None] = {}
    looked_at = 0.0

    def look() -> None:
        nonlocal looked_at
        if time.monotonic() - looked_at >= context.poll_seconds:
            looked_at = time.monotonic()
            with suppress(Exception):  # an unanswered request proves nothing, and must not stop the deployment
                seen.setdefault(f"{environment()['status']} with the job {state()}")

    pool = f"ami:cpu-{context.facts.cpu_instance_type.replace('.', '-')}={other}"
    context.cdk(
        "deploy", f"{context.stage}/compute", "--exclusively", "-c", pool, "--require-approval=never", look=look
    )
    after, ended = ami(), state()
    seen.setdefault(f"{environment()['status']} with the job {ended}")
    runs.cancel(context, ids)  # the environment cannot be deleted before its old instances are gone
    text = f"{before} -> {after} while {job.run_id} ran; the environment was {', then '.join(seen)}"
    if ended not in (_RUNNING, "SUCCEEDED in attempt 1") or after != other:
        raise JobFailedError(f"{text}; in the end the job was {ended}", next_step=f"trainyard why {job.run_id}")
    is_proven = not context.aws.emulated and f"UPDATING with the job {_RUNNING}" in seen
    if context.aws.emulated:
        text += "; the emulator has no instances to replace"
    seen_ids = {**runs.ids_of(job), "AMI before": before, "AMI after": after}
    return [Evidence(claim="update", outcome=PROVEN if is_proven else NOT_PROVEN, text=text, ids=seen_ids)]


def _sleep(planned: Plan) -> Plan:
    """Let the container sleep, because a job of this size would end before the deployment."""
    request = json.loads(json.dumps(planned.request))
    request["ecsPropertiesOverride"]["taskProperties"][0]["containers"][0]["command"] = ["sleep", str(_SLEEP_SECONDS)]
    return replace(planned, request=request)


def _other_ami(context: Context, ami: str) -> str | None:
    """Return the AMI that AWS published before an AMI of the same family, or None if there is none."""
    if context.aws.emulated:
        return context.aws.ec2.register_image(Name=f"acceptance {time.time():.0f}")["ImageId"]
    [image] = context.aws.ec2.describe_images(ImageIds=[ami])["Images"]
    family: list[Any] = [{"Name": "name", "Values": [_DATE.sub("????????", image["Name"])]}]
    found = context.aws.ec2.describe_images(Owners=[image["OwnerId"]], Filters=family)["Images"]
    older = [each for each in found if each["CreationDate"] < image["CreationDate"]]
    return max(older, key=lambda each: each["CreationDate"])["ImageId"] if older else None
