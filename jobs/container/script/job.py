"""Prepare a script on this node, watch it while its ranks run, and save its files."""

import contextlib
import errno
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

import jobs
from jobs.aws import s3 as object_store
from jobs.container.channel import read_heartbeats, read_saved_step, uses_library
from jobs.container.packages import Environment
from jobs.container.rank import ALONE, ATTEMPT_VARIABLE, one_line
from jobs.container.saving.manifest import SupersededError, check_newest, complete_steps, list_steps
from jobs.container.saving.saved_folder import SavedFolder
from jobs.container.saving.script_checkpoints import CODE, ScriptCheckpoints, ShardedError
from jobs.container.saving.script_complete import trainer_step
from jobs.container.script.inputs import fetch, unpack
from jobs.container.script.metrics import LOOK_SECONDS as METRICS_SECONDS
from jobs.container.script.metrics import ScriptMetrics
from jobs.container.script.own_environment import OwnEnvironment
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINTS
from jobs.core.words import counted
from jobs.spec.code import (
    CHECKPOINTS_VARIABLE,
    ENVIRONMENT_FILE,
    MAIN_ADDRESS_VARIABLE,
    NNODES_VARIABLE,
    NODE_VARIABLE,
    OUTPUT_VARIABLE,
    SCRIPT_VARIABLE,
    input_variable,
    parameter_variable,
)
from jobs.spec.kinds.script import LAST_CHECKPOINT, Script

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

OUTPUT = "output"

LOOK_SECONDS = 1.0


