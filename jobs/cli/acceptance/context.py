"""What every step is given: the connection, the stage's facts, programs to start, and waits that end at the limit."""

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
"""The folder of cdk.json."""

POLL_SECONDS = 10.0
POLL_SECONDS_EMULATOR = 0.5


class Facts(BaseModel):
    """What the settings say of the stage before it is deployed: `python -m infra.idle_costs -o json`."""

    usd_a_month: float
    """What it costs while nothing runs."""
    instance_type: str
    cpu_instance_type: str
    builds_machine_image: bool
    several_nodes_on_demand: bool
    """Whether it has a queue for nodes that start together. Otherwise two nodes start on Spot, each by itself."""


@dataclass(kw_only=True)
class Context:
    """One acceptance run's surroundings."""

    aws: Aws
    stage: str
    keep: bool
    folder: Path
    """For its logs and reports."""
    facts: Facts
    say: Callable[[str], None]
    check: Callable[[], None] = lambda: None
    """Counts, and raises LimitReachedError if no more may be spent."""
    look: Callable[[], None] = lambda: None
    """Counts what is spent."""
    prices: dict[str, Prices] = field(default_factory=dict)
    """By instance type: today's, or the recorded ones."""
    findings: list[Any] = field(default_factory=list)
    """What the preflight found, once it was asked."""

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
        """Wait as long as AWS should be left alone. Raises LimitReachedError."""
        self.check()
        time.sleep(self.poll_seconds)

    def instances(self, **more: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the stage's EC2 instances, those that have ended left out. `more`: further filters, `tag_key=…`."""
        filters: list[Any] = [{"Name": "tag:trainyard:stage", "Values": [self.stage]}]
        filters += [{"Name": name.replace("_", "-"), "Values": list(values)} for name, values in more.items()]
        for page in self.aws.ec2.get_paginator("describe_instances").paginate(Filters=filters):
            for reservation in page["Reservations"]:
                yield from (each for each in reservation["Instances"] if each["State"]["Name"] != "terminated")

    def cdk(self, command: str, selected: str, *options: str) -> None:
        """Run the CDK CLI, but at the limit only to destroy. Raises TrainyardError if it fails."""
        self.say(f"  cdk {command} '{selected}' -c stage={self.stage}")
        output = ("--output", str(self.folder.absolute() / "cdk.out"))
        words = ["cdk", command, selected, "-c", f"stage={self.stage}", *options, *output, "--no-notices"]
        program(words, self.folder / command, aws=self.aws, check=self.look if command == "destroy" else self.check)

    def program(self, command: Sequence[str], *, log: str) -> None:
        """Run a program to its end, which the limit ends. Raises TrainyardError if it fails."""
        program(command, self.folder / log, aws=self.aws, check=self.check)


def program(
    command: Sequence[str],
    name: Path,
    *,
    aws: Aws,
    check: Callable[[], None] = lambda: None,
    codes: Sequence[int] = (0,),
) -> str:
    """Run a program to its end in the repository's folder, and return what it printed. `check` is called meanwhile.

    Raises TrainyardError with the program's last words for any other exit code than `codes`.
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
    """Return what a program of `infra`, which this command may not import, prints as JSON."""
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
