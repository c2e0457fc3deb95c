"""Claims decide who goes on with a run after a job of it has ended: whoever put one beside the run's files first.

SubmitJob has no idempotency token, and two jobs must never write one run. So whoever submits the next job first writes
`moves/JOB.json`, which S3 does only where there is none: `trainyard resume`, or the function that moves a run to
On-Demand (infra/observability/functions/move_to_on_demand.py), which holds its claims in the same way.
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
"""After so long a claim without a successor counts as abandoned. The function that moves runs has the same number."""


class _Held(BaseModel):
    """A claim as it lies there. One that cannot be read names no successor: it is taken over once it is abandoned."""

    claimed_at: int = 0
    """Nanoseconds since the epoch: they make each claim's ETag its own."""
    successor: str | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim on going on after one job."""

    aws: Aws
    run_id: str
    place: S3Location

    @classmethod
    def of(cls, aws: Aws, run_id: str, location: S3Location, job_id: str) -> "Claim":
        return cls(aws=aws, run_id=run_id, place=location / f"{CLAIMS}{job_id}.json")

    def take(self) -> bool:
        """Take the claim, and return whether it was taken over from somebody who seems to have abandoned it.

        There may be a job of such a claim.
        Raises UsageError where the run goes on already, or somebody else is at it.
        """
        if self._write(IfNoneMatch="*"):
            return False
        held = self.aws.s3.get_object(Bucket=self.place.bucket, Key=self.place.key)
        found = read_record(_Held, held["Body"].read(), place=self.place)
        successor = found.successor if found is not None else None
        if successor:
            raise UsageError(
                f"{self.run_id} goes on already, as job {successor}", next_step=f"trainyard status {self.run_id}"
            )
        if time.time() - held["LastModified"].timestamp() < CLAIM_SECONDS or not self._write(IfMatch=held["ETag"]):
            raise UsageError(
                f"{self.run_id} is being resumed, or moved to On-Demand, by somebody else at this moment",
                next_step=f"trainyard status {self.run_id}; where nothing comes of it, resume it in two minutes",
            )
        return True

    def record(self, successor: str) -> None:
        """Write down the job that goes on."""
        body = json.dumps({"claimed_at": time.time_ns(), "successor": successor})
        self.aws.s3.put_object(Bucket=self.place.bucket, Key=self.place.key, Body=body.encode())

    def release(self) -> None:
        """Delete the claim, since no job came of it."""
        self.aws.s3.delete_object(Bucket=self.place.bucket, Key=self.place.key)

    def _write(self, **condition: str) -> bool:
        # The time makes each claim's ETag its own: of two that take one over, one succeeds.
        body = json.dumps({"claimed_at": time.time_ns(), "successor": None})
        try:
            self.aws.s3.put_object(
                Bucket=self.place.bucket,
                Key=self.place.key,
                Body=body.encode(),
                **condition,  # type: ignore[arg-type]  # one of two conditions, by its name
            )
        except Exception as error:
            # The second: two wrote at the very same time, and the other one won.
            if error_code(error) in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True
