"""`trainyard fetch`: downloads what a run wrote, or the code that it ran."""

from pathlib import Path

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.plain import print_text
from jobs.cli.sweep import refuse_sweep
from jobs.core.words import printable_name
from jobs.runs import batch, storage
from jobs.runs.code_archive import fetch_code


def fetch(
    aws: Aws, stage_name: str, text: str, *, to: Path, checkpoints: bool, code: bool = False, output: str
) -> None:
    """Run `trainyard fetch`. With `code`, that comes alone."""
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    if not code:  # the code is the sweep's
        refuse_sweep(aws, stage, run, what="files", command="fetch")
    fetched = []
    target = to / run.run_id
    files = storage.fetch(aws, run.location, target, checkpoints=checkpoints)
    for path in fetch_code(aws, run.location, target / "code") if code else files:
        fetched.append(str(path))
        if output == "table":
            print_text(printable_name(str(path)))
    if output == "json":
        tables.print_json(fetched)
