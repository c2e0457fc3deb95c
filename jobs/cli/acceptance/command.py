"""`trainyard acceptance`: plan, price and confirm, run the steps, undo them, and report what was proven."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.demo import STATE_FOLDER
from jobs.cli.options import Yes

if TYPE_CHECKING:
    from datetime import datetime

    from jobs.cli.acceptance.context import Context
    from jobs.cli.acceptance.runner import Ending, LimitReachedError, State, Step
    from jobs.core.acceptance import AcceptanceRecord, Evidence

FOLDER = STATE_FOLDER / "acceptance"


def acceptance(
    ctx: typer.Context,
    *,
    max_usd: Annotated[
        float,
        typer.Option(min=0, help="Limit in USD for the whole run. At the limit, the run stops and removes everything."),
    ] = 40.0,
    keep: Annotated[
        bool, typer.Option(help="Keep the stage at the end. Required if the stage is already deployed.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Prove that a stage works on its AWS account, step by step.

    Deploys the stage, runs jobs, reclaims an instance, destroys the stage, and writes a report. First prints the
    maximum cost and asks for confirmation. After an interruption, the same command continues.
    """
    import signal
    from datetime import datetime, timezone

    from jobs.cli import tables
    from jobs.cli.acceptance import deployment
    from jobs.cli.acceptance.context import Context, Facts, infra
    from jobs.cli.acceptance.runner import LimitReachedError, State
    from jobs.cli.emulator import INTERRUPTS
    from jobs.core.acceptance import DEPLOY, AcceptanceRecord
    from jobs.core.errors import ConfigurationError, UsageError
    from jobs.core.words import usd

    aws, stage = ctx.obj.aws(), ctx.obj.stage
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
        signal.signal(interrupt, signal.default_int_handler)
    due = any(step.needs_undo for step in record.steps)
    if record.complete and not due:
        console.print(f"this run is already complete; to run it again, remove {state.path}")
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
    if not keep and "ours" not in record.step(DEPLOY).ids and (existing := deployment.stacks(context)):
        raise ConfigurationError(
            f"stage '{stage}' is already deployed ({', '.join(sorted(existing)[:3])}, …) and would be destroyed at the "
            "end",
            next_step="use --keep to prove what can be proven on it and leave it unchanged, or use another stage",
        )
    steps = steps_of(context)
    for step in steps:
        record.step(step.name).usd = step.usd
    worst_usd = record.spent_usd + sum(step.usd for step in record.steps if not step.done)
    _show_plan(context, record, worst_usd=worst_usd)
    too_expensive = None
    if worst_usd > max_usd:
        too_expensive = LimitReachedError(
            f"this may cost {usd(worst_usd)}, but --max-usd is {usd(max_usd)}: nothing was started",
            next_step=f"--max-usd {worst_usd + 1:.0f}, or a smaller instance type in the stage's row of "
            "infra/settings.py",
        )
    if not due:  # otherwise resources have to be removed, whatever the rest costs
        if too_expensive:
            raise UsageError(str(too_expensive.args[0]), next_step=too_expensive.next_step)
        _confirm(context, yes=yes, worst_usd=worst_usd)
    try:
        ending = _run(context, state, steps, too_expensive)
    finally:
        _report(record, folder)
    _raise(ending, record)


def steps_of(context: "Context") -> "list[Step]":
    """Return all steps in order."""
    from jobs.cli.acceptance import deployment, runs
    from jobs.cli.acceptance.reclaim import reclaim_step
    from jobs.cli.acceptance.runner import Step
    from jobs.cli.acceptance.update import update_step
    from jobs.cli.acceptance.watched import watched_step
    from jobs.core.acceptance import PLAN

    preflight, deploy, destroy = deployment.steps(context)
    cpu_job, accelerator_job, fabric_check, isolation = runs.steps(context)
    jobs = [cpu_job, accelerator_job, fabric_check, reclaim_step(context), isolation]
    prices = Step(name=PLAN, run=lambda _ids: [_prices(context)])
    return [prices, preflight, deploy, *jobs, update_step(context), watched_step(context), destroy]


