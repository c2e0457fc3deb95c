"""Scripts of users, packed as by `trainyard submit`, for runs of the real launcher."""

import functools
import io
import re
import subprocess
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


@functools.cache
def uv_settings() -> dict[str, Any]:
    """Return variables that let uv use this machine's package index: uv does not read pip's settings."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {
        name.rpartition(".")[2]: value for name, value in re.findall(r"^(\S+)='(.*)'$", listed.stdout, re.MULTILINE)
    }
    names = {"UV_DEFAULT_INDEX": "index-url", "UV_FIND_LINKS": "find-links"}
    return {name: found[of_pip] for name, of_pip in names.items() if of_pip in found}


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
