"""The step that has one team's job try another team's files."""

import json
from collections.abc import MutableMapping
from dataclasses import replace
from functools import partial

from jobs.cli.acceptance import runs
from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.runner import Step
from jobs.client import batch
from jobs.client.logs import LogReader
from jobs.contract.acceptance import CPU_JOB, ISOLATION, NOT_PROVEN, PROVEN, Evidence
from jobs.contract.errors import JobFailedError
from jobs.contract.plan import Plan

_DENIED = ("denied", "forbidden", "not authorized")
"""One of these is in what S3's refusal comes to in a log."""

Ids = MutableMapping[str, str]


def isolation_step(context: Context) -> Step:
    usd = runs.usd(context, context.known.cpu_row, runs.HOURS[CPU_JOB])
    return Step(name=ISOLATION, usd=usd, run=partial(isolation, context), undo=partial(undo, context))


def isolation(context: Context, ids: Ids) -> list[Evidence]:
    """Have a job of the default team read what lies with another team's data.

    That the same job reads its own team's data is what the CPU job has shown. Raises JobFailedError where AWS let it.
    """
    stage = batch.read_stage(context.aws, context.stage)
    others = [team for team in stage.teams if team != stage.default_team]
    if not others:
        text = "the stage has one team: there is nobody to be kept out"
        return [Evidence(claim="iam", outcome=NOT_PROVEN, text=text)]
    place = runs.put_corpus(context, stage, others[0])
    ids["bucket"], ids["key"] = place.bucket, place.key
    own = runs.put_corpus(context, stage, stage.default_team)
    spec = runs.corpus_spec(context, stage, name="acceptance-trespass")
    runs.start(context, stage, spec, ids, change=partial(_reading, str(place), str(own)))
    job = runs.wait_for_end(context, stage, ids)
    tried = f"{job.run_id}, of team {stage.default_team}, tried to read {place}"
    if job.state == "SUCCEEDED":
        if context.aws.embedded:
            text = f"{tried}, and could: the embedded AWS enforces no IAM"
            return [Evidence(claim="iam", outcome=NOT_PROVEN, text=text, ids=runs.ids_of(job))]
        raise JobFailedError(f"{tried}, and could", next_step=f"trainyard logs {job.run_id}: teams are not kept apart")
    lines = [line.text for line in LogReader(context.aws, stage.log_group).read(job.log_streams)]
    refused = next((line for line in reversed(lines) if any(word in line.lower() for word in _DENIED)), None)
    if refused is None:
        raise JobFailedError(
            f"{tried}, and failed for another reason than a refusal: {job.reason}",
            next_step=f"trainyard logs {job.run_id}",
        )
    text = f"{tried}, and was refused: {refused.strip()}"
    return [Evidence(claim="iam", outcome=PROVEN, text=text, ids=runs.ids_of(job))]


def _reading(place: str, own: str, planned: Plan) -> Plan:
    """Return the plan with another place in its request. A spec that names it is refused before there is a job."""
    text = json.dumps(planned.request)
    assert own in text, f"{planned.run_id} does not read {own}"  # noqa: S101 - a defect here
    return replace(planned, request=json.loads(text.replace(own, place)))


def undo(context: Context, ids: Ids) -> None:
    """Stop the job, and delete what was put into the other team's data."""
    runs.cancel(context, ids)
    if "key" in ids:
        context.aws.s3.delete_object(Bucket=ids["bucket"], Key=ids["key"])
        del ids["key"]
