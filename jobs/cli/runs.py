"""`trainyard status | why | logs | cancel | fetch | receipt`: the commands about runs that were submitted."""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.sweep import read_now, refuse_point, sweep_json
from jobs.client import batch, storage
from jobs.client.code import fetch_code, read_code_record
from jobs.client.job import CANCELLED, UNSUCCESSFUL, Job
from jobs.client.prices import spot_paid
from jobs.client.records import read_classes
from jobs.client.sweeps import progress_text, read_sweep, spent_by, sweep_of
from jobs.contract.code import CodeRecord
from jobs.contract.errors import NotFoundError, TrainyardError, UsageError
from jobs.contract.log_lines import LEFT, Progress
from jobs.contract.outlook import Outlook, cards_text, money_text, outlook, seconds_per_step, time_text
from jobs.contract.records import Receipt
from jobs.contract.retries import CANCELLED_REASON, EXITED_REASON
from jobs.contract.run import is_latest
from jobs.contract.stage import DeployedStage
from jobs.contract.words import counted, duration, result_label, usd

_AGO = re.compile(r"(\d+)\s*([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def status(aws: Aws, stage_name: str, text: str, *, output: str) -> None:
    """Run `trainyard status`."""
    from jobs.client.logs import newest_progress

    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    jobs = batch.find_jobs(aws, stage, run.run_id)
    job = jobs[-1] if jobs else None
    metrics = storage.read_metrics(aws, run.location)
    receipt = storage.readable_receipt(aws, run.location)
    is_running = job is not None and job.state == "RUNNING"
    progress = newest_progress(aws, stage.log_group, job.log_streams) if job is not None and is_running else None
    standing = _outlook(receipt, progress) if is_running and receipt else None
    now = read_now(aws, run, job) if job is None or job.points else None
    if output == "json":
        tables.print_json(
            {
                "run_id": run.run_id,
                "sweep": sweep_json(now) if now else None,
                "location": str(run.location),
                "job": tables.job_json(job) if job else None,
                "earlier_jobs": [tables.job_json(earlier) for earlier in jobs[:-1]],
                "progress": dataclasses.asdict(progress) if progress else None,
                "outlook": dataclasses.asdict(standing) if standing else None,
                "last_metrics": metrics[-1] if metrics else None,
                "receipt": receipt.model_dump(mode="json") if receipt else None,
            }
        )
        return
    console = tables.stdout()
    if job is None:
        state = f"{receipt.state}, says its receipt" if receipt else "never started, or long ago"
        of = sweep_of(aws, run.location)
        unknown = f"{state}; a point of the sweep {of}" if of else f"unknown to AWS Batch by now ({state})"
        rows = [("run", run.run_id), ("state", unknown), ("points", progress_text(now.points) if now else "")]
        tables.show(tables.Pairs([*rows, ("metrics", _last(metrics)), ("files", str(run.location))]), on=console)
        return
    dependencies = batch.describe(aws, stage, job.depends_on) if not job.attempts else []
    waits_for = ", ".join(f"{other.run_id} ({other.state})" for other in dependencies if other.state != "SUCCEEDED")
    before = f" after job {jobs[-2].id}" if job.origin and len(jobs) > 1 else ""
    rows = [
        ("run", job.run_id),
        ("state", job.state if now else _state(job)),
        ("points", progress_text(now.points) if now else ""),
        ("workers" if now else "nodes", ", ".join(f"{count} {state}" for state, count in job.nodes.items())),
        ("reason", job.reason if job.state != "SUCCEEDED" and job.reason != EXITED_REASON else ""),
        ("waited for" if job.ended else "waits for", waits_for),
        ("goes on", f"{job.origin}{before}"),
        ("job", f"{job.kind}, team {job.team}, queue {job.queue}"),
        ("submitted", tables.moment(job.created_at)),
        ("started", tables.moment(job.started_at)),
        ("stopped", tables.moment(job.stopped_at)),
        ("ended by", _ended_by(job, receipt)),
        ("budget", f"{receipt.budget} used" if receipt and receipt.budget else ""),
        ("budget", f"{now.budget_text} used" if now and now.budget_text else ""),
        ("cost", usd(spent_by(now.points).usd) if now else ""),
        ("progress", _progress(progress)),
        ("time left", progress.time_left if progress else ""),
        *(_standing(receipt, standing, progress, embedded=stage.embedded) if standing and receipt else ()),
        ("metrics", _last(metrics)),
        ("files", str(run.location)),
        ("Batch job", job.id),
    ]
    tables.show(tables.Pairs(rows), on=console)
    attempts = list(chain.from_iterable(each.attempts for each in jobs))
    if attempts:
        console.print()
        numbered = [dataclasses.replace(attempt, number=number) for number, attempt in enumerate(attempts, start=1)]
        tables.show(tables.attempts_table(numbered), on=console)


def _state(job: Job) -> str:
    return f"{job.state}, attempt {job.attempt} of {job.max_attempts}{' there' if job.origin else ''}"


def _outlook(receipt: Receipt, progress: Progress | None) -> Outlook:
    now = datetime.now(timezone.utc)
    pace = seconds_per_step(receipt.attempts[-1], progress, at=now) if progress else None
    return outlook(receipt.attempts, progress, pace, now=now)


def _standing(receipt: Receipt, found: Outlook, progress: Progress | None, *, embedded: bool) -> list[tuple[str, str]]:
    """Return how busy the cards of a run that goes on are, how long it still takes, and what it costs."""
    return [
        ("cards", cards_text(receipt)),
        ("time left", "" if progress and progress.time_left else time_text(found)),
        ("in AWS it would cost" if embedded else "cost", money_text(found)),
    ]


def _progress(progress: Progress | None) -> str:
    if progress is None:
        return ""
    percent = 100 * progress.step // max(1, progress.total_steps)
    note = progress.note.removesuffix(f", {progress.time_left}{LEFT}")  # it has a row of its own
    return f"{progress.step} of {progress.total_steps} ({percent} %){f': {note}' if note else ''}"


def _last(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of the newest line of metrics as text, called as in lists and reports."""
    figures = [(key, value) for line in metrics[-1:] for key, value in line.items() if isinstance(value, (int, float))]
    return ", ".join(f"{result_label(key)} {value:.4g}" for key, value in figures)


def why(aws: Aws, stage_name: str, text: str, *, output: str) -> None:
    """Run `trainyard why`."""
    from jobs.client.why import findings, is_waiting

    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    refuse_point(aws, run, "why")
    job = job_of(aws, stage, run.run_id)
    found = findings(aws, stage, job) if is_waiting(job) else []
    ended_by = _ended_by(job, storage.readable_receipt(aws, run.location)) or (
        job.reason if job.state in UNSUCCESSFUL else ""
    )
    if output == "json":
        answer = {"run_id": job.run_id, "state": job.state, "queue": job.queue, "ended_by": ended_by}
        tables.print_json({**answer, "findings": [dataclasses.asdict(finding) for finding in found]})
        return
    console = tables.stderr()
    if ended_by:
        console.print(f"{job.run_id} has ended: {ended_by}")
        if job.timed_out:
            console.print(f"next: trainyard resume {job.run_id} --timeout-hours HOURS")
        return
    if not found:
        console.print(f"{job.run_id} does not wait: it is {job.state}; see: trainyard status {job.run_id}")
        return
    waited = duration((datetime.now(timezone.utc) - job.created_at).total_seconds())
    some = f" on {job.nodes_text}" if job.nodes_text else ""
    console.print(f"{job.run_id} is {job.state}{some} in queue {job.queue}, submitted {waited} ago")
    tables.show(tables.findings_table(found), on=tables.stdout())


def _ended_by(job: Job, receipt: Receipt | None) -> str:
    """Return what the job's last attempt itself said of its end, of which Batch knows only the exit code.

    Of a timeout and of a cancellation it is Batch that knows: the attempt got no more than a SIGTERM.
    """
    if job.state == CANCELLED:
        return job.reason
    last = receipt.attempts[-1] if receipt else None
    ours = job.state == "FAILED" and last is not None and last.job_id == job.id
    said = (last.reason or "") if ours and last is not None else ""
    return "; ".join(filter(None, ("its timeout_hours were over" if job.timed_out else "", said)))


def logs(aws: Aws, stage_name: str, text: str, *, follow: bool, since: str | None, output: str) -> None:
    """Run `trainyard logs`."""
    from jobs.cli.live import LiveView, detaching, print_heading, print_line
    from jobs.client.follow import follow as follow_job
    from jobs.client.follow import may_go_on
    from jobs.client.logs import LogReader

    after = parse_since(since) if since else None
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    refuse_point(aws, run, "logs")
    jobs = _jobs_of(aws, stage, run.run_id)
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
        with detaching(job.run_id), LiveView(show_log=True, embedded=stage.embedded, as_json=output == "json") as view:
            follow_job(aws, stage, job.id, reader=reader, show=view.show)
    elif not logged:
        console.print(f"{job.run_id} ({job.state}) has logged nothing{f' since {since}' if since else ' yet'}")


def cancel(aws: Aws, stage_name: str, text: str, *, reason: str, yes: bool) -> None:
    """Run `trainyard cancel`. Raises UsageError where `latest` has to be confirmed and nobody can be asked."""
    from jobs.client.follow import may_go_on

    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    refuse_point(aws, run, "cancel")
    job = job_of(aws, stage, run.run_id)
    console = tables.stderr()
    if is_latest(text) and not job.ended and not yes:
        _confirm_cancel(job)
    if may_go_on(stage, job):
        raise TrainyardError(
            f"{job.run_id} is between two jobs: what ran on Spot has ended, and may go on On-Demand",
            next_step=f"trainyard cancel {job.run_id}, again in a minute",
        )
    if job.ended:
        console.print(f"{job.run_id} had ended before: {job.state}")
        return
    batch.terminate(aws, job, reason=f"{CANCELLED_REASON} {aws.caller}{f': {reason}' if reason else ''}")
    console.print(f"{job.run_id} ({job.state}) is being stopped; see: trainyard status {job.run_id}")


def _confirm_cancel(job: Job) -> None:
    """Ask whether this is the run that was meant: another one may have been submitted since."""
    import typer

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"nothing was cancelled: 'latest' is {job.run_id}, and there is no terminal to ask on whether it is meant",
            next_step=f"trainyard cancel {job.run_id}, or add --yes",
        )
    typer.confirm(f"Cancel {job.run_id}, submitted {tables.moment(job.created_at)}?", abort=True, err=True)


def fetch(
    aws: Aws, stage_name: str, text: str, *, to: Path, checkpoints: bool, code: bool = False, output: str
) -> None:
    """Run `trainyard fetch`. With `code`, that comes alone."""
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    fetched = []
    target = to / run.run_id
    files = storage.fetch(aws, run.location, target, checkpoints=checkpoints)
    for path in fetch_code(aws, run.location, target / "code") if code else files:
        fetched.append(str(path))
        if output == "table":
            print(path, flush=True)
    if output == "json":
        tables.print_json(fetched)


def _code_text(record: CodeRecord) -> str:
    commit = f"commit {record.commit}{' and changes' if record.dirty else ''}" if record.commit else "in no commit"
    return f"{counted(record.files, 'file')} of {record.folder}, {commit}; trainyard fetch --code gives it back"


def receipt(aws: Aws, stage_name: str, text: str, *, output: str) -> None:
    """Run `trainyard receipt`."""
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    found = storage.read_receipt(aws, run.location)
    if found is None and read_sweep(aws, run.location) is not None:
        raise UsageError(
            f"{run.run_id} is a sweep, each of whose points has a receipt", next_step=f"trainyard sweep {run.run_id}"
        )
    if found is None:
        raise NotFoundError(
            f"{run.run_id} has written no receipt: it has not started training, or failed before",
            next_step=f"trainyard status {run.run_id}",
        )
    found = found.model_copy(update={"spot_paid": spot_paid(aws, found.attempts)})
    if output == "json":
        tables.print_json(found.model_dump(mode="json"))
    else:
        jobs = batch.find_jobs(aws, stage, run.run_id) if found.state != "succeeded" else []
        ended_by = _ended_by(jobs[-1], found) if jobs else found.attempts[-1].reason
        state = "cancelled" if jobs and jobs[-1].state == CANCELLED else found.state
        code = read_code_record(aws, run.location)
        table = tables.receipt_table(
            found,
            state=state,
            location=str(run.location),
            ended_by=ended_by or "",
            code=_code_text(code) if code else "",
        )
        tables.show_result(table, read_classes(aws, run.location), on=tables.stdout())


def parse_since(text: str) -> datetime:
    """Return the moment that `30m`, `12h`, `7d` or an ISO 8601 time names; it is in UTC where it names no offset.

    Raises UsageError for all else.
    """
    match = _AGO.fullmatch(text.strip())
    try:
        if match:
            return datetime.now(timezone.utc) - timedelta(**{_UNITS[match[2]]: int(match[1])})
        time = datetime.fromisoformat(text.strip())
    except OverflowError:
        raise UsageError(f"--since {text}: that is before the first year there is") from None
    except ValueError:
        raise UsageError(f"--since {text}: it should look like 30m, 12h, 7d or 2026-01-31T12:00:00") from None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def job_of(aws: Aws, stage: DeployedStage, run_id: str) -> Job:
    """Return the job that a run is by now. Raises NotFoundError where Batch has forgotten it."""
    return _jobs_of(aws, stage, run_id)[-1]


def _jobs_of(aws: Aws, stage: DeployedStage, run_id: str) -> list[Job]:
    jobs = batch.find_jobs(aws, stage, run_id)
    if not jobs:
        raise NotFoundError(
            f"AWS Batch does not know {run_id} any more; its files are still there",
            next_step=f"trainyard fetch {run_id}",
        )
    return jobs
