"""`trainyard demo`, which is `make demo`: the real stacks on an emulator, a real model fine-tuned there.

Everything goes the way it goes in AWS: the CDK CLI deploys, the spec is submitted through the Batch API, and what the
run wrote is fetched from S3. Only the AWS is one that this process starts, and stops again.
"""

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.text import Text

from jobs.aws.connection import Aws
from jobs.cli import demo_data, emulator, tables
from jobs.cli.next_steps import commands
from jobs.cli.options import RUNS_FOLDER
from jobs.cli.plain import print_text
from jobs.cli.report import REPORT, write_fetched
from jobs.cli.spec_file import READY_SPECS, read_spec
from jobs.cli.submit import How, submit
from jobs.core.errors import Detached
from jobs.core.stage import DEFAULT_STAGE
from jobs.core.words import duration
from jobs.runs import storage
from jobs.runs.batch import read_stage

SPEC = READY_SPECS / "finetune-reviews.yaml"
STATE_FOLDER = Path(".trainyard")


def demo(*, executor: str) -> None:
    """Run `trainyard demo`. Raises Detached (exit code 130) on Ctrl-C, after all that it started has ended.

    `executor`: `docker` has the job run in a container of the cpu image, which is built with the other two first.
    """
    started_at = time.monotonic()
    in_container = executor == "docker"
    steps = Steps(8 if in_container else 6)
    for ending in emulator.INTERRUPTS:
        signal.signal(ending, _interrupt)
    try:
        with _emulator(steps, executor) as server:
            _deploy(steps, server)
            if in_container:
                _build(steps, server)
            folder = _run(steps)
            steps.say(f"stopping the emulator; all in all {duration(time.monotonic() - started_at)}")
        _say_next(folder)
    except (KeyboardInterrupt, Detached):
        raise Detached("interrupted; what the demo had started is stopped", next_step="make demo") from None


def _deploy(steps: "Steps", server: emulator.Server) -> None:
    with steps.step(f"deploy stage '{DEFAULT_STAGE}' to it with the CDK CLI"):
        emulator.deploy(server, DEFAULT_STAGE)
    os.environ.update(server.environment)
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)


def _build(steps: "Steps", server: emulator.Server) -> None:
    from jobs.cli.images.push import push_images
    from jobs.images.stage_images import StageImages

    aws = Aws()
    with steps.step("trainyard images push cpu"):
        there = StageImages.read(aws, DEFAULT_STAGE, None)
        push_images(aws, there, ["cpu"])
    with steps.step("deploy again, which has jobs run in that image"):
        emulator.deploy(server, DEFAULT_STAGE)


def _run(steps: "Steps") -> Path:
    """Train, and return the folder of what the run wrote."""
    aws = Aws()
    with steps.step("put real data and pretrained weights into the data bucket"):
        for done in demo_data.put(aws, read_spec(SPEC), read_stage(aws, DEFAULT_STAGE), STATE_FOLDER / "cache"):
            steps.say(done)

    with steps.step(f"trainyard submit {os.path.relpath(SPEC)}"):
        [run_id] = submit(aws, DEFAULT_STAGE, SPEC, [], how=How.FOLLOW, yes=True, output="table")

    target = RUNS_FOLDER / run_id
    with steps.step(f"trainyard fetch {run_id}"):
        run = storage.find_run(aws, read_stage(aws, DEFAULT_STAGE), run_id)
        fetched = list(storage.fetch(aws, run.location, target))
        steps.say(f"{len(fetched)} files, {sum(path.stat().st_size for path in fetched) / 2**20:.0f} MiB")

    with steps.step(f"trainyard report {target}"):
        write_fetched(target, target / REPORT)
    return target


def _say_next(folder: Path) -> None:
    """Name the next commands, as the user's shell can run them. make has put the program on its own PATH only."""
    here = Path(sys.argv[0])
    found = shutil.which("trainyard")
    is_found = found is not None and Path(found).absolute() == here.absolute() and "MAKELEVEL" not in os.environ
    program = "trainyard" if is_found or not here.is_file() else shlex.quote(os.path.relpath(here))
    print_text("\nThe page above shows in any browser. Next:")
    commands(
        [
            (f"{program} receipt {folder}", "what the run took and brought, read from its folder"),
            (f"{program} local up", "start an emulator that stays, for jobs of your own"),
            (f'eval "$({program} local env)"', f"have this shell talk to it; then {program} submit SPEC"),
        ]
    )


@contextmanager
def _emulator(steps: "Steps", executor: str) -> Iterator[emulator.Server]:
    """An emulator of the demo's own, which ends with this process however that ends."""
    state_file = STATE_FOLDER / f"demo-{os.getpid()}.json"
    server = None
    try:
        with steps.step("start an emulator"):
            log_file = STATE_FOLDER / "demo.log"
            server = emulator.start(state_file, log_file, executor=executor, exit_with_pid=os.getpid())
            steps.say(f"it answers at {server.endpoint}; infra/emulator/README.md tells what it does not prove")
        yield server
    finally:
        # From here on a second Ctrl-C would only leave behind what the first one is about to stop.
        for ending in emulator.INTERRUPTS:
            signal.signal(ending, signal.SIG_IGN)
        if server:
            emulator.stop(server)


def _interrupt(_signal_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


class Steps:
    """Prints numbered steps on stderr, each with the time it took."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._console = tables.stderr()
        self._number = 0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        self._number += 1
        self._console.print(Text(f"[{self._number}/{self._count}] {title}", style="bold"))
        started_at = time.monotonic()
        yield
        self._console.print(Text(f"      done in {time.monotonic() - started_at:.1f} s", style="dim"))

    def say(self, sentence: str) -> None:
        self._console.print(Text(f"      {sentence}"))
