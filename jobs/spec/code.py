"""The code of a script of one's own: which files a folder gives, what they are called together, where they lie.

    s3://<run bucket>/<team>/code/<fingerprint>.tar.gz   the files, once for all runs that have the same
    s3://<run bucket>/<team>/<run id>/code.json          one `CodeRecord`: which of them the run has

The fingerprint is that of names, contents and the right to be executed, so the same files have the same anywhere.
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
"""Folder of a team's code, beside its runs; no run's id is that short."""

CODE_RECORD = "code.json"

ARCHIVE = ".tar.gz"

MAX_CODE_BYTES = 100_000_000
"""Code is small; what is larger is data, which a run reads as an input."""

MAX_CODE_FILES = 10_000

OWN_NAMES = ("jobs", "trainyard")
"""Names at the top of a folder that would stand in the way of the platform's own packages."""


_PACK_AGAIN = "aws s3 rm {}, then submit the spec again from the folder of the code: it is packed and uploaded again"


@dataclass(frozen=True, order=True)
class CodeFile:
    """One file of the code."""

    name: str
    """Relative to the folder, with slashes."""
    bytes: int
    sha256: str
    executable: bool


class CodeRecord(BaseModel):
    """What a run was submitted with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: str
    location: str
    folder: str
    """The folder that was packed, on the machine that it was submitted from."""
    files: int
    bytes: int
    commit: str | None = None
    """The last git commit of the folder, in full; None: it is in no repository."""
    dirty: bool = False
    """True: the folder differed from that commit."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """The code of one submission, ready to be uploaded."""

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
    """Return 64 digits that tell these files from all others."""
    content = [[file.name, file.sha256, file.executable] for file in sorted(files)]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def fingerprint_of(location: str) -> str:
    """Return the fingerprint of the code that lies at a location. Raises UsageError where that is none of code."""
    name = location.rpartition("/")[2]
    digits = name.removesuffix(ARCHIVE)
    if not location.startswith(S3) or digits == name or len(digits) != 64:
        raise UsageError(f"{location} is no code that `trainyard submit` has packed")
    return digits


def is_packed(location: str) -> bool:
    """Return whether a spec's code is that of a run that was submitted, and no folder."""
    return location.startswith(S3)


def check_name(name: str) -> None:
    """Raise UsageError where a name of an archive leads out of its folder."""
    if name.startswith("/") or "\\" in name or not stays_below(name):
        raise UsageError(f"'{name}' is no name of a file below a folder of code")


def read_archive(content: bytes, *, location: str, fingerprint: str) -> list[tuple[CodeFile, bytes]]:
    """Return the files of packed code with their contents.

    Raises UsageError if the archive is damaged or too large, if a name leads out of its folder, or if it holds other
    code than `fingerprint` says.
    """
    found = []
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for entry in archive:
                check_name(entry.name)
                total += entry.size
                if total > MAX_CODE_BYTES:
                    raise UsageError(f"{location} is no packed code: it has more than {MAX_CODE_BYTES / 1e6:.0f} MB")
                source = archive.extractfile(entry) if entry.isreg() else None
                if source is None:
                    raise UsageError(f"{location} is no packed code: '{entry.name}' is not a file")
                data = source.read()
                digest = hashlib.sha256(data).hexdigest()
                file = CodeFile(entry.name, bytes=len(data), sha256=digest, executable=bool(entry.mode & 0o100))
                found.append((file, data))
    # tarfile lets the last two out for a damaged header.
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError) as error:
        raise UsageError(f"{location} is damaged: {error}", next_step=_PACK_AGAIN.format(location)) from None
    if code_fingerprint(file for file, _ in found) != fingerprint:
        raise UsageError(
            f"{location} holds other code than its run was submitted with", next_step=_PACK_AGAIN.format(location)
        )
    return found


def write_file(file: CodeFile, content: bytes, folder: Path) -> Path:
    """Write a file of packed code below a folder, and return its path."""
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755 if file.executable else 0o644)
    return path


SCRIPT_VARIABLE = "TRAINYARD_SCRIPT"
"""What decides the script's result, as JSON: its checkpoints are resumed with the same only."""

OUTPUT_VARIABLE = "TRAINYARD_OUTPUT"
"""The folder whose files are kept on S3, below the run's output/."""

CHECKPOINTS_VARIABLE = "TRAINYARD_CHECKPOINTS"
"""The folder whose complete checkpoints are kept on S3, and are there again in the next attempt."""

INPUT_PREFIX = "TRAINYARD_INPUT_"
"""Begins the variable that says where an input lies, followed by its name in capitals."""

PARAMETER_PREFIX = "TRAINYARD_PARAMETER_"
"""Begins the variable that holds a parameter, followed by its name in capitals."""

NODE_VARIABLE = "TRAINYARD_NODE"
NNODES_VARIABLE = "TRAINYARD_NNODES"
MAIN_ADDRESS_VARIABLE = "TRAINYARD_MAIN_ADDRESS"


def input_variable(name: str) -> str:
    """Return the variable that says where the input `name` lies."""
    return INPUT_PREFIX + name.upper().replace("-", "_")


def parameter_variable(name: str) -> str:
    """Return the variable that holds the parameter `name`."""
    return PARAMETER_PREFIX + name.upper()
