"""The code of a custom script: its files, fingerprint and location on S3, and the script's environment variables.

    s3://<run bucket>/<team>/code/<fingerprint>.tar.gz   the files, shared by all runs with the same code
    s3://<run bucket>/<team>/<run id>/code.json          one `CodeRecord`: the code of the run

The fingerprint covers names, contents and execute permissions, so equal files have the same fingerprint on any machine.
"""

import hashlib
import io
import json
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from jobs.core.errors import UsageError
from jobs.core.locations import S3, S3Location, stays_below

CODE = "code/"
"""Folder of a team's code, next to its runs. Run ids are longer, so the name cannot clash."""

CODE_RECORD = "code.json"

ARCHIVE = ".tar.gz"

MAX_CODE_BYTES = 100_000_000
"""Code is small; larger files are data, which belong in the inputs."""

MAX_CODE_FILES = 10_000

OWN_NAMES = ("jobs", "trainyard")
"""Top-level names that would shadow the platform's packages."""

_PACK_AGAIN = "aws s3 rm {}, then submit the spec again from the code's folder, which uploads the code again"


@dataclass(frozen=True, order=True)
class CodeFile:
    """One file of the code."""

    name: str
    """Relative to the folder, with slashes."""
    bytes: int
    sha256: str
    executable: bool


class CodeRecord(BaseModel):
    """The code that a run was submitted with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: str
    location: str
    folder: str
    """The packed folder, on the machine that submitted the run."""
    files: int
    bytes: int
    commit: str | None = None
    """Full hash of the folder's last git commit; None if it is not in a repository."""
    dirty: bool = False
    """Whether the folder differed from that commit."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """The code of one submission, ready to upload."""

    folder: Path
    files: tuple[CodeFile, ...]
    commit: str | None
    dirty: bool

    @property
    def fingerprint(self) -> str:
        return code_fingerprint(self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def location(self, run_bucket: str, team: str) -> S3Location:
        return S3Location(run_bucket, f"{team}/{CODE}{self.fingerprint}{ARCHIVE}")

    def record(self, location: S3Location) -> CodeRecord:
        return CodeRecord(
            fingerprint=self.fingerprint,
            location=str(location),
            folder=str(self.folder),
            files=len(self.files),
            bytes=self.bytes,
            commit=self.commit,
            dirty=self.dirty,
        )


def code_fingerprint(files: Iterable[CodeFile]) -> str:
    """Return 64 hex digits that identify these files."""
    content = [[file.name, file.sha256, file.executable] for file in sorted(files)]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def fingerprint_of(location: str) -> str:
    """Return the fingerprint in a location of packed code. Raises UsageError for any other location."""
    name = location.rpartition("/")[2]
    digits = name.removesuffix(ARCHIVE)
    if not location.startswith(S3) or digits == name or len(digits) != 64:
        raise UsageError(f"{location} is not code that `trainyard submit` packed")
    return digits


def is_packed(location: str) -> bool:
    """Return whether a spec's code is already packed on S3, instead of a local folder."""
    return location.startswith(S3)


def check_name(name: str) -> None:
    """Raise UsageError if a name in an archive leads out of its folder."""
    if name.startswith("/") or "\\" in name or not stays_below(name):
        raise UsageError(f"'{name}' is not a file name below the code's folder")


def read_archive(content: bytes, *, location: str, fingerprint: str) -> list[tuple[CodeFile, bytes]]:
    """Return the files of packed code with their contents.

    Raises UsageError if the archive is damaged or too large, a name leads out of its folder, or the content does not
    match `fingerprint`.
    """
    found = []
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for entry in archive:
                check_name(entry.name)
                total += entry.size
                if total > MAX_CODE_BYTES:
                    raise UsageError(f"{location} is not packed code: it has more than {MAX_CODE_BYTES / 1e6:.0f} MB")
                source = archive.extractfile(entry) if entry.isreg() else None
                if source is None:
                    raise UsageError(f"{location} is not packed code: '{entry.name}' is not a file")
                data = source.read()
                digest = hashlib.sha256(data).hexdigest()
                file = CodeFile(entry.name, bytes=len(data), sha256=digest, executable=bool(entry.mode & 0o100))
                found.append((file, data))
    # tarfile raises the last two for a damaged header.
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError) as error:
        raise UsageError(f"{location} is damaged: {error}", next_step=_PACK_AGAIN.format(location)) from None
    if code_fingerprint(file for file, _ in found) != fingerprint:
        raise UsageError(
            f"{location} is not the code that its run was submitted with", next_step=_PACK_AGAIN.format(location)
        )
    return found


def write_file(file: CodeFile, content: bytes, folder: Path) -> Path:
    """Write a file of packed code below a folder and return its path."""
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755 if file.executable else 0o644)
    return path


SCRIPT_VARIABLE = "TRAINYARD_SCRIPT"
"""The script's arguments that determine its result, as JSON; checkpoints are resumed only with the same values."""

OUTPUT_VARIABLE = "TRAINYARD_OUTPUT"
"""Folder whose files are uploaded to the run's output/."""

CHECKPOINTS_VARIABLE = "TRAINYARD_CHECKPOINTS"
"""Folder whose complete checkpoints are uploaded, and restored for the next attempt."""

INPUT_PREFIX = "TRAINYARD_INPUT_"
"""Prefix of the variable with an input's location; the input's name in upper case follows."""

PARAMETER_PREFIX = "TRAINYARD_PARAMETER_"
"""Prefix of the variable with a parameter's value; the parameter's name in upper case follows."""

NODE_VARIABLE = "TRAINYARD_NODE"
NNODES_VARIABLE = "TRAINYARD_NNODES"
MAIN_ADDRESS_VARIABLE = "TRAINYARD_MAIN_ADDRESS"


ENVIRONMENT_FILE = "environment.sh"
"""Shell lines in a node's scratch folder, with which `trainyard exec` gets the script's environment and folder."""


def input_variable(name: str) -> str:
    """Return the variable with the location of the input `name`."""
    return INPUT_PREFIX + name.upper().replace("-", "_")


def parameter_variable(name: str) -> str:
    """Return the variable with the value of the parameter `name`."""
    return PARAMETER_PREFIX + name.upper()
