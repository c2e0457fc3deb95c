"""`trainyard acceptance`: plan and price, ask once, run the steps, take all away, and report what was seen."""

import json
import signal
from datetime import datetime, timezone
from pathlib import Path

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.acceptance import deployment, runs
from jobs.cli.acceptance.context import Context, Facts, infra
from jobs.cli.acceptance.reclaim import reclaim_step
from jobs.cli.acceptance.runner import Ending, LimitReachedError, State, Step, run_steps
from jobs.cli.acceptance.spend import Meter
from jobs.cli.acceptance.watched import watched_step
from jobs.cli.demo import STATE_FOLDER
from jobs.cli.emulator import INTERRUPTS
from jobs.cli.options import ask
from jobs.cli.plain import print_text
from jobs.cli.report import write
from jobs.core.acceptance import (
    DEPLOY,
    NOT_PROVEN,
    PLAN,
    PROVEN,
    AcceptanceRecord,
    Evidence,
    claim_outcomes,
    claims_of,
)
from jobs.core.errors import ConfigurationError, StoppedError, TrainyardError, UsageError
from jobs.core.words import usd

FOLDER = STATE_FOLDER / "acceptance"


def acceptance(aws: Aws, stage: str, *, max_usd: float, keep: bool, yes: bool) -> None:
    """Run `trainyard acceptance`.

    Raises UsageError if the worst case is beyond the limit, ConfigurationError if somebody else deployed the stage, and
    after its end the error whose exit code tells how that was.
    """
    folder = FOLDER / f"{stage}-{aws.account}-{aws.region_name}"
    new = AcceptanceRecord(
        stage=stage,
        account=aws.account,
        region=aws.region_name,
        emulated=aws.emulated,
        max_usd=max_usd,
        keep=keep,
        started_at=datetime.now(timezone.utc),
        steps=[],
    )
    state = State.open(folder.with_suffix(".json"), new)
    record, console = state.record, tables.stderr()
    for interrupt in INTERRUPTS:
        signal.signal(interrupt, _interrupt)
    due = any(step.needs_undo for step in record.steps)
    if record.complete and not due:
        console.print(f"it ran before, to its end; to run it again, remove {state.path}")
        _report(record, folder)
        return
    [facts] = infra("idle_costs", "--stage", stage, folder=folder, aws=aws)
    context = Context(
        aws=aws,
        stage=stage,
        keep=keep,
        folder=folder,
        facts=Facts.model_validate(facts),
        say=lambda text: console.print(text, markup=False, highlight=False),
    )
    if not keep and "ours" not in record.step(DEPLOY).ids and (there := deployment.stacks(context)):
        raise ConfigurationError(
            f"stage '{stage}' is there already ({', '.join(sorted(there)[:3])}, …), and would be destroyed at the end",
            next_step="--keep proves what it can on it and leaves it as it is; or choose another stage",
        )
    steps = steps_of(context)
    for step in steps:
        record.step(step.name).usd = step.usd
    worst_usd = record.spent_usd + sum(step.usd for step in record.steps if not step.done)
    _show_plan(context, record, worst_usd=worst_usd)
    too_expensive = None
    if worst_usd > max_usd:
        too_expensive = LimitReachedError(
            f"it may cost {usd(worst_usd)}, and --max-usd allows {usd(max_usd)}: nothing was begun",
            next_step=f"--max-usd {worst_usd + 1:.0f}, or a smaller instance type in the stage's row of "
            "infra/settings.py",
        )
    if not due:  # otherwise there is something to take away, whatever the rest may cost
        if too_expensive:
            raise UsageError(str(too_expensive.args[0]), next_step=too_expensive.next_step)
        _confirm(context, yes=yes, worst_usd=worst_usd)
    try:
        ending = _run(context, state, steps, too_expensive)
    finally:
        _report(record, folder)
    _raise(ending, record)


def steps_of(context: Context) -> list[Step]:
    """Return all steps, in their order."""
    preflight, deploy, destroy = deployment.steps(context)
    cpu_job, accelerator_job, fabric_check, isolation = runs.steps(context)
    jobs = [cpu_job, accelerator_job, fabric_check, reclaim_step(context), isolation]
    prices = Step(name=PLAN, run=lambda _ids: [_prices(context)])
    return [prices, preflight, deploy, *jobs, watched_step(context), destroy]


