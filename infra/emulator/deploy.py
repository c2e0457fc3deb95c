"""Bootstrap and deploy one stage to a running embedded AWS, with the real CDK CLI and the project's own stacks.

python -m infra.emulator deploy --endpoint http://localhost:PORT [--stage dev]
"""

import json
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from infra.emulator import ACCOUNT_ID, REGION, cdk_cli
from infra.emulator.client import client
from infra.settings import STAGES
from infra.stages.checks import check
from jobs.contract.errors import ConfigurationError, UsageError, did_you_mean

BOOTSTRAP_PARAMETER = "/cdk-bootstrap/hnb659fds/version"
"""Where the CDK's bootstrap stack writes its version."""

FAILURE_LINES = 30
"""How much of the CLI's output is shown where it fails: it ends with what failed, and why."""


def deploy(*, endpoint: str, stage: str) -> int:
    """Bootstrap where that is still to do, then deploy; the CLI's exit code. Progress goes to stderr.

    Raises UsageError for a stage that settings.py does not have, ConfigurationError where its row has mistakes, no
    embedded AWS answers, or the CLI cannot be run.
    """
    if stage not in STAGES:
        raise UsageError(f"infra/settings.py has no stage '{stage}'{did_you_mean(stage, STAGES)}")
    # The app that the CLI starts checks it as well, but after a bootstrap, and amid the CLI's own output.
    check(STAGES[stage])
    errors_before = len(_health(endpoint)["server_errors"])
    ssm = client("ssm", endpoint)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainyard-cdk-") as folder:
        scratch = Path(folder)
        if not _has_parameter(ssm, BOOTSTRAP_PARAMETER):
            _say("bootstrapping the account")
            # Away from cdk.json: finding an app there, the CLI would synthesise it once for this alone.
            code = _cdk(["bootstrap", f"aws://{ACCOUNT_ID}/{REGION}", "--no-notices"], endpoint, scratch, cwd=scratch)
            if code:
                return code
        _say(f"synthesising stage '{stage}'")
        code = _cdk(
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
            endpoint,
            scratch,
            cwd=cdk_cli.ROOT,
        )
    if code:
        return code
    health = _health(endpoint)
    if len(health["server_errors"]) > errors_before:
        # The CLI tries again after a 500 and may then find nothing to do.
        _say(f"the embedded AWS failed inside, so this deployment proves nothing: {health['server_errors'][-1]}")
        return 1
    for resource_type in health["unproven"]:
        _say(f"on record only, there is no service behind it: {resource_type}")
    _say(f"deployed stage '{stage}' in {time.monotonic() - started:.0f} s")
    return 0


def _cdk(arguments: list[str], endpoint: str, scratch: Path, *, cwd: Path) -> int:
    """Run the CLI; what it is at on stderr, and the last it said where it fails."""
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        progress = _progress(line)
        if progress:
            _say(progress)

    code = cdk_cli.run(arguments, endpoint=endpoint, scratch=scratch, cwd=cwd, on_line=on_line)
    if code:
        sys.stderr.write("\n".join([*lines[-FAILURE_LINES:], f"cdk {arguments[0]} failed with exit code {code}\n"]))
    return code


_PROGRESS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Synthesis time: ([\d.]+)s"), "synthesised in {0} s"),
    (re.compile(r"\((\S+)\): deploying\.\.\. \[(\d+)/(\d+)\]"), "[{1}/{2}] {0}"),
)


def _progress(line: str) -> str | None:
    """What a line of the CLI's tells whoever waits, if anything; it writes several for each resource."""
    for pattern, text in _PROGRESS:
        match = pattern.search(line)
        if match:
            return text.format(*match.groups())
    return None


def _say(text: str) -> None:
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def _has_parameter(ssm: Any, name: str) -> bool:
    try:
        ssm.get_parameter(Name=name)
    except ClientError as error:
        if error.response["Error"]["Code"] == "ParameterNotFound":
            return False
        raise
    return True


def _health(endpoint: str) -> dict[str, Any]:
    """Raises ConfigurationError where no embedded AWS answers."""
    try:
        with urllib.request.urlopen(f"{endpoint}/trainyard/health", timeout=10) as answer:  # noqa: S310 - http, ours
            health: dict[str, Any] = json.load(answer)
            return health
    except (OSError, ValueError, urllib.error.URLError):
        raise ConfigurationError(f"no embedded AWS answers at {endpoint}", next_step="trainyard local up") from None
