"""`trainyard submit SPEC`: check, plan, confirm, submit exactly once, follow."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import Detach, DryRun, Mode, NoCheck, Output, Overrides, Wait, Yes, chosen_mode, user_path

if TYPE_CHECKING:
    from jobs.aws.connection import Aws
    from jobs.core.errors import TrainyardError
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
    from jobs.cli.spec_file import read_specs
    from jobs.cli.submission import confirm, finish, placement_errors, plan_runs, send_all, show_dry_run, show_plans
    from jobs.runs.batch import read_stage

    def errors_in_stage(invalid: "JobSpec") -> "list[TrainyardError]":
        try:
            return placement_errors(aws, invalid, read_stage(aws, stage_name))
        except Exception:  # noqa: BLE001 - the errors of the file are reported, even if AWS cannot be reached
            return []

    specs = read_specs(path, overrides, also=errors_in_stage)
    stage = read_stage(aws, stage_name)
    plans = plan_runs(aws, stage, specs, check_contents=check_contents)
    if mode is Mode.DRY_RUN:
        show_dry_run(plans, emulated=stage.emulated, output=output)
        return []
    show_plans(plans, emulated=stage.emulated)
    if not yes and not stage.emulated:
        confirm(plans)
    job_ids = send_all(aws, plans, print_ids=output == "table")
    finish(aws, stage, plans, job_ids, mode=mode, output=output)
    return list(job_ids)
