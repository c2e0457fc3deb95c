"""`trainyard fetch RUN`: download the files of a run, or its code."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.options import RUNS_FOLDER, Output, Run, user_path


def fetch(
    ctx: typer.Context,
    *,
    run: Run,
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", parser=user_path, help="Download into FOLDER/RUN.")
    ] = RUNS_FOLDER,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Also download the checkpoints.")] = False,
    code: Annotated[
        bool, typer.Option("--code", help="Download only the script's code, into FOLDER/RUN/code.")
    ] = False,
    output: Output = "table",
) -> None:
    """Download a run's files: model, metrics, TensorBoard events, receipt.

    Of a script without output, the newest checkpoint.
    """
    from jobs.cli import tables
    from jobs.cli.sweep_state import refuse_sweep
    from jobs.cli.terminal import print_text
    from jobs.core.run import CHECKPOINTS
    from jobs.core.words import counted, printable_name, size
    from jobs.runs import batch, storage
    from jobs.runs.code_archive import fetch_code

    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    if not code:  # a sweep has code, but no files
        refuse_sweep(aws, stage, found, what="files", command="fetch")
    fetched = []
    left: dict[str, int] = {}
    target = to / found.run_id
    files = storage.fetch(aws, found.location, target, checkpoints=checkpoints, left_out=left.__setitem__)
    for path in fetch_code(aws, found.location, target / "code") if code else files:
        fetched.append(str(path))
        if output == "table":
            print_text(printable_name(str(path)))
    if not checkpoints and any(path.startswith(f"{target / CHECKPOINTS}{os.sep}") for path in fetched):
        tables.stderr().print("the run has no output, so its newest checkpoint was downloaded")
    if output == "json":
        tables.print_json(fetched)
    if left:
        folders = {name.split("/")[1] for name in left if name.count("/") > 1}
        what = f"{counted(len(folders), 'checkpoint')}, {size(sum(left.values()))}"
        again = shlex.join(
            ["trainyard", "fetch", found.run_id, "--checkpoints", *([f"--to={to}"] * (to != RUNS_FOLDER))]
        )
        tables.stderr().print(f"kept on S3 only: {what}; to download: {again}", soft_wrap=True)
