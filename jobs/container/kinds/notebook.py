"""Run JupyterLab and TensorBoard on an instance until they are shut down or idle for too long.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=1 notebook --idle-timeout-hours=2

The notebook's folder is saved to the run every few seconds and at the end, and restored in the next attempt. The run's
notebook.json has the address and the token. The job succeeds when JupyterLab is shut down from its menu, or after the
idle timeout.

JupyterLab is a child process that listens on loopback only. One token protects it and TensorBoard. The token is in a
configuration file that only this user can read, not in a command or a variable, which kernels would inherit.
"""

import importlib.util
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

from typing_extensions import Self

from jobs.aws import s3 as object_store
from jobs.container.channel import LOOPBACK
from jobs.container.data import sources
from jobs.container.environment import attempt_number, job_id
from jobs.container.rank import Rank, die_with_parent, one_line, run
from jobs.container.saving.manifest import SupersededError, check_newest
from jobs.container.saving.saved_folder import SavedFolder
from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.records import NotebookServer
from jobs.core.run import NOTEBOOK, NOTEBOOK_SERVER
from jobs.core.words import counted
from jobs.spec.kinds.notebook import Notebook
from jobs.spec.launcher_options import TORCHRUN_VARIABLES

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


log = logging.getLogger("trainyard")

ROUND_SECONDS = 10.0
"""Interval at which changes are saved, so at most this much work is lost if an instance ends without notice."""

START_SECONDS = 120.0
STOP_SECONDS = 5.0
_REQUEST_SECONDS = 10.0
_POLL_SECONDS = 0.1

AUTOSAVE_SECONDS = 30
"""Interval at which the browser saves an open notebook. JupyterLab's default is 120."""

TENSORBOARD = "tensorboard"
"""The path of TensorBoard below JupyterLab's address."""

_RUN_MODULE = (
    sys.executable,
    "-c",
    "import runpy, sys; del sys.path[0]; runpy.run_module(sys.argv.pop(1), run_name='__main__')",
)
"""`python -m` without the working directory on the path, where a user's file may be named `random.py`."""


class Interrupted(BaseException):
    """SIGTERM arrived. A BaseException, because botocore would retry on an Exception."""


