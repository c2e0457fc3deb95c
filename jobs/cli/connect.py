"""`trainyard connect RUN`: JupyterLab and TensorBoard of a notebook that runs, in this machine's browser."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.plain import print_text
from jobs.core.errors import Detached, TrainyardError, UsageError
from jobs.core.records import NotebookServer
from jobs.core.run import NOTEBOOK
from jobs.core.stage import DeployedStage
from jobs.runs import batch, port_forwarding, storage
from jobs.runs.follow import may_go_on
from jobs.runs.job import Job
from jobs.runs.storage import StoredRun
from jobs.runs.why import findings, is_waiting
from jobs.spec.catalog import CATALOG

POLL_SECONDS = 2.0
_KIND = CATALOG["notebook"].name


def connect(aws: Aws, stage_name: str, text: str, *, port: int, output: str) -> None:
    """Waits until it answers, and prints where; forwards its port until Ctrl-C, on AWS.

    After a reclaim it goes on with the next attempt. Raises TrainyardError where the run has ended.
    """
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    if not stage.emulated:
        port_forwarding.check_programs("aws", port_forwarding.PLUGIN)
    local_port = port or port_forwarding.free_port()
    was_there = False
    with _leaving(run.run_id):
        while True:
            found = _running(aws, stage, run)
            if found is None:
                if was_there:
                    tables.stderr().print(
                        f"{run.run_id} has ended; next: trainyard receipt {run.run_id}", soft_wrap=True
                    )
                    return
                _refuse_ended(run)
            job, server = found
            if stage.emulated:  # it runs on this machine
                _show(run, server, port=server.port, instance=None, output=output)
                return
            try:
                instance = port_forwarding.instance_of(aws, job)
                with port_forwarding.forwarded(
                    aws, instance=instance, port=server.port, local_port=local_port
                ) as process:
                    was_there = True
                    _show(run, server, port=local_port, instance=instance, output=output)
                    while port_forwarding.answers(process, local_port):
                        time.sleep(POLL_SECONDS)
            except TrainyardError:
                if not was_there:
                    raise
            tables.stderr().print("the connection was lost; looking for the notebook again")
            time.sleep(POLL_SECONDS)


def _running(aws: Aws, stage: DeployedStage, run: StoredRun) -> tuple[Job, NotebookServer] | None:
    """The run's job and where its notebook answers, once it does; None where the run has ended."""
    said = set[str]()
    while True:
        job = batch.job_of(aws, stage, run.run_id)
        if job.kind != _KIND:
            raise UsageError(
                f"{run.run_id} is a '{job.kind}', no '{_KIND}': there is nothing to connect to",
                next_step=f"trainyard logs {run.run_id} --follow",
            )
        if job.ended and not may_go_on(stage, job):
            return None
        if is_waiting(job):
            cause = findings(aws, stage, job)[0]
            _say(f"{job.run_id} is {job.state} in queue {job.queue}: {cause.text}", said)
        elif not job.ended:
            server = storage.read_notebook(aws, run.location)
            # One that was lost with an earlier attempt's instance says nothing of this one.
            if server is not None and (server.job_id, server.attempt) == (job.id, job.attempt):
                return job, server
            _say(f"{run.run_id} is {job.state}, attempt {job.attempt}; JupyterLab does not answer yet", said)
        time.sleep(POLL_SECONDS)


def _say(text: str, said: set[str]) -> None:
    """Says each text once, however often it is found again."""
    if text not in said:
        tables.stderr().print(text)
        said.add(text)


def _refuse_ended(run: StoredRun) -> NoReturn:
    raise TrainyardError(
        f"{run.run_id} has ended: there is nothing to connect to",
        next_step="a new run goes on with its files: trainyard submit SPEC "
        f"--set arguments.files={run.location / NOTEBOOK}",
    )


def _show(run: StoredRun, server: NotebookServer, *, port: int, instance: str | None, output: str) -> None:
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
        console.print(f"{instance} is connected until Ctrl-C; the notebook goes on")


@contextmanager
def _leaving(run_id: str) -> Iterator[None]:
    """Turns Ctrl-C into Detached, which says how to come back."""
    try:
        yield
    except KeyboardInterrupt:
        raise Detached(
            f"disconnected from {run_id}; it goes on, and is paid for",
            next_step=f"trainyard connect {run_id}; to end it: File > Shut Down, or trainyard cancel {run_id}",
        ) from None
