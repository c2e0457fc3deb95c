"""The steps around the jobs: check the account, deploy the stage, destroy it."""

import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any

from jobs.cli.acceptance.context import Context, infra
from jobs.cli.acceptance.runner import Ids, Running, Step
from jobs.core.acceptance import DEPLOY, DESTROY, NOT_PROVEN, PREFLIGHT, PROVEN, Evidence
from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.money.leftovers import PASSING, kind_of, tagged
from jobs.runs import batch

_BUILD_HOURS = 2.0
"""Hours for which Image Builder's instance is priced. A build takes about one hour."""

_GONE = frozenset({"other", "repository"})
"""Kinds of resources that `cdk destroy` deletes. The others stay (infra/README.md, "Delete a stage")."""

_DESTROY_TRIES = 3
_GONE_SECONDS = 600.0
"""The tagging service may list deleted resources for this long."""


def steps(context: Context) -> tuple[Step, Step, Step]:
    """Return the steps `preflight`, `deploy` and `destroy`."""
    usd = context.facts.usd_a_month / 730 * 8
    if context.facts.builds_machine_image:
        usd += _BUILD_HOURS * _build_usd_per_hour(context)
    run, undo = partial(_deploy, context), partial(_undo_deploy, context)
    return (
        Step(name=PREFLIGHT, run=lambda _ids: [_preflight(context)]),
        Step(name=DEPLOY, usd=usd, run=run, undo=undo, sets_up=True),
        Step(name=DESTROY, run=lambda _ids: [_destroy(context)]),
    )


def _preflight(context: Context) -> Evidence:
    """Check the account. Raises ConfigurationError for a problem that the deployment does not solve by itself."""
    found = findings(context)
    verdicts = [each["verdict"] for each in found]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "unknown", "problem"))
    if context.aws.emulated:
        text = f"the emulator has no offers and quotas: its answers ({counts}) prove nothing about AWS"
        return Evidence(claim="account", outcome=NOT_PROVEN, text=text)
    problems = [each for each in found if each["verdict"] == "problem" and not _is_bootstrap(each)]
    if problems:
        raise ConfigurationError(
            "; ".join(f"{each['check']}: {each['text']}" for each in problems),
            next_step=" && ".join(dict.fromkeys(each["next_step"] for each in problems if each["next_step"])),
        )
    outcome = NOT_PROVEN if "unknown" in verdicts else PROVEN
    return Evidence(claim="account", outcome=outcome, text=f"python -m infra.preflight: {counts}")


def findings(context: Context) -> list[Any]:
    """Return the findings of the preflight, which runs once per command."""
    arguments, with_problems = ("preflight", "--stage", context.stage), (0, ConfigurationError.exit_code)
    context.findings = context.findings or infra(
        *arguments, folder=context.folder, aws=context.aws, codes=with_problems
    )
    return context.findings


def _is_bootstrap(finding: dict[str, str]) -> bool:
    return finding["next_step"].startswith("cdk bootstrap ")


def stacks(context: Context, *, or_begun: bool = False) -> dict[str, str]:
    """Return the ARNs of the stage's stacks by name, including stacks whose deletion failed.

    `or_begun` includes stacks of a deployment that ended before it created anything. They have no description.
    """
    pages = context.aws.client("cloudformation").get_paginator("describe_stacks").paginate()
    existing = [each for page in pages for each in page["Stacks"] if each["StackStatus"] != "DELETE_COMPLETE"]
    # The names of stage `dev-2` begin with those of `dev`; its descriptions do not (infra/constructs/stage_stack.py).
    found = [each for each in existing if each.get("Description", "").startswith(f"trainyard {context.stage}: ")]
    begun = [
        each
        for each in existing
        if each["StackStatus"] == "REVIEW_IN_PROGRESS" and each["StackName"].startswith(f"trainyard-{context.stage}-")
    ]
    return {each["StackName"]: each["StackId"] for each in [*found, *begun * or_begun]}


def _deploy(context: Context, ids: Ids) -> list[Evidence]:
    """Deploy the stage and its images, unless --keep was given for an existing stage."""
    if context.keep and "ours" not in ids and stacks(context):
        text = "the stage existed before, and --keep leaves it unchanged"
        return [Evidence(claim=name, outcome=NOT_PROVEN, text=text) for name in ("templates", "images")]
    ids["ours"] = "yes"
    for finding in findings(context):
        if _is_bootstrap(finding) and finding["verdict"] == "problem":
            context.say(f"  {finding['next_step']}")
            context.program(shlex.split(finding["next_step"]), log="bootstrap")
    if not context.aws.emulated:
        context.cdk("deploy", f"{context.stage}/image", "--require-approval", "never")
        context.say(f"  trainyard --stage {context.stage} images push")
        program = (sys.executable, "-P", "-c", "from jobs.cli import main; main()")
        context.program([*program, "--stage", context.stage, "images", "push"], log="images")
    context.cdk("deploy", f"{context.stage}/*", "--require-approval", "never")
    stage, made = batch.read_stage(context.aws, context.stage), stacks(context)
    text = f"{len(made)} stacks, {len(stage.queues)} queues, {len(stage.job_definitions)} job definitions"
    return [Evidence(claim="templates", outcome=PROVEN, text=text, ids=made), _images(context, stage.job_images)]


