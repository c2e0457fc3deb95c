"""The steps before and after all jobs: what the account says, the deployment, and the end of the stage."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from jobs.cli.acceptance.context import Context
from jobs.cli.acceptance.runner import Step
from jobs.cli.acceptance.spend import Running
from jobs.client import batch
from jobs.client.prices import current_prices
from jobs.contract.acceptance import DEPLOY, DESTROY, NOT_PROVEN, PREFLIGHT, PROVEN, Evidence
from jobs.contract.errors import ConfigurationError, TrainyardError
from jobs.contract.instance_types import InstanceType, instance_type

if TYPE_CHECKING:
    from mypy_boto3_cloudformation.type_defs import StackTypeDef

BUILD_HOURS = 2.0
"""Image Builder's instance is priced for so long: a build takes about one."""

_BUILD_TYPE = "m6id.4xlarge"
"""Image Builder's, of infra/machine_image/build.py, which has no row of prices: the CPU row's is its measure."""

_STAYS = {
    ":s3:::": "bucket",
    ":kms:": "key",
    ":secretsmanager:": "secret",
    ":logs:": "log group",
    ":job-definition/": "revision of a job definition",
    ":job/": "job that has ended",
    ":image/": "machine image",
    ":snapshot/": "snapshot of a machine image",
    ":imagebuilder:": "record of a machine image's build",
}
"""What outlives a stage on purpose (infra/README.md, "Take it down without losing data"), by a part of its ARN."""

_DESTROY_TRIES = 3
_GONE_SECONDS = 600.0
"""The tagging service may show for so long what has gone."""


def preflight_step(context: Context) -> Step:
    return Step(name=PREFLIGHT, run=lambda _ids: preflight(context))


def preflight(context: Context) -> list[Evidence]:
    """Ask the account. Raises ConfigurationError for a problem that the deployment doesn't solve by itself."""
    findings = _findings(context)
    problems = [found for found in findings if found["verdict"] == "problem" and not _is_bootstrap(found)]
    counts = ", ".join(
        f"{sum(found['verdict'] == verdict for found in findings)} {verdict}"
        for verdict in ("ok", "unknown", "problem")
    )
    if context.aws.embedded:
        text = f"the embedded AWS has no offers and no quotas of its own: its answers ({counts}) say nothing of AWS"
        return [Evidence(claim="account", outcome=NOT_PROVEN, text=text)]
    if problems:
        raise ConfigurationError(
            "; ".join(f"{found['check']}: {found['text']}" for found in problems),
            next_step=" && ".join(dict.fromkeys(found["next_step"] for found in problems if found["next_step"])),
        )
    outcome = NOT_PROVEN if any(found["verdict"] == "unknown" for found in findings) else PROVEN
    return [Evidence(claim="account", outcome=outcome, text=f"python -m infra.preflight: {counts}")]


def _findings(context: Context) -> list[dict[str, str]]:
    options = ("--profile", context.aws.profile) if context.aws.profile else ()
    asked = context.infra("infra.preflight", "--stage", context.stage, "-o", "json", *options)
    try:
        found: list[dict[str, str]] = json.loads(asked.stdout)
    except ValueError:
        asked.expect("python -m infra.preflight")
        raise
    return found


def _is_bootstrap(finding: Mapping[str, str]) -> bool:
    return finding["next_step"].startswith("cdk bootstrap ")


def stacks(context: Context) -> dict[str, str]:
    """Return the stage's stacks that are there: name to ARN, the ones that nobody could delete included."""
    return {
        stack["StackName"]: stack["StackId"]
        for stack in _described(context)
        # Names of stage `dev` begin those of a stage `dev-2`; descriptions don't (infra/constructs/stage_stack.py).
        if stack.get("Description", "").startswith(f"trainyard {context.stage}: ")
        and stack["StackStatus"] != "DELETE_COMPLETE"
    }


def _described(context: Context) -> "Iterator[StackTypeDef]":
    for page in context.aws.client("cloudformation").get_paginator("describe_stacks").paginate():
        yield from page["Stacks"]


def _is_under_review(context: Context) -> bool:
    """Return whether a stack may be left of a deployment that ended before it made anything: it has no description."""
    return any(
        stack["StackStatus"] == "REVIEW_IN_PROGRESS" and stack["StackName"].startswith(f"trainyard-{context.stage}-")
        for stack in _described(context)
    )


def deploy_step(context: Context) -> Step:
    row = context.known
    usd = row.usd_a_month / 730 * 8 + (BUILD_HOURS * build_usd_per_hour(context) if row.builds_machine_image else 0)
    return Step(name=DEPLOY, usd=usd, run=partial(deploy, context), undo=partial(undo_deploy, context), sets_up=True)


