"""`trainyard estimate SPEC`: time and money of a spec on each instance type, before anything is spent.

Of a sweep that is the time until all points are done, and the money of all of them.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.spec_file import read_specs
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.instance_types import INSTANCE_TYPES, InstanceType
from jobs.core.stage import DeployedStage
from jobs.core.words import counted, duration, usd
from jobs.data_checks.table_summary import summarize
from jobs.money.aws_prices import current_prices
from jobs.money.estimate import Estimate, Measurement, Work, estimate, model_name, sweep_estimate, throughputs
from jobs.runs.batch import read_stage, room_of
from jobs.runs.past_runs import PastRun, measured, past_runs
from jobs.spec.arguments import Columns
from jobs.spec.kinds.finetune_classification import GLUE_TRAINING_EXAMPLES, FinetuneClassification
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from jobs.spec.placement import place
from jobs.spec.plan import with_s3_locations
from jobs.spec.recipe import hpu_trainer
from jobs.spec.spec import JobSpec
from jobs.spec.sweep import SweepSize


def show_estimate(
    aws: Aws, stage_name: str, path: Path, overrides: Sequence[str], *, examples: int | None, output: str
) -> None:
    """Run `trainyard estimate`."""
    specs = [spec for spec in read_specs(path, overrides) if _trains(spec)]
    if not specs:
        raise UsageError(
            f"{path}: its spec does not say how many samples it takes, as those of finetune-classification and "
            "pretrain-mlm do, so it cannot be estimated",
            next_step="trainyard costs --by job tells what earlier runs of its kind took",
        )
    stage = read_stage(aws, stage_name)
    answers = []
    for spec in specs:
        points = spec.point_specs() or [spec]
        counts: dict[str, tuple[int, str]] = {}
        works = [_work(aws, stage, point, examples, counts) for point in points]
        workers = None
        if spec.sweep is not None:
            room = room_of(aws, stage, place(spec, stage))
            workers = SweepSize.of(spec.sweep, len(points), room=room).workers
        found, unknown = _estimates(aws, stage, points, works, workers)
        if not found:
            models = ", ".join(dict.fromkeys(f"'{model_name(point.entrypoint_arguments())}'" for point in points))
            raise NotFoundError(
                f"nothing is known of {models} in '{spec.job}': no run of it has succeeded in this stage, and no "
                "figure is published in jobs/money/throughputs.jsonl",
                next_step="submit a short run of it, whose records are then reckoned from",
            )
        samples = sum(work.samples for work in works)
        figures = {"points": len(points), "samples": samples, "estimates": list(map(dataclasses.asdict, found))}
        answers.append({"name": spec.name, **figures})
        if output == "table":
            heading = spec.name if len(specs) > 1 else ""
            if workers is not None:
                heading = f"{spec.name}: {counted(len(points), 'point')}, {workers} at once"
            _show(heading, found, unknown, on=tables.stdout())
    if output == "json":
        tables.print_json(answers if len(specs) > 1 else answers[0])


def _trains(spec: JobSpec) -> bool:
    return issubclass(spec.kind.arguments, (FinetuneClassification, PretrainMlm))


def _work(
    aws: Aws, stage: DeployedStage, spec: JobSpec, examples: int | None, counts: dict[str, tuple[int, str]]
) -> Work:
    """Return what is to be done; `counts` keeps the examples of tables that were counted, for further points."""
    arguments = spec.entrypoint_arguments()
    if isinstance(arguments, PretrainMlm):
        samples = arguments.max_steps * arguments.global_batch_size
        because = f"{arguments.max_steps:,} steps x {arguments.global_batch_size} sequences"
        hours = arguments.mean_hours_between_reclaims
    else:
        assert isinstance(arguments, FinetuneClassification)  # noqa: S101 - `_trains` left no other
        count, source = examples or 0, "as --examples says"
        if examples is None:
            tables_of_it = repr((arguments.inputs(), arguments.eval_fraction))
            if tables_of_it not in counts:
                counts[tables_of_it] = _examples(aws, stage, spec, arguments)
            count, source = counts[tables_of_it]
        samples = max(1, round(count * arguments.epochs))
        because = f"{counted(count, 'example')} ({source}) x {arguments.epochs:g} epochs"
        hours = arguments.mean_hours_between_reclaims
    resources = spec.resources
    return Work(
        samples=samples,
        because=because,
        nnodes=resources.nnodes,
        capacity=resources.capacity or ("spot" if resources.nnodes == 1 else "on-demand"),
        mean_hours_between_reclaims=hours,
    )


def _examples(aws: Aws, stage: DeployedStage, spec: JobSpec, arguments: FinetuneClassification) -> tuple[int, str]:
    """Return how many training examples there are, and who says so. Raises UsageError where nobody can be asked."""
    if arguments.train_data is None and arguments.glue_task in GLUE_TRAINING_EXAMPLES:
        return GLUE_TRAINING_EXAMPLES[arguments.glue_task], f"GLUE's {arguments.glue_task}"
    there = with_s3_locations(spec, stage)
    assert isinstance(there, FinetuneClassification)  # noqa: S101 - the same kind
    inputs = there.inputs()
    if any(location.startswith(("hf://", "run://")) for location in [*inputs.train, *inputs.evaluation]):
        raise UsageError(
            f"{spec.name}: the examples of {', '.join(inputs.train)} are not counted before the job runs",
            next_step="say how many there are: --examples 11514",
        )
    columns = Columns(texts=tuple(inputs.columns[:-1]), label=inputs.label, missing_next="correct the spec")
    found = summarize(lambda: aws, inputs.train, [], columns)
    if inputs.evaluation:
        return found.training, "counted"
    kept = round(found.training * (1 - arguments.eval_fraction))
    return kept, f"counted: {found.training:,}, of which {100 * arguments.eval_fraction:g} % are held out"


def _estimates(
    aws: Aws, stage: DeployedStage, points: Sequence[JobSpec], works: Sequence[Work], workers: int | None
) -> tuple[list[Estimate], list[InstanceType]]:
    """Return an estimate for each place that something is known of, the cheapest first, and the types that are left.

    Of a sweep, which has `workers`, all its points have to be known there.
    """
    runs = past_runs(aws, stage, job=points[0].job)
    rows = [row for row in INSTANCE_TYPES.values() if bool(row.accelerators) == points[0].kind.accelerated]
    found, unknown = [], []
    for row in [*rows, None]:
        known: dict[tuple[str, int | None], list[Measurement]] = {}
        prices = None
        of_points = []
        for point, work in zip(points, works, strict=True):
            arguments = point.entrypoint_arguments()
            case = (model_name(arguments), arguments.longest_sequence)
            if case not in known:
                known[case] = list(_known(runs, point, row) if row else measured(runs, point, None))
            if not known[case]:
                break
            prices = prices or (current_prices(aws, row) if row else None)
            of_points.append(estimate(work, known[case], row, prices))
        if len(of_points) == len(points):
            found.append(of_points[0] if workers is None else sweep_estimate(of_points, workers))
        elif row is not None:
            unknown.append(row)
    return sorted(found, key=lambda each: (each.usd, each.seconds)), unknown


def _known(runs: Sequence[PastRun], spec: JobSpec, row: InstanceType) -> Iterator[Measurement]:
    """Yield what the organisation's own runs measured on a type; where there is none, what others have published."""
    own = list(measured(runs, spec, row.name))
    yield from own
    if own or spec.resources.nnodes > 1:
        return
    arguments = spec.entrypoint_arguments()
    if row.accelerator == "hpu" and hpu_trainer(arguments) != "optimum-habana":
        return  # what is published of HPUs was measured with optimum-habana
    ranks = spec.resources.nproc_per_node or row.processes
    for each in throughputs():
        if (each.job, each.instance_type, each.cards, each.model) != (spec.job, row.name, ranks, model_name(arguments)):
            continue
        other = arguments.longest_sequence
        length = f", at {each.length} tokens, here at most {other}" if other and other != each.length else ""
        yield Measurement(
            name="published",
            samples_per_second=each.samples_per_second,
            start_seconds=each.start_seconds,
            note=f"{counted(each.cards, 'card')}{length}, {each.date}: {each.source}",
        )