class ScriptJob:
    """One script on this node. A context manager while its ranks run."""

    def __init__(
        self,
        arguments: Script,
        run: S3Location,
        scratch: Path,
        *,
        node: int,
        nnodes: int,
        nproc_per_node: int,
        main_address: str,
        cards: int,
        allow_changes: bool,
    ) -> None:
        self._arguments = arguments
        self._run = run
        self._scratch = scratch
        self._node, self._nnodes = node, nnodes
        self._is_main = node == 0
        self._allow_changes = allow_changes
        self._folder = scratch / "script"
        self._code = self._folder / CODE
        self._workdir = self._code / arguments.folder
        self._output = self._folder / OUTPUT
        self._checkpoints = self._folder / "checkpoints"
        self._inputs: dict[str, str] = {}
        self.python = sys.executable
        """The Python of the ranks. `prepare` sets it to that of the script's own environment, if it has one."""
        self._places = {
            "output": str(self._output),
            "checkpoints": str(self._checkpoints),
            "node": str(node),
            "nnodes": str(nnodes),
            "main_address": main_address,
            "cards": str(cards or nproc_per_node),
        }
        self._world_size = nnodes * nproc_per_node
        self._nproc_per_node = nproc_per_node
        self._s3: S3Client | None = None
        self._uploads: ScriptCheckpoints | None = None
        """The uploads of checkpoints. Set on the main node only, which cannot vouch for files of other nodes."""
        self._metrics: ScriptMetrics | None = None
        """Set on the main node only."""
        self._saved: SavedFolder | None = None
        self._lock = threading.Lock()
        self._output_lock = threading.Lock()
        """Separate from the other lock, because an output of 100 GB must not delay checkpoints."""
        self._closed = threading.Event()
        self._output_is_due = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (
                ("script", self._watch),
                ("script-output", self._keep_output),
                ("script-metrics", self._collect),
            )
        ]
        self._activity_at = time.monotonic()
        self._newest_time = 0
        self._saved_step: int | None = None
        self.ran_with: dict[str, str] | None = None
        """The versions of the main packages in the script's own environment, if it has one. Set by `prepare`."""
        self.refusal: ShardedError | None = None
        """Why the script was ended, if its checkpoints cannot be saved."""

    @property
    def silence_seconds(self) -> float:
        return self._arguments.silence_timeout_seconds

    @property
    def program(self) -> list[str]:
        """Python's arguments for each rank: our module, the folders of the code and the script, and the command."""
        inputs = {f"inputs.{name}": at for name, at in self._inputs.items()}
        parameters = {f"parameters.{name}": text for name, text in self._arguments.parameter_texts.items()}
        words = self._arguments.filled({**self._places, **inputs, **parameters})
        alone = [] if self._arguments.processes is None else [ALONE]
        return ["-m", "jobs.container.kinds.script", *alone, str(self._code), str(self._workdir), *words]

    def prepare(self) -> dict[str, str]:
        """Download everything that the script needs. Returns the variables of its ranks.

        Raises TrainyardError if something cannot be downloaded or does not fit on the disk.
        """
        try:
            return self._prepare()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            usage = shutil.disk_usage(self._scratch)
            raise TrainyardError(
                f"code, packages and inputs do not fit on the disk of {self._scratch}: "
                f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB are free",
                next_step="stream the largest input (arguments.streamed_inputs), or use a larger volume",
            ) from None

    def _prepare(self) -> dict[str, str]:
        started = time.monotonic()
        self._s3 = s3 = object_store.connect()
        for folder in (self._code, self._output, self._checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        files = unpack(s3, self._arguments.code, self._code)
        if not self._workdir.is_dir():
            raise UsageError(
                f"the code has no folder '{self._arguments.workdir}'", next_step="correct arguments.workdir"
            )
        packages = self._packages(s3)
        for name, location in self._arguments.inputs.items():
            streamed = name in self._arguments.streamed_inputs
            found = location if streamed else str(fetch(s3, name, location, self._scratch / "inputs"))
            self._inputs[name] = found
        if self._is_main and self._arguments.inputs:
            from jobs.container.data.artifacts import record_inputs  # slow, and needed only with inputs

            # A streamed input may be too large to list.
            streamed_inputs = self._arguments.streamed_inputs
            listed = [at for name, at in self._arguments.inputs.items() if name not in streamed_inputs]
            record_inputs(self._run, listed, s3=s3)
        self._restore(s3)
        log.info("script: %s of code, ready in %.1f s", counted(files, "file"), time.monotonic() - started)
        variables = {
            SCRIPT_VARIABLE: json.dumps(self._arguments.fixed_arguments()),
            OUTPUT_VARIABLE: str(self._output),
            CHECKPOINTS_VARIABLE: str(self._checkpoints),
            NODE_VARIABLE: str(self._node),
            NNODES_VARIABLE: str(self._nnodes),
            MAIN_ADDRESS_VARIABLE: self._places["main_address"],
            **{input_variable(name): at for name, at in self._inputs.items()},
            **{parameter_variable(name): text for name, text in self._arguments.parameter_texts.items()},
            **_search_paths(packages),
        }
        lines = [
            *(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
            f"cd {shlex.quote(str(self._workdir))}\n",
        ]
        (self._scratch / ENVIRONMENT_FILE).write_text("\n".join(lines))
        return variables

    def __enter__(self) -> Self:
        self._activity_at = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def add_line(self, line: str) -> None:
        """Take a line of rank 0's log. Returns at once."""
        if self._metrics is not None:
            self._metrics.add_line(line)

    def last_activity(self) -> float:
        """Return when the script last wrote a file, by time.monotonic."""
        kept = (self._workdir / name for name in self._arguments.keep)
        newest = _newest_time(self._output, self._checkpoints, *kept)
        if newest != self._newest_time:
            self._newest_time, self._activity_at = newest, time.monotonic()
        return self._activity_at

    def pids(self) -> list[int]:
        """Return the process ids of the ranks that have sent a heartbeat."""
        return [heartbeat.pid for heartbeat in read_heartbeats(self._scratch).values()]

    def finish(self, *, ended_well: bool) -> None:
        """Save the script's files, and kill the processes that it left running. Raises TrainyardError if S3 fails."""
        self._close()
        self._kill_ranks()
        try:
            with self._lock:
                if self._uploads is not None:
                    self._upload_last_checkpoint(self._uploads, ended_well=ended_well)
            self._finish_metrics(ended_well=ended_well)
        finally:
            with self._output_lock:
                if self._saved is not None:
                    self._saved.save(checkpoints=ended_well)
        if ended_well and self._is_main and not uses_library(self._scratch):
            self._warn_without_output()

    def _warn_without_output(self) -> None:
        """Warn if a script that succeeded has left nothing, or only checkpoints, which expire."""
        kept = [self._workdir / name for name in self._arguments.keep]
        if any(self._output.iterdir()) or any(path.exists() for path in kept):
            return
        if any(self._checkpoints.iterdir()):
            log.warning(
                "warning: the script has written nothing to {output}, only checkpoints, which expire. Next: trainyard "
                "fetch RUN downloads the newest; to keep results, make the script write them to $%s",
                OUTPUT_VARIABLE,
            )
        else:
            log.warning(
                "warning: the script succeeded, but it has saved no files. Next: make the script write to $%s, use "
                "{output} in its command, or name what it writes in arguments.keep",
                OUTPUT_VARIABLE,
            )

    def _finish_metrics(self, *, ended_well: bool) -> None:
        try:
            if self._metrics is not None:
                self._metrics.finish(ended_well=ended_well)
        except Exception as error:  # noqa: BLE001 - the script's files are worth more
            log.warning("warning: not all of the script's metrics were saved: %s", one_line(error))

    def _kill_ranks(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # each rank leads its own process group

    def _upload_last_checkpoint(self, uploads: ScriptCheckpoints, *, ended_well: bool) -> None:
        uploads.check_newest()
        if self.refusal is None and not uses_library(self._scratch):
            uploads.upload("done" if ended_well else "ended")
            uploads.warn_of_rest()
        uploads.close()

    def _close(self) -> None:
        self._closed.set()
        self._output_is_due.set()

    def _packages(self, s3: "S3Client") -> dict[str, str]:
        source = self._arguments.lock or self._arguments.requirements
        if source is None:
            return {}
        wheels = None
        if self._arguments.wheelhouse is not None:
            wheels = fetch(s3, "wheelhouse", self._arguments.wheelhouse, self._scratch / "wheels")
        folder = self._scratch / "packages"
        if self._arguments.environment is None:
            added = Environment(s3, self._run, folder, code=self._code, requirements=source)
            return added.make(wheels=wheels, installs=self._is_main)
        own = OwnEnvironment(s3, self._run, folder, code=self._code, source=source, python=self._arguments.python)
        self.python = str(own.python)
        variables = own.make(wheels=wheels, installs=self._is_main)
        self.ran_with = own.ran_with()
        return variables

    def _restore(self, s3: "S3Client") -> None:
        """Restore this node's output and the run's checkpoints from earlier attempts."""
        place = self._run / (OUTPUT if self._is_main else f"{OUTPUT}-of-node-{self._node}")
        attempt = int(os.environ[ATTEMPT_VARIABLE]) if ATTEMPT_VARIABLE in os.environ else None
        self._saved = SavedFolder(
            s3,
            self._output,
            place,
            without=lambda name: trainer_step(name) is not None,  # a Trainer's checkpoint
            elsewhere=self._workdir,
            parts=self._arguments.keep,
            check_may_write=lambda: check_newest(s3, self._run, attempt),
        )
        starts_over = not complete_steps(list_steps(s3, self._run / CHECKPOINTS))
        restored = self._saved.restore(outdated=_is_event_file if starts_over else lambda _: False)
        if restored:
            log.info("restored: %s of output", counted(restored, "file"))
        checkpoints = ScriptCheckpoints(
            s3,
            self._run,
            self._scratch,
            folder=self._folder,
            arguments={**self._arguments.fixed_arguments(), "ranks": self._world_size},
            world_size=self._world_size,
            ranks_here=self._nproc_per_node,
            kept=[f"{self._arguments.folder}{name}" for name in self._arguments.keep],
            nnodes=self._nnodes,
            attempt=attempt,
        )
        checkpoints.restore(allow_changes=self._allow_changes)
        if (newest := checkpoints.newest()) is not None:
            self._places[LAST_CHECKPOINT] = str(newest)
        self._saved.restore_links()
        if self._is_main:
            self._uploads = checkpoints
            self._metrics = ScriptMetrics(
                s3,
                self._run,
                self._scratch,
                folders=(self._output, self._checkpoints, *(self._workdir / name for name in self._arguments.keep)),
                patterns=self._arguments.metrics,
                attempt=attempt,
            )
            self._metrics.restored()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self._look()
            except SupersededError as error:  # noqa: PERF203 - no further round
                log.warning("%s", error.args[0])
                os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends the script
                return
            except ShardedError as error:
                self.refusal = error
                self._kill_ranks()  # they have nothing to save, and torchrun would wait for the other nodes' ranks
                return
            except Exception as error:  # noqa: BLE001 - the next round may succeed
                log.warning("warning: the upload of the script's checkpoints is late: %s", one_line(error))

    def _look(self) -> None:
        with self._lock:
            if self._closed.is_set() or self._uploads is None:
                return
            if uses_library(self._scratch):
                step = read_saved_step(self._scratch)
                has_saved, self._saved_step = step != self._saved_step, step
            else:
                has_saved = self._uploads.upload("running")
        if has_saved:
            self._output_is_due.set()

    def _collect(self) -> None:
        """Collect the script's metrics, separate from uploads that take minutes."""
        while self._metrics is not None and not self._closed.wait(METRICS_SECONDS):
            try:
                self._metrics.look()
            except SupersededError:  # noqa: PERF203 - `_watch` ends the script
                return
            except Exception as error:  # noqa: BLE001 - the next round may succeed
                log.warning("warning: the script's metrics are late: %s", one_line(error))

    def _keep_output(self) -> None:
        """Save the output after each checkpoint, while `_watch` looks for the next checkpoint."""
        while self._output_is_due.wait() and not self._closed.is_set():
            self._output_is_due.clear()
            try:
                with self._output_lock:
                    if self._saved is not None and not self._closed.is_set():
                        if self._metrics is not None:
                            self._metrics.look(upload_now=True)  # the next attempt skips what this output contains
                        self._saved.save()
            except Exception as error:  # noqa: BLE001 - the next save may succeed
                log.warning("warning: the upload of the script's output is late: %s", one_line(error))


def _is_event_file(name: str) -> bool:
    """Return whether a file has TensorBoard events. They are outdated if no checkpoint was saved.

    The script then repeats their steps, and the examples of transformers refuse an output folder that has files but no
    checkpoint.
    """
    return ".tfevents." in name


def _newest_time(*folders: Path) -> int:
    times = [0]
    for folder in folders:
        with contextlib.suppress(OSError):
            times.append(folder.stat().st_mtime_ns)
        for place, _, names in os.walk(folder):
            with contextlib.suppress(OSError):
                times.append(Path(place).stat().st_mtime_ns)
            for name in names:
                with contextlib.suppress(OSError):
                    times.append(Path(place, name).stat().st_mtime_ns)
    return max(times)


def _search_paths(packages: dict[str, str]) -> dict[str, Any]:
    """Return the absolute search paths of the ranks: the script's packages first, then ours.

    PATH includes the programs of this Python's packages (torchrun, accelerate), even if its venv is not activated.
    A script with its own environment does not get the image's PYTHONPATH.
    """
    ours = str(Path(jobs.__path__[0]).parent)
    own = [packages["PYTHONPATH"]] if packages.get("PYTHONPATH") else []
    inherited = "" if "VIRTUAL_ENV" in packages else os.environ.get("PYTHONPATH", "")
    found = {**packages, "PYTHONPATH": os.pathsep.join([*own, ours, *filter(None, [inherited])])}
    first = [packages["PATH"]] if packages else []
    found["PATH"] = os.pathsep.join([*first, str(Path(sys.executable).parent), os.environ["PATH"]])
    return found
