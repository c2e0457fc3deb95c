"""Completions by the shell that need more than the command's own words: it offers them after Tab."""

from collections.abc import Iterator

import typer


def complete_run(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Run ids of the stage, the newest first; none where AWS does not answer: Tab is no place for an error."""
    from jobs.aws.connection import Aws
    from jobs.core.run import LATEST
    from jobs.runs.batch import read_stage
    from jobs.runs.storage import stored_runs

    options = ctx.parent.params if ctx.parent else {}
    try:
        aws = Aws(options.get("profile"), options.get("region"))
        runs = stored_runs(aws, read_stage(aws, options["stage"]), prefix=incomplete)
    except Exception:  # noqa: BLE001 - see above
        return
    if LATEST.startswith(incomplete):
        yield LATEST, "the newest run"
    for run in reversed(runs):
        yield run.run_id, run.team
