"""What every step is given: the connection, the stage's facts, programs to start, and waits that end at the limit."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.aws.connection import Aws
from jobs.cli.embedded import started
from jobs.contract.errors import TrainyardError
from jobs.contract.instance_types import InstanceType, instance_type
from jobs.contract.prices import Prices

ROOT = Path(__file__).parents[3]
"""Where cdk.json lies."""

POLL_SECONDS = 10.0
POLL_SECONDS_EMBEDDED = 0.5


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the settings say of the stage, before it is deployed."""

    usd_a_month: float
    """What it costs while nothing runs."""
    row: InstanceType
    cpu_row: InstanceType
    builds_machine_image: bool
    several_nodes_on_demand: bool
    """Whether it has a queue for nodes that start together; else two nodes start on Spot, each for itself."""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Facts":
        """Read what `python -m infra.idle_costs -o json` says of one stage."""
        return cls(
            usd_a_month=said["usd_a_month"],
            row=instance_type(said["instance_type"]),
            cpu_row=instance_type(said["cpu_instance_type"]),
            builds_machine_image=said["builds_machine_image"],
            several_nodes_on_demand=said["several_nodes_on_demand"],
        )


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A program that has ended."""

    code: int
    stdout: str
    log: Path
    """What it said beside that."""

    def expect(self, what: str) -> "Finished":
        """Raise TrainyardError with the program's last words where it failed."""
        if self.code:
            words = self.log.read_text(errors="replace").splitlines() or self.stdout.splitlines()
            last = "\n".join(line for line in words[-15:] if line.strip())
            raise TrainyardError(f"{what} failed with exit code {self.code}:\n{last}", next_step=f"see {self.log}")
        return self


@dataclass(kw_only=True)
class Context:
    """One acceptance run's surroundings."""

    aws: Aws
    stage: str
    keep: bool
    folder: Path
    """Where its logs and reports go."""
    say: Callable[[str], None]
    check: Callable[[], None] = lambda: None
    """Raises LimitReachedError where no more may be spent."""
    facts: Facts | None = None
    prices: dict[str, Prices] = field(default_factory=dict)
    """By instance type: today's, or the recorded ones."""

    @property
    def known(self) -> Facts:
        assert self.facts is not None  # noqa: S101 - set before the first step is made
        return self.facts

    def usd_per_hour(self, row: InstanceType, *, spot: bool = True) -> float:
        prices = self.prices[row.name]
        return (prices.spot if spot else prices.on_demand).usd_per_hour

    @property
    def poll_seconds(self) -> float:
        return POLL_SECONDS_EMBEDDED if self.aws.embedded else POLL_SECONDS

    def wait(self, seconds: float | None = None) -> None:
        """Wait, by default for as long as AWS likes to be asked again. Raises LimitReachedError."""
        self.check()
        time.sleep(self.poll_seconds if seconds is None else seconds)

    def program(self, command: Sequence[str], *, name: str, limited: bool = True) -> Finished:
        """Run a program to its end, in the repository's folder.

        `limited`: it ends at the limit, as what takes things away may not.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        log, output = self.folder / f"{name}.log", self.folder / f"{name}.out"
        with (
            log.open("wb") as errors,
            output.open("wb") as out,
            started(command, stdout=out, stderr=errors.fileno(), environment=self._environment(), cwd=ROOT) as process,
        ):
            while process.poll() is None:
                if limited:
                    self.check()
                time.sleep(0.2)
        return Finished(code=process.returncode, stdout=output.read_text(errors="replace"), log=log)

    def infra(self, module: str, *arguments: str) -> Finished:
        """Run one of `infra`'s own programs, which this command may not import."""
        return self.program([sys.executable, "-P", "-W", "ignore", "-m", module, *arguments], name=module)

    def cdk(self, *arguments: str, name: str, limited: bool = True) -> Finished:
        """Run the CDK CLI that `make install` brought."""
        command = ["cdk", *arguments, "--no-notices", "--no-version-reporting"]
        return self.program(command, name=name, limited=limited)

    def _environment(self) -> dict[str, str]:
        target = {"AWS_PROFILE": self.aws.profile, "AWS_REGION": self.aws.region, "AWS_DEFAULT_REGION": self.aws.region}
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        loopback = {"NO_PROXY": "localhost,127.0.0.1", "no_proxy": "localhost,127.0.0.1"} if self.aws.embedded else {}
        return {
            **os.environ,
            **{name: value for name, value in target.items() if value},
            **loopback,
            "PATH": path,
            "CDK_DISABLE_CLI_TELEMETRY": "true",
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "1",
        }
