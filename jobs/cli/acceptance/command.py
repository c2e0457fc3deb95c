"""`trainyard acceptance`: plan and price, ask once, run the steps, take all away, and write what was seen."""

import json
import signal
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.acceptance import deployment, isolation, reclaim, runs, watched
from jobs.cli.acceptance.context import Context, Facts
from jobs.cli.acceptance.runner import Ending, LimitReachedError, Step, run_steps
from jobs.cli.acceptance.spend import Meter
from jobs.cli.acceptance.state import State
from jobs.cli.demo import STATE_FOLDER
from jobs.cli.embedded import INTERRUPTS
from jobs.cli.plain import print_text
from jobs.cli.report import write
from jobs.client.prices import current_prices
from jobs.contract.acceptance import (
    DEPLOY,
    NOT_PROVEN,
    PLAN,
    PROVEN,
    AcceptanceRecord,
    Evidence,
    claims_of,
    claims_seen,
)
from jobs.contract.errors import ConfigurationError, StoppedError, TrainyardError, UsageError
from jobs.contract.words import usd

FOLDER = STATE_FOLDER / "acceptance"


def acceptance(aws: Aws, stage: str, *, max_usd: float, keep: bool, yes: bool, output: str) -> None:
    """Run `trainyard acceptance`.

    Raises UsageError where the worst case is beyond the limit, ConfigurationError where the stage is somebody's, and
    after its end the error whose exit code tells how that was.
    """
    name = f"{stage}-{aws.account}-{aws.region_name}"
    state = State.open(
        FOLDER / f"{name}.json",
        stage=stage,
        account=aws.account,
        region=aws.region_name,
        embedded=aws.embedded,
        max_usd=max_usd,
        now=datetime.now(timezone.utc),
    )
    console = tables.stderr()
    context = Context(
        aws=aws,
        stage=stage,
        keep=keep,
        folder=FOLDER / name,
        say=lambda text: console.print(text, markup=False, highlight=False),
    )
    state.change(lambda record: setattr(record, "keep", keep))
    for interrupt in INTERRUPTS:
        signal.signal(interrupt, _interrupt)
    due = any(step.undo_due for step in state.record.steps)
    if state.record.complete and not due:
        context.say(f"it was run before, to its end; to run it anew, remove {state.path}")
        _report(state.record, context.folder, output=output)
        return
    if not keep and not deployment.is_ours(state.record.step(DEPLOY).ids) and (there := deployment.stacks(context)):
        raise ConfigurationError(
            f"stage '{stage}' is there already ({', '.join(sorted(there)[:3])}, …), and would be destroyed at the end",
            next_step="--keep proves what it can on it and leaves it as it is; or take a stage of its own",
        )
    _ask_what_it_costs(context)
    steps = steps_of(context)
    for step in steps:
        state.record.step(step.name).usd = step.usd
    missing = [step for step in steps if not state.record.step(step.name).done]
    worst_usd = state.record.spent_usd + sum(step.usd for step in missing)
    _show_plan(state.record, steps, context, worst_usd=worst_usd)
    too_dear = worst_usd > max_usd
    if not due:
        if too_dear:
            raise _too_dear(worst_usd, max_usd)
        _confirm(context, yes=yes, worst_usd=worst_usd)
    try:
        ending = _run(context, state, steps, too_dear=too_dear, worst_usd=worst_usd)
    finally:
        _report(state.record, context.folder, output=output)
    _raise(ending, state.record)


def steps_of(context: Context) -> list[Step]:
    """Return all steps, in their order."""
    return [
        Step(name=PLAN, run=lambda _ids: [_prices(context)]),
        deployment.preflight_step(context),
        deployment.deploy_step(context),
        runs.ami_step(context),
        runs.cpu_step(context),
        runs.accelerator_step(context),
        runs.fabric_step(context),
        reclaim.reclaim_step(context),
        isolation.isolation_step(context),
        watched.watched_step(context),
        deployment.destroy_step(context),
    ]


def _ask_what_it_costs(context: Context) -> None:
    asked = context.infra("infra.idle_costs", "--stage", context.stage, "-o", "json")
    if asked.code == UsageError.exit_code:
        raise UsageError(asked.log.read_text(errors="replace").strip(), next_step="name a stage of infra/settings.py")
    [said] = json.loads(asked.expect("python -m infra.idle_costs").stdout)
    context.facts = Facts.of(said)
    for row in (context.known.row, context.known.cpu_row):
        context.prices[row.name] = current_prices(context.aws, row)


