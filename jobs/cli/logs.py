"""`trainyard logs RUN`: the log of a run, from all attempts and nodes."""

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import Output, Run, parse_since

if TYPE_CHECKING:
    from jobs.runs.job import Job
    from jobs.runs.logs import LogLine


def logs(
    ctx: typer.Context,
    *,
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the job ends.")] = False,
    since: Annotated[
        str | None,
        typer.Option(
            help="Print only lines logged since this time: 30m, 12h or 7d ago, or an ISO 8601 time. Default: all lines."
        ),
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, metavar="N", help="Print only the last N lines. Default: all.")
    ] = None,
    output: Output = "table",
) -> None:
    """Print the log of a run: all its attempts and nodes."""
    from jobs.cli import tables
    from jobs.cli.live import LiveView, Repeats, detaching, print_heading, print_line
    from jobs.cli.sweep_state import refuse_point
    from jobs.runs import batch, storage
    from jobs.runs.logs import LogReader, may_have_successor
    from jobs.runs.logs import follow as follow_job

    after = parse_since(since) if since else None
    as_json = output == "json"
    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    refuse_point(aws, found, "logs")
    jobs = batch.jobs_of(aws, stage, found.run_id)
    job = jobs[-1]
    reader = LogReader(aws, stage.log_group, since=after)
    following = follow and (not job.ended or may_have_successor(stage, job))
    console = tables.stderr()
    read = reader.read if tail is None else partial(reader.read_last, count=tail)
    parts = jobs[:-1] if following and tail is None else jobs
    logged: Iterable[tuple[Job, LogLine]] = ((part, line) for part in parts for line in read(part.log_streams))
    if tail is not None:
        logged = deque(logged, maxlen=tail)
    shown, attempt, repeats = None, 0, Repeats()
    for part, line in logged:
        if part is not shown:
            shown, attempt, repeats = part, 0, Repeats()
        if line.attempt != attempt and (len(part.attempts) > 1 or len(jobs) > 1):
            print_heading(console, line.attempt, origin=part.origin)
        attempt = line.attempt
        if as_json or repeats.repeated(line.text) is None:
            print_line(line, as_json=as_json)
    if following:
        with detaching(job.run_id), LiveView(show_log=True, emulated=stage.emulated, as_json=as_json) as view:
            follow_job(aws, stage, job.id, reader=reader, show=view.show)
    elif shown is None and tail != 0:
        console.print(f"{job.run_id} ({job.state}) has logged nothing{f' since {since}' if since else ' yet'}")
