"""Secrets in a folder of code: files that are called as keys are, and text that has the form of one.

What is packed is kept on S3, readable for the whole team, so a key in it would be known to all of them.
"""

import fnmatch
import re

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
    # The form of AWS's identifiers: IAM User Guide, "IAM identifiers", unique IDs (AKIA: an access key).
    "an AWS access key": re.compile(rb"(?<![A-Za-z0-9/+=])AKIA[A-Z2-7]{16}(?![A-Za-z0-9/+=])"),
    "a token of the Hugging Face Hub": re.compile(rb"(?<![A-Za-z0-9_])hf_[A-Za-z]{34}(?![A-Za-z0-9_])"),
    "a token of GitHub": re.compile(rb"(?<![A-Za-z0-9_])gh[pousr]_[A-Za-z0-9]{36}(?![A-Za-z0-9_])"),
}

MAX_LOOKED_AT_BYTES = 1_000_000
"""Larger files are data, in which some bytes look like anything."""


def secret_name(name: str) -> str | None:
    """Return why a file of this relative name is taken for a secret; None where it is not."""
    *folders, last = name.split("/")
    for folder in folders:
        if folder in _FOLDERS:
            return f"it lies in {folder}"
    if last in _HARMLESS:
        return None
    if any(fnmatch.fnmatchcase(last.lower(), pattern) for pattern in _NAMES):
        return "it is called as files of keys are"
    return None


def secret_content(content: bytes) -> str | None:
    """Return what secret a file's content seems to have; None where it has none."""
    return next((what for what, pattern in _CONTENTS.items() if pattern.search(content)), None)