def _prices(context: Context) -> Evidence:
    quotes = [
        (f"{row.name} {market}", quote)
        for row in (context.known.row, context.known.cpu_row)
        for market, quote in (
            ("On-Demand", context.prices[row.name].on_demand),
            ("Spot", context.prices[row.name].spot),
        )
    ]
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    asked = not context.aws.embedded and all(quote.date == today for _, quote in quotes)
    said = "; ".join(f"{what} {quote.usd_per_hour:.4f} USD/h ({quote.date})" for what, quote in quotes)
    text = said if asked else f"{said}: recorded, since AWS did not say all of them"
    return Evidence(claim="prices", outcome=PROVEN if asked else NOT_PROVEN, text=text)


def _show_plan(record: AcceptanceRecord, steps: Sequence[Step], context: Context, *, worst_usd: float) -> None:
    table = tables.columns("STEP", "PROVES", "AT MOST", "")
    for step in steps:
        claims = "\n".join(claim.text for claim in claims_of(step.name))
        done = record.step(step.name)
        table.add_row(step.name, claims, f"{step.usd:.2f}" if step.usd else "", done.outcome if done.done else "")
    tables.show(table, on=tables.stderr())
    spent = f", {usd(record.spent_usd)} of them spent before" if record.spent_usd else ""
    context.say(
        f"account {record.account}, {record.region}; at most {usd(worst_usd)}{spent}; limit {usd(record.max_usd)}"
    )
    if context.aws.embedded:
        context.say("this is the embedded AWS: nothing costs anything, and what it can't show is not called proven")


def _too_dear(worst_usd: float, max_usd: float) -> UsageError:
    return UsageError(
        f"it may cost {usd(worst_usd)}, and --max-usd allows {usd(max_usd)}: nothing was begun",
        next_step=f"--max-usd {worst_usd + 1:.0f}, or a smaller instance type in the stage's row of infra/settings.py",
    )


def _confirm(context: Context, *, yes: bool, worst_usd: float) -> None:
    """Ask once, before anything is made. Raises UsageError where nobody can be asked, typer.Abort on a no."""
    import sys

    import typer

    if yes or context.aws.embedded:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "nothing was begun: there is no terminal to ask on before money is spent", next_step="add --yes"
        )
    what = "run jobs on" if context.keep else "deploy, use and destroy"
    typer.confirm(f"{what.capitalize()} stage '{context.stage}' for at most {usd(worst_usd)}?", abort=True, err=True)


def _run(context: Context, state: State, steps: Sequence[Step], *, too_dear: bool, worst_usd: float) -> Ending:
    def keep(at: datetime, spent_usd: float) -> None:
        state.change(lambda record: record.__dict__.update(metered_at=at, spent_usd=spent_usd))

    def idle_usd_per_hour() -> float:
        stands = state.record.step(DEPLOY).undo_due and not context.aws.embedded
        return context.known.usd_a_month / 730 if stands else 0.0

    def stops() -> None:
        if too_dear:
            raise LimitReachedError(str(_too_dear(worst_usd, state.record.max_usd)))
        meter.check()

    meter = Meter(
        limit_usd=state.record.max_usd,
        spent_usd=state.record.spent_usd,
        metered_at=state.record.metered_at or state.record.started_at,
        instances=lambda: deployment.running(context),
        idle_usd_per_hour=idle_usd_per_hour,
        keep=keep,
    )
    with meter.counting():
        context.check = meter.check
        return run_steps(steps, state, say=context.say, stops=stops)


def _report(record: AcceptanceRecord, folder: Path, *, output: str) -> None:
    """Write the report as a page and as JSON, and print where, or the latter."""
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
        for claim, outcome, evidence in claims_seen(record)
    ]
    content: dict[str, Any] = {**record.model_dump(mode="json"), "claims": seen}
    page, data = folder / "report.html", folder / "report.json"
    write(page, acceptance_page(record, now=datetime.now(timezone.utc)))
    write(data, json.dumps(content, indent=2) + "\n")
    if output == "json":
        tables.print_json(content)
    else:
        print_text(f"{page}\n{data}")


def _raise(ending: Ending, record: AcceptanceRecord) -> None:
    left = [f"{step.name}: {step.undo_error}" for step in record.steps if step.undo_due]
    remains = f"; not taken away: {'; '.join(left)}" if left else ""
    again = "the same command goes on with what is not done"
    if ending == "interrupted":
        raise StoppedError(f"interrupted{remains or '; what was made is taken away'}", next_step=again)
    failed = [f"{step.name}: {step.error.partition(chr(10))[0]}" for step in record.steps if step.error]
    if ending != "done":
        raise TrainyardError(f"{'; '.join(failed) or 'not all was taken away'}{remains}", next_step=again)


def _interrupt(_signal_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
