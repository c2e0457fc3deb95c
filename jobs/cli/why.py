"""`trainyard why RUN`: what keeps a waiting run from starting, or why a run ended."""

import typer

from jobs.cli.options import Output, Run


def why(ctx: typer.Context, run: Run, output: Output = "table") -> None:
    """Explain why a run is waiting, or why it ended.

    For a waiting run, checks everything in Batch and EC2 that can keep it from starting.
    """
    import contextlib
    import dataclasses
    from datetime import datetime, timezone

    from rich.text import Text

    from jobs.cli import tables
    from jobs.cli.estimate import estimates_by_type
    from jobs.cli.sweep_state import read_state, refuse_point
    from jobs.core.errors import UsageError
    from jobs.core.words import duration, printable
    from jobs.runs import batch, storage
    from jobs.runs.considered import considered
    from jobs.runs.job import UNSUCCESSFUL
    from jobs.runs.run_records import read_spec
    from jobs.runs.why import findings, is_waiting
    from jobs.spec.placement import place

    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    stored = storage.find_run(aws, stage, run)
    refuse_point(aws, stored, "why")
    job = batch.job_of(aws, stage, stored.run_id)
    found = findings(*batch.place_of(aws, stage, job), job) if is_waiting(job) else []
    spec = read_spec(aws, stored.location) if found else None
    types = []
    with contextlib.suppress(UsageError):  # the stage has changed, or the run has moved to another queue
        if spec is not None and place(spec, stage).queue_name == job.queue and not job.home:
            types = considered(aws, stage, spec, lambda: estimates_by_type(aws, stage, spec))
    sweep = read_state(aws, stored, job) if job.points else None
    if sweep is not None:
        ended_by = sweep.reason
    else:
        ended_by = job.ended_by(storage.readable_receipt(aws, stored.location)) or (
            job.reason if job.state in UNSUCCESSFUL else ""
        )
    if output == "json":
        answer: dict[str, object] = {"run_id": job.run_id, "state": job.state, "queue": job.queue, "ended_by": ended_by}
        answer["findings"] = [dataclasses.asdict(finding) for finding in found]
        answer["considered"] = [dataclasses.asdict(row) for row in types]
        tables.print_json(answer)
        return
    console = tables.stderr()
    if ended_by:
        console.print(Text(f"{job.run_id} has ended: {printable(ended_by)}"), soft_wrap=True)
        if job.timed_out:
            console.print(f"next: trainyard resume {job.run_id} --set timeout_hours=HOURS", soft_wrap=True)
        elif sweep is not None:
            console.print(f"next: trainyard sweep {job.run_id}, then trainyard resume {job.run_id}", soft_wrap=True)
        elif job.state == "FAILED" and job.log_streams:
            console.print(f"next: trainyard logs {job.run_id}", soft_wrap=True)
        elif job.state == "CANCELLED":
            console.print(f"next: trainyard resume {job.run_id}", soft_wrap=True)
        return
    if not found:
        state = "has succeeded" if job.state == "SUCCEEDED" else f"is {job.state}"
        console.print(f"{job.run_id} is not waiting: it {state}", soft_wrap=True)
        command = "status" if not job.ended else "receipt" if sweep is None else "sweep"
        console.print(f"next: trainyard {command} {job.run_id}", soft_wrap=True)
        return
    waited = duration((datetime.now(timezone.utc) - job.created_at).total_seconds())
    nodes = f" on {job.nodes_text}" if job.nodes_text else ""
    console.print(f"{job.run_id} is {job.state}{nodes} in queue {job.place}, submitted {waited} ago")
    tables.show(tables.findings_table(found), on=tables.stdout())
    tables.show_considered(types, on=tables.stdout(), emulated=stage.emulated)
