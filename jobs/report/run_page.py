"""Render the report of one run: result, curves, attempts and costs, classes, inputs and settings, next steps."""

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from jobs.core.labels import quoted_name
from jobs.core.records import IMAGE_DIGEST, Attempt
from jobs.core.words import baseline_warning, counted, duration, figure, main_result, result_label, result_rows, usd
from jobs.data_checks.classes import by_f1
from jobs.money.budget import duration_seconds, spent
from jobs.money.phases import PHASES, Phase, lost_steps, phases
from jobs.money.receipt import cards_name, savings, stored_text
from jobs.report import charts
from jobs.report.comparison import argument_text
from jobs.report.curves import EVENTS, capitalized, curves, events, time_axis
from jobs.report.rendering import Tile, render
from jobs.runs.recorded_run import RecordedRun
from jobs.spec.kinds.evaluate import Evaluate
from jobs.spec.spec import JobSpec

_MIXED_UP = 10
_TABLE_KEYS = (
    "max_length",
    *("text_column", "text_pair_column", "label_column", "label_delimiter", "positive_class"),
    *("delimiter", "encoding", "quotes_are_text", "strip"),
)
"""Arguments of a fine-tuning that an evaluation of a similar table needs too."""
_SHOWN_GENERATIONS = 20
_LABELLED_CLASSES = 15
"""Maximum number of classes for which the cells of a confusion matrix show their counts."""


def run_page(
    run: RecordedRun, *, now: datetime, recipe: JobSpec | None = None, live: bool = False, home: str = ""
) -> str:
    """Return the report as one HTML file.

    `recipe` is the ready-made spec to compare the run's arguments with; None compares them with the kind's defaults.
    A `live` page asks its server for newer content every few seconds. `home` is the address of the page of all runs.
    """
    axis, found = time_axis(run), phases(run.attempts)
    happened = events(run)
    measured = curves(run, happened)
    kinds = {event.kind for event in happened}
    drawn: dict[str, Any] = {curve.id: curve.spec for curve in measured}
    if found:
        drawn["timeline"] = _timeline(found, axis, _timeline_text(run))
    classes = _classes(run)
    if classes["confusion"]:
        drawn["confusion"] = classes["confusion"]
    sections = [("result", "Result")]
    sections += [("curves", "Curves")] * bool(measured) + [("attempts", "Attempts and costs")] * bool(run.attempts)
    sections += [("classes", "Classes")] * bool(run.classes)
    sections += [("samples", "Samples")] * bool(run.generations)
    sections += [("inputs", "Inputs and settings"), ("next", "Next steps")]
    return render(
        "run.html",
        charts=drawn,
        now=now,
        live=live,
        home=home,
        run=run,
        head=_head(run),
        sections=sections,
        verdict=baseline_warning(run.result),
        tiles=_tiles(run),
        result=result_rows(run.result),
        curves=measured,
        curves_note=f"From {counted(len(run.metrics), 'line')} of metrics, all on the same time axis.",
        curve_height=charts.CURVE_HEIGHT,
        events=[(kind, text) for kind, text in EVENTS.items() if kind in kinds],
        happened=[(axis.text(event.at), event.text) for event in happened],
        phase_colors=charts.PHASE_COLORS,
        timeline_height=drawn["timeline"]["height"] if found else 0,
        timeline_note=_timeline_text(run),
        attempts=_attempts(run),
        **_money(run),
        **classes,
        **_samples(run),
        evaluation_command=_evaluation_command(run),
        inputs=_inputs(run),
        data="\n".join(_data(run)),
        differences=differences(run.spec, recipe) if run.spec else [],
        recipe=f"the ready-made spec {recipe.name}" if recipe else "the kind's defaults",
    )


