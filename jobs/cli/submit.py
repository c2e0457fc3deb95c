"""`trainyard submit SPEC`: check, plan, confirm, submit exactly once, follow."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import Detach, DryRun, Mode, NoCheck, Output, Overrides, Wait, Yes, chosen_mode, user_path

if TYPE_CHECKING:
    from jobs.aws.connection import Aws
    from jobs.spec.spec import JobSpec


def submit(
    ctx: typer.Context,
    *,
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC",
            parser=user_path,
            help="A spec file, or - for standard input. jobs/specs/ has ready-made specs.",
        ),
    ],
    no_check: NoCheck = False,
    dry_run: DryRun = False,
    wait: Wait = False,
    detach: Detach = False,
    yes: Yes = False,
    overrides: Overrides = None,
    output: Output = "table",
) -> None:
    """Submit a spec as a job and follow it until it ends.

    A file may hold several specs, separated by ---. All are checked first, then submitted and followed in order. A run
    that reads another run's results (run://NAME/…) starts after that run. Ctrl-C stops following; the job continues.
    Prints the run id on stdout. Exit code 1 means that the job failed.
    """
    if ctx.obj.team is not None:
        raise typer.BadParameter("the spec names the team that pays; use --set team=TEAM", param_hint="--team")
    mode = chosen_mode(dry_run=dry_run, wait=wait, detach=detach)
    submit_specs(
        ctx.obj.aws(),
        ctx.obj.stage,
        spec,
        overrides or [],
        mode=mode,
        yes=yes,
        output=output,
        check_contents=not no_check,
    )


def submit_specs(
    aws: "Aws",
    stage_name: str,
    path: Path,
    overrides: Sequence[str],
    *,
    mode: Mode,
    yes: bool,
    output: str,
    check_contents: bool = True,
) -> list[str]:
    """Submit the specs of a file and return their run ids. Raises the error of the first run that failed."""
    from dataclasses import replace

    from jobs.cli import submission, tables
    from jobs.cli.estimate import estimates_by_type
    from jobs.core.errors import TrainyardError, raise_all
    from jobs.runs import planning
    from jobs.runs.batch import read_stage
    from jobs.runs.considered import considered
    from jobs.runs.spec_file import read_specs

    quick = replace(aws, quick=True)  # to complete a list of errors that are known without AWS

    def errors_in_stage(invalid: "JobSpec") -> "list[TrainyardError]":
        try:
            return planning.placement_errors(quick, invalid, read_stage(quick, stage_name))
        except Exception:  # noqa: BLE001 - the errors of the file are reported, even if AWS cannot be reached
            return []

    specs = read_specs(path, overrides, also=errors_in_stage)
    errors = planning.errors_without_aws(aws, specs)
    try:
        stage = read_stage(quick if errors else aws, stage_name)
    except Exception as error:
        if errors:
            raise_all([*errors, *([error] if isinstance(error, TrainyardError) else [])])
        raise
    plans = planning.plan_runs(aws, stage, specs, check_contents=check_contents)
    if mode is Mode.DRY_RUN:
        submission.show_dry_run(plans, emulated=stage.emulated, output=output)
        for planned in plans:
            types = considered(aws, stage, planned.spec, partial(estimates_by_type, aws, stage, planned.spec))
            on = tables.stderr() if output == "json" else tables.stdout()
            tables.show_considered(types, on=on, emulated=stage.emulated)
        return []
    submission.show_plans(plans, emulated=stage.emulated)
    if not yes and not stage.emulated:
        submission.confirm(plans)
    job_ids = submission.send_all(aws, plans, print_ids=output == "table")
    submission.finish(aws, stage, plans, job_ids, mode=mode, output=output)
    return list(job_ids)
