"""The steps that submit jobs like any user, with a spec, a plan and the Batch API, and the functions they share."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.aws.errors import is_transient
from jobs.cli import demo_data
from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.runner import Ids, Step
from jobs.cli.demo import STATE_FOLDER
from jobs.core.acceptance import (
    ACCELERATOR_JOB,
    CPU_JOB,
    FABRIC_CHECK,
    ISOLATION,
    NOT_PROVEN,
    PROVEN,
    Evidence,
)
from jobs.core.errors import JobFailedError, TrainyardError
from jobs.core.instance_types import InstanceType
from jobs.core.locations import DATA, S3Location
from jobs.core.records import Receipt
from jobs.core.run import FABRIC, run_prefix
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.failure import raise_failure
from jobs.runs.job import Job
from jobs.runs.logs import LogReader, may_have_successor
from jobs.runs.planning import plan_run
from jobs.runs.spec_file import READY_SPECS, read_spec
from jobs.runs.storage import read_receipt
from jobs.runs.submit import send
from jobs.spec.plan import Plan
from jobs.spec.spec import JobSpec, parse_spec

START_HOURS = 0.25
"""Hours added to the price of each job for booting, pulling the image, and idling until the instance ends."""

CORPUS = "acceptance/corpus.txt"
"""Key, below a team's prefix in the data bucket, of the CPU job's text: the pages of jobs/docs."""

_SENTENCES = 128
"""Training examples on the emulator: enough for an end-to-end run in seconds, with short texts on one rank."""
_SMALL = ("resources.nproc_per_node=1", "arguments.max_length=24")

_JOINED_TAGS = ("trainyard:joined", "trainyard:run")
"""Tags of an instance that joined its cluster, set by infra/observability/functions/watch_instances.py."""

_ON_THIS_MACHINE = "jobs are processes on this machine, without instances"
_DENIED = ("denied", "forbidden", "not authorized")
"""The log line of a request that S3 denies contains one of these words."""

_CPU_HOURS, _ACCELERATOR_HOURS, _FABRIC_HOURS = 0.5, 0.75, 0.5


def steps(context: Context) -> tuple[Step, Step, Step, Step]:
    """Return the steps `cpu-job`, `accelerator-job`, `fabric-check` and `isolation`."""
    row, spot = context.row, not context.facts.several_nodes_on_demand
    of_cpu = usd(context, context.cpu_row, _CPU_HOURS)
    of_two = usd(context, row, _FABRIC_HOURS, nodes=2, spot=spot)

    def step(name: str, cost: float, run: Callable[[Context, Ids], Sequence[Evidence]]) -> Step:
        return Step(name=name, usd=cost, run=partial(run, context), undo=partial(cancel, context))

    return (
        step(CPU_JOB, of_cpu, _cpu_job),
        step(ACCELERATOR_JOB, usd(context, row, _ACCELERATOR_HOURS), _accelerator_job),
        step(FABRIC_CHECK, of_two, _fabric_check),
        step(ISOLATION, of_cpu, _isolation),
    )


def usd(context: Context, row: InstanceType, hours: float, *, nodes: int = 1, spot: bool = True) -> float:
    """Return the maximum cost of a job."""
    return context.usd_per_hour(row, spot=spot) * nodes * (hours + START_HOURS)


def limits(context: Context, row: InstanceType, hours: float, *, nodes: int = 1, spot: bool = True) -> list[str]:
    """Return the overrides that make a job end by itself, even if this machine is gone."""
    max_usd = context.usd_per_hour(row, spot=spot) * nodes * hours
    return [f"timeout_hours={hours}", f"max_usd={max_usd:.4f}"]


def _cpu_job(context: Context, ids: Ids) -> list[Evidence]:
    """Upload the pages of jobs/docs to the team's data, and prepare a corpus from them."""
    stage = batch.read_stage(context.aws, context.stage)
    put_corpus(context.aws, stage, stage.default_team)
    start(context, stage, corpus_job(context, stage, name="acceptance-corpus"), ids)
    job, receipt = end(context, stage, ids)
    text = f"{job.run_id} read {DATA}{stage.default_team}/{CORPUS}; {_took(receipt)}"
    return [_proven("batch", text, job), _on_instance(context, "container", receipt, job)]


