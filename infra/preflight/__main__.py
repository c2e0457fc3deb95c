"""Check whether a stage can work in the account: python -m infra.preflight [--stage dev] [-o json].

Exit code 0: no problems. 3: problems were found, or the account cannot be reached.
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

from infra.preflight import billing, capacity, network, prerequisites
from infra.preflight.account import Account, Finding, run_check
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
    (network.ENDPOINTS, network.endpoint_services),
    (prerequisites.BOOTSTRAP, prerequisites.bootstrap),
    (prerequisites.ROLES, prerequisites.service_linked_roles),
    (prerequisites.EBS, prerequisites.ebs_key),
    (prerequisites.IMAGE, prerequisites.machine_image),
    (prerequisites.BOUNDARY, prerequisites.permissions_boundary),
    (prerequisites.OIDC, prerequisites.oidc_provider),
    (prerequisites.SUBJECT, prerequisites.oidc_subject),
    (billing.TAGS, billing.cost_allocation_tags),
)
"""Name of each check, and the function that runs it."""

_STYLES = {"ok": "green", "problem": "bold red", "unknown": "yellow"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m infra.preflight", description="Check whether a stage can work in this account. Changes nothing."
    )
    parser.add_argument("--stage", default=DEFAULT_STAGE, help="a row of infra/settings.py (default: %(default)s)")
    parser.add_argument("--profile", help="AWS profile (default: AWS_PROFILE)")
    parser.add_argument("--region", help="region, if the stage has none (default: AWS_REGION, or the profile's)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    try:
        (stage,) = selected_stages(options.stage)
        account = Account.of(stage, profile=options.profile, region=options.region)
        sys.stderr.write(f"Checking stage '{stage.name}' in account {account.id}, region {account.region}\n")
        findings = [
            finding for name, check in _CHECKS for finding in run_check(account, name, partial(check, account, stage))
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
    # Do not wrap in a pipe, so that commands can be copied.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def _conclude(findings: Sequence[Finding]) -> int:
    count = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _STYLES}
    sys.stderr.write(f"{count['problem']} problems, {count['unknown']} unknown, {count['ok']} ok\n")
    return ConfigurationError.exit_code if count["problem"] else 0


if __name__ == "__main__":
    run_program(main)
