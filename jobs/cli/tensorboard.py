"""`trainyard tensorboard [RUN…]`: what runs have measured, in TensorBoard on this machine."""

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.error import URLError

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.embedded import Process, end_group, started
from jobs.cli.options import RUNS_FOLDER
from jobs.cli.plain import print_text
from jobs.cli.sweep import begun_points
from jobs.client import batch, port_forwarding, storage
from jobs.client.storage import StoredRun
from jobs.contract.errors import ConfigurationError, NotFoundError, TrainyardError, UsageError
from jobs.contract.run import TENSORBOARD
from jobs.contract.words import counted

FETCH_EVERY_SECONDS = 10.0
"""What runs have measured meanwhile is fetched so often; TensorBoard itself looks into its files twice a minute."""

START_SECONDS = 60.0
_LOOK_AGAIN_SECONDS = 0.1

_PATH_VARIABLE = "TRAINYARD_TENSORBOARD_PATH"
_PROGRAM = (
    f"import os, sys; sys.argv += ['--path_prefix', os.environ.pop('{_PATH_VARIABLE}')]; "
    "from tensorboard.main import run_main; run_main()"
)
"""Starts TensorBoard under a path that other users of this machine must not see, as they see a command line."""

_EVENTS = "events.out.*"
"""The names of TensorBoard's files."""

_OUTPUT = "output"
"""Begins the folders of what a script leaves: output/ of the main node, output-of-node-1/ of another."""


def tensorboard(connect: Callable[[], Aws], stage_name: str, texts: Sequence[str], *, port: int) -> None:
    """Run `trainyard tensorboard`. It ends on Ctrl-C or SIGTERM.

    Raises ConfigurationError where TensorBoard is not installed, NotFoundError where no run has measured anything,
    UsageError where the port is taken.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigurationError(
            "TensorBoard is not installed here", next_step="pip install tensorboard, or: make install"
        )
    aws, runs = None, list[StoredRun]()
    if texts:
        aws = connect()
        stage = batch.read_stage(aws, stage_name)
        named = dict.fromkeys(storage.find_run(aws, stage, text) for text in texts)
        of_sweeps = ((run, begun_points(aws, stage, run)) for run in named)
        runs = [each for run, points in of_sweeps for each in ([run] if points is None else points)]
        _fetch(aws, runs)
    names = [run.run_id for run in runs] or sorted({path.parts[1] for path in _events("*")})
    with tempfile.TemporaryDirectory(prefix="trainyard-tensorboard-") as folder:
        shown = [name for name in names if _link(Path(folder), name)]
        if not shown:
            raise NotFoundError(
                "none of these runs has measured anything yet" if texts else f"{RUNS_FOLDER}/ has no run with events",
                next_step=f"trainyard logs {runs[-1].run_id} --follow" if runs else "trainyard tensorboard latest",
            )
        _serve(Path(folder), port or port_forwarding.free_port(), counted(len(shown), "run"), aws, runs)


def _events(run: str) -> list[Path]:
    """Return the files of events that are here: the platform's own, and those that a script has left in its output."""
    own = RUNS_FOLDER.glob(f"{run}/{TENSORBOARD}/{_EVENTS}")
    return sorted([*own, *RUNS_FOLDER.glob(f"{run}/{_OUTPUT}*/**/{_EVENTS}")])


def _link(folder: Path, name: str) -> bool:
    """Let TensorBoard find a run's events under the run's id; returns whether there are any.

    A script's own stand beside them, with the folder of its output that they are in.
    """
    places = {path.parent for path in _events(name)}
    for place in places:
        below = place.relative_to(RUNS_FOLDER / name)
        link = folder / (name if str(below) == TENSORBOARD.rstrip("/") else ".".join([name, *below.parts]))
        if not link.is_symlink():
            link.symlink_to(place.absolute())
    return bool(places)


def _fetch(aws: Aws, runs: Sequence[StoredRun]) -> None:
    for run in runs:
        target = RUNS_FOLDER / run.run_id
        for _ in storage.fetch(aws, run.location, target, below=TENSORBOARD):
            pass
        for _ in storage.fetch(aws, run.location, target, below=_OUTPUT, wanted=_is_events):
            pass


def _is_events(name: str) -> bool:
    return PurePosixPath(name).match(_EVENTS)


def _serve(folder: Path, port: int, what: str, aws: Aws | None, runs: Sequence[StoredRun]) -> None:
    # TensorBoard asks nobody who he is: a path that cannot be guessed keeps other users of this machine out.
    path = f"/{secrets.token_urlsafe(24)}"
    command = [sys.executable, "-P", "-c", _PROGRAM, "--logdir", str(folder), "--host", "127.0.0.1"]
    # Its faster loader is a second server, on a port that asks for nothing.
    command += ["--port", str(port), "--load_fast", "false"]
    environment = {**os.environ, _PATH_VARIABLE: path}
    log_file = folder.with_name(f"{folder.name}.log")
    before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        with (
            log_file.open("wb") as log,
            started(command, stdout=log, stderr=subprocess.STDOUT, environment=environment) as process,
        ):
            _wait_until_up(process, f"http://127.0.0.1:{port}{path}/", port, log_file)
            print_text(f"http://127.0.0.1:{port}{path}/")
            tables.stderr().print(f"TensorBoard shows {what} to this machine until Ctrl-C")
            while process.poll() is None:
                time.sleep(FETCH_EVERY_SECONDS)
                with suppress(TrainyardError, OSError):  # the next look may fare better; what is here is shown on
                    if aws is not None:
                        _fetch(aws, runs)
                        for run in runs:
                            _link(folder, run.run_id)
            raise TrainyardError(
                f"TensorBoard ended with exit code {process.returncode}: {_last_line(log_file)}",
                next_step="trainyard tensorboard, again",
            )
    except KeyboardInterrupt:
        tables.stderr().print("TensorBoard is stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
        log_file.unlink(missing_ok=True)


def _wait_until_up(process: Process, address: str, port: int, log_file: Path) -> None:
    give_up_at = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise UsageError(
                f"--port {port}: TensorBoard could not be started: {_last_line(log_file)}",
                next_step="leave --port out: a free one is taken",
            )
        with suppress(URLError, OSError), urllib.request.urlopen(address, timeout=5):  # noqa: S310 - loopback
            return
        time.sleep(_LOOK_AGAIN_SECONDS)
    end_group(process)
    raise TrainyardError(f"TensorBoard did not answer within {START_SECONDS:.0f} s", next_step="trainyard tensorboard")


def _last_line(log_file: Path) -> str:
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