def put_corpus(aws: Aws, stage: DeployedStage, team: str) -> S3Location:
    """Upload the pages of jobs/docs to a team's data, and return their location."""
    place = S3Location(stage.data_bucket, f"{team}/{CORPUS}")
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    aws.s3.put_object(Bucket=place.bucket, Key=place.key, Body=text.encode())
    return place


def corpus_job(context: Context, stage: DeployedStage, *, name: str) -> JobSpec:
    return corpus_spec(stage, name=name, max_usd=context.usd_per_hour(stage.cpu_instance_type) * _CPU_HOURS)


def corpus_spec(stage: DeployedStage, *, name: str, max_usd: float | None = None) -> JobSpec:
    """Return the spec of a job of the default team that prepares a corpus on a CPU instance from its own text."""
    return parse_spec(
        {
            "name": name,
            "job": "prepare-corpus",
            "team": stage.default_team,
            "timeout_hours": _CPU_HOURS,
            "max_usd": max_usd and round(max_usd, 4),
            "arguments": {"data": [f"{DATA}{stage.default_team}/{CORPUS}"], "held_out_fraction": 0.1},
        },
        origin=name,
    )


def _accelerator_job(context: Context, ids: Ids) -> list[Evidence]:
    """Fine-tune BERT-large on MRPC, or on the emulator a small model on a few film reviews."""
    stage = batch.read_stage(context.aws, context.stage)
    start(context, stage, training(context, stage, limits(context, stage.instance_type, _ACCELERATOR_HOURS)), ids)
    joined: list[Any] = []
    names = [row.name for row in stage.instance_types]

    def look(_job: Job) -> bool:
        joined[:] = joined or context.instances(instance_type=names, tag_key=_JOINED_TAGS)
        return False

    job, receipt = end(context, stage, ids, until=look)
    wanted = ("eval_accuracy", "eval_majority_accuracy", "eval_f1", "train_samples_per_second")
    if "eval_accuracy" not in receipt.result:
        raise JobFailedError(f"{job.run_id} reports no accuracy", next_step=f"trainyard receipt {job.run_id}")
    figures = {key: float(receipt.result[key]) for key in wanted if receipt.result.get(key) is not None}
    metrics = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
    if context.aws.emulated:
        joins = Evidence(claim="joins", outcome=NOT_PROVEN, text=_ON_THIS_MACHINE)
    elif joined:
        seen = {"instance": joined[0]["InstanceId"], "AMI": joined[0]["ImageId"], **ids_of(job)}
        text = f"{seen['instance']}, a {joined[0]['InstanceType']}, joined its cluster from {seen['AMI']}"
        joins = Evidence(claim="joins", outcome=PROVEN, text=f"{text}, and ran {job.run_id}", ids=seen)
    else:
        raise TrainyardError(f"{job.run_id} ended, but no {' or '.join(names)} is tagged as joined")
    trained = _proven("training", f"{job.run_id}: {metrics}; {_took(receipt)}", job)
    return [joins, trained, _on_instance(context, "accelerator", receipt, job)]


def training(context: Context, stage: DeployedStage, overrides: Sequence[str]) -> JobSpec:
    """Return the spec of a fine-tuning. On the emulator, uploads its inputs."""
    own = [f"team={stage.default_team}", *overrides]
    if not context.aws.emulated:
        return read_spec(READY_SPECS / "finetune-mrpc.yaml", own)
    spec = read_spec(demo_data.SPEC, [*own, *_SMALL])
    for _ in demo_data.put(context.aws, spec, stage, STATE_FOLDER / "cache", at_most=_SENTENCES):
        pass
    return spec


