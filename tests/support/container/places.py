"""Inputs of a test, local or on S3, and how a job reads or refuses them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.container.data.labelled_text import Table, read_table
from jobs.container.models.pretrained import model_folder
from tests.support.container.launching import Run

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

BUCKET = "inputs"


@dataclass(frozen=True)
class Place:
    """Return the location of a test's inputs."""

    folder: Path
    prefix: str | None
    """Return the S3 client, or None for local inputs."""
    s3: "S3Client | None"

    def at(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.prefix is None else f"s3://{BUCKET}/{self.prefix}/{name}"

    def put(self, name: str, content: bytes) -> str:
        if self.s3 is not None:
            self.s3.put_object(Bucket=BUCKET, Key=f"{self.prefix}/{name}", Body=content)
        else:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return self.at(name)

    def read(self, location: str, *columns: str) -> Table:
        return read_table(location, columns or ("text", "label"), s3=self._client)

    def model(self, location: str) -> Path:
        return model_folder(location, s3=self._client, scratch=self.folder / "tmp")

    def _client(self) -> "S3Client":
        assert self.s3 is not None, "a local input needs no S3"
        return self.s3


def refused(run: Run, model: Path, table: Path) -> str:
    """Return the one-line error of a job that cannot use its inputs."""
    launched = run.attempt(f"--model={model}", f"--train-data={table}", "--max-length=32", expect=1)
    assert "Traceback" not in launched.output
    errors = [line for line in launched.lines if "rror" in line]
    assert errors == launched.lines[-1:], launched.output
    return errors[0]
