"""`trainyard connect RUN`: JupyterLab and TensorBoard of a running notebook in this machine's browser."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import Output, Run

if TYPE_CHECKING:
    from jobs.aws.connection import Aws
    from jobs.core.records import NotebookServer
    from jobs.core.stage import DeployedStage
    from jobs.runs.job import Job
    from jobs.runs.storage import StoredRun

POLL_SECONDS = 2.0


def connect(
    ctx: typer.Context,
    run: Run,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine. 0 picks a free one.")] = 0,
    output: Output = "table",
) -> None:
    """Open a notebook's JupyterLab and TensorBoard on this machine.

    Waits until the notebook answers, prints its address on stdout, and on AWS forwards the port through Session Manager
    until Ctrl-C. Reconnects after a reclaim. Ctrl-C never stops the notebook.
    """
    import time

    from jobs.cli import tables
    from jobs.core.errors import TrainyardError
    from jobs.core.run import NOTEBOOK
    from jobs.runs import batch, storage
    from jobs.runs.connect import PLUGIN, answers, check_programs, forward_port, free_port, instance_of

    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    if not stage.emulated:
        check_programs("aws", PLUGIN)
    local_port = port or free_port()
    was_connected = False
    with _disconnecting(found.run_id):
        while True:
            running = _wait_for_notebook(aws, stage, found)
            if running is None and was_connected:
                tables.stderr().print(
                    f"{found.run_id} has ended; next: trainyard receipt {found.run_id}", soft_wrap=True
                )
                return
            if running is None:
                raise TrainyardError(
                    f"{found.run_id} has ended, so there is nothing to connect to",
                    next_step="start a new run with its files: trainyard submit SPEC "
                    f"--set arguments.files={found.location / NOTEBOOK}",
                )
            job, server = running
            if stage.emulated:  # the notebook runs on this machine
                _show(found, server, port=server.port, instance=None, output=output)
                return
            try:
                there, _ = batch.place_of(aws, stage, job)
                instance = instance_of(there, job)
                with forward_port(there, instance=instance, port=server.port, local_port=local_port) as process:
                    was_connected = True
                    _show(found, server, port=local_port, instance=instance, output=output)
                    while answers(process, local_port):
                        time.sleep(POLL_SECONDS)
            except TrainyardError:
                if not was_connected:
                    raise
            tables.stderr().print("the connection was lost; reconnecting")
            time.sleep(POLL_SECONDS)


def _wait_for_notebook(aws: "Aws", stage: "DeployedStage", run: "StoredRun") -> "tuple[Job, NotebookServer] | None":
    """Wait until the notebook answers; return its job and address, or None if the run has ended."""
    import time

    from jobs.cli import tables
    from jobs.core.errors import UsageError
    from jobs.runs import batch, storage
    from jobs.runs.logs import may_have_successor
    from jobs.runs.why import findings, is_waiting
    from jobs.spec.catalog import CATALOG

    kind = CATALOG["notebook"].name
    printed = set[str]()
    while True:
        job = batch.job_of(aws, stage, run.run_id)
        if job.kind != kind:
            raise UsageError(
                f"{run.run_id} is a '{job.kind}' job, not a '{kind}': there is nothing to connect to",
                next_step=f"trainyard logs {run.run_id} --follow",
            )
        if job.ended and not may_have_successor(stage, job):
            return None
        waits = ""
        if is_waiting(job):
            first, *_ = findings(*batch.place_of(aws, stage, job), job)
            waits = f"{job.run_id} is {job.state} in queue {job.place}: {first.text}"
        elif not job.ended:
            server = storage.read_notebook(aws, run.location)
            # The record may be of an earlier attempt, whose instance is gone.
            if server is not None and (server.job_id, server.attempt) == (job.id, job.attempt):
                return job, server
            waits = f"{run.run_id} is {job.state}, attempt {job.attempt}; JupyterLab does not answer yet"
        if waits and waits not in printed:
            tables.stderr().print(waits)
            printed.add(waits)
        time.sleep(POLL_SECONDS)


def _show(run: "StoredRun", server: "NotebookServer", *, port: int, instance: str | None, output: str) -> None:
    from jobs.cli import tables
    from jobs.cli.terminal import print_text

    url, tensorboard = server.url(port), server.url(port, path="tensorboard/")
    if output == "json":
        tables.print_json(
            {"run_id": run.run_id, "url": url, "tensorboard_url": tensorboard, "port": port, "instance": instance}
        )
        return
    console = tables.stderr()
    print_text(url)
    console.print(f"TensorBoard: {tensorboard}", soft_wrap=True)
    if instance is not None:
        console.print(f"connected to {instance} until Ctrl-C; the notebook continues after that")


@contextmanager
def _disconnecting(run_id: str) -> Iterator[None]:
    """Turn Ctrl-C into Detached, whose message names the command that reconnects."""
    from jobs.core.errors import Detached

    try:
        yield
    except KeyboardInterrupt:
        raise Detached(
            f"disconnected from {run_id}, which continues and keeps costing money",
            next_step=f"trainyard connect {run_id}; to end it: File > Shut Down, or trainyard cancel {run_id}",
        ) from None