def _fabric_check(context: Context, ids: Ids) -> list[Evidence]:
    """Check the network between two nodes, in the queue for several nodes or on Spot if there is no such queue."""
    stage = batch.read_stage(context.aws, context.stage)
    spot = not context.facts.several_nodes_on_demand
    overrides = [f"team={stage.default_team}", *(["resources.capacity=spot"] if spot else [])]
    overrides += limits(context, stage.instance_type, _FABRIC_HOURS, nodes=2, spot=spot)
    if context.aws.emulated:
        quick = ("largest_message_bytes=4096", "seconds_per_measurement=0.02")
        overrides += ["resources.nproc_per_node=1", *(f"arguments.{each}" for each in quick)]
    start(context, stage, read_spec(READY_SPECS / "fabric-check-multinode.yaml", overrides), ids)
    job, receipt = end(context, stage, ids)
    report = json.loads(object_store.read_once(context.aws.s3, place_of(stage, job) / FABRIC) or b"{}")
    if report.get("nnodes") != 2 or report.get("wrong"):
        raise JobFailedError(f"{job.run_id}: {report.get('wrong') or 'no report of two nodes'}")
    text = f"{job.run_id}: {report['world_size']} ranks on 2 nodes, no wrong value; {_took(receipt)}"
    providers = sorted(set(report["providers"]))
    how = f"{report['backend']}, {'provider ' + ', '.join(providers) if providers else 'no provider of libfabric'}"
    if context.aws.emulated:
        how += f"; {_ON_THIS_MACHINE}, and both nodes run on it"
    has_efa = bool(stage.instance_type.efa_cards)
    fast = not context.aws.emulated and report["backend"] != "gloo" and (providers == ["efa"] or not has_efa)
    speed = f"{how}; {receipt.result.get('across_nodes_bus_gigabytes_per_second')} GB/s across nodes"
    fabric = Evidence(claim="fabric", outcome=PROVEN if fast else NOT_PROVEN, text=speed, ids=ids_of(job))
    return [_proven("collectives", text, job), fabric]


def _isolation(context: Context, ids: Ids) -> list[Evidence]:
    """Let a job of the default team try to read another team's data. The CPU job proves that it can read its own.

    Raises JobFailedError if AWS allows it.
    """
    stage = batch.read_stage(context.aws, context.stage)
    others = [team for team in stage.teams if team != stage.default_team]
    if not others:
        text = "the stage has only one team, so there is no other data to protect"
        return [Evidence(claim="iam", outcome=NOT_PROVEN, text=text)]
    own, place = (put_corpus(context.aws, stage, team) for team in (stage.default_team, others[0]))
    ids["bucket"], ids["key"] = place.bucket, place.key

    def read_other_team(planned: Plan) -> Plan:
        """Change the request, because a spec that names another team's data is refused before it becomes a job."""
        return replace(planned, request=json.loads(json.dumps(planned.request).replace(str(own), str(place))))

    start(context, stage, corpus_job(context, stage, name="acceptance-trespass"), ids, change=read_other_team)
    job = wait(context, stage, ids)
    tried = f"{job.run_id}, of team {stage.default_team}, tried to read {place}"
    if job.state == "SUCCEEDED" and context.aws.emulated:
        text = f"{tried}, and succeeded: the emulator does not enforce IAM"
        return [Evidence(claim="iam", outcome=NOT_PROVEN, text=text, ids=ids_of(job))]
    if job.state == "SUCCEEDED":
        raise JobFailedError(
            f"{tried}, and succeeded: teams are not isolated", next_step=f"trainyard logs {job.run_id}"
        )
    lines = [line.text for line in LogReader(context.aws, stage.log_group).read(job.log_streams)]
    refused = next((line for line in reversed(lines) if any(word in line.lower() for word in _DENIED)), None)
    if refused is None:
        raise JobFailedError(
            f"{tried}, and failed, but S3 did not deny it: {job.reason}",
            next_step=f"trainyard logs {job.run_id}",
        )
    return [_proven("iam", f"{tried}, and was denied: {refused.strip()}", job)]