def _timeline(found: Sequence[Phase], axis: charts.TimeAxis, description: str) -> dict[str, Any]:
    """Return a chart with a row for each attempt and a bar for each phase."""
    return charts.chart(
        "timeline",
        height=charts.ROW_HEIGHT * len({phase.attempt for phase in found}) + 55,
        description=description,
        values=[
            {
                "a": f"attempt {phase.attempt}",
                "p": phase.name,
                "b": axis.value(phase.started_at),
                "e": axis.value(phase.ended_at),
                "h": round(phase.instance_seconds / 3600, 4),
                "u": round(phase.usd, 4),
            }
            for phase in found
        ],
        x=axis.encoding("b"),
    )


def _confusion(names: Sequence[str], counts: Sequence[Sequence[int]], description: str) -> dict[str, Any]:
    """Return a confusion matrix: rows are classes, columns predictions; darker means a larger share of the class."""
    labelled = len(names) <= _LABELLED_CLASSES
    return charts.chart(
        "confusion",
        height=(28 if labelled else 14) * len(names) + 130,
        description=description,
        names=list(names),
        values=[
            {
                "l": label,
                "p": guess,
                "n": counts[row][column],
                "r": counts[row][column] / max(1, sum(counts[row])),
                **({} if labelled else {"unlabelled": 1}),
            }
            for row, label in enumerate(names)
            for column, guess in enumerate(names)
        ],
    )


def _head(run: RecordedRun) -> str:
    job = run.receipt.job if run.receipt else run.spec.job if run.spec else "a job"
    return f"{job} of team {run.team}, submitted {run.submitted_at:%Y-%m-%d %H:%M:%S} UTC"


def _tiles(run: RecordedRun) -> list[Tile]:
    found: list[Tile] = []
    result, receipt = run.result, run.receipt
    if "eval_accuracy" in result:
        baseline = result.get("eval_majority_accuracy")
        beside = f"largest class alone: {figure(baseline)}" if baseline is not None else ""
        found.append(Tile("Accuracy", figure(result["eval_accuracy"]), beside))
    if "eval_f1" in result:
        found.append(Tile("F1", figure(result["eval_f1"]), f"on {result.get('eval_samples', '?')} held-out examples"))
    if "eval_perplexity" in result:
        found.append(Tile("Perplexity", figure(result["eval_perplexity"]), "on held-out data"))
    if not found and (main := main_result(result)):
        found.append(Tile(capitalized(result_label(main[0])), figure(main[1]), ""))
    if not result and run.metrics:
        last = run.metrics[-1]
        loss = (
            [Tile("Current loss", figure(last["loss"]), f"at step {last['step']:,}")]
            if last.get("loss") is not None
            else []
        )
        found += loss or [Tile("Step", f"{last['step']:,}")]
    if receipt is None:
        return [*found, Tile("State", "no attempt has started")]
    if receipt.stopped_early and (halving := receipt.halving) is not None:
        found.append(Tile("Stopped early", f"{halving.rank} of {halving.of}", f"points at step {halving.step:,}"))
    found.append(Tile("Time", duration(receipt.duration_seconds), f"in {counted(len(run.attempts), 'attempt')}"))
    if receipt.estimated_usd is not None:
        saved = savings(receipt)
        beside = f"saved {saved}" if saved else f"On-Demand {usd(receipt.on_demand_usd)}"
        found.append(Tile("Estimated cost", usd(receipt.estimated_usd), beside))
    found += _cards(run)
    speed = result.get("train_samples_per_second")
    return [*found, Tile("Samples per second", figure(float(speed)))] if speed else found


def _cards(run: RecordedRun) -> list[Tile]:
    """Return the utilization of the newest attempt's accelerators: current while it runs, else the average."""
    last = run.attempts[-1]
    if last.cards is None:
        return []
    if run.state == "running":
        memory = f"{last.cards.memory_percent:.0f} % of their memory in use"
        return [Tile(f"{cards_name(last)} busy", f"{last.cards.utilization_percent:.0f} %", memory)]
    idle = f"of attempt {last.number}; idle for {duration(last.cards.idle_seconds)}"
    return [Tile(f"{cards_name(last)} busy on average", f"{last.cards.mean_utilization_percent:.0f} %", idle)]


