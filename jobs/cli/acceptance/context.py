"""Gives all steps the connection, facts about the stage, a way to run programs, and waits that end at the limit."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jobs.aws.connection import Aws
from jobs.cli.emulator import started
from jobs.core.errors import TrainyardError
from jobs.core.instance_types import InstanceType, instance_type
from jobs.money.aws_prices import current_prices
from jobs.money.prices import Prices

ROOT = Path(__file__).parents[3]
"""Folder of cdk.json."""

POLL_SECONDS = 10.0
POLL_SECONDS_EMULATOR = 0.5


class Facts(BaseModel):
    """Facts about the stage from its settings, before it is deployed: `python -m infra.idle_costs -o json`."""

    usd_a_month: float
    """Cost while no job runs."""
    instance_type: str
    cpu_instance_type: str
    builds_machine_image: bool
    several_nodes_on_demand: bool
    """Whether the stage has a queue for nodes that start together. Otherwise two nodes start on Spot, one by one."""


@dataclass(kw_only=True)
class Context:
    """The connection, stage and limits of an acceptance run."""

    aws: Aws
    stage: str
    keep: bool
    folder: Path
    """Folder of its logs and reports."""
    facts: Facts
    say: Callable[[str], None]
    check: Callable[[], None] = lambda: None
    """Counts the cost, and raises LimitReachedError at the limit."""
    look: Callable[[], None] = lambda: None
    """Counts the cost."""
    prices: dict[str, Prices] = field(default_factory=dict)
    """Prices by instance type: today's, or the recorded ones if AWS does not answer."""
    findings: list[Any] = field(default_factory=list)
    """Findings of the preflight; empty until it has run."""

    @property
    def row(self) -> InstanceType:
        return instance_type(self.facts.instance_type)

    @property
    def cpu_row(self) -> InstanceType:
        return instance_type(self.facts.cpu_instance_type)

    def prices_of(self, row: InstanceType) -> Prices:
        if row.name not in self.prices:
            self.prices[row.name] = current_prices(self.aws, row)
        return self.prices[row.name]

    def usd_per_hour(self, row: InstanceType, *, spot: bool = True) -> float:
        prices = self.prices_of(row)
        return (prices.spot if spot else prices.on_demand).usd_per_hour

    @property
    def poll_seconds(self) -> float:
        return POLL_SECONDS_EMULATOR if self.aws.emulated else POLL_SECONDS

    def wait(self) -> None:
        """Wait between two requests to AWS. Raises LimitReachedError."""
        self.check()
        time.sleep(self.poll_seconds)

    def instances(self, **more: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the stage's EC2 instances that are not terminated. `more`: further filters, e.g. `tag_key=…`."""
        filters: list[Any] = [{"Name": "tag:trainyard:stage", "Values": [self.stage]}]
        filters += [{"Name": name.replace("_", "-"), "Values": list(values)} for name, values in more.items()]
        for page in self.aws.ec2.get_paginator("describe_instances").paginate(Filters=filters):
            for reservation in page["Reservations"]:
                yield from (each for each in reservation["Instances"] if each["State"]["Name"] != "terminated")

    def cdk(self, command: str, selected: str, *options: str, look: Callable[[], None] = lambda: None) -> None:
        """Run the CDK CLI. At the limit, only `destroy` is allowed. Raises TrainyardError if it fails.

        `look` is called while the CLI runs.
        """
        self.say(f"  cdk {command} '{selected}' -c stage={self.stage}")
        output = ("--output", str(self.folder.absolute() / "cdk.out"))
        words = ["cdk", command, selected, "-c", f"stage={self.stage}", *options, *output, "--no-notices"]

        def check() -> None:
            (self.look if command == "destroy" else self.check)()
            look()

        program(words, self.folder / command, aws=self.aws, check=check)

    def program(self, command: Sequence[str], *, log: str) -> None:
        """Run a program, and stop it at the limit. Raises TrainyardError if it fails."""
        program(command, self.folder / log, aws=self.aws, check=self.check)


def program(
    command: Sequence[str],
    name: Path,
    *,
    aws: Aws,
    check: Callable[[], None] = lambda: None,
    codes: Sequence[int] = (0,),
) -> str:
    """Run a program in the repository's folder and return its stdout. `check` is called while it runs.

    Raises TrainyardError with the last lines of its stderr if the exit code is not one of `codes`.
    """
    name.parent.mkdir(parents=True, exist_ok=True)
    log, output = name.with_suffix(".log"), name.with_suffix(".out")
    with (
        log.open("wb") as errors,
        output.open("wb") as out,
        started(command, stdout=out, stderr=errors.fileno(), environment=_environment(aws), cwd=ROOT) as process,
    ):
        while process.poll() is None:
            check()
            time.sleep(0.2)
    printed = output.read_text(errors="replace")
    if process.returncode not in codes or (process.returncode and not printed):
        lines = log.read_text(errors="replace").splitlines() or printed.splitlines()
        last = "\n".join(line for line in lines[-15:] if line.strip())
        what = " ".join(["python", *command[command.index("-m") :]] if "-m" in command else command)
        raise TrainyardError(f"{what} failed with exit code {process.returncode}:\n{last}", next_step=f"see {log}")
    return printed


def infra(module: str, *arguments: str, folder: Path, aws: Aws, codes: Sequence[int] = (0,)) -> list[Any]:
    """Run a module of `infra`, which this command may not import, and return the JSON that it prints."""
    command = [sys.executable, "-P", "-W", "ignore", "-m", f"infra.{module}", *arguments, "-o", "json"]
    found: list[Any] = json.loads(program(command, folder / module, aws=aws, codes=codes))
    return found


def _environment(aws: Aws) -> dict[str, str]:
    target = {"AWS_PROFILE": aws.profile, "AWS_REGION": aws.region, "AWS_DEFAULT_REGION": aws.region}
    loopback = dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1") if aws.emulated else {}
    return {
        **os.environ,
        **{name: value for name, value in target.items() if value},
        **loopback,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
        "CDK_DISABLE_CLI_TELEMETRY": "true",
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "1",
    }
