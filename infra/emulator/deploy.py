"""Bootstrap and deploy one stage to a running emulator, with the real CDK CLI and the project's own stacks.

python -m infra.emulator deploy --endpoint http://localhost:PORT [--stage dev]
"""

import json
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from infra.emulator import ACCOUNT_ID, REGION, cdk_cli
from infra.emulator.client import client
from infra.emulator.credentials import NEXT_STEP, Credentials
from infra.emulator.errors import ConfigurationError, EmulatorError
from infra.stages import loading
from infra.stages.checks import check
from jobs.core.errors import TrainyardError, UsageError, did_you_mean
from jobs.core.stage import DEFAULT_STAGE
from jobs.core.urls import check_endpoint
from jobs.core.words import counted

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
                cdk_cli.APP,
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
            cwd=cdk_cli.ROOT,
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

    code = cdk_cli.run(arguments, endpoint=endpoint, credentials=credentials, scratch=scratch, cwd=cwd, on_line=on_line)
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
