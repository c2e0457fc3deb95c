"""`trainyard exec RUN [COMMAND]`: a shell or a command in the container of a running job."""

from typing import Annotated

import typer

from jobs.cli.options import Run

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Click's settings for the command: options after RUN belong to COMMAND."""


def run_in_job(
    ctx: typer.Context,
    run: Run,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Command to run. Default: a shell.")
    ] = None,
    node: Annotated[int, typer.Option(min=0, help="Node to run the command on, counted from 0.")] = 0,
) -> None:
    """Run a shell or a command in the container of a running job.

    For example: trainyard exec RUN hl-smi, or trainyard exec RUN py-spy dump --pid 7. Only the run's team may do this,
    and a stage can switch it off. AWS CloudTrail records who ran which command. Exit code 0 only means that the
    command has ended: ECS Exec does not report its exit code.
    """
    from jobs.core.errors import ConfigurationError, TrainyardError
    from jobs.runs import batch, storage
    from jobs.runs.connect import SHELL, enter, task_of

    # `--` between RUN and COMMAND stops trainyard from taking its global options out of COMMAND.
    words = command[1:] if command and command[0] == "--" else command or []
    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    job = batch.job_of(aws, stage, storage.find_run(aws, stage, run).run_id)
    run_id = job.run_id
    if job.ended:
        raise TrainyardError(
            f"{run_id} has ended ({job.state}), so it has no container to run a command in",
            next_step=f"trainyard logs {run_id}, or trainyard fetch {run_id} for what it wrote",
        )
    if job.state != "RUNNING":
        raise TrainyardError(
            f"{run_id} is not running yet: it is {job.state}", next_step=f"trainyard why {run_id}; retry once it runs"
        )
    aws, stage = batch.place_of(aws, stage, job)
    task = task_of(aws, job, node)
    if not task.allows_commands:
        raise ConfigurationError(
            f"commands cannot run in {run_id}: commands_in_jobs of stage '{stage.name}' was off when the run was "
            "submitted",
            next_step="set commands_in_jobs in infra/settings.py, deploy, and submit a new run, or ask the stage's "
            f"administrator. Meanwhile: trainyard logs {run_id} --follow",
        )
    enter(aws, job, task, words or SHELL)
