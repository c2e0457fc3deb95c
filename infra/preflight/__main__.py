"""Asks the account whether a stage can work there: python -m infra.preflight [--stage dev] [-o json].

Exit code 0: no problem was found. 3: there are some, or no account answers.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.preflight import capacity, network, prerequisites
from infra.preflight.account import Account, Finding, ask
from infra.stages import Stage
from infra.stages.checks import selected_stages
from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.output import run_program
from jobs.core.stage import DEFAULT_STAGE

_CHECKS: tuple[tuple[str, Callable[[Account, Stage], Iterator[Finding]]], ...] = (
    (capacity.OFFER, capacity.offers),
    (capacity.QUOTA, capacity.quotas),
    (capacity.BATCH, capacity.batch_quotas),
    (capacity.RESERVATION, capacity.reservation),
    (network.VPC, network.existing_vpc),
    (prerequisites.BOOTSTRAP, prerequisites.bootstrap),
    (prerequisites.ROLES, prerequisites.service_linked_roles),
    (prerequisites.IMAGE, prerequisites.machine_image),
    (prerequisites.BOUNDARY, prerequisites.permissions_boundary),
    (prerequisites.OIDC, prerequisites.oidc_provider),
)
"""What it is called, and who asks."""

_STYLES = {"ok": "green", "problem": "bold red", "unknown": "yellow"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m infra.preflight", description="Can this stage work in this account? Changes nothing."
    )
    parser.add_argument("--stage", default=DEFAULT_STAGE, help="a row of infra/settings.py (default: %(default)s)")
    parser.add_argument("--profile", help="AWS profile (default: AWS_PROFILE)")
    parser.add_argument("--region", help="where the stage's row names none (default: AWS_REGION, or the profile's)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    try:
        (stage,) = selected_stages(options.stage)
        account = Account.of(stage, profile=options.profile, region=options.region)
        sys.stderr.write(f"Asking account {account.id} in {account.region} about stage '{stage.name}'\n")
        findings = [
            finding for check, question in _CHECKS for finding in ask(account, check, partial(question, account, stage))
        ]
    except KeyboardInterrupt:
        return 130
    except TrainyardError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if options.output == "json":
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        _print(findings)
    return _conclude(findings)


def _print(findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("CHECK", "", "WHAT"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        what = Text(finding.text)
        if finding.next_step:
            what.append(f"\nNext: {finding.next_step}", style="bold")
        table.add_row(finding.check, Text(finding.verdict, style=_STYLES[finding.verdict]), what)
    # In a pipe there is no width to fit into, and a command that is cut in two cannot be copied.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def _conclude(findings: Sequence[Finding]) -> int:
    count = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _STYLES}
    sys.stderr.write(f"{count['problem']} problems, {count['unknown']} unknown, {count['ok']} ok\n")
    return ConfigurationError.exit_code if count["problem"] else 0


if __name__ == "__main__":
    run_program(main)