def _prices(context: "Context") -> "Evidence":
    from datetime import datetime, timezone

    from jobs.core.acceptance import NOT_PROVEN, PROVEN, Evidence

    rows = {row.name: context.prices_of(row) for row in (context.row, context.cpu_row)}
    quotes = {f"{name} On-Demand": prices.on_demand for name, prices in rows.items()}
    quotes |= {f"{name} Spot": prices.spot for name, prices in rows.items()}
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    asked = not context.aws.emulated and all(quote.date == today for quote in quotes.values())
    text = "; ".join(f"{what} {quote.usd_per_hour:.4f} USD/h ({quote.date})" for what, quote in quotes.items())
    if not asked:
        text += ": recorded prices, because AWS did not report all of them"
    return Evidence(claim="prices", outcome=PROVEN if asked else NOT_PROVEN, text=text)


def _show_plan(context: "Context", record: "AcceptanceRecord", *, worst_usd: float) -> None:
    from jobs.cli import tables
    from jobs.core.acceptance import claims_of
    from jobs.core.words import usd

    table = tables.columns("STEP", "PROVES", "AT MOST", "")
    for step in record.steps:
        claims = "\n".join(claim.text for claim in claims_of(step.name))
        table.add_row(step.name, claims, f"{step.usd:.2f}" if step.usd else "", step.outcome if step.done else "")
    tables.show(table, on=tables.stderr())
    spent = f", including {usd(record.spent_usd)} already spent" if record.spent_usd else ""
    context.say(
        f"account {record.account}, {record.region}; at most {usd(worst_usd)}{spent}; limit {usd(record.max_usd)}"
    )
    if context.aws.emulated:
        context.say("this is the emulator: nothing costs money, and claims that need AWS are not proven")


def _confirm(context: "Context", *, yes: bool, worst_usd: float) -> None:
    """Ask before anything is created. Raises UsageError without a terminal, typer.Abort if the answer is no."""
    from jobs.cli.terminal import ask
    from jobs.core.errors import UsageError
    from jobs.core.words import usd

    if yes or context.aws.emulated:
        return
    what = "Run jobs on" if context.keep else "Deploy, use and destroy"
    unasked = UsageError("nothing was started: confirming the costs needs a terminal", next_step="add --yes")
    ask(f"{what} stage '{context.stage}' for at most {usd(worst_usd)}?", unasked=unasked)


def _run(
    context: "Context", state: "State", steps: "list[Step]", too_expensive: "LimitReachedError | None"
) -> "Ending":
    """Run the steps while counting what they cost."""
    from jobs.cli.acceptance import deployment
    from jobs.cli.acceptance.runner import Meter, run_steps
    from jobs.core.acceptance import DEPLOY

    record = state.record

    def keep(at: "datetime", spent_usd: float) -> None:
        record.metered_at, record.spent_usd = at, spent_usd
        state.save()

    def idle_usd_per_hour() -> float:
        is_deployed = record.step(DEPLOY).needs_undo and not context.aws.emulated
        return context.facts.usd_a_month / 730 if is_deployed else 0.0

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


def _report(record: "AcceptanceRecord", folder: Path) -> None:
    """Write the report as a page and as JSON, and print their paths."""
    import json
    from datetime import datetime, timezone

    from jobs.cli.terminal import print_text, write_page
    from jobs.core.acceptance import claim_outcomes
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
    write_page(page, acceptance_page(record, now=datetime.now(timezone.utc)))
    write_page(data, json.dumps(content, indent=2) + "\n")
    print_text(f"{page}\n{data}")


def _raise(ending: "Ending", record: "AcceptanceRecord") -> None:
    """Raise the error for an ending other than success."""
    from jobs.core.errors import StoppedError, TrainyardError

    left = "; ".join(f"{step.name}: {step.undo_error}" for step in record.steps if step.needs_undo)
    remains = f"; not removed: {left}" if left else ""
    again = "the same command continues with the remaining steps"
    if ending == "interrupted":
        raise StoppedError(f"interrupted{remains or '; everything it created was removed'}", next_step=again)
    failed = "; ".join(f"{step.name}: {step.error.partition(chr(10))[0]}" for step in record.steps if step.error)
    if ending != "done":
        raise TrainyardError(f"{failed or 'not everything was removed'}{remains}", next_step=again)
