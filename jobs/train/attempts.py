"""What an attempt leaves behind: attempts/N.json, from its start, and the receipt over all attempts.

The launcher of the main node writes both when it starts, every half minute, and when it ends; so an attempt whose node
was lost still has the last sign of its life.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ValidationError

from jobs.aws import s3 as object_store
from jobs.contract.budget import Budget, Spent, duration_seconds, spent
from jobs.contract.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.contract.instance_types import InstanceType, instance_type
from jobs.contract.locations import S3Location
from jobs.contract.queues import Capacity
from jobs.contract.records import Attempt, Receipt
from jobs.contract.run import ATTEMPTS, RECEIPT

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

HEARTBEAT_SECONDS = 30.0

_LAST_BEAT_SECONDS = 5.0

NO_BUDGET = Budget()

State = Literal["running", "interrupted", "succeeded", "failed"]


class RankStatus(BaseModel):
    """How far the ranks are: rank 0 writes it into the scratch folder, the launcher reads it."""

    resumed_from_step: int = 0
    last_step: int = 0
    changed: dict[str, tuple[Any, Any]] = {}
    result: dict[str, Any] = {}

    def write(self, scratch: Path) -> None:
        part = scratch / "status.part"
        part.write_text(self.model_dump_json())
        part.replace(scratch / "status.json")

    @classmethod
    def read(cls, scratch: Path) -> "RankStatus":
        path = scratch / "status.json"
        return cls.model_validate_json(path.read_bytes()) if path.exists() else cls()


class AttemptRecord:
    """The record of this attempt, kept up to date on S3 from `start` to `finish`."""

    def __init__(
        self,
        s3: "S3Client",
        run: S3Location,
        *,
        job: str,
        instance: InstanceType,
        number: int,
        job_id: str | None,
        accelerator: str,
        capacity: Capacity | None,
        budget: Budget,
        on_instance: bool,
        nnodes: int,
        world_size: int,
        waited_instance_seconds: float,
        scratch: Path,
    ) -> None:
        """`on_instance` is False where the job runs on some other machine than the instance type it names."""
        now = datetime.now(timezone.utc)
        self._attempt = Attempt(
            number=number,
            job_id=job_id,
            started_at=now,
            last_seen_at=now,
            instance_type=instance.name,
            capacity=capacity,
            accelerator=accelerator,
            nnodes=nnodes,
            world_size=world_size,
            waited_instance_seconds=waited_instance_seconds,
        )
        self._s3 = s3
        self._run = run
        self._job = job
        self._instance = instance
        self._budget = budget
        self._on_instance = on_instance
        self._scratch = scratch
        self._result: dict[str, Any] = {}
        self._earlier: list[Attempt] | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="attempt-record", daemon=True)

    def start(self) -> None:
        """Raises TrainyardError where the run cannot be written to: better now than after hours of training."""
        self._write("running")
        self._thread.start()

    def spent(self) -> Spent:
        """What the run has taken up to now, over all its attempts."""
        now = self._attempt.model_copy(update={"last_seen_at": datetime.now(timezone.utc)})
        if self._earlier is None:  # they do not change any more; S3 may fail when it is asked again
            self._earlier = [item for item in _recorded(self._s3, self._run) if item.number != now.number]
        return spent([*self._earlier, now])

    def finish(self, exit_code: int, reason: str | None) -> None:
        """Raises TrainyardError where the run cannot be written to."""
        self._finished.set()
        if self._thread.is_alive():
            # No longer: it may hang in tries of a service that is gone, and Batch's grace time runs.
            self._thread.join(_LAST_BEAT_SECONDS)
        state: State = {0: "succeeded", INTERRUPTED_EXIT_CODE: "interrupted"}.get(exit_code, "failed")  # type: ignore[assignment]
        ended = {"finished_at": datetime.now(timezone.utc), "exit_code": exit_code, "reason": reason}
        self._attempt = self._attempt.model_copy(update=ended)
        self._write(state)

    def _beat(self) -> None:
        while not self._finished.wait(HEARTBEAT_SECONDS):
            try:
                self._write("running")
            except (TrainyardError, ValidationError, OSError) as error:  # noqa: PERF203 - one round in half a minute
                log.warning("warning: the attempt's record is late: %s", str(error).splitlines()[0])

    def _write(self, state: State) -> None:
        status = RankStatus.read(self._scratch)
        self._attempt = self._attempt.model_copy(
            update={
                "last_seen_at": datetime.now(timezone.utc),
                "resumed_from_step": status.resumed_from_step,
                "last_step": status.last_step,
                "changed": status.changed,
            }
        )
        place = self._run / ATTEMPTS / f"{self._attempt.number}.json"
        object_store.write(self._s3, place, _json(self._attempt))
        attempts = {self._attempt.number: self._attempt}
        for earlier in _recorded(self._s3, self._run):
            attempts.setdefault(earlier.number, earlier)
        bill = receipt(
            self._run,
            [attempts[number] for number in sorted(attempts)],
            job=self._job,
            instance=self._instance,
            state=state,
            result=status.result,
            budget=self._budget,
            on_instance=self._on_instance,
        )
        object_store.write(self._s3, self._run / RECEIPT, _json(bill))


def receipt(
    run: S3Location,
    attempts: list[Attempt],
    *,
    job: str,
    instance: InstanceType,
    state: State,
    result: Mapping[str, Any],
    budget: Budget = NO_BUDGET,
    on_instance: bool,
) -> Receipt:
    """What the attempts took. Times the recorded prices, which makes it an estimate; `estimate_note` says of what."""
    team, _, run_id = run.key.strip("/").rpartition("/")
    so_far = spent(attempts)
    rows = {attempt.instance_type: instance_type(attempt.instance_type) for attempt in attempts}
    prices = " and ".join(f"the {row.name} prices recorded on {row.price_date}" for row in rows.values())
    note = (
        f"An estimate: instance hours times {prices}. It leaves out the instance's start-up, storage and transfer, and "
        "Spot prices change."
    )
    if not on_instance:
        note += (
            f" These minutes were not spent on {instance.name} but on the machine that stood in for it "
            f"({attempts[-1].accelerator}); there they would have been others."
        )
    return Receipt(
        run_id=run_id,
        team=team,
        job=job,
        state=state,
        attempts=attempts,
        duration_seconds=round(sum(duration_seconds(attempt) for attempt in attempts), 3),
        instance_hours=round(so_far.instance_hours, 6),
        instance_type=instance.name,
        on_demand_usd=round(spent(attempts, all_on="on-demand").usd, 6),
        spot_usd=round(spent(attempts, all_on="spot").usd, 6),
        estimated_usd=round(so_far.usd, 6),
        budget=budget.text(so_far),
        price_date=instance.price_date,
        price_source=instance.price_source,
        estimate_note=note,
        result=dict(result),
    )


def attempt_number(environment: Mapping[str, str] = os.environ) -> int:
    """Of the Batch job: it counts from 1."""
    return int(environment.get("AWS_BATCH_JOB_ATTEMPT", "1"))


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Of the Batch job, without the number of its node or child; None outside Batch."""
    return re.split("[#:]", environment.get("AWS_BATCH_JOB_ID", ""))[0] or None


def number_in_run(s3: "S3Client", run: S3Location, *, job_id: str | None, attempt: int) -> int:
    """What number an attempt has in its run, which may have begun as another Batch job, on Spot.

    It follows all that the jobs before have recorded. They have ended, so the answer is the same however often it is
    asked for. Raises TrainyardError where the run cannot be read.
    """
    before = [recorded.number for recorded in _recorded(s3, run) if recorded.job_id != job_id]
    return max(before, default=0) + attempt


def _recorded(s3: "S3Client", run: S3Location) -> Iterator[Attempt]:
    for name in object_store.sizes(s3, run / ATTEMPTS):
        content = object_store.read(s3, run / ATTEMPTS / name)
        if content is not None:
            yield Attempt.model_validate_json(content)


def _json(model: BaseModel) -> bytes:
    return (json.dumps(model.model_dump(mode="json"), indent=2) + "\n").encode()
