"""Send hostile input to every entry point: specs, command lines, settings, requests to the emulator.

python -m tests.benchmarks.fuzz                                all kinds of input, in about half an hour
python -m tests.benchmarks.fuzz specs --seed 7 --count 500     one kind, with other and fewer draws

    specs       drawn from the JSON Schema of a spec, valid or malformed, through `submit --dry-run`; an accepted spec
                must give a request that AWS Batch accepts, and arguments that the container can read
    commands    command lines for all commands, run in this process, and one in twenty also as a separate process
    inputs      data files and model folders that `submit` checks: known bad cases, and damaged files
    settings    rows through the checks until enough have passed; rows that pass also through a synthesis
    requests    every operation of every service that stacks and commands use, from intruders and from a page in
                Chromium: an intruder must get 403, and the owner another status

Findings are tracebacks, hangs, accepted nonsense, and input that runs as a command. With findings, the exit code is 1.
The same seed gives the same input on the same machine.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.aws.connection import Aws
from jobs.core.stage import DEFAULT_STAGE
from tests.support.fuzz import commands, inputs, settings, specs, web
from tests.support.fuzz.findings import Round
from tests.support.running_emulator import Emulator, deploy_stage, environment_of, run_emulator

COUNTS = {"specs": 5_000, "commands": 1_000, "inputs": 500, "settings": 500, "requests": 0}
"""Number of inputs; for settings, of rows that pass. Requests are sent once per operation and sender."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kinds", metavar="KIND", nargs="*", help=f"{', '.join(COUNTS)}; default: all")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draws (default: 1)")
    parser.add_argument("--count", type=int, help="inputs of each kind except requests")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(COUNTS):
        parser.error(f"unknown kind: {', '.join(sorted(unknown))}")
    with TemporaryDirectory(prefix="trainyard-fuzz-") as name, deployed(Path(name)) as aws:
        rounds = [
            look(kind, aws, Path(name), count=options.count or COUNTS[kind], seed=options.seed)
            for kind in options.kinds or COUNTS
        ]
    return int(any(round_.findings for round_ in rounds))


def look(kind: str, aws: Emulator, folder: Path, *, count: int, seed: int) -> Round:
    """Run the round of a kind, print its result, and return it."""
    round_, began = Round(kind, canary=folder / "canary"), time.monotonic()
    match kind:
        case "specs":
            specs.fuzz(round_, Aws(), DEFAULT_STAGE, folder, count=count, number=seed)
        case "commands":
            commands.fuzz(round_, folder, count=count, number=seed)
        case "settings":
            settings.fuzz(round_, count=count, number=seed)
        case "inputs":
            inputs.fuzz(round_, Aws(), DEFAULT_STAGE, folder, count=count, number=seed)
        case "requests":
            web.fuzz(round_, aws)
    print(f"{time.monotonic() - began:6.0f} s  {round_}", flush=True)
    return round_


@contextmanager
def deployed(folder: Path) -> Iterator[Emulator]:
    """Yield an emulator with a stage. This process uses it, has an empty home folder, and works in `folder`."""
    with run_emulator(folder) as aws:
        deploy_stage(aws)
        for variable in [name for name in os.environ if name.startswith(("AWS_", "TRAINYARD_"))]:
            del os.environ[variable]
        os.environ.update({**environment_of(aws.endpoint), "HOME": str(folder), "CDK_VALIDATION": "false"})
        os.chdir(folder)
        specs.put_inputs(Aws(), DEFAULT_STAGE)
        yield aws
        os.chdir("/")


if __name__ == "__main__":
    sys.exit(main())
