"""`trainyard status RUN`: state and progress of a run, its attempts, their cost, and the time left."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from jobs.cli.options import Output, Run

if TYPE_CHECKING:
    from rich.text import Text

    from jobs.core.output import Progress
    from jobs.core.records import Receipt
    from jobs.money.estimate import Forecast


def status(ctx: typer.Context, run: Run, output: Output = "table") -> None:
    """Show the state, progress and attempts of a run."""
    import dataclasses
    from itertools import chain

    from jobs.cli import tables
    from jobs.cli.sweep_state import read_state
    from jobs.core.retries import EXITED_REASON
    from jobs.core.words import cost_label, duration, usd
    from jobs.runs import batch, storage
    from jobs.runs.logs import newest_progress
    from jobs.runs.sweeps import progress_text, spent_by, sweep_of

    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    jobs = batch.find_jobs(aws, stage, found.run_id)
    job = jobs[-1] if jobs else None
    metrics = storage.read_metrics(aws, found.location)
    receipt = storage.readable_receipt(aws, found.location)
    if job is not None and receipt is not None:
        receipt = job.with_end(receipt)
    is_running = job is not None and job.state == "RUNNING"
    progress = newest_progress(aws, stage.log_group, job.log_streams) if job is not None and is_running else None
    prediction = _forecast(receipt, progress) if is_running and receipt else None
    cost = cost_label(emulated=stage.emulated)
    sweep = read_state(aws, found, job) if job is None or job.points else None
    if output == "json":
        tables.print_json(
            {
                "run_id": found.run_id,
                "sweep": sweep.as_json() if sweep else None,
                "location": str(found.location),
                "job": tables.job_json(job) if job else None,
                "earlier_jobs": [tables.job_json(earlier) for earlier in jobs[:-1]],
                "progress": dataclasses.asdict(progress) if progress else None,
                "forecast": dataclasses.asdict(prediction) if prediction else None,
                "last_metrics": metrics[-1] if metrics else None,
                "receipt": receipt.model_dump(mode="json") if receipt else None,
            }
        )
        return
    console = tables.stdout()
    if job is None:
        recorded = f"{receipt.state} according to its receipt" if receipt else "never started, or started long ago"
        parent = sweep_of(aws, found.location)
        unknown = f"{recorded}; a point of the sweep {parent}" if parent else f"unknown to AWS Batch ({recorded})"
        forgotten = [
            ("run", found.run_id),
            ("state", unknown),
            ("sweep", progress_text(sweep.points) if sweep else ""),
            (cost, _total_cost(receipt)),
            ("metrics", _newest_metrics(metrics)),
            ("files", str(found.location)),
        ]
        tables.show(tables.Pairs(forgotten), on=console)
        return
    dependencies = batch.describe(aws, stage, job.depends_on) if not job.attempts else []
    waits_for = ", ".join(f"{other.run_id} ({other.state})" for other in dependencies if other.state != "SUCCEEDED")
    before = f" after job {jobs[-2].id}" if job.origin and len(jobs) > 1 else ""
    ended_by = sweep.reason if sweep else job.ended_by(receipt)
    # Batch's reason is usually the same as `ended by`, or has less detail.
    reason = "" if job.state == "SUCCEEDED" or job.reason in (EXITED_REASON, ended_by) else job.reason
    attempt = "" if sweep else f", attempt {job.attempt} of {job.max_attempts}{' of this job' if job.origin else ''}"
    took = f"{duration((job.stopped_at - job.created_at).total_seconds())} including the wait" if job.stopped_at else ""
    priority = f", priority {job.priority}" if job.priority else ""
    rows: list[tuple[str, str | Text]] = [
        ("run", job.run_id),
        ("state", tables.state(job) + attempt),
        ("sweep", progress_text(sweep.points) if sweep else ""),
        ("workers" if sweep else "nodes", ", ".join(f"{count} {state}" for state, count in job.nodes.items())),
        ("reason", reason),
        ("waited for" if job.ended else "waits for", waits_for),
        ("continues", f"{job.origin}{before}"),
        ("job", f"{job.kind}, team {job.team}, queue {job.place}{priority}"),
        ("runs on" if job.state == "RUNNING" else "ran on", _instances(receipt)),
        ("submitted", tables.moment(job.created_at)),
        ("started", tables.moment(job.started_at)),
        ("stopped", tables.moment(job.stopped_at)),
        ("took", took),
        ("ended by", ended_by),
        ("budget", f"{receipt.budget} used" if receipt and receipt.budget else ""),
        ("budget", f"{sweep.budget_text} used" if sweep and sweep.budget_text else ""),
        (cost, usd(spent_by(sweep.points).usd) if sweep else _total_cost(receipt) if job.ended else ""),
        ("progress", _progress_text(progress)),
        ("time left", progress.time_left if progress else ""),
        *(_forecast_rows(receipt, prediction, progress, cost=cost) if prediction and receipt else ()),
        ("metrics", _newest_metrics(metrics)),
        ("files", str(found.location)),
        ("Batch job", job.id),
    ]
    tables.show(tables.Pairs(rows), on=console)
    attempts = list(chain.from_iterable(each.attempts for each in jobs))
    if attempts:
        console.print()
        numbered = [dataclasses.replace(attempt, number=number) for number, attempt in enumerate(attempts, start=1)]
        tables.show(tables.attempts_table(numbered), on=console)


def _instances(receipt: "Receipt | None") -> str:
    """Return the instance type of the newest attempt; empty if no attempt has a record."""
    if receipt is None or not receipt.attempts:
        return ""
    newest = receipt.attempts[-1]
    return f"{newest.nnodes} x {newest.instance_type}"


def _forecast(receipt: "Receipt", progress: "Progress | None") -> "Forecast":
    from datetime import datetime, timezone

    from jobs.money.estimate import forecast, seconds_per_step

    now = datetime.now(timezone.utc)
    pace = seconds_per_step(receipt.attempts[-1], progress, at=now) if progress else None
    return forecast(receipt.attempts, progress, pace, now=now)


def _total_cost(receipt: "Receipt | None") -> str:
    """Return what a run that has ended cost; empty without a receipt."""
    from jobs.money.estimate import money_text

    return "" if receipt is None else money_text(_forecast(receipt, None), ended=True)


def _forecast_rows(
    receipt: "Receipt", found: "Forecast", progress: "Progress | None", *, cost: str
) -> list[tuple[str, str]]:
    """Return the rows of a running job: how busy its accelerators are, the time left, and the cost."""
    from jobs.money.estimate import money_text, time_text
    from jobs.money.receipt import cards_text

    return [
        ("cards", cards_text(receipt)),
        ("time left", "" if progress and progress.time_left else time_text(found)),
        (cost, money_text(found)),
    ]


def _progress_text(progress: "Progress | None") -> str:
    from jobs.core.output import TIME_LEFT_SUFFIX

    if progress is None:
        return ""
    percent = round(100 * progress.step / max(1, progress.total_steps))  # rounded as in the bar of `logs --follow`
    note = progress.note.removesuffix(f", {progress.time_left}{TIME_LEFT_SUFFIX}")  # the time left has its own row
    return f"{progress.step} of {progress.total_steps} ({percent} %){f': {note}' if note else ''}"


def _newest_metrics(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the numbers of the newest line of metrics as text."""
    from jobs.core.words import result_label

    figures = [(key, value) for line in metrics[-1:] for key, value in line.items() if type(value) in (int, float)]
    return ", ".join(f"{result_label(key)} {value:.4g}" for key, value in figures)