def _prices(context: Context) -> Evidence:
    rows = {row.name: context.prices_of(row) for row in (context.row, context.cpu_row)}
    quotes = {f"{name} On-Demand": prices.on_demand for name, prices in rows.items()}
    quotes |= {f"{name} Spot": prices.spot for name, prices in rows.items()}
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    asked = not context.aws.emulated and all(quote.date == today for quote in quotes.values())
    text = "; ".join(f"{what} {quote.usd_per_hour:.4f} USD/h ({quote.date})" for what, quote in quotes.items())
    if not asked:
        text += ": recorded, since AWS did not report all of them"
    return Evidence(claim="prices", outcome=PROVEN if asked else NOT_PROVEN, text=text)


def _show_plan(context: Context, record: AcceptanceRecord, *, worst_usd: float) -> None:
    table = tables.columns("STEP", "PROVES", "AT MOST", "")
    for step in record.steps:
        claims = "\n".join(claim.text for claim in claims_of(step.name))
        table.add_row(step.name, claims, f"{step.usd:.2f}" if step.usd else "", step.outcome if step.done else "")
    tables.show(table, on=tables.stderr())
    spent = f", {usd(record.spent_usd)} of them spent before" if record.spent_usd else ""
    context.say(
        f"account {record.account}, {record.region}; at most {usd(worst_usd)}{spent}; limit {usd(record.max_usd)}"
    )
    if context.aws.emulated:
        context.say("this is the emulator: nothing costs anything, and what it can't show is not called proven")


def _confirm(context: Context, *, yes: bool, worst_usd: float) -> None:
    """Ask once, before anything is made. Raises UsageError if nobody can be asked, typer.Abort on a no."""
    if yes or context.aws.emulated:
        return
    what = "Run jobs on" if context.keep else "Deploy, use and destroy"
    unasked = UsageError(
        "nothing was begun: there is no terminal to ask on before money is spent", next_step="add --yes"
    )
    ask(f"{what} stage '{context.stage}' for at most {usd(worst_usd)}?", unasked=unasked)


def _run(context: Context, state: State, steps: list[Step], too_expensive: LimitReachedError | None) -> Ending:
    record = state.record

    def keep(at: datetime, spent_usd: float) -> None:
        record.metered_at, record.spent_usd = at, spent_usd
        state.save()

    def idle_usd_per_hour() -> float:
        is_there = record.step(DEPLOY).needs_undo and not context.aws.emulated
        return context.facts.usd_a_month / 730 if is_there else 0.0

    def check() -> None:
        if too_expensive:
            raise too_expensive
        meter.check()

    meter = Meter(
        limit_usd=record.max_usd,
        spent_usd=record.spent_usd,
        until=record.metered_at or record.started_at,
        instances=lambda: deployment.running(context),
        idle_usd_per_hour=idle_usd_per_hour,
        keep=keep,
    )
    meter.look()
    context.check, context.look = meter.check, meter.look_if_due
    try:
        return run_steps(steps, state, say=context.say, check=check)
    finally:
        meter.look()


def _report(record: AcceptanceRecord, folder: Path) -> None:
    """Write the report as a page and as JSON, and print where they are."""
    from jobs.report.acceptance import acceptance_page

    seen = [
        {
            "claim": claim.name,
            "text": claim.text,
            "step": claim.step,
            "outcome": outcome,
            "evidence": evidence.text if evidence else "",
            "ids": evidence.ids if evidence else {},
        }
        for claim, outcome, evidence in claim_outcomes(record)
    ]
    content = {**record.model_dump(mode="json"), "claims": seen}
    page, data = folder / "report.html", folder / "report.json"
    write(page, acceptance_page(record, now=datetime.now(timezone.utc)))
    write(data, json.dumps(content, indent=2) + "\n")
    print_text(f"{page}\n{data}")


def _raise(ending: Ending, record: AcceptanceRecord) -> None:
    """Raise the error whose exit code tells how the run ended, if it did not end well."""
    left = "; ".join(f"{step.name}: {step.undo_error}" for step in record.steps if step.needs_undo)
    remains = f"; not taken away: {left}" if left else ""
    again = "the same command continues with what is not done"
    if ending == "interrupted":
        raise StoppedError(f"interrupted{remains or '; what was made is taken away'}", next_step=again)
    failed = "; ".join(f"{step.name}: {step.error.partition(chr(10))[0]}" for step in record.steps if step.error)
    if ending != "done":
        raise TrainyardError(f"{failed or 'not all was taken away'}{remains}", next_step=again)


def _interrupt(_signal_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
