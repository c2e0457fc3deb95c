"""`trainyard exec RUN [COMMAND]`: a shell, or a command, in the container of a job that runs."""

from collections.abc import Sequence

from jobs.aws.connection import Aws
from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.runs import batch, entering, storage


def run_in_job(aws: Aws, stage_name: str, text: str, command: Sequence[str], *, node: int) -> None:
    """Run `trainyard exec`. Raises TrainyardError where the run waits or has ended, or lets nobody in."""
    stage = batch.read_stage(aws, stage_name)
    job = batch.job_of(aws, stage, storage.find_run(aws, stage, text).run_id)
    run_id = job.run_id
    if job.ended:
        raise TrainyardError(
            f"{run_id} has ended ({job.state}): there is no container to run anything in",
            next_step=f"trainyard logs {run_id}; what it wrote: trainyard fetch {run_id}",
        )
    if job.state != "RUNNING":
        raise TrainyardError(
            f"{run_id} does not run yet: it is {job.state}", next_step=f"trainyard why {run_id}; again once it runs"
        )
    task = entering.task_of(aws, job, node)
    if not task.lets_commands_in:
        raise ConfigurationError(
            f"nobody may run commands in {run_id}: stage '{stage.name}' has that switched off, or had when it was "
            "submitted",
            next_step="commands_in_jobs in infra/settings.py, a deployment, and a new run; or ask whoever runs the "
            f"stage. Meanwhile: trainyard logs {run_id} --follow",
        )
    entering.enter(aws, job, task, command or entering.SHELL)
