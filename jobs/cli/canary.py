"""`trainyard canary AMI`: run one job on another AMI before the stage's other jobs."""

from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.options import Output, Overrides, Yes, user_path


def canary(
    ctx: typer.Context,
    *,
    ami: Annotated[str, typer.Argument(metavar="AMI", help="Id of the AMI; python -m infra.amis list prints them.")],
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SPEC]",
            parser=user_path,
            help="A spec of one run on one node. Default: jobs/specs/fabric-check.yaml.",
        ),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Test an AMI of CPU instances, with a job that needs no spec.")
    ] = False,
    yes: Yes = False,
    overrides: Overrides = None,
    output: Output = "table",
) -> None:
    """Run one job on another AMI, before the stage's other jobs use it.

    Creates a queue of one instance that boots the AMI, follows the job, and deletes the queue. The stage stays as it
    is. Ctrl-C ends the job. Exit code 1 means that the job failed.
    """
    import re
    from dataclasses import replace

    from jobs.cli import tables
    from jobs.cli.acceptance.runs import corpus_spec, put_corpus
    from jobs.cli.options import Mode
    from jobs.cli.submission import confirm, finish, show_plans
    from jobs.core.errors import Detached, StoppedError, UsageError
    from jobs.runs.batch import read_stage, terminate
    from jobs.runs.canary import temporary_queue
    from jobs.runs.planning import plan_run
    from jobs.runs.spec_file import READY_SPECS, read_spec
    from jobs.runs.submit import send

    if not re.fullmatch(r"ami-[0-9a-f]{8,17}", ami):
        raise UsageError(f"'{ami}' is not an AMI's id", next_step="python -m infra.amis list")
    aws = ctx.obj.aws()
    stage = read_stage(aws, ctx.obj.stage)
    if spec is None and cpu:
        put_corpus(aws, stage, stage.default_team)
        chosen = corpus_spec(stage, name="canary")
    else:
        chosen = read_spec(spec or READY_SPECS / "fabric-check.yaml", overrides or [])
    planned = plan_run(aws, stage, chosen)
    if chosen.resources.nnodes > 1 or chosen.sweep is not None:
        raise UsageError("a canary is one run on one node", next_step="--set resources.nnodes=1, and remove `sweep`")
    show_plans([planned], emulated=stage.emulated)
    if not yes and not stage.emulated:
        confirm([planned], verb=f"Test {ami} with one run: submit it")
    row = stage.row_of(accelerated=chosen.kind.accelerated)
    name = f"canary-{planned.run_id}"[:128]
    left = f"disable and delete the job queue and the compute environment {name} with aws batch"
    tables.stderr().print(f"if this command is killed, {left}")
    with temporary_queue(aws, stage.queue(planned.queue), row, ami, name=name) as queue:
        planned = replace(planned, request={**planned.request, "jobQueue": queue})
        own = replace(stage, queues={**stage.queues, planned.queue: queue})
        job_ids = {planned.run_id: send(aws, planned)}
        try:
            finish(aws, own, [planned], job_ids, mode=Mode.FOLLOW, output=output)
        except Detached:
            terminate(aws, job_ids[planned.run_id], reason="its canary was interrupted")
            raise StoppedError(f"interrupted: {planned.run_id} is ended, and its queue is deleted") from None