def is_ours(ids: Mapping[str, str]) -> bool:
    """Return whether the deploy step with these ids has deployed the stage, and not taken it down since."""
    return "ours" in ids


def undo_deploy(context: Context, ids: MutableMapping[str, str]) -> None:
    """Take down what the step deployed, unless it stays."""
    if is_ours(ids) and not context.keep:
        take_down(context)
        del ids["ours"]


def build_usd_per_hour(context: Context) -> float:
    return context.usd_per_hour(context.known.cpu_row, spot=False) * 1.25  # its disks of its own cost about a quarter


def deploy(context: Context, ids: MutableMapping[str, str]) -> list[Evidence]:
    """Deploy the stage and its images, unless it was there before and stays."""
    if context.keep and not is_ours(ids) and stacks(context):
        text = "the stage was there before, and --keep leaves it as it is"
        return [Evidence(claim=name, outcome=NOT_PROVEN, text=text) for name in ("templates", "images")]
    ids["ours"] = "yes"
    for finding in _findings(context):
        if _is_bootstrap(finding) and finding["verdict"] == "problem":
            context.say(f"  {finding['next_step']}")
            _, _, *arguments = shlex.split(finding["next_step"])
            context.cdk("bootstrap", *arguments, name="bootstrap").expect("cdk bootstrap")
    faults_before = _faults(context)
    if not context.aws.embedded:
        _cdk_deploy(context, f"{context.stage}/image")
        _push_images(context)
    _cdk_deploy(context, f"{context.stage}/*")
    if faults := _faults(context)[len(faults_before) :]:
        raise TrainyardError(f"the embedded AWS failed inside, so its word proves nothing: {faults[-1]}")
    made = stacks(context)
    if not made:
        raise TrainyardError(f"the CDK CLI says that stage '{context.stage}' is deployed, and there is no stack of it")
    stage = batch.read_stage(context.aws, context.stage)
    templates = Evidence(
        claim="templates",
        outcome=PROVEN,
        text=f"{len(made)} stacks, {len(stage.queues)} queues, {len(stage.job_definitions)} job definitions",
        ids=made,
    )
    return [templates, _images(context, stage.job_images)]


def _images(context: Context, job_images: Mapping[str, str]) -> Evidence:
    if context.aws.embedded:
        text = "nothing is built: jobs are processes of this machine, and Image Builder is on record only"
        return Evidence(claim="images", outcome=NOT_PROVEN, text=text)
    amis = context.aws.ec2.describe_images(
        Owners=["self"], Filters=[{"Name": "tag:trainyard:stage", "Values": [context.stage]}]
    )["Images"]
    ids = {f"image of {kind}": uri for kind, uri in job_images.items()}
    ids |= {f"AMI {number}": ami["ImageId"] for number, ami in enumerate(amis, start=1)}
    built = bool(amis) or not context.known.builds_machine_image
    text = f"{len(set(job_images.values()))} job images by their digests; {len(amis)} AMIs of the stage's own"
    return Evidence(claim="images", outcome=PROVEN if built else NOT_PROVEN, text=text, ids=ids)


def _cdk_deploy(context: Context, selected: str) -> None:
    context.say(f"  cdk deploy '{selected}' -c stage={context.stage}")
    options = ("--context", f"stage={context.stage}", "--output", str(context.folder.absolute() / "cdk.out"))
    context.cdk("deploy", selected, *options, "--require-approval", "never", name="deploy").expect("cdk deploy")


def _push_images(context: Context) -> None:
    context.say(f"  trainyard --stage {context.stage} images push")
    program = "from jobs.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, "--stage", context.stage, "images", "push"]
    context.program(command, name="images").expect("trainyard images push")


def _faults(context: Context) -> list[Any]:
    """Return what the embedded AWS failed at: the CDK CLI tries again, and may then find nothing to do."""
    if not context.aws.embedded:
        return []
    with urlopen(f"{context.aws.endpoint}/trainyard/health", timeout=10) as answer:  # noqa: S310 - loopback
        return list(json.load(answer)["server_errors"])


def destroy_step(context: Context) -> Step:
    return Step(name=DESTROY, run=lambda _ids: destroy(context))