def _attempts(run: RecordedRun) -> list[tuple[str, ...]]:
    return [
        (
            str(attempt.number),
            f"{attempt.started_at:%Y-%m-%d %H:%M:%S}",
            duration(duration_seconds(attempt)),
            ("" if attempt.restored_step is None else "checkpoint ")
            + f"{attempt.start_step:,}{'?' if attempt.may_repeat else ''} to {attempt.last_step:,}",
            f"{lost_steps(attempt, later):,}",
            f"{spent([attempt]).usd:.2f}",
            attempt.reason or _ended_by(attempt, later[0] if later else None),
            f"{attempt.nnodes} x {attempt.instance_type}, {attempt.capacity or 'capacity unknown'}",
        )
        for attempt, later in ((each, run.attempts[number:]) for number, each in enumerate(run.attempts, 1))
    ]


def _ended_by(attempt: Attempt, later: Attempt | None) -> str:
    if attempt.finished_at is None:
        return "still running" if later is None else "lost without a message; counted up to its last record"
    return "finished" if attempt.exit_code == 0 else f"exit code {attempt.exit_code}"


def _timeline_text(run: RecordedRun) -> str:
    found = phases(run.attempts)
    total = {name: sum(phase.instance_seconds for phase in found if phase.name == name) for name in PHASES}
    parts = [f"{name} {duration(seconds)}" for name, seconds in total.items() if seconds]
    axis = time_axis(run)
    before = duration(max(0.0, (axis.begin - run.submitted_at).total_seconds()))
    gaps = (
        (later.started_at - each.started_at).total_seconds() - duration_seconds(each)
        for each, later in pairwise(run.attempts)
    )
    between = f" and {duration(sum(max(0.0, gap) for gap in gaps))} between attempts" if len(run.attempts) > 1 else ""
    return (
        f"Instance time over {counted(len(run.attempts), 'attempt')}: {', '.join(parts) or 'none yet'}. The run waited "
        f"{before} before the first attempt{between}, at no cost."
    )


def _money(run: RecordedRun) -> dict[str, Any]:
    found, receipt = phases(run.attempts), run.receipt
    all_usd = sum(phase.usd for phase in found)
    rows = []
    for name in PHASES:
        of_phase = [phase for phase in found if phase.name == name]
        cost = sum(phase.usd for phase in of_phase)
        share = f"{100 * cost / all_usd:.1f} %" if all_usd else ""
        hours = sum(phase.instance_seconds for phase in of_phase) / 3600
        rows.append((name, f"{hours:.3f}", f"{cost:.3f}", share))
    hours = sum(phase.instance_seconds for phase in found) / 3600
    prices: list[tuple[str, str]] = []
    if receipt:
        prices = [
            ("all On-Demand", usd(receipt.on_demand_usd)),
            ("saved", savings(receipt)),
            ("budget", f"{receipt.budget} used" if receipt.budget else ""),
            ("stored", stored_text(receipt.stored)),
            ("price", f"as of {receipt.price_date}, from {receipt.price_source}; {receipt.estimate_note}"),
        ]
    return {"money": rows, "money_total": ("all", f"{hours:.3f}", f"{all_usd:.3f}", ""), "prices": prices}


