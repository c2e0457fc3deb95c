"""`trainyard demo` (`make demo`): deploys the real stacks to an emulator and fine-tunes a real model there.

Every step is the same as on AWS: the CDK CLI deploys, the Batch API takes the job, and S3 has its results. Only AWS is
replaced by an emulator, which this process starts and stops.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jobs.cli.options import RUNS_FOLDER, Mode
from jobs.core.stage import DEFAULT_STAGE

if TYPE_CHECKING:
    from jobs.cli.emulator import Server

STATE_FOLDER = Path(".trainyard")


def demo(
    executor: Annotated[
        Literal["process", "docker"],
        typer.Option(help="Run the job as processes on this machine, or in a container of the cpu image."),
    ] = "process",
) -> None:
    """Fine-tune a real model on an emulator and show the result.

    Deploys the real stacks to the emulator first; `make demo` runs this command. With --executor docker, also builds
    the cpu image if it is missing. Ctrl-C stops everything that the demo has started.
    """
    import time

    from jobs.cli.emulator import INTERRUPTS
    from jobs.core.errors import Detached
    from jobs.core.words import duration

    started_at = time.monotonic()
    in_container = executor == "docker"
    steps = Steps(8 if in_container else 6)
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    try:
        with _emulator(steps, executor) as server:
            _deploy(steps, server)
            if in_container:
                _build(steps, server)
            folder = _run(steps)
            steps.say(f"stopping the emulator; the demo took {duration(time.monotonic() - started_at)}")
        _show_next(folder)
    except (KeyboardInterrupt, Detached):
        raise Detached("interrupted; everything the demo started has been stopped", next_step="make demo") from None


def _deploy(steps: "Steps", server: "Server") -> None:
    from jobs.cli import emulator

    with steps.step(f"deploy stage '{DEFAULT_STAGE}' to it with the CDK CLI"):
        emulator.deploy(server, DEFAULT_STAGE)
    emulator.connect(server)


def _build(steps: "Steps", server: "Server") -> None:
    from jobs.aws.connection import Aws
    from jobs.cli import emulator
    from jobs.cli.images import push_images
    from jobs.images.inventory import StageImages

    aws = Aws()
    with steps.step("trainyard images push cpu"):
        push_images(aws, StageImages.read(aws, DEFAULT_STAGE, None), ["cpu"])
    with steps.step("deploy again, so that jobs run in that image"):
        emulator.deploy(server, DEFAULT_STAGE)


def _run(steps: "Steps") -> Path:
    """Train a model, and return the folder of the fetched run."""
    import os

    from jobs.aws.connection import Aws
    from jobs.cli import demo_data
    from jobs.cli.report import REPORT, write_fetched
    from jobs.cli.submit import submit_specs
    from jobs.runs import storage
    from jobs.runs.batch import read_stage
    from jobs.runs.spec_file import read_spec

    aws, path = Aws(), demo_data.SPEC
    with steps.step("upload real data and pretrained weights to the data bucket"):
        for uploaded in demo_data.put(aws, read_spec(path), read_stage(aws, DEFAULT_STAGE), STATE_FOLDER / "cache"):
            steps.say(uploaded)

    with steps.step(f"trainyard submit {os.path.relpath(path)}"):
        [run_id] = submit_specs(aws, DEFAULT_STAGE, path, [], mode=Mode.FOLLOW, yes=True, output="table")

    target = RUNS_FOLDER / run_id
    with steps.step(f"trainyard fetch {run_id}"):
        run = storage.find_run(aws, read_stage(aws, DEFAULT_STAGE), run_id)
        fetched = list(storage.fetch(aws, run.location, target))
        steps.say(f"{len(fetched)} files, {sum(path.stat().st_size for path in fetched) / 2**20:.0f} MiB")

    with steps.step(f"trainyard report {target}"):
        write_fetched(target, target / REPORT)
    return target


def _show_next(folder: Path) -> None:
    """Print the next commands for the user's shell, whose PATH may lack the program that `make` ran."""
    import os
    import shlex
    import shutil
    import sys

    from jobs.cli.terminal import print_commands, print_text

    here = Path(sys.argv[0])
    found = shutil.which("trainyard")
    is_found = found is not None and Path(found).absolute() == here.absolute() and "MAKELEVEL" not in os.environ
    program = "trainyard" if is_found or not here.is_file() else shlex.quote(os.path.relpath(here))
    print_text("\nOpen the page above in a browser. Next:")
    print_commands(
        [
            (f"{program} receipt {folder}", "the run's result and cost, read from its folder"),
            (f"{program} local up", "start an emulator for your own jobs"),
            (f'eval "$({program} local env)"', f"connect this shell to it; then {program} submit SPEC"),
        ]
    )


@contextmanager
def _emulator(steps: "Steps", executor: str) -> "Iterator[Server]":
    """Run an emulator that ends with this process, even if the process is killed."""
    import os

    from jobs.cli import emulator

    state_file = STATE_FOLDER / f"demo-{os.getpid()}.json"
    server = None
    try:
        with steps.step("start an emulator"):
            log_file = STATE_FOLDER / "demo.log"
            server = emulator.start(state_file, log_file, executor=executor, exit_with_pid=os.getpid())
            steps.say(f"it listens at {server.endpoint}; infra/emulator/README.md lists what it does not prove")
        yield server
    finally:
        # A second Ctrl-C would interrupt this cleanup.
        for number in emulator.INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)
        if server:
            emulator.stop(server)


class Steps:
    """Prints numbered steps on stderr, each with the time it took."""

    def __init__(self, count: int) -> None:
        from jobs.cli import tables

        self._count = count
        self._console = tables.stderr()
        self._number = 0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Print the title before the block, and the time it took after it."""
        import time

        from rich.text import Text

        self._number += 1
        self._console.print(Text(f"[{self._number}/{self._count}] {title}", style="bold"))
        started_at = time.monotonic()
        yield
        self._console.print(Text(f"      done in {time.monotonic() - started_at:.1f} s", style="dim"))

    def say(self, sentence: str) -> None:
        """Print a sentence below the title of the step."""
        from rich.text import Text

        self._console.print(Text(f"      {sentence}"))
