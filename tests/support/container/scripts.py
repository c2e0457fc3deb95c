"""Scripts of users, as `trainyard submit` packs them, for runs of the real launcher."""

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
"""What lets a process find the packages of requirements-scripts.txt."""

WARM: dict[str, Any] = {"kind": "script", "script_ranks": "forked"}
"""For a run of a script that imports PyTorch or transformers, where how it comes to them is not what is tested."""


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def script_flags(s3: "S3Client", folder: Path, command: str, **arguments: object) -> Sequence[str]:
    """The flags of a run of the folder's script, whose code lies on S3 then."""
    pack = pack_folder(folder)
    place = pack.location("runs", TEAM)
    archive = io.BytesIO()
    write_archive(pack, archive)
    s3.put_object(Bucket=place.bucket, Key=place.key, Body=archive.getvalue())
    return Script.model_validate({"code": str(place), "command": command, **arguments}).to_flags()