def _classes(run: RecordedRun) -> dict[str, Any]:
    report = run.classes
    found: dict[str, Any] = {"classes": [], "mistakes": [], "mixed_up": [], "confusion": None, "confusion_size": None}
    if report is None:
        return found
    names = [quoted_name(score.name) for score in report.classes]
    rows = [
        (quoted_name(score.name), str(score.examples), *score.figures()) for score in sorted(report.classes, key=by_f1)
    ]
    mistakes = [
        (
            f"{each.text} | {each.pair}" if each.pair else each.text,
            quoted_name(each.label),
            quoted_name(each.predicted),
            f"{each.confidence:.3f}",
        )
        for each in report.mistakes
    ]
    found |= {"classes": rows, "mistakes": mistakes}
    counts = report.confusion
    if counts is None:
        return found
    pairs = [
        (count, names[row], names[column])
        for row, line in enumerate(counts)
        for column, count in enumerate(line)
        if count and row != column
    ]
    found["mixed_up"] = [(label, guess, str(count)) for count, label, guess in sorted(pairs, reverse=True)[:_MIXED_UP]]
    text = f"Confusion matrix of {counted(len(names), 'class', 'classes')}. A table below lists the most confused ones."
    found["confusion"] = _confusion(names, counts, text)
    found["confusion_size"] = (64 * len(names) + 180, found["confusion"]["height"])
    return found


def _samples(run: RecordedRun) -> dict[str, Any]:
    shown = run.generations[:_SHOWN_GENERATIONS]
    names = list(dict.fromkeys(name for line in shown for name in line))
    return {
        "generation_names": names,
        "generations": [[line.get(name, "") for name in names] for line in shown],
    }


def _inputs(run: RecordedRun) -> list[tuple[str, str]]:
    last, code = run.attempts[-1] if run.attempts else None, run.code
    rows = [("files", run.location)]
    if code:
        commit = f"commit {code.commit}{' with changes' if code.dirty else ''}" if code.commit else "not committed"
        rows.append(
            ("code", f"{counted(code.files, 'file')} from {code.folder}, {commit}, fingerprint {code.fingerprint}")
        )
    if run.spec:
        rows.append(("kind", f"{run.spec.job}: {run.spec.kind.summary}"))
        rows += [(name, location) for name, location, _ in run.spec.entrypoint_arguments().sources()]
    if last:
        rows += [
            ("ran on", run.ran_on),
            ("Batch job", last.job_id or ""),
        ]
        of_image = ("image", IMAGE_DIGEST)
        rows += [(name, last.ran_with.get(name, "")) for name in of_image]
        versions = [f"{name} {version}" for name, version in last.ran_with.items() if name not in of_image]
        rows.append(("versions", ", ".join(versions)))
    return rows


def _data(run: RecordedRun) -> Iterator[str]:
    if run.data:
        yield from run.data.lines()
    for location, digits in run.inputs.fingerprints.items() if run.inputs else ():
        yield f"read: {location} (fingerprint {digits})"


def _evaluation_command(run: RecordedRun) -> str:
    """Return the command that evaluates a classifier on another table of the training table's format."""
    given = run.spec.entrypoint_arguments().model_dump() if run.spec else {}
    # The ready spec has its own max_length, and otherwise the kind's defaults.
    defaults = {name: field.default for name, field in Evaluate.model_fields.items() if name != "max_length"}
    settings = {"arguments.model": f"run://{run.run_id}/model", "arguments.data": "data://TEAM/TABLE.csv"}
    settings |= {
        f"arguments.{name}": given[name] for name in _TABLE_KEYS if name in given and given[name] != defaults.get(name)
    }
    options = [f"--set {shlex.quote(f'{name}={argument_text(value)}')}" for name, value in settings.items()]
    return " \\\n  ".join(["trainyard submit jobs/specs/evaluate-reviews.yaml", *options])


def differences(spec: JobSpec, recipe: JobSpec | None) -> list[tuple[str, str, str]]:
    """Return the arguments that differ from the recipe's, or from the kind's defaults, with both values."""
    here = spec.entrypoint_arguments().model_dump(mode="json")
    if recipe is not None and recipe.job == spec.job:
        there = recipe.entrypoint_arguments().model_dump(mode="json")
    else:
        fields = type(spec.entrypoint_arguments()).model_fields
        there = {
            name: None if field.is_required() else field.get_default(call_default_factory=True)
            for name, field in fields.items()
        }
    return [
        (name, argument_text(value), argument_text(there.get(name)))
        for name, value in here.items()
        if value != there.get(name)
    ]
