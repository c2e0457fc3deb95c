"""The steps that submit jobs, as anybody does: through a spec, the plan and the Batch API."""

import json
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from jobs.aws import s3 as object_store
from jobs.aws.errors import is_transient
from jobs.cli import demo_data
from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.runner import Step
from jobs.cli.demo import STATE_FOLDER
from jobs.cli.spec_file import READY_SPECS, read_spec
from jobs.cli.submit import plan_run, raise_failure, send
from jobs.client import batch
from jobs.client.follow import may_go_on
from jobs.client.job import Job
from jobs.client.storage import read_receipt
from jobs.contract.acceptance import (
    ACCELERATOR_JOB,
    AMI_JOINS,
    CPU_JOB,
    FABRIC_CHECK,
    NOT_PROVEN,
    PROVEN,
    Evidence,
)
from jobs.contract.errors import JobFailedError, TrainyardError
from jobs.contract.instance_types import InstanceType
from jobs.contract.locations import DATA, S3Location
from jobs.contract.plan import Plan
from jobs.contract.records import Receipt
from jobs.contract.run import FABRIC, run_prefix
from jobs.contract.spec import JobSpec, parse_spec
from jobs.contract.stage import DeployedStage

START_HOURS = 0.25
"""Beside what a job may take, each of its instances is priced for so long: it boots, pulls, and idles until it goes."""

HOURS = {CPU_JOB: 0.5, AMI_JOINS: 0.5, ACCELERATOR_JOB: 0.75, FABRIC_CHECK: 0.5}
"""How long the jobs of these steps may take."""

CORPUS = "acceptance/corpus.txt"
"""Key, below a team's prefix of the data bucket, of the text that the CPU job reads: the pages of jobs/docs."""

SENTENCES = 128
"""On the embedded AWS a model is fine-tuned on so many: enough to see it through, in seconds."""

EMBEDDED_SPEC = READY_SPECS / "finetune-reviews.yaml"
MRPC_SPEC = READY_SPECS / "finetune-mrpc.yaml"

_SMALL = ("resources.nproc_per_node=1", "arguments.max_length=24")
"""And on one rank, in short sequences."""

JOINED_TAGS = ("trainyard:joined", "trainyard:run")
"""Tags of an instance that has joined its cluster: infra/observability/functions/watch_instances.py."""

_ON_THIS_MACHINE = "jobs are processes of this machine: there is no instance"

Ids = MutableMapping[str, str]


def usd(context: Context, row: InstanceType, hours: float, *, nodes: int = 1, spot: bool = True) -> float:
    """Return the most that a job of so many hours may cost."""
    return context.usd_per_hour(row, spot=spot) * nodes * (hours + START_HOURS)


def limits(context: Context, row: InstanceType, hours: float, *, nodes: int = 1, spot: bool = True) -> list[str]:
    """Return what makes a spec end by itself, whatever becomes of the laptop."""
    max_usd = context.usd_per_hour(row, spot=spot) * nodes * hours
    return [f"timeout_hours={hours}", f"max_usd={max_usd:.4f}"]


def cpu_step(context: Context) -> Step:
    row, hours = context.known.cpu_row, HOURS[CPU_JOB]
    return Step(
        name=CPU_JOB, usd=usd(context, row, hours), run=partial(cpu_job, context), undo=partial(cancel, context)
    )


def cpu_job(context: Context, ids: Ids) -> list[Evidence]:
    """Gather the pages of jobs/docs, which lie with the team's own data, into a corpus."""
    stage = batch.read_stage(context.aws, context.stage)
    put_corpus(context, stage, stage.default_team)
    job, receipt = succeed(context, stage, corpus_spec(context, stage), ids)
    text = f"{job.run_id} read {DATA}{stage.default_team}/{CORPUS}; {_took(receipt)}"
    seen = Evidence(claim="batch", outcome=PROVEN, text=text, ids=ids_of(job))
    return [seen, _on_instance(context, "container", receipt, job)]


