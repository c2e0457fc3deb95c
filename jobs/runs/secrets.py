"""Find secrets in a folder of code or in a spec, by typical file names and by the form of the text.

Code and specs are stored on S3, where the whole team can read them, keys included.
"""

import fnmatch
import re
from collections.abc import Iterator
from typing import Any

from jobs.core.errors import UsageError
from jobs.core.urls import login_in
from jobs.spec.spec import JobSpec

_NAMES = (
    ".env",
    ".env.*",
    ".netrc",
    ".pypirc",
    ".git-credentials",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.keystore",
)

_HARMLESS = (".env.example", ".env.sample", ".env.template")

_FOLDERS = (".aws", ".ssh", ".gnupg")

_CONTENTS = {
    "a private key": re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    # The form of AWS's identifiers: IAM User Guide, "IAM identifiers", unique IDs (AKIA is an access key).
    "an AWS access key": re.compile(rb"(?<![A-Za-z0-9/+=])AKIA[A-Z2-7]{16}(?![A-Za-z0-9/+=])"),
    "a token of the Hugging Face Hub": re.compile(rb"(?<![A-Za-z0-9_])hf_[A-Za-z]{34}(?![A-Za-z0-9_])"),
    "a token of GitHub": re.compile(rb"(?<![A-Za-z0-9_])gh[pousr]_[A-Za-z0-9]{36}(?![A-Za-z0-9_])"),
}

_CONFIGURATION_FILES = (
    *(".gitmodules", ".condarc", "pip.conf", "pip.ini", "uv.toml", "poetry.toml", "pyproject.toml", "setup.cfg"),
    *("tox.ini", "pipfile", "environment.yml", "environment.yaml", ".npmrc"),
)
"""Files whose URLs are checked for logins. In other files most logins are examples."""

ENVIRONMENT_NEXT = (
    "put it into the team's secret (secret_variables in infra/settings.py), which sets environment variables of its "
    "jobs"
)

MAX_CHECKED_BYTES = 1_000_000
"""Larger files are not checked: they are data, in which any byte sequence may occur by chance."""


def secret_name(name: str) -> str | None:
    """Return why a file with this relative name looks like a secret, or None if it does not."""
    *folders, last = name.split("/")
    for folder in folders:
        if folder in _FOLDERS:
            return f"it is in {folder}"
    if last in _HARMLESS:
        return None
    if any(fnmatch.fnmatchcase(last.lower(), pattern) for pattern in _NAMES):
        return "its name is typical of key files"
    return None


def secret_content(content: bytes, name: str = "") -> str | None:
    """Return the kind of secret that a file seems to contain, or None. `name` decides whether URLs are checked."""
    is_configuration = name.rpartition("/")[2].lower() in _CONFIGURATION_FILES
    if is_configuration and (address := login_in(content.decode(errors="replace"))):
        return f"a login for {address}"
    return next((what for what, pattern in _CONTENTS.items() if pattern.search(content)), None)


def secret_text(text: str) -> str | None:
    """Return the kind of secret that a text seems to contain, logins in URLs included, or None."""
    if address := login_in(text):
        return f"a login for {address}"
    return secret_content(text.encode())


_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|(?:API|ACCESS|SECRET|PRIVATE)_KEY)$")

_SECRET_VALUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[^\s/][^\s]{7,}|[A-Za-z]{20,}")
"""Text without spaces that is no word, number or path: letters and digits, or many letters."""


def check_spec(spec: JobSpec) -> None:
    """Raise UsageError if a value of a spec seems to hold a secret."""
    for name, value in spec.env.items():
        if _SECRET_VARIABLE.search(name.upper()) and _SECRET_VALUE.fullmatch(value):
            raise UsageError(
                f"env.{name}: it seems to hold a secret, but the whole team can read a run's spec",
                next_step=ENVIRONMENT_NEXT,
            )
    for place, text in _texts(spec.model_dump(mode="json", exclude_defaults=True), ()):
        if (what := secret_text(text)) is not None:
            raise UsageError(
                f"{'.'.join(place)}: it seems to hold {what}, but the whole team can read a run's spec",
                next_step=ENVIRONMENT_NEXT,
            )


def _texts(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, (*place, str(name)))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, place)
