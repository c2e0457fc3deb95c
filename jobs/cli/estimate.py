"""`trainyard estimate SPEC`: time and money of a spec on each instance type, before anything is spent."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.spec_file import read_specs
from jobs.client.batch import read_stage
from jobs.client.estimate import Estimate, Measured, Work, estimate
from jobs.client.past_runs import PastRun, measured, past_runs
from jobs.client.prices import current_prices
from jobs.client.table_summary import summarize
from jobs.client.throughputs import model_name, throughputs
from jobs.contract.arguments import Columns
from jobs.contract.errors import NotFoundError, UsageError
from jobs.contract.instance_types import INSTANCE_TYPES, InstanceType
from jobs.contract.plan import arguments_in_s3
from jobs.contract.spec import JobSpec
from jobs.contract.stage import DeployedStage
from jobs.contract.words import counted, duration, usd
from jobs.kinds.finetune_classification import GLUE_TRAINING_EXAMPLES, FinetuneClassification
from jobs.kinds.pretrain_mlm import PretrainMlm


def show_estimate(
    aws: Aws, stage_name: str, path: Path, overrides: Sequence[str], *, examples: int | None, output: str
) -> None:
    """Run `trainyard estimate`."""
    specs = [spec for spec in read_specs(path, overrides) if _trains(spec)]
    if not specs:
        raise UsageError(
            f"{path}: none of it trains by samples, so there is nothing to reckon with",
            next_step="trainyard costs --by job tells what earlier runs of its kind took",
        )
    stage = read_stage(aws, stage_name)
    answers = []
    for spec in specs:
        work = _work(aws, stage, spec, examples)
        found, unknown = _estimates(aws, stage, spec, work)
        if not found:
            raise NotFoundError(
                f"nothing is known of '{model_name(spec.entrypoint_arguments())}' in '{spec.job}': no run of it has "
                "succeeded in this stage, and no figure is published in jobs/client/throughputs.toml",
                next_step="submit a short run of it, whose records are then reckoned from",
            )
        answers.append({"name": spec.name, "samples": work.samples, "estimates": list(map(dataclasses.asdict, found))})
        if output == "table":
            _show(spec, found, unknown, several=len(specs) > 1, on=tables.stdout())
    if output == "json":
        tables.print_json(answers if len(specs) > 1 else answers[0])


def _trains(spec: JobSpec) -> bool:
    return isinstance(spec.entrypoint_arguments(), (FinetuneClassification, PretrainMlm))


def _work(aws: Aws, stage: DeployedStage, spec: JobSpec, examples: int | None) -> Work:
    arguments = spec.entrypoint_arguments()
    if isinstance(arguments, PretrainMlm):
        samples = arguments.max_steps * arguments.global_batch_size
        because = f"{arguments.max_steps:,} steps x {arguments.global_batch_size} sequences"
        hours = arguments.mean_hours_between_reclaims
    else:
        assert isinstance(arguments, FinetuneClassification)  # noqa: S101 - `_trains` left no other
        count, source = _examples(aws, stage, spec, arguments) if examples is None else (examples, "as --examples says")
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
    there = arguments_in_s3(spec, stage)
    assert isinstance(there, FinetuneClassification)  # noqa: S101 - the same kind
    inputs = there.inputs()
    if any(location.startswith(("hf://", "run://")) for location in [*inputs.train, *inputs.evaluation]):
        raise UsageError(
            f"{spec.name}: the examples of {', '.join(inputs.train)} are not counted before the job runs",
            next_step="say how many there are: --examples 11514",
        )
    columns = Columns(texts=tuple(inputs.columns[:-1]), label=inputs.label, named_by="correct the spec")
    found = summarize(lambda: aws, inputs.train, [], columns)
    if inputs.evaluation:
        return found.training, "counted"
    kept = round(found.training * (1 - arguments.eval_fraction))
    return kept, f"counted: {found.training:,}, of which {arguments.eval_fraction:.0%} are held out"


def _estimates(aws: Aws, stage: DeployedStage, spec: JobSpec, work: Work) -> tuple[list[Estimate], list[InstanceType]]:
    """Return an estimate for each place that something is known of, the cheapest first, and the types that are left."""
    runs = past_runs(aws, stage, job=spec.job)
    rows = [row for row in INSTANCE_TYPES.values() if bool(row.accelerators) == spec.kind.accelerated]
    found, unknown = [], []
    for row in rows:
        if known := list(_known(runs, spec, row)):
            found.append(estimate(work, known, row, current_prices(aws, row)))
        else:
            unknown.append(row)
    if here := list(measured(runs, spec, None)):
        found.append(estimate(work, here, None, None))
    return sorted(found, key=lambda each: (each.usd, each.seconds)), unknown


def _known(runs: Sequence[PastRun], spec: JobSpec, row: InstanceType) -> Iterator[Measured]:
    """Yield what the organisation's own runs measured on a type; where there is none, what others have published."""
    own = list(measured(runs, spec, row.name))
    yield from own
    if own or spec.resources.nnodes > 1:
        return
    arguments = spec.entrypoint_arguments()
    ranks = spec.resources.nproc_per_node or row.processes
    for each in throughputs():
        if (each.job, each.instance_type, each.cards, each.model) != (spec.job, row.name, ranks, model_name(arguments)):
            continue
        other = arguments.longest_sequence
        length = f", at {each.length} tokens, here at most {other}" if other and other != each.length else ""
        yield Measured(
            name="published",
            samples_per_second=each.samples_per_second,
            start_seconds=each.start_seconds,
            note=f"{each.cards} cards{length}, {each.date}: {each.source}",
        )


def _show(
    spec: JobSpec, found: Sequence[Estimate], unknown: Sequence[InstanceType], *, several: bool, on: Console
) -> None:
    if several:
        on.print(spec.name)
    table = tables.columns("WHERE", "TIME", "FROM", "TO", "USD", "FROM", "TO", "ON-DEMAND")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in found:
        times = [duration(seconds) for seconds in (each.seconds, each.low_seconds, each.high_seconds)]
        paid = each.place in INSTANCE_TYPES
        money = [usd(amount).removesuffix(" USD") for amount in (each.usd, each.low_usd, each.high_usd)]
        money += [usd(each.on_demand_usd).removesuffix(" USD")]
        table.add_row(each.place, *times, *(money if paid else ["", "", "", ""]))
    tables.show(table, on=on)
    for each in found:
        on.print(f"\n{each.place}")
        for line in each.arithmetic:
            on.print(f"  {line}", soft_wrap=True)
    console = tables.stderr()
    if unknown:
        names = ", ".join(row.name for row in unknown)
        console.print(
            f"\nnothing is known of {names}: no run of this model there, and no published figure", soft_wrap=True
        )
    console.print("an estimate: no instance's start-up, no storage, no transfer; Spot prices change", soft_wrap=True)