def put_corpus(context: Context, stage: DeployedStage, team: str) -> S3Location:
    place = S3Location(stage.data_bucket, f"{team}/{CORPUS}")
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    context.aws.s3.put_object(Bucket=place.bucket, Key=place.key, Body=text.encode())
    return place


def corpus_spec(context: Context, stage: DeployedStage, *, name: str = "acceptance-corpus") -> JobSpec:
    """Return a job of the default team that reads that team's text."""
    hours = HOURS[CPU_JOB]
    return parse_spec(
        {
            "name": name,
            "job": "prepare-corpus",
            "team": stage.default_team,
            "timeout_hours": hours,
            "max_usd": round(context.usd_per_hour(stage.cpu_instance_type) * hours, 4),
            "arguments": {"data": [f"{DATA}{stage.default_team}/{CORPUS}"], "held_out_fraction": 0.1},
        },
        origin="the acceptance",
    )


def ami_step(context: Context) -> Step:
    row, hours = context.known.row, HOURS[AMI_JOINS]
    return Step(
        name=AMI_JOINS, usd=usd(context, row, hours), run=partial(ami_joins, context), undo=partial(cancel, context)
    )


def ami_joins(context: Context, ids: Ids) -> list[Evidence]:
    """Run the fabric check of one node, for which an instance boots, and look at the tag that it gets as it joins."""
    if context.aws.embedded:
        return [Evidence(claim="joins", outcome=NOT_PROVEN, text=_ON_THIS_MACHINE)]
    stage = batch.read_stage(context.aws, context.stage)
    own = limits(context, context.known.row, HOURS[AMI_JOINS])
    spec = read_spec(READY_SPECS / "fabric-check.yaml", [f"team={stage.default_team}", *own])
    start(context, stage, spec, ids)
    joined = None
    while joined is None:
        job = find(context, stage, ids)
        joined = joined_instance(context, stage.instance_type)
        if job is not None and job.ended and joined is None:
            raise_failure(job)
            raise TrainyardError(
                f"{job.run_id} ended, and no {stage.instance_type.name} has the tag of one that joined"
            )
        context.wait()
    job, _ = end(context, stage, ids)
    text = f"{joined['InstanceId']}, a {joined['InstanceType']}, joined its cluster from {joined['ImageId']}"
    seen = {"instance": joined["InstanceId"], "AMI": joined["ImageId"], **ids_of(job)}
    return [Evidence(claim="joins", outcome=PROVEN, text=f"{text}, and ran {job.run_id}", ids=seen)]


def joined_instance(context: Context, row: InstanceType) -> Any | None:
    """Return an instance of the stage's accelerator type that has joined its cluster; None: there is none yet."""
    filters: list[Any] = [
        {"Name": "tag:trainyard:stage", "Values": [context.stage]},
        {"Name": "instance-type", "Values": [row.name]},
        {"Name": "tag-key", "Values": list(JOINED_TAGS)},
    ]
    pages = context.aws.ec2.get_paginator("describe_instances").paginate(Filters=filters)
    found = [one for page in pages for reservation in page["Reservations"] for one in reservation["Instances"]]
    return max(found, key=lambda instance: instance["LaunchTime"], default=None)


def accelerator_step(context: Context) -> Step:
    row, hours = context.known.row, HOURS[ACCELERATOR_JOB]
    run, undo = partial(accelerator_job, context), partial(cancel, context)
    return Step(name=ACCELERATOR_JOB, usd=usd(context, row, hours), run=run, undo=undo)


