"""`trainyard status`: how a run stands, with its attempts, what they cost and how long it still takes."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from typing import Any

from rich.text import Text

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.sweep import read_now, sweep_json
from jobs.core.output import LEFT, Progress
from jobs.core.records import Receipt
from jobs.core.retries import EXITED_REASON
from jobs.core.words import cost_label, duration, result_label, usd
from jobs.money.estimate import Forecast, forecast, money_text, seconds_per_step, time_text
from jobs.money.receipt import cards_text
from jobs.runs import batch, storage
from jobs.runs.logs import newest_progress
from jobs.runs.sweeps import progress_text, spent_by, sweep_of


def status(aws: Aws, stage_name: str, text: str, *, output: str) -> None:
    """Run `trainyard status`."""
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    jobs = batch.find_jobs(aws, stage, run.run_id)
    job = jobs[-1] if jobs else None
    metrics = storage.read_metrics(aws, run.location)
    receipt = storage.readable_receipt(aws, run.location)
    if job is not None and receipt is not None:
        receipt = job.with_end(receipt)
    is_running = job is not None and job.state == "RUNNING"
    progress = newest_progress(aws, stage.log_group, job.log_streams) if job is not None and is_running else None
    standing = _forecast(receipt, progress) if is_running and receipt else None
    cost = cost_label(emulated=stage.emulated)
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
                "forecast": dataclasses.asdict(standing) if standing else None,
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
        forgotten = [
            ("run", run.run_id),
            ("state", unknown),
            ("sweep", progress_text(now.points) if now else ""),
            (cost, _whole_cost(receipt)),
            ("metrics", _last(metrics)),
            ("files", str(run.location)),
        ]
        tables.show(tables.Pairs(forgotten), on=console)
        return
    dependencies = batch.describe(aws, stage, job.depends_on) if not job.attempts else []
    waits_for = ", ".join(f"{other.run_id} ({other.state})" for other in dependencies if other.state != "SUCCEEDED")
    before = f" after job {jobs[-2].id}" if job.origin and len(jobs) > 1 else ""
    ended_by = now.reason if now else job.ended_by(receipt)
    # What ended it is said once: as a rule Batch's reason is the same, or less.
    reason = "" if job.state == "SUCCEEDED" or job.reason in (EXITED_REASON, ended_by) else job.reason
    of = "" if now else f", attempt {job.attempt} of {job.max_attempts}{' there' if job.origin else ''}"
    rows: list[tuple[str, str | Text]] = [
        ("run", job.run_id),
        ("state", tables.state(job) + of),
        ("sweep", progress_text(now.points) if now else ""),
        ("workers" if now else "nodes", ", ".join(f"{count} {state}" for state, count in job.nodes.items())),
        ("reason", reason),
        ("waited for" if job.ended else "waits for", waits_for),
        ("goes on", f"{job.origin}{before}"),
        ("job", f"{job.kind}, team {job.team}, queue {job.queue}"),
        ("submitted", tables.moment(job.created_at)),
        ("started", tables.moment(job.started_at)),
        ("stopped", tables.moment(job.stopped_at)),
        (
            "took",
            f"{duration((job.stopped_at - job.created_at).total_seconds())}, waiting too" if job.stopped_at else "",
        ),
        ("ended by", ended_by),
        ("budget", f"{receipt.budget} used" if receipt and receipt.budget else ""),
        ("budget", f"{now.budget_text} used" if now and now.budget_text else ""),
        (cost, usd(spent_by(now.points).usd) if now else _whole_cost(receipt) if job.ended else ""),
        ("progress", _progress(progress)),
        ("time left", progress.time_left if progress else ""),
        *(_standing(receipt, standing, progress, cost=cost) if standing and receipt else ()),
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


def _forecast(receipt: Receipt, progress: Progress | None) -> Forecast:
    now = datetime.now(timezone.utc)
    pace = seconds_per_step(receipt.attempts[-1], progress, at=now) if progress else None
    return forecast(receipt.attempts, progress, pace, now=now)


def _whole_cost(receipt: Receipt | None) -> str:
    """Return what a run that has ended has cost; empty where it has written no receipt."""
    return "" if receipt is None else money_text(_forecast(receipt, None), ended=True)


def _standing(receipt: Receipt, found: Forecast, progress: Progress | None, *, cost: str) -> list[tuple[str, str]]:
    """Return how busy the cards of a run that goes on are, how long it still takes, and what it costs."""
    return [
        ("cards", cards_text(receipt)),
        ("time left", "" if progress and progress.time_left else time_text(found)),
        (cost, money_text(found)),
    ]


def _progress(progress: Progress | None) -> str:
    if progress is None:
        return ""
    percent = round(100 * progress.step / max(1, progress.total_steps))  # as the bar of `logs --follow` has it
    note = progress.note.removesuffix(f", {progress.time_left}{LEFT}")  # it has a row of its own
    return f"{progress.step} of {progress.total_steps} ({percent} %){f': {note}' if note else ''}"


def _last(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of the newest line of metrics as text, called as in lists and reports."""
    figures = [(key, value) for line in metrics[-1:] for key, value in line.items() if isinstance(value, (int, float))]
    return ", ".join(f"{result_label(key)} {value:.4g}" for key, value in figures)
