"""`trainyard logs`: the log of a run, all its attempts and nodes, to its end where that is followed."""

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.live import LiveView, detaching, print_heading, print_line
from jobs.cli.options import parse_since
from jobs.cli.sweep import refuse_point
from jobs.runs import batch, storage
from jobs.runs.follow import follow as follow_job
from jobs.runs.follow import may_go_on
from jobs.runs.logs import LogReader


def logs(aws: Aws, stage_name: str, text: str, *, follow: bool, since: str | None, output: str) -> None:
    """Run `trainyard logs`."""
    after = parse_since(since) if since else None
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    refuse_point(aws, run, "logs")
    jobs = batch.jobs_of(aws, stage, run.run_id)
    job = jobs[-1]
    reader = LogReader(aws, stage.log_group, since=after)
    following = follow and (not job.ended or may_go_on(stage, job))
    console = tables.stderr()
    logged = False
    for part in jobs[:-1] if following else jobs:
        attempt = 0
        for line in reader.read(part.log_streams):
            if line.attempt != attempt and (len(part.attempts) > 1 or len(jobs) > 1):
                print_heading(console, line.attempt, origin=part.origin)
            attempt = line.attempt
            logged = True
            print_line(line, as_json=output == "json")
    if following:
        with detaching(job.run_id), LiveView(show_log=True, emulated=stage.emulated, as_json=output == "json") as view:
            follow_job(aws, stage, job.id, reader=reader, show=view.show)
    elif not logged:
        console.print(f"{job.run_id} ({job.state}) has logged nothing{f' since {since}' if since else ' yet'}")