def start(
    context: Context,
    stage: DeployedStage,
    spec: JobSpec,
    ids: Ids,
    *,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> None:
    """Submit a job, unless the job of an earlier start is running or has succeeded. `change` edits the plan."""
    job = find(context, stage, ids)
    if job is not None and (not job.ended or job.state == "SUCCEEDED"):
        context.say(f"  {job.run_id} was submitted earlier: {job.state}")
        return
    planned = change(plan_run(context.aws, stage, spec))
    ids["run"] = planned.run_id  # before submitting: without a record the run could not be stopped
    send(context.aws, planned)
    context.say(f"  {planned.run_id} is submitted to queue {planned.queue}")


def find(context: Context, stage: DeployedStage, ids: Ids) -> Job | None:
    """Return the current job of the step's run; None if there is none."""
    return batch.find_job(context.aws, stage, ids["run"]) if "run" in ids else None


def end(
    context: Context, stage: DeployedStage, ids: Ids, *, until: Callable[[Job], bool] = lambda _job: False
) -> tuple[Job, Receipt]:
    """Wait until the run ends, and return its job and receipt. Raises JobFailedError if it failed."""
    job = wait(context, stage, ids, until=until)
    raise_failure(job)
    receipt = read_receipt(context.aws, place_of(stage, job))
    if receipt is None:
        raise JobFailedError(f"{job.run_id} succeeded without a receipt", next_step=f"trainyard logs {job.run_id}")
    return job, receipt


def wait(context: Context, stage: DeployedStage, ids: Ids, *, until: Callable[[Job], bool] = lambda _job: False) -> Job:
    """Wait until the run ends or `until` is true, and return its last job. Raises LimitReachedError."""
    while True:
        context.wait()
        try:
            job = find(context, stage, ids)
            is_wanted = job is not None and until(job)
        except Exception as error:
            if not is_transient(error):
                raise
            continue
        if job is None:
            raise JobFailedError(f"AWS Batch has no job {ids.get('run')}", next_step="run the same command again")
        if is_wanted or (job.ended and not may_have_successor(stage, job)):
            return job


def cancel(context: Context, ids: Ids) -> None:
    """Stop the step's run, and delete its upload to another team's data."""
    with suppress(TrainyardError):  # without the stage, there is nothing to stop
        stage = batch.read_stage(context.aws, context.stage)
        job = find(context, stage, ids)
        if job is not None and not job.ended:
            batch.terminate(context.aws, job.id, reason="the acceptance has ended")
    if "key" in ids:
        context.aws.s3.delete_object(Bucket=ids["bucket"], Key=ids["key"])
        del ids["key"]


def place_of(stage: DeployedStage, job: Job) -> S3Location:
    return S3Location(stage.run_bucket, run_prefix(job.team, job.run_id))


def ids_of(job: Job) -> dict[str, str]:
    return {"run": job.run_id, "Batch job": job.id, "queue": job.queue}


def _proven(claim: str, text: str, job: Job) -> Evidence:
    return Evidence(claim=claim, outcome=PROVEN, text=text, ids=ids_of(job))


def _took(receipt: Receipt) -> str:
    cost = "" if receipt.estimated_usd is None else f", about {receipt.estimated_usd:.2f} USD"
    return f"{receipt.duration_seconds:.0f} s on {receipt.instance_type}{cost}"


def _on_instance(context: Context, claim: str, receipt: Receipt, job: Job) -> Evidence:
    """Return the instance and accelerators of the run's last attempt as evidence."""
    last = receipt.attempts[-1]
    if context.aws.emulated:
        return Evidence(claim=claim, outcome=NOT_PROVEN, text=f"{_ON_THIS_MACHINE}; it ran on {last.accelerator}")
    image = last.ran_with.get("image", "an unknown image")
    text = f"{last.world_size} x {last.accelerator} of {last.instance_type} in {last.zone}, {last.capacity}, in {image}"
    return _proven(claim, text, job)
