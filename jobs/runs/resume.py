"""Claim the right to continue a run after one of its jobs has ended, so that only one successor is submitted.

SubmitJob has no idempotency token, and two jobs must never write to one run. Before it submits the next job, a program
therefore creates `moves/JOB.json`, which S3 allows only once. Both `trainyard resume` and the function that moves runs
to On-Demand (infra/observability/functions/move_to_on_demand.py) do this.
"""

import json
import time
from dataclasses import dataclass

from pydantic import BaseModel

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.records import read_record
from jobs.core.retries import CLAIMS

CLAIM_SECONDS = 120
"""Age at which a claim without a successor counts as abandoned. Must equal the number in the function."""


class _Held(BaseModel):
    """A stored claim. A claim that cannot be read names no successor, and can be taken over once it is abandoned."""

    claimed_at: int = 0
    """Nanoseconds since the epoch, which make each claim's ETag unique."""
    successor: str | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim to continue a run after one of its jobs."""

    aws: Aws
    run_id: str
    place: S3Location

    @classmethod
    def of(cls, aws: Aws, run_id: str, location: S3Location, job_id: str) -> "Claim":
        return cls(aws=aws, run_id=run_id, place=location / f"{CLAIMS}{job_id}.json")

    def take(self) -> bool:
        """Take the claim. Return whether it was taken over from a program that seems to have abandoned it.

        That program may have submitted a job.
        Raises UsageError if the run already continues, or is being continued by another program.
        """
        if self._write(IfNoneMatch="*"):
            return False
        held = self.aws.s3.get_object(Bucket=self.place.bucket, Key=self.place.key)
        found = read_record(_Held, held["Body"].read(), place=self.place)
        successor = found.successor if found is not None else None
        if successor:
            raise UsageError(
                f"{self.run_id} already continues as job {successor}", next_step=f"trainyard status {self.run_id}"
            )
        if time.time() - held["LastModified"].timestamp() < CLAIM_SECONDS or not self._write(IfMatch=held["ETag"]):
            raise UsageError(
                f"{self.run_id} is just being resumed, or moved to On-Demand, by someone else",
                next_step=f"trainyard status {self.run_id}; if no job appears, resume it again in two minutes",
            )
        return True

    def record(self, successor: str) -> None:
        """Record the job that continues the run."""
        body = json.dumps({"claimed_at": time.time_ns(), "successor": successor})
        self.aws.s3.put_object(Bucket=self.place.bucket, Key=self.place.key, Body=body.encode())

    def release(self) -> None:
        """Delete the claim, because no job was submitted."""
        self.aws.s3.delete_object(Bucket=self.place.bucket, Key=self.place.key)

    def _write(self, **condition: str) -> bool:
        # The time makes the ETag unique: if two programs take over the same claim, only one succeeds.
        body = json.dumps({"claimed_at": time.time_ns(), "successor": None})
        try:
            self.aws.s3.put_object(
                Bucket=self.place.bucket,
                Key=self.place.key,
                Body=body.encode(),
                **condition,  # type: ignore[arg-type]  # IfNoneMatch or IfMatch
            )
        except Exception as error:
            # ConditionalRequestConflict: both wrote at the same time, and the other program won.
            if error_code(error) in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True