def accelerator_job(context: Context, ids: Ids) -> list[Evidence]:
    """Fine-tune BERT-large on MRPC; on the embedded AWS a small model on a few film reviews."""
    stage = batch.read_stage(context.aws, context.stage)
    own = limits(context, stage.instance_type, HOURS[ACCELERATOR_JOB])
    job, receipt = succeed(context, stage, training(context, stage, own), ids)
    if "eval_accuracy" not in receipt.result:
        raise JobFailedError(f"{job.run_id} says nothing of its accuracy", next_step=f"trainyard receipt {job.run_id}")
    brought = ", ".join(f"{key} {value:.3f}" for key, value in _figures(receipt).items())
    seen = Evidence(
        claim="training", outcome=PROVEN, text=f"{job.run_id}: {brought}; {_took(receipt)}", ids=ids_of(job)
    )
    return [seen, _on_instance(context, "accelerator", receipt, job)]


def _figures(receipt: Receipt) -> dict[str, float]:
    wanted = ("eval_accuracy", "eval_majority_accuracy", "eval_f1", "train_samples_per_second")
    return {key: float(receipt.result[key]) for key in wanted if receipt.result.get(key) is not None}


def training(context: Context, stage: DeployedStage, overrides: Sequence[str]) -> JobSpec:
    """Return the spec of a fine-tuning, all of whose inputs are there."""
    own = [f"team={stage.default_team}", *overrides]
    if not context.aws.embedded:
        return read_spec(MRPC_SPEC, own)
    spec = read_spec(EMBEDDED_SPEC, [*own, *_SMALL])
    places = {
        argument: S3Location(stage.data_bucket, location.removeprefix(DATA))
        for argument, location, _ in spec.entrypoint_arguments().sources()
    }
    for _ in demo_data.stage(context.aws, places, STATE_FOLDER / "cache", at_most=SENTENCES):
        pass
    return spec


def fabric_step(context: Context) -> Step:
    row, hours, spot = context.known.row, HOURS[FABRIC_CHECK], not context.known.several_nodes_on_demand
    run, undo = partial(fabric_check, context), partial(cancel, context)
    return Step(name=FABRIC_CHECK, usd=usd(context, row, hours, nodes=2, spot=spot), run=run, undo=undo)


def fabric_check(context: Context, ids: Ids) -> list[Evidence]:
    """Check what connects two nodes: of the queue for several, or of Spot where the stage has none."""
    stage = batch.read_stage(context.aws, context.stage)
    spot = not context.known.several_nodes_on_demand
    overrides = [f"team={stage.default_team}", *(["resources.capacity=spot"] if spot else [])]
    overrides += limits(context, stage.instance_type, HOURS[FABRIC_CHECK], nodes=2, spot=spot)
    if context.aws.embedded:
        quick = ("resources.nproc_per_node=1", "arguments.largest_message_bytes=4096")
        overrides += [*quick, "arguments.seconds_per_measurement=0.02"]
    job, receipt = succeed(context, stage, read_spec(READY_SPECS / "fabric-check-multinode.yaml", overrides), ids)
    report = json.loads(object_store.read_once(context.aws.s3, place_of(stage, job) / FABRIC) or b"{}")
    if report.get("nnodes") != 2 or report.get("wrong"):
        raise JobFailedError(f"{job.run_id}: {report.get('wrong') or 'no report of two nodes'}")
    text = f"{job.run_id}: {report['world_size']} ranks on 2 nodes, no wrong value; {_took(receipt)}"
    right = Evidence(claim="collectives", outcome=PROVEN, text=text, ids=ids_of(job))
    providers = sorted(set(report["providers"]))
    how = f"{report['backend']}, {'provider ' + ', '.join(providers) if providers else 'no provider of libfabric'}"
    if context.aws.embedded:
        how += f"; {_ON_THIS_MACHINE}, and both nodes are it"
    speed = receipt.result.get("across_nodes_bus_gigabytes_per_second")
    fast = not context.aws.embedded and report["backend"] != "gloo" and (providers == ["efa"] or not _has_efa(stage))
    outcome = PROVEN if fast else NOT_PROVEN
    return [right, Evidence(claim="fabric", outcome=outcome, text=f"{how}; {speed} GB/s across nodes", ids=ids_of(job))]


