"""JupyterLab as a child process: on loopback, behind a token, with TensorBoard behind the same token.

The token stands in a configuration file that only this user can read, never in a command or an environment, which
kernels would inherit.
"""

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from typing_extensions import Self

from jobs.container.rank import TORCHRUN_VARIABLES, die_with_parent
from jobs.container.store import LOOPBACK
from jobs.core.errors import ConfigurationError, TrainyardError

START_SECONDS = 120.0
STOP_SECONDS = 5.0
_REQUEST_SECONDS = 10.0
_POLL_SECONDS = 0.1

AUTOSAVE_SECONDS = 30
"""How often the browser saves an open notebook; JupyterLab's own default is 120."""

TENSORBOARD = "tensorboard"
"""The path of TensorBoard below JupyterLab's address."""

_RUN_MODULE = (
    sys.executable,
    "-c",
    "import runpy, sys; del sys.path[0]; runpy.run_module(sys.argv.pop(1), run_name='__main__')",
)
"""`python -m` without the working directory on the path: there are the user's files, who may call one `random.py`."""


def check_installed() -> None:
    """Check that this image has JupyterLab. Raises ConfigurationError where it has not."""
    missing = [name for name in ("jupyterlab", "jupyter_server_proxy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} not installed here: a notebook runs in the image <root>-notebook "
            "(images/notebook)",
            next_step="trainyard images build gaudi-notebook, push it and deploy; on a laptop: "
            "pip install --editable '.[notebook]'",
        )


class JupyterLab:
    """One server process: there, and answering, inside the `with` block; its kernels end with it."""

    def __init__(self, root: Path, *, settings: Path, tensorboard_logdir: str) -> None:
        """`root` is the folder that it shows; `settings` is one for its own files, which is not there yet."""
        self.token = secrets.token_urlsafe(32)
        self.port = 0
        """The port on loopback, once it answers."""
        self._root = root
        self._settings = settings
        _write_settings(settings, root=root, token=self.token, tensorboard_logdir=tensorboard_logdir)

    def __enter__(self) -> Self:
        """Start JupyterLab. Raises TrainyardError where it ends, or does not answer in time."""
        runtime, parent = self._settings / "runtime", os.getpid()
        self._process = subprocess.Popen(
            [*_RUN_MODULE, "jupyterlab"],
            cwd=self._root,  # that of kernels without a notebook
            env={
                **_environment(os.environ),
                "JUPYTER_CONFIG_DIR": str(self._settings),
                "JUPYTER_RUNTIME_DIR": str(runtime),
            },
            stdin=subprocess.DEVNULL,
            # A group of its own: who stops the rank's group leaves JupyterLab to the rank.
            start_new_session=True,
            # No thread runs that could hold a lock in the child.
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
        """Return its exit code once it has ended; None where it still runs after so many seconds."""
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
        """Return when somebody last ran a cell or a command in it: now, while one runs; None where nobody has yet.

        An open browser tab is no work, though it asks for news all the time. Raises TrainyardError where JupyterLab
        does not answer.
        """
        kernels, terminals = self._get("api/kernels"), self._get("api/terminals")
        if any(kernel["execution_state"] == "busy" for kernel in kernels) or self._runs_commands():
            return datetime.now(timezone.utc)
        times = [datetime.fromisoformat(item["last_activity"].replace("Z", "+00:00")) for item in kernels + terminals]
        return max(times, default=None)

    def _runs_commands(self) -> bool:
        """Return True if a terminal's shell has a child: a training may run for hours unheard and without a viewer."""
        import psutil

        try:
            shells = [child for child in psutil.Process(self._process.pid).children() if _is_on_a_terminal(child.pid)]
            return any(shell.children() for shell in shells)
        except (psutil.Error, OSError):  # ended meanwhile
            return False

    def _await(self, runtime: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers(runtime):
            if self._process.poll() is not None:
                raise TrainyardError(f"JupyterLab ended as it started (exit code {self._process.returncode})")
            if time.monotonic() > deadline:
                raise TrainyardError(f"JupyterLab has not answered for {START_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _answers(self, runtime: Path) -> bool:
        """Return True if it answers at the port that it took, which it writes to a file once it has it."""
        found = list(runtime.glob("jpserver-*.json"))
        try:
            self.port = json.loads(found[0].read_text())["port"]
            self._get("api/status")
        except (IndexError, ValueError, TrainyardError):  # no file yet, half a file, not serving yet
            return False
        return True

    def _get(self, path: str) -> Any:
        request = Request(f"http://{LOOPBACK}:{self.port}/{path}", headers={"Authorization": f"token {self.token}"})
        try:
            with _without_proxy().open(request, timeout=_REQUEST_SECONDS) as answer:
                return json.loads(answer.read())
        except (URLError, OSError, ValueError) as error:
            raise TrainyardError(f"JupyterLab does not answer: {error}") from None


def _write_settings(settings: Path, *, root: Path, token: str, tensorboard_logdir: str) -> None:
    logdir = tensorboard_logdir if "://" in tensorboard_logdir else str(root / tensorboard_logdir)
    tensorboard = [*_RUN_MODULE, "jobs.container.kinds.notebook.tensorboard_server", f"--logdir={_literally(logdir)}"]
    server = {
        "ServerApp": {
            "ip": LOOPBACK,
            "port": 0,
            "open_browser": False,
            "root_dir": str(root),
            "allow_root": True,  # which it is in the Gaudi image; see images/gaudi/Dockerfile
        },
        "Application": {"log_level": "WARN"},
        "KernelManager": {"transport_encryption": "auto"},  # else each kernel warns that others here could listen
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
        # It would ask the internet, and there may be none.
        "@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"},
    }
    settings.mkdir(mode=0o700)
    (settings / "labconfig").mkdir()
    _write_private(settings / "jupyter_server_config.json", server)
    _write_private(settings / "labconfig" / "default_setting_overrides.json", lab)


def _is_on_a_terminal(pid: int) -> bool:
    """Return True if a process has a terminal, as the kernel says: psutil knows none newer than its first look."""
    # "pid (name) state parent group session terminal …", and a name may hold spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[4] != "0"


def _write_private(path: Path, content: Mapping[str, Any]) -> None:
    path.touch(mode=0o600)
    path.write_text(json.dumps(content))


def _literally(text: str) -> str:
    """Escape a text for the proxy, which formats each word of a command."""
    return text.replace("{", "{{").replace("}", "}}")


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of kernels and terminals: the rank's own, without its place among its peers."""
    return {name: value for name, value in environment.items() if not name.startswith(TORCHRUN_VARIABLES)}


def _without_proxy() -> OpenerDirector:
    return build_opener(ProxyHandler({}))
