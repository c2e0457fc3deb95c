"""Record which AMI each pool boots in infra/amis.json, so that a deployment only changes an AMI if the record does.

python -m infra.amis list --stage dev          print the recorded and the newest AMI of each pool; changes nothing
python -m infra.amis update --stage dev        record the newest ones
python -m infra.amis rollback --stage dev      record the ones before them again

Neither deploys. `cdk diff` shows the change, and git keeps its history.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from rich.console import Console
from rich.table import Table

from infra.preflight.account import Account
from infra.stages import Stage
from infra.stages.amis import ami_sources, is_ami, read_record, write_record
from infra.stages.checks import selected_stages
from jobs.core.errors import ConfigurationError, UsageError, did_you_mean
from jobs.core.output import run_program
from jobs.core.stage import DEFAULT_STAGE, deploy_command

_KEPT = 10
"""AMIs that the record keeps of a source, the current one included."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Raises TrainyardError."""
    parser = argparse.ArgumentParser(prog="python -m infra.amis", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("list", "update", "rollback"))
    parser.add_argument("--stage", default=DEFAULT_STAGE, help="a row of infra/settings.py (default: %(default)s)")
    parser.add_argument("--pool", help="only this pool, as `list` prints it (default: all pools of the stage)")
    parser.add_argument("--profile", help="AWS profile (default: AWS_PROFILE)")
    parser.add_argument("--region", help="region, if the stage has none (default: AWS_REGION, or the profile's)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    (stage,) = selected_stages(options.stage)
    sources = ami_sources(stage)
    if options.pool not in (None, *sources):
        raise UsageError(f"stage '{stage.name}' has no pool '{options.pool}'{did_you_mean(options.pool, sources)}")
    account = Account.of(stage, profile=options.profile, region=options.region)
    try:
        newest = {source: None if is_ami(source) else account.parameter(source) for source in sources.values()}
        chosen = {source for pool, source in sources.items() if options.pool in (None, pool)}
        changed = _change(options.command, account, stage, {source: newest[source] for source in chosen})
    except (BotoCoreError, ClientError) as error:
        raise ConfigurationError(f"AWS did not answer: {error}", next_step="allow the call, and try again") from None
    record = read_record().get(stage.name, {})
    rows = [
        {"pool": pool, "source": source, "newest": newest[source], "recorded": record.get(source, [])}
        for pool, source in sources.items()
        if source in chosen
    ]
    if options.output == "json":
        print(json.dumps(rows, indent=2))
    else:
        _print(rows)
    for pool in (pool for pool, source in sources.items() if source in changed):
        option = " --cpu" if pool == stage.cpu_pool_id else ""
        sys.stderr.write(f"next: trainyard --stage {stage.name} canary {changed[sources[pool]][0]}{option}\n")
    if changed:
        deploy = deploy_command(stage.name, "compute", emulated=False)
        sys.stderr.write(f"then: commit infra/amis.json, and {deploy}\n")
    return 0


def _change(command: str, account: Account, stage: Stage, newest: Mapping[str, str | None]) -> Mapping[str, list[str]]:
    """Change the record of some sources, and return the new lists of those that changed.

    Raises UsageError if there is no earlier AMI, ConfigurationError if the account cannot see an AMI.
    """
    record = read_record()
    old = record.get(stage.name, {})
    changed: dict[str, list[str]] = {}
    if command == "update":
        found = {source: ami for source, ami in newest.items() if ami and [ami] != old.get(source, [])[:1]}
        changed = {source: [ami, *old.get(source, [])][:_KEPT] for source, ami in found.items()}
        if not changed:
            sys.stderr.write("nothing to update: the record has the newest AMIs\n")
    elif command == "rollback":
        changed = {source: old[source][1:] for source in newest if old.get(source, [])[1:]}
        if not changed:
            raise UsageError(
                f"infra/amis.json has no earlier AMI of stage '{stage.name}'",
                next_step="git log -p infra/amis.json, or set machine_image or cpu_machine_image in infra/settings.py",
            )
    gone = [ami for ami, *_ in changed.values() if account.image(ami) is None]
    if gone:
        raise ConfigurationError(
            f"{', '.join(gone)} cannot be seen by account {account.id} in {account.region}: nothing was recorded",
            next_step=f"python -m infra.amis list --stage {stage.name}, or pass another --region",
        )
    if changed:
        write_record({**record, stage.name: {**old, **changed}})
    return changed


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("POOL", "AMI", "BEFORE", "NEWEST"):
        table.add_column(column, overflow="fold")
    for row in rows:
        current, newest = next(iter(row["recorded"]), "not recorded"), row["newest"] or "not built yet"
        if is_ami(row["source"]):
            current, newest = row["source"], "fixed by the settings"
        table.add_row(row["pool"], current, next(iter(row["recorded"][1:]), ""), newest)
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


if __name__ == "__main__":
    run_program(main)