def check_installed() -> None:
    """Raise ConfigurationError if this image has no JupyterLab."""
    missing = [name for name in ("jupyterlab", "jupyter_server_proxy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} not installed here; a notebook needs the image <root>-notebook (images/notebook)",
            next_step="trainyard images build gaudi-notebook, push it and deploy; on a laptop: "
            "pip install --editable '.[notebook]'",
        )


class JupyterLab:
    """A JupyterLab server that runs inside the `with` block. Its kernels end with it."""

    def __init__(self, root: Path, *, settings: Path, tensorboard_logdir: str) -> None:
        """`root` is the folder to show. `settings` is a new folder for JupyterLab's own files."""
        self.token = secrets.token_urlsafe(32)
        self.port = 0
        """The port on loopback, set when the server answers."""
        self._root = root
        self._settings = settings
        _write_settings(settings, root=root, token=self.token, tensorboard_logdir=tensorboard_logdir)

    def __enter__(self) -> Self:
        """Start JupyterLab. Raises TrainyardError if it exits or does not answer in time."""
        runtime, parent = self._settings / "runtime", os.getpid()
        self._process = subprocess.Popen(
            [*_RUN_MODULE, "jupyterlab"],
            cwd=self._root,  # the working directory of kernels without a notebook
            env={
                **_environment(os.environ),
                "JUPYTER_CONFIG_DIR": str(self._settings),
                "JUPYTER_RUNTIME_DIR": str(runtime),
            },
            stdin=subprocess.DEVNULL,
            # In a separate process group: if the rank's group is stopped, the rank stops JupyterLab.
            start_new_session=True,
            # Safe, because no thread is running that could hold a lock in the child.
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
        )
        try:
            self._await(runtime)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def wait(self, seconds: float) -> int | None:
        """Wait for the server to exit and return its exit code, or None if it still runs after `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            if self.wait(STOP_SECONDS) is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def last_activity(self) -> datetime | None:
        """Return when a cell or a command last ran: now if one is running, or None if none has run yet.

        An open browser tab does not count, although it polls all the time. Raises TrainyardError if JupyterLab does not
        answer.
        """
        kernels, terminals = self._get("api/kernels"), self._get("api/terminals")
        if any(kernel["execution_state"] == "busy" for kernel in kernels) or self._runs_commands():
            return datetime.now(timezone.utc)
        times = [datetime.fromisoformat(item["last_activity"].replace("Z", "+00:00")) for item in kernels + terminals]
        return max(times, default=None)

    def _runs_commands(self) -> bool:
        """Return whether a shell in a terminal has a child: training may run for hours without output or viewers."""
        import psutil

        try:
            shells = [child for child in psutil.Process(self._process.pid).children() if _is_on_a_terminal(child.pid)]
            return any(shell.children() for shell in shells)
        except (psutil.Error, OSError):  # a process has ended meanwhile
            return False

    def _await(self, runtime: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers(runtime):
            if self._process.poll() is not None:
                raise TrainyardError(f"JupyterLab exited while starting (exit code {self._process.returncode})")
            if time.monotonic() > deadline:
                raise TrainyardError(f"JupyterLab did not answer within {START_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _answers(self, runtime: Path) -> bool:
        """Return whether JupyterLab answers at the port that it writes to a file."""
        found = list(runtime.glob("jpserver-*.json"))
        try:
            self.port = json.loads(found[0].read_text())["port"]
            self._get("api/status")
        except (IndexError, ValueError, TrainyardError):  # no file yet, an incomplete file, or not serving yet
            return False
        return True

    def _get(self, path: str) -> Any:
        request = Request(f"http://{LOOPBACK}:{self.port}/{path}", headers={"Authorization": f"token {self.token}"})
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=_REQUEST_SECONDS) as answer:
                return json.loads(answer.read())
        except (URLError, OSError, ValueError) as error:
            raise TrainyardError(f"JupyterLab does not answer: {error}") from None


def _write_settings(settings: Path, *, root: Path, token: str, tensorboard_logdir: str) -> None:
    logdir = tensorboard_logdir if "://" in tensorboard_logdir else str(root / tensorboard_logdir)
    tensorboard = [*_RUN_MODULE, "jobs.container.kinds.tensorboard_server", f"--logdir={_escape(logdir)}"]
    server = {
        "ServerApp": {
            "ip": LOOPBACK,
            "port": 0,
            "open_browser": False,
            "root_dir": str(root),
            "allow_root": True,  # the user of the Gaudi image (images/gaudi/Dockerfile)
        },
        "Application": {"log_level": "WARN"},
        "KernelManager": {"transport_encryption": "auto"},  # otherwise each kernel warns that others could listen
        "IdentityProvider": {"token": token},
        "PasswordIdentityProvider": {"allow_password_change": False},
        "ServerProxy": {
            "servers": {
                TENSORBOARD: {
                    "command": [*tensorboard, "--socket={unix_socket}"],
                    "unix_socket": True,
                    "timeout": 180.0,
                    "launcher_entry": {"title": "TensorBoard"},
                }
            }
        },
    }
    lab = {
        "@jupyterlab/docmanager-extension:plugin": {"autosaveInterval": AUTOSAVE_SECONDS},
        # Both need the internet, which may not be reachable.
        "@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"},
    }
    settings.mkdir(mode=0o700)
    (settings / "labconfig").mkdir()
    _write_private(settings / "jupyter_server_config.json", server)
    _write_private(settings / "labconfig" / "default_setting_overrides.json", lab)


def _is_on_a_terminal(pid: int) -> bool:
    """Return whether a process has a terminal. Read from the kernel, because psutil caches its list of terminals."""
    # The format is "pid (name) state parent group session terminal …". A name may contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[4] != "0"


def _write_private(path: Path, content: Mapping[str, Any]) -> None:
    path.touch(mode=0o600)
    path.write_text(json.dumps(content))


def _escape(text: str) -> str:
    """Escape a text for the proxy, which applies `str.format` to each word of a command."""
    return text.replace("{", "{{").replace("}", "}}")


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of kernels and terminals: the rank's, without the variables that describe its peers."""
    return {name: value for name, value in environment.items() if not name.startswith(TORCHRUN_VARIABLES)}


def serve(rank: Rank, arguments: Notebook) -> None:
    """Run JupyterLab until it is shut down, is idle for too long, or SIGTERM arrives.

    Raises ConfigurationError if this image has no JupyterLab, and TrainyardError if JupyterLab fails.
    """
    check_installed()
    signal.signal(signal.SIGTERM, _interrupt)
    s3 = object_store.connect()
    folder = rank.scratch / "notebook"
    folder.mkdir()

    def check_may_write() -> None:
        check_newest(s3, rank.run, rank.attempt)

    saved = SavedFolder(s3, folder, rank.run / NOTEBOOK.rstrip("/"), check_may_write=check_may_write)
    code = 0
    try:
        _fill(s3, saved, folder, arguments)
        with JupyterLab(
            folder, settings=rank.scratch / "jupyter", tensorboard_logdir=arguments.tensorboard_logdir
        ) as lab:
            try:
                check_may_write()
                _announce(s3, rank, lab)
                code = _save_until_end(lab, saved, idle_timeout=timedelta(hours=arguments.idle_timeout_hours))
            finally:
                # Save without interruption, before JupyterLab is stopped: the grace period may be running.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                check_may_write()  # a newer attempt owns the files and the address to connect to
                saved.save()
                object_store.delete_all(s3, rank.run, [NOTEBOOK_SERVER])
    except Interrupted:
        # Die of SIGTERM, so that the launcher retries the job.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if code:
        raise TrainyardError(f"JupyterLab ended with exit code {code}", next_step="read its log above")


def _fill(s3: "S3Client", saved: SavedFolder, folder: Path, arguments: Notebook) -> None:
    """Restore the folder of an earlier attempt or, in the first attempt, copy the files that the arguments name."""
    restored = saved.restore()
    saved.restore_links()
    if restored:
        log.info("notebook: restored %s of an earlier attempt", counted(restored, "file"))
    elif arguments.files is not None:
        sources.copy_folder(arguments.files, folder, s3=lambda: s3)
        log.info("notebook: copied the files of %s", arguments.files)


def _announce(s3: "S3Client", rank: Rank, lab: JupyterLab) -> None:
    """Write the address and token for `trainyard connect`. Only the team can read its runs."""
    server = NotebookServer(job_id=job_id(), attempt=attempt_number(), port=lab.port, token=lab.token)
    object_store.write(s3, rank.run / NOTEBOOK_SERVER, server.model_dump_json(indent=2).encode())
    run_id = rank.run.key.strip("/").rpartition("/")[2]
    log.info("notebook: JupyterLab listens on %s:%s; next: trainyard connect %s", LOOPBACK, lab.port, run_id)


def _save_until_end(lab: JupyterLab, saved: SavedFolder, *, idle_timeout: timedelta) -> int:
    """Save changes until JupyterLab ends, and return its exit code, or 0 if it was idle for too long."""
    # Only changes of the last activity count, not its time, because the clock may be adjusted meanwhile.
    seen, worked = None, time.monotonic()
    while True:
        code = lab.wait(min(ROUND_SECONDS, idle_timeout.total_seconds() / 4))
        if code is not None:
            log.info("notebook: JupyterLab was shut down")
            return code
        now = time.monotonic()
        try:
            if saved.save():
                worked = now
            if (activity := lab.last_activity()) != seen:
                seen, worked = activity, now
        except SupersededError:
            raise
        except Exception as error:  # noqa: BLE001 - the next round may succeed
            log.warning("warning: notebook: %s", one_line(error))
        if now - worked >= idle_timeout.total_seconds():
            log.info("notebook: idle for %s, so the job ends", idle_timeout)
            return 0


def _interrupt(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Interrupted


if __name__ == "__main__":
    run(serve, Notebook)