def _show(heading: str, found: Sequence[Estimate], unknown: Sequence[InstanceType], *, on: Console) -> None:
    if heading:
        on.print(heading)
    priced = any(each.place in INSTANCE_TYPES for each in found)
    table = tables.columns("WHERE", "TIME", "FROM", "TO", *(("USD", "FROM", "TO", "ON-DEMAND") if priced else ()))
    for column in table.columns[1:]:
        column.justify = "right"
    for each in found:
        times = [duration(seconds) for seconds in (each.seconds, each.low_seconds, each.high_seconds)]
        money = [usd(amount).removesuffix(" USD") for amount in (each.usd, each.low_usd, each.high_usd)]
        money += [usd(each.on_demand_usd).removesuffix(" USD")]
        table.add_row(each.place, *times, *(money if each.place in INSTANCE_TYPES else []))
    tables.show(table, on=on)
    for each in found:
        on.print(f"\n{each.place}")
        tables.show(tables.Pairs(("  -", line) for line in each.arithmetic), on=on)
    console = tables.stderr()
    if unknown:
        names = ", ".join(row.name for row in unknown)
        console.print(
            f"\nnothing is known of {names}: no run of this model there, and no published figure", soft_wrap=True
        )
    console.print("an estimate: no instance's start-up, no storage, no transfer; Spot prices change", soft_wrap=True)
