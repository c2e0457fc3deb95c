"""`trainyard estimate SPEC`: time and money of a spec on each instance type, before anything is spent."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.cli.options import Output, Overrides, user_path

if TYPE_CHECKING:
    from jobs.aws.connection import Aws
    from jobs.core.errors import TrainyardError
    from jobs.core.instance_types import InstanceType
    from jobs.core.stage import DeployedStage
    from jobs.money.estimate import Estimate, Measurement, Work
    from jobs.runs.run_records import PastRun
    from jobs.spec.kinds.finetune_classification import FinetuneClassification
    from jobs.spec.spec import JobSpec


def estimate(
    ctx: typer.Context,
    *,
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC", parser=user_path, help="A spec file. jobs/specs/ has ready-made specs.")
    ],
    examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of training examples, if they cannot be counted before the job runs. Default: count them.",
        ),
    ] = None,
    overrides: Overrides = None,
    output: Output = "table",
) -> None:
    """Estimate time and cost of a spec on each instance type.

    Costs nothing, and lists the cheapest instance type first. If the speed is unknown, and the stage has several types,
    shows their prices only. Uses the stage's own runs of the same model, or published
    figures if there are none, and shows the arithmetic. For a sweep, estimates the time until all points are done and
    their total cost.
    """
    import dataclasses

    from jobs.cli import tables
    from jobs.core.errors import NotFoundError, UsageError
    from jobs.core.words import counted
    from jobs.money.estimate import model_name
    from jobs.runs.batch import read_stage, room_of
    from jobs.runs.considered import considered
    from jobs.runs.spec_file import read_specs
    from jobs.spec.kinds.finetune_classification import FinetuneClassification
    from jobs.spec.kinds.pretrain_mlm import PretrainMlm
    from jobs.spec.placement import place
    from jobs.spec.sweep import SweepSize

    known_kinds = (FinetuneClassification, PretrainMlm)
    read = read_specs(spec, overrides or [])
    specs = [each for each in read if issubclass(each.kind.arguments, known_kinds)]
    aws = ctx.obj.aws()
    stage = read_stage(aws, ctx.obj.stage)
    answers: list[dict[str, Any]] = []
    if not specs:
        cannot = UsageError(
            f"{spec} cannot be estimated: only specs of finetune-classification and pretrain-mlm state "
            "the number of samples",
            next_step="trainyard costs --by job shows what earlier runs of this kind cost",
        )
        answers += [_prices_only(aws, stage, each, cannot, output) for each in read]
    for each in specs:
        points = each.point_specs() or [each]
        counts: dict[str, tuple[int, str]] = {}
        works = [_work(aws, stage, point, examples, counts) for point in points]
        workers = None
        if each.sweep is not None:
            room = room_of(aws, stage, place(each, stage))
            workers = SweepSize.of(each.sweep, len(points), room=room).workers
        found, unknown = _estimates(aws, stage, points, works, workers)
        if not found:
            models = ", ".join(dict.fromkeys(f"'{model_name(point.entrypoint_arguments())}'" for point in points))
            unknown_speed = NotFoundError(
                f"no figures for {models} in '{each.job}': no such run has succeeded in this stage, and "
                "jobs/money/throughputs.jsonl has no published figure",
                next_step="submit a short run; later estimates use its records",
            )
            answers.append(_prices_only(aws, stage, each, unknown_speed, output))
            continue
        samples = sum(work.samples for work in works)
        figures = {"points": len(points), "samples": samples, "estimates": list(map(dataclasses.asdict, found))}
        types = considered(aws, stage, each, partial(_by_type, [] if each.sweep else found))
        figures["considered"] = list(map(dataclasses.asdict, types))
        answers.append({"name": each.name, **figures})
        if output == "table":
            heading = each.name if len(specs) > 1 else ""
            if workers is not None:
                heading = f"{each.name}: {counted(len(points), 'point')}, {workers} at a time"
            _show(heading, found, unknown)
            tables.show_considered(types, on=tables.stdout(), emulated=stage.emulated)
    if output == "json":
        tables.print_json(answers if len(answers) > 1 else answers[0])


def _prices_only(
    aws: "Aws", stage: "DeployedStage", spec: "JobSpec", error: "TrainyardError", output: str
) -> dict[str, Any]:
    """Return the types considered for a spec that cannot be estimated, and show them below the reason.

    Raises that reason, `error`, if the stage has a single type, so that there is nothing to compare.
    """
    import dataclasses

    from jobs.cli import tables
    from jobs.runs.considered import considered

    types = considered(aws, stage, spec, dict)
    if not types:
        raise error
    tables.stderr().print(str(error), soft_wrap=True)
    if output == "table":
        tables.show_considered(types, on=tables.stdout(), emulated=stage.emulated)
    return {"name": spec.name, "estimates": [], "considered": list(map(dataclasses.asdict, types))}


def estimates_by_type(aws: "Aws", stage: "DeployedStage", spec: "JobSpec") -> "dict[str, Estimate]":
    """Return the estimates of a run by instance type. Empty for sweeps, and if nothing is known about its speed."""
    from jobs.core.errors import TrainyardError
    from jobs.spec.kinds.finetune_classification import FinetuneClassification
    from jobs.spec.kinds.pretrain_mlm import PretrainMlm

    if spec.sweep is not None or not issubclass(spec.kind.arguments, (FinetuneClassification, PretrainMlm)):
        return {}
    try:
        found, _ = _estimates(aws, stage, [spec], [_work(aws, stage, spec, None, {})], None)
    except TrainyardError:  # its examples cannot be counted before it runs
        return {}
    return _by_type(found)


def _by_type(found: "Sequence[Estimate]") -> "dict[str, Estimate]":
    return {each.place: each for each in found}


def _work(
    aws: "Aws", stage: "DeployedStage", spec: "JobSpec", examples: int | None, counts: dict[str, tuple[int, str]]
) -> "Work":
    """Return the work of a spec: how many samples it trains on, and why. `counts` caches the counts of tables."""
    from jobs.core.words import counted
    from jobs.money.estimate import Work
    from jobs.spec.kinds.finetune_classification import FinetuneClassification
    from jobs.spec.kinds.pretrain_mlm import PretrainMlm

    arguments = spec.entrypoint_arguments()
    if isinstance(arguments, PretrainMlm):
        samples = arguments.max_steps * arguments.global_batch_size
        samples_text = f"{arguments.max_steps:,} steps x {arguments.global_batch_size} sequences"
    else:
        assert isinstance(arguments, FinetuneClassification)  # noqa: S101 - `estimate` skips all other kinds
        count, source = examples or 0, "from --examples"
        if examples is None:
            key = repr((arguments.inputs(), arguments.eval_fraction))
            if key not in counts:
                counts[key] = _count_examples(aws, stage, spec, arguments)
            count, source = counts[key]
        samples = max(1, round(count * arguments.epochs))
        samples_text = f"{counted(count, 'example')} ({source}) x {arguments.epochs:g} epochs"
    resources = spec.resources
    return Work(
        samples=samples,
        samples_text=samples_text,
        nnodes=resources.nnodes,
        capacity=resources.capacity or ("spot" if resources.nnodes == 1 else "on-demand"),
        mean_hours_between_reclaims=arguments.mean_hours_between_reclaims,
    )


def _count_examples(
    aws: "Aws", stage: "DeployedStage", spec: "JobSpec", arguments: "FinetuneClassification"
) -> tuple[int, str]:
    """Return the number of training examples and its source. Raises UsageError if they cannot be counted here."""
    from jobs.core.errors import UsageError
    from jobs.data_checks.table_summary import summarize
    from jobs.spec.kinds.finetune_classification import GLUE_TRAINING_EXAMPLES, FinetuneClassification
    from jobs.spec.plan import with_s3_locations

    if arguments.train_data is None and arguments.glue_task in GLUE_TRAINING_EXAMPLES:
        return GLUE_TRAINING_EXAMPLES[arguments.glue_task], f"GLUE's {arguments.glue_task}"
    resolved = with_s3_locations(spec, stage)
    assert isinstance(resolved, FinetuneClassification)  # noqa: S101 - the same kind
    inputs = resolved.inputs()
    if any(location.startswith(("hf://", "run://")) for location in [*inputs.train, *inputs.evaluation]):
        raise UsageError(
            f"{spec.name}: the examples of {', '.join(inputs.train)} cannot be counted before the job runs",
            next_step="give their number: --examples 11514",
        )
    columns = resolved.columns("train_data")
    assert columns is not None  # noqa: S101 - train_data is a table
    found = summarize(lambda: aws, inputs.train, [], columns)
    if inputs.evaluation:
        return found.training, "counted"
    kept = round(found.training * (1 - arguments.eval_fraction))
    return kept, f"counted: {found.training:,}, of which {100 * arguments.eval_fraction:g} % are held out"


def _estimates(
    aws: "Aws", stage: "DeployedStage", points: "Sequence[JobSpec]", works: "Sequence[Work]", workers: int | None
) -> "tuple[list[Estimate], list[InstanceType]]":
    """Return an estimate per place with known speeds, cheapest first, and the instance types without known speeds.

    `workers`: number of workers of a sweep, None for a single run. A sweep needs known speeds for all of its points.
    """
    from jobs.core.instance_types import INSTANCE_TYPES
    from jobs.money.aws_prices import current_prices
    from jobs.money.estimate import estimate as estimate_point
    from jobs.money.estimate import model_name, sweep_estimate
    from jobs.runs.run_records import measurements, past_runs

    runs = past_runs(aws, stage, job=points[0].job)
    rows = [row for row in INSTANCE_TYPES.values() if bool(row.accelerators) == points[0].kind.accelerated]
    found, unknown = [], []
    for row in [*rows, None]:  # None: this machine
        known: dict[tuple[str, int | None], list[Measurement]] = {}
        prices = None
        of_points = []
        for point, work in zip(points, works, strict=True):
            arguments = point.entrypoint_arguments()
            case = (model_name(arguments), arguments.longest_sequence)
            if case not in known:
                known[case] = list(_known_speeds(runs, point, row) if row else measurements(runs, point, None))
            if not known[case]:
                break
            prices = prices or (current_prices(aws, row) if row else None)
            of_points.append(estimate_point(work, known[case], row, prices))
        if len(of_points) == len(points):
            found.append(of_points[0] if workers is None else sweep_estimate(of_points, workers))
        elif row is not None:
            unknown.append(row)
    return sorted(found, key=lambda each: (each.usd, each.seconds)), unknown


def _known_speeds(runs: "Sequence[PastRun]", spec: "JobSpec", row: "InstanceType") -> "Iterator[Measurement]":
    """Yield the speeds that the stage's own runs measured on an instance type, or published ones if there are none."""
    from jobs.core.words import counted
    from jobs.money.estimate import Measurement, model_name, throughputs
    from jobs.runs.run_records import measurements
    from jobs.spec.recipe import hpu_trainer

    own = list(measurements(runs, spec, row.name))
    yield from own
    if own or spec.resources.nnodes > 1:
        return
    arguments = spec.entrypoint_arguments()
    if row.accelerator == "hpu" and hpu_trainer(arguments) != "optimum-habana":
        return  # the published HPU figures were measured with optimum-habana
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


def _show(heading: str, found: "Sequence[Estimate]", unknown: "Sequence[InstanceType]") -> None:
    from jobs.cli import tables
    from jobs.core.instance_types import INSTANCE_TYPES
    from jobs.core.words import counted, duration, usd

    on, console = tables.stdout(), tables.stderr()
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
    if unknown:
        others = counted(len(unknown), "other instance type")
        console.print(f"\nno figures for {others}: no run of this model there, and none published", soft_wrap=True)
    console.print("Estimates leave out instance startup, storage and transfer. Spot prices change.", soft_wrap=True)