def destroy(context: Context) -> list[Evidence]:
    """Take the stage down and list what its tag still finds. Raises TrainyardError for what should be gone."""
    if context.keep:
        return [Evidence(claim="gone", outcome=NOT_PROVEN, text="--keep leaves the stage as it is")]
    before = stacks(context)
    take_down(context)
    waited = 0.0
    while unwanted := [arn for arn in tagged(context) if not any(part in arn for part in _STAYS)]:
        if waited >= (1.0 if context.aws.embedded else _GONE_SECONDS):
            raise TrainyardError(
                f"{len(unwanted)} things of the stage are left that should be gone: {', '.join(unwanted)}",
                next_step="delete them by hand: they may cost money",
            )
        context.wait()
        waited += context.poll_seconds
    left = tagged(context)
    text = f"{len(before)} stacks are gone; what is meant to stay: {_what_stays(left) or 'nothing'}"
    ids = {f"left {number}": arn for number, arn in enumerate(left, start=1)}
    return [Evidence(claim="gone", outcome=PROVEN, text=text, ids=ids)]


def take_down(context: Context) -> None:
    """End the stage's jobs and destroy its stacks; nothing where there are none."""
    if not stacks(context) and not _is_under_review(context):
        return
    _cancel_jobs(context)
    context.say(f"  cdk destroy '{context.stage}/*' -c stage={context.stage}")
    for attempt in range(1, _DESTROY_TRIES + 1):
        options = ("--force", "--context", f"stage={context.stage}")
        output = ("--output", str(context.folder.absolute() / "cdk.out"))
        finished = context.cdk("destroy", f"{context.stage}/*", *options, *output, name="destroy", limited=False)
        left = stacks(context)
        if not left:
            return
        if attempt == _DESTROY_TRIES:
            finished.expect("cdk destroy")
            raise TrainyardError(f"stacks are left: {', '.join(left)}", next_step=f"see {finished.log}")


def _cancel_jobs(context: Context) -> None:
    try:
        stage = batch.read_stage(context.aws, context.stage)
    except ConfigurationError:
        return  # it was never whole
    for job in batch.list_jobs(context.aws, stage, since=datetime.fromtimestamp(0, timezone.utc)):
        if not job.ended:
            batch.terminate(context.aws, job, reason="the acceptance takes its stage down")


def tagged(context: Context) -> list[str]:
    """Return the ARNs of what the stage's tag finds.

    Instances that have ended and gateways that are deleted stay listed for about an hour, and are left out.
    """
    pages = (
        context.aws.client("resourcegroupstaggingapi")
        .get_paginator("get_resources")
        .paginate(TagFilters=[{"Key": "trainyard:stage", "Values": [context.stage]}])
    )
    found = {item["ResourceARN"] for page in pages for item in page["ResourceTagMappingList"]}
    alive = {instance["InstanceId"] for instance in _instances(context)}
    of_stage: list[Any] = [{"Name": "tag:trainyard:stage", "Values": [context.stage]}]
    for page in context.aws.ec2.get_paginator("describe_nat_gateways").paginate(Filters=of_stage):
        alive |= {gateway["NatGatewayId"] for gateway in page["NatGateways"] if gateway["State"] != "deleted"}
    mortal = (":instance/", ":natgateway/")
    return sorted(arn for arn in found if arn.rpartition("/")[2] in alive or not any(part in arn for part in mortal))


def _what_stays(arns: list[str]) -> str:
    kinds = [next(kind for part, kind in _STAYS.items() if part in arn) for arn in arns]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def running(context: Context) -> list[Running]:
    """Return the stage's instances that are paid for, at what they cost an hour."""
    return [
        Running(
            id=instance["InstanceId"],
            launched_at=instance["LaunchTime"],
            usd_per_hour=_price(context, instance["InstanceType"], spot=instance.get("InstanceLifecycle") == "spot"),
        )
        for instance in _instances(context)
    ]


def _instances(context: Context) -> Iterator[Mapping[str, Any]]:
    filters: list[Any] = [{"Name": "tag:trainyard:stage", "Values": [context.stage]}]
    for page in context.aws.ec2.get_paginator("describe_instances").paginate(Filters=filters):
        for reservation in page["Reservations"]:
            for instance in reservation["Instances"]:
                if instance["State"]["Name"] != "terminated":
                    yield instance


def _price(context: Context, name: str, *, spot: bool) -> float:
    if name == _BUILD_TYPE:
        return build_usd_per_hour(context)
    if name not in context.prices:
        context.prices[name] = current_prices(context.aws, _row(context, name))
    prices = context.prices[name]
    return (prices.spot if spot else prices.on_demand).usd_per_hour


def _row(context: Context, name: str) -> InstanceType:
    try:
        return instance_type(name)
    except TrainyardError:  # somebody else's choice: the accelerators' price stands in
        return context.known.row