def _images(context: Context, job_images: Mapping[str, str]) -> Evidence:
    if context.aws.emulated:
        text = "nothing is built: jobs are processes on this machine, and the emulator only records Image Builder"
        return Evidence(claim="images", outcome=NOT_PROVEN, text=text)
    of_stage: list[Any] = [{"Name": "tag:trainyard:stage", "Values": [context.stage]}]
    amis = context.aws.ec2.describe_images(Owners=["self"], Filters=of_stage)["Images"]
    ids = {f"image of {kind}": uri for kind, uri in job_images.items()}
    ids |= {f"AMI {number}": ami["ImageId"] for number, ami in enumerate(amis, start=1)}
    built = bool(amis) or not context.facts.builds_machine_image
    text = f"{len(set(job_images.values()))} job images by digest; {len(amis)} AMIs built for the stage"
    return Evidence(claim="images", outcome=PROVEN if built else NOT_PROVEN, text=text, ids=ids)


def _undo_deploy(context: Context, ids: Ids) -> None:
    """Destroy what the step deployed, unless --keep was given."""
    if "ours" in ids and not context.keep:
        _take_down(context)
        del ids["ours"]


def _destroy(context: Context) -> Evidence:
    """Destroy the stage and list the resources that remain. Raises TrainyardError if any of them should be gone."""
    if context.keep:
        return Evidence(claim="gone", outcome=NOT_PROVEN, text="--keep leaves the stage unchanged")
    before = stacks(context)
    _take_down(context)
    waited, patience = 0.0, 1.0 if context.aws.emulated else _GONE_SECONDS
    while unwanted := [arn for arn in _tagged(context) if kind_of(arn) in _GONE]:
        if waited >= patience:
            raise TrainyardError(
                f"{len(unwanted)} resources of the stage should be gone: {', '.join(unwanted)}",
                next_step="delete them by hand: they may cost money",
            )
        context.wait()
        waited += context.poll_seconds
    left = _tagged(context)
    kinds = [kind_of(arn) for arn in left]
    stays = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "nothing"
    ids = {f"left {number}": arn for number, arn in enumerate(left, start=1)}
    text = f"{len(before)} stacks are gone; kept on purpose: {stays}"
    return Evidence(claim="gone", outcome=PROVEN, text=text, ids=ids)


def _take_down(context: Context) -> None:
    """Stop the stage's jobs and destroy its stacks, if there are any."""
    if not stacks(context, or_begun=True):
        return
    try:
        stage = batch.read_stage(context.aws, context.stage)
        for job in batch.list_jobs(context.aws, stage, since=datetime.fromtimestamp(0, timezone.utc)):
            if not job.ended:
                batch.terminate(context.aws, job.id, reason="the acceptance destroys its stage")
    except ConfigurationError:
        pass  # the stage was never completely deployed
    error: TrainyardError | None = None
    for _ in range(_DESTROY_TRIES):
        try:
            context.cdk("destroy", f"{context.stage}/*", "--force")
        except TrainyardError as failed:
            error = failed
        if not (left := stacks(context)):
            return
    raise error or TrainyardError(f"stacks are left: {', '.join(left)}", next_step=f"see {context.folder}/destroy.log")


def _tagged(context: Context) -> list[str]:
    """Return the ARNs of the resources with the stage's tag.

    Terminated instances and deleted gateways, which stay listed for about an hour, and jobs are left out.
    """
    found = {*tagged(context.aws, context.stage)}
    gateways = context.aws.ec2.get_paginator("describe_nat_gateways").paginate()
    alive = {each["NatGatewayId"] for page in gateways for each in page["NatGateways"] if each["State"] != "deleted"}
    alive |= {instance["InstanceId"] for instance in context.instances()}
    return sorted(arn for arn in found if arn.rpartition("/")[2] in alive or not any(part in arn for part in PASSING))


def running(context: Context) -> list[Running]:
    """Return the stage's instances with their cost per hour."""
    rows = {row.name: row for row in (context.row, context.cpu_row)}

    def usd_per_hour(name: str, *, spot: bool) -> float:
        return context.usd_per_hour(rows[name], spot=spot) if name in rows else _build_usd_per_hour(context)

    return [
        Running(
            id=each["InstanceId"],
            launched_at=each["LaunchTime"],
            usd_per_hour=usd_per_hour(each["InstanceType"], spot=each.get("InstanceLifecycle") == "spot"),
        )
        for each in context.instances()
    ]


def _build_usd_per_hour(context: Context) -> float:
    """Return the cost of Image Builder's instance: about a quarter more than a CPU instance, for its disks."""
    return context.usd_per_hour(context.cpu_row, spot=False) * 1.25