def _has_efa(stage: DeployedStage) -> bool:
    return stage.instance_type.network_cards > 0


def start(
    context: Context,
    stage: DeployedStage,
    spec: JobSpec,
    ids: Ids,
    *,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> None:
    """Submit a job, unless an earlier start of the step has, and it has not failed since.

    `change`: what is done to the plan that a spec cannot ask for.
    """
    job = find(context, stage, ids)
    if job is not None and (not job.ended or job.state == "SUCCEEDED"):
        context.say(f"  {job.run_id} was submitted before: {job.state}")
        return
    planned = change(plan_run(context.aws, stage, spec))
    ids["run"] = planned.run_id  # before it exists: a run that nobody knows of could not be stopped
    ids["job"] = send(context.aws, planned)
    context.say(f"  {planned.run_id} is submitted to queue {planned.queue}")


def find(context: Context, stage: DeployedStage, ids: Ids) -> Job | None:
    """Return the job that the step's run is now; None where there is none."""
    return batch.find_job(context.aws, stage, ids["run"]) if "run" in ids else None


def end(context: Context, stage: DeployedStage, ids: Ids) -> tuple[Job, Receipt]:
    """Wait for the run's end. Raises JobFailedError where it failed."""
    job = wait_for_end(context, stage, ids)
    raise_failure(job)
    receipt = read_receipt(context.aws, place_of(stage, job))
    if receipt is None:
        raise JobFailedError(f"{job.run_id} succeeded without a receipt", next_step=f"trainyard logs {job.run_id}")
    return job, receipt


def wait_for_end(context: Context, stage: DeployedStage, ids: Ids) -> Job:
    """Return the run's last job once it has ended. The limit ends the wait."""
    while True:
        context.wait()
        job = None
        try:
            job = find(context, stage, ids)
        except Exception as error:
            if not is_transient(error):
                raise
        else:
            if job is None:
                raise JobFailedError(f"AWS Batch does not know {ids.get('run')}", next_step="the same command, again")
        if job is not None and job.ended and not may_go_on(stage, job):
            return job


def succeed(context: Context, stage: DeployedStage, spec: JobSpec, ids: Ids) -> tuple[Job, Receipt]:
    start(context, stage, spec, ids)
    return end(context, stage, ids)


def cancel(context: Context, ids: Ids) -> None:
    """Stop the step's run, if it goes on; with its stage it is gone anyway."""
    with suppress(TrainyardError):  # the stage is not there
        stage = batch.read_stage(context.aws, context.stage)
        job = find(context, stage, ids)
        if job is not None and not job.ended:
            batch.terminate(context.aws, job, reason="the acceptance has ended")


def place_of(stage: DeployedStage, job: Job) -> S3Location:
    return S3Location(stage.run_bucket, run_prefix(job.team, job.run_id))


def ids_of(job: Job) -> dict[str, str]:
    return {"run": job.run_id, "Batch job": job.id, "queue": job.queue}


def _took(receipt: Receipt) -> str:
    cost = "" if receipt.estimated_usd is None else f", about {receipt.estimated_usd:.2f} USD"
    return f"{receipt.duration_seconds:.0f} s on {receipt.instance_type}{cost}"


def _on_instance(context: Context, claim: str, receipt: Receipt, job: Job) -> Evidence:
    """Return what the run's last attempt says of the machine that it ran on."""
    last = receipt.attempts[-1]
    if context.aws.embedded:
        return Evidence(claim=claim, outcome=NOT_PROVEN, text=f"{_ON_THIS_MACHINE}; it ran on {last.accelerator}")
    image = last.ran_with.get("image", "no image that it knows of")
    text = f"{last.world_size} x {last.accelerator} of {last.instance_type} in {last.zone}, {last.capacity}, in {image}"
    return Evidence(claim=claim, outcome=PROVEN, text=text, ids=ids_of(job))
