"""Scripts of users, packed as by `trainyard submit`, for runs of the real launcher."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.runs.code_archive import pack_folder, write_archive
from jobs.spec.kinds.script import Script

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

TEAM = "research"

REPOSITORY = Path(__file__).parents[3]

PACKAGES = {"PYTHONPATH": str(Path(sys.prefix) / "scripts")}
"""The variables with which a process finds the packages of requirements-scripts.txt."""

WARM: dict[str, Any] = {"kind": "script", "script_ranks": "forked"}
"""Options for scripts that import PyTorch or transformers, if the test is not about the imports."""


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def script_flags(s3: "S3Client", folder: Path, command: str, **arguments: object) -> Sequence[str]:
    """Upload the code of a folder, and return the flags of a run of its script."""
    pack = pack_folder(folder)
    place = pack.location("runs", TEAM)
    archive = io.BytesIO()
    write_archive(pack, archive)
    s3.put_object(Bucket=place.bucket, Key=place.key, Body=archive.getvalue())
    return Script.model_validate({"code": str(place), "command": command, **arguments}).to_flags()
