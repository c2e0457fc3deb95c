"""`trainyard why`: what keeps a run that waits from starting, or what ended it."""

import dataclasses
from datetime import datetime, timezone

from rich.text import Text

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.sweep import read_now, refuse_point
from jobs.core.words import duration, printable
from jobs.runs import batch, storage
from jobs.runs.job import UNSUCCESSFUL
from jobs.runs.why import findings, is_waiting


def why(aws: Aws, stage_name: str, text: str, *, output: str) -> None:
    """Run `trainyard why`."""
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    refuse_point(aws, run, "why")
    job = batch.job_of(aws, stage, run.run_id)
    found = findings(aws, stage, job) if is_waiting(job) else []
    ended_by = job.ended_by(storage.readable_receipt(aws, run.location)) or (
        job.reason if job.state in UNSUCCESSFUL else ""
    )
    swept = read_now(aws, run, job) if job.points else None
    ended_by = swept.reason if swept else ended_by
    if output == "json":
        answer = {"run_id": job.run_id, "state": job.state, "queue": job.queue, "ended_by": ended_by}
        tables.print_json({**answer, "findings": [dataclasses.asdict(finding) for finding in found]})
        return
    console = tables.stderr()
    if ended_by:
        console.print(Text(f"{job.run_id} has ended: {printable(ended_by)}"), soft_wrap=True)
        if job.timed_out:
            console.print(f"next: trainyard resume {job.run_id} --set timeout_hours=HOURS", soft_wrap=True)
        elif swept is not None:
            console.print(f"next: trainyard sweep {job.run_id}, then trainyard resume {job.run_id}", soft_wrap=True)
        elif job.state == "FAILED" and job.log_streams:
            console.print(f"next: trainyard logs {job.run_id}", soft_wrap=True)
        return
    if not found:
        console.print(f"{job.run_id} does not wait: it is {job.state}")
        console.print(f"next: trainyard status {job.run_id}", soft_wrap=True)
        return
    waited = duration((datetime.now(timezone.utc) - job.created_at).total_seconds())
    some = f" on {job.nodes_text}" if job.nodes_text else ""
    console.print(f"{job.run_id} is {job.state}{some} in queue {job.queue}, submitted {waited} ago")
    tables.show(tables.findings_table(found), on=tables.stdout())
