"""`trainyard` without a command: what to do next, as things stand in this folder and this shell."""

import os
from collections.abc import Iterable
from pathlib import Path

from jobs.cli import emulator
from jobs.cli.plain import print_text
from jobs.core.errors import TrainyardError

_AWS_SETTINGS = ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""Any of these says that the shell is meant to talk to an AWS."""


def show(stage_name: str, *, profile: str | None, region: str | None, state_file: Path, runs_folder: Path) -> None:
    """Print some lines on the state of things, each next step as the command to type."""
    print_text("trainyard trains Hugging Face models on Gaudi in AWS, and on this machine.\n")
    try:
        server = emulator.running(state_file)
    except TrainyardError as error:
        print_text(str(error))
        return
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if server is not None and endpoint != server.endpoint:
        print_text("The emulator runs, and this shell does not talk to it yet.")
        commands([('eval "$(trainyard local env)"', "have every AWS tool of this shell talk to it")])
    elif server is not None or profile or any(name in os.environ for name in _AWS_SETTINGS):
        _of_the_newest_run(stage_name, profile, region, runs_folder)
    else:
        print_text("Nothing is set up in this shell.")
        commands(
            [
                ("trainyard demo", "see all of it once, on this machine: two minutes"),
                ("trainyard local up", "start an emulator for jobs of your own"),
                ("export AWS_PROFILE=…", "or talk to an AWS account that a stage is deployed to"),
            ]
        )
    print_text("\ntrainyard --help lists every command.")


def _of_the_newest_run(stage_name: str, profile: str | None, region: str | None, runs_folder: Path) -> None:
    from jobs.aws.connection import Aws
    from jobs.aws.errors import explain
    from jobs.cli.options import parse_since
    from jobs.runs import batch

    aws = Aws(profile, region)
    try:
        jobs = batch.list_jobs(aws, batch.read_stage(aws, stage_name), since=parse_since("7d"))
    except Exception as error:
        told = error if isinstance(error, TrainyardError) else explain(error)
        if told is None:
            raise
        print_text(f"AWS cannot be asked for runs: {told.args[0]}")
        commands([(told.next_step, "")] if told.next_step else [])
        return
    if not jobs:
        print_text(f"Stage '{stage_name}' has had no run in the last seven days.")
        commands([("trainyard submit SPEC", "ready ones lie in jobs/specs/; --dry-run only checks one")])
        return
    newest = jobs[0]
    print_text(f"The newest run of stage '{stage_name}' is {newest.run_id}: {newest.state}.")
    if not newest.ended:
        steps = [("logs {} --follow", "watch it"), ("status {}", "how far it is"), ("why {}", "what it waits for")]
    elif newest.state == "SUCCEEDED":
        steps = [("receipt {}", "what it took and brought"), ("report {}", "the same as a page, with its curves")]
        if not (runs_folder / newest.run_id).exists():
            steps.append(("fetch {}", f"its model and curves, into {runs_folder}/"))
    else:
        steps = [
            ("status {}", "how it ended"),
            ("logs {}", "what it said"),
            ("resume {}", "start it again, from its newest checkpoint if it has one"),
        ]
    steps.append(("list", "all runs"))
    commands((f"trainyard {command.format(newest.run_id)}", what) for command, what in steps)


def commands(steps: Iterable[tuple[str, str]]) -> None:
    """Print commands to type, each with what it does."""
    steps = list(steps)
    width = max((len(command) for command, _ in steps), default=0)
    for command, what in steps:
        print_text(f"  {command:{width}}  {what}".rstrip())
