"""Unpack a run's code, and see that it is what was submitted."""

import hashlib
import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.contract.code import CodeFile, check_name, code_fingerprint, fingerprint_of
from jobs.contract.errors import NotFoundError, UsageError
from jobs.contract.locations import S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def unpack(s3: "S3Client", location: str, folder: Path) -> int:
    """Write the code at `location` below `folder`, and return the number of files.

    Raises NotFoundError where there is none, UsageError where it is not what its name says.
    """
    expected = fingerprint_of(location)
    content = object_store.read(s3, S3Location.parse(location))
    if content is None:
        raise NotFoundError(f"the code of this run is gone: {location}", next_step="submit the spec again")
    files = []
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for entry in archive:
                check_name(entry.name)
                source = archive.extractfile(entry) if entry.isreg() else None
                if source is None:
                    raise UsageError(f"{location}: '{entry.name}' is no file")
                path = folder / entry.name
                path.parent.mkdir(parents=True, exist_ok=True)
                data = source.read()
                path.write_bytes(data)
                executable = bool(entry.mode & 0o100)
                path.chmod(0o755 if executable else 0o644)
                digest = hashlib.sha256(data).hexdigest()
                files.append(CodeFile(name=entry.name, bytes=len(data), sha256=digest, executable=executable))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(f"{location} is damaged: {error}", next_step="delete it, and submit the spec again") from None
    if code_fingerprint(files) != expected:
        raise UsageError(f"{location} holds other code than its name says", next_step="delete it, and submit again")
    return len(files)
