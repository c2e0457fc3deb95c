"""Unpack a run's code, and see that it is what was submitted."""

from pathlib import Path
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.core.errors import NotFoundError
from jobs.core.locations import S3Location
from jobs.spec.code import fingerprint_of, read_archive, write_file

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
    files = read_archive(content, location=location, fingerprint=expected)
    for file, data in files:
        write_file(file, data, folder)
    return len(files)
