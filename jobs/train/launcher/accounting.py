"""The account that the main node keeps of an attempt: its record and the run's receipt on S3, and the budget.

The record (attempts/N.json) and the receipt over all attempts are written at the start, every half minute, and at the
end; so an attempt whose node was lost still has its last heartbeat. A run that nears its budget saves and stops.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ValidationError

from jobs.aws import s3 as object_store
from jobs.contract.budget import SAVE_SECONDS, Budget, Left, Spent, duration_seconds, reached, spent
from jobs.contract.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.contract.instance_types import InstanceType, instance_type
from jobs.contract.locations import S3Location
from jobs.contract.records import Attempt, Receipt
from jobs.contract.run import ATTEMPTS, RECEIPT
from jobs.train.accelerator import Accelerator
from jobs.train.batch_job import job_id
from jobs.train.channel import RankStatus
from jobs.train.launcher import shutdown
from jobs.train.launcher.outcome import End
from jobs.train.launcher.request import Launch

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

HEARTBEAT_SECONDS = 30.0

_LAST_HEARTBEAT_SECONDS = 5.0

NO_BUDGET = Budget()

_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
"""The name of a record, without its ending."""

State = Literal["running", "interrupted", "succeeded", "failed"]


class AttemptRecord:
    """The record of this attempt, kept up to date on S3 from `start` to `finish`."""

    def __init__(
        self, launch: Launch, accelerator: Accelerator, scratch: Path, *, waited_instance_seconds: float
    ) -> None:
        """Number the attempt in its run. Raises TrainyardError where the run cannot be read."""
        self._s3 = object_store.connect()
        self._launch = launch
        self._scratch = scratch
        self._clock = SteadyClock()
        self._recorded = RecordedAttempts(self._s3, launch.run)
        job = job_id()
        number = self._recorded.next_number(job_id=job, attempt=launch.attempt)
        now = self._clock.now()
        self._attempt = Attempt(
            number=number,
            job_id=job,
            started_at=now,
            last_seen_at=now,
            instance_type=launch.instance.name,
            capacity=launch.capacity,
            accelerator=accelerator.name,
            nnodes=launch.node.nnodes,
            world_size=launch.world_size,
            waited_instance_seconds=waited_instance_seconds,
        )
        self._earlier: list[Attempt] | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="attempt-record", daemon=True)

    @property
    def number(self) -> int:
        """The number of the attempt in its run."""
        return self._attempt.number

    def start(self) -> None:
        """Begin the record. Raises TrainyardError where the run cannot be written to: better now than hours later."""
        self._write("running")
        self._thread.start()

    def spent(self) -> Spent:
        """Return what the run has taken up to now, over all its attempts."""
        now = self._attempt.model_copy(update={"last_seen_at": self._clock.now()})
        if self._earlier is None:  # they do not change any more; S3 may fail when it is asked again
            self._earlier = [item for item in self._recorded.read() if item.number != now.number]
        return spent([*self._earlier, now])

    def finish(self, end: End) -> None:
        """Write how the attempt ended. Raises TrainyardError where S3 does not take that the run is done."""
        self._finished.set()
        if self._thread.is_alive():
            # No longer: it may hang in tries of a service that is gone, and Batch's grace time runs.
            self._thread.join(_LAST_HEARTBEAT_SECONDS)
        state: State = {0: "succeeded", INTERRUPTED_EXIT_CODE: "interrupted"}.get(end.code, "failed")  # type: ignore[assignment]
        ended = {"finished_at": self._clock.now(), "exit_code": end.code, "reason": end.reason}
        self._attempt = self._attempt.model_copy(update=ended)
        try:
            self._write(state)
        except TrainyardError as error:
            if end.code == 0:
                raise
            # The code decides whether Batch starts the job again; a record that is late must not change that.
            log.warning("warning: the attempt's record is unfinished: %s", error.args[0])

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
                "last_seen_at": self._clock.now(),
                "resumed_from_step": status.resumed_from_step,
                "last_step": status.last_step,
                "changed": status.changed,
            }
        )
        run = self._launch.run
        object_store.write(self._s3, run / ATTEMPTS / f"{self.number}.json", _json(self._attempt))
        attempts = {self.number: self._attempt}
        for earlier in self._recorded.read():
            attempts.setdefault(earlier.number, earlier)
        bill = receipt(
            run,
            [attempts[number] for number in sorted(attempts)],
            job=self._launch.kind.name,
            instance=self._launch.instance,
            state=state,
            result=status.result,
            budget=self._launch.options.budget,
            on_instance=self._launch.on_instance,
        )
        object_store.write(self._s3, run / RECEIPT, _json(bill))


class SteadyClock:
    """Tells the time, in UTC, as its first reading of the clock plus what has passed since.

    A clock that is set meanwhile would bill hours that nobody took, or give some back.
    """

    def __init__(self) -> None:
        self._first = datetime.now(timezone.utc)
        self._since = time.monotonic()

    def now(self) -> datetime:
        return self._first + timedelta(seconds=time.monotonic() - self._since)


class RecordedAttempts:
    """The records of a run's attempts on S3. One that cannot be read is left out, with a warning, and ends nothing."""

    def __init__(self, s3: "S3Client", run: S3Location) -> None:
        self._s3 = s3
        self._run = run
        self._warned: set[str] = set()

    def read(self) -> list[Attempt]:
        """Return all that can be read. Raises TrainyardError where S3 does not give them."""
        return [attempt for attempt in self._by_name().values() if attempt is not None]

    def next_number(self, *, job_id: str | None, attempt: int) -> int:
        """Return the number that an attempt has in its run, which may have begun as another Batch job, on Spot.

        It follows all that the jobs before have recorded. They have ended, so the answer is the same however often it
        is asked for. What cannot be read keeps its number, or it would be written over.
        Raises TrainyardError where S3 does not give the records.
        """
        before = [0]
        for name, recorded in self._by_name().items():
            if recorded is None:
                before += [int(stem) for stem in [name.removesuffix(".json")] if _NUMBER.fullmatch(stem)]
            elif recorded.job_id != job_id:
                before.append(recorded.number)
        return max(before) + attempt

    def _by_name(self) -> dict[str, Attempt | None]:
        found: dict[str, Attempt | None] = {}
        for name in object_store.sizes(self._s3, self._run / ATTEMPTS):
            content = object_store.read(self._s3, self._run / ATTEMPTS / name)
            if content is not None:
                found[name] = self._parsed(name, content)
        return found

    def _parsed(self, name: str, content: bytes) -> Attempt | None:
        """Return the record; None where it is none. What only a later release writes is left out of it."""
        try:
            fields = json.loads(content)
            unknown = sorted(set(fields) - set(Attempt.model_fields))
            attempt = Attempt.model_validate({key: fields[key] for key in fields if key not in unknown})
            spent([attempt])  # an older release may not know its instance type
        except (TrainyardError, ValueError, TypeError, RecursionError):
            self._warn(name, "cannot be read: it is left out, and so is what that attempt took")
            return None
        if unknown:
            self._warn(name, f"holds what this release does not know ({', '.join(unknown)}): that is left out")
        return attempt

    def _warn(self, name: str, what: str) -> None:
        """Warn once of each record: they are read every half minute."""
        if name not in self._warned:
            self._warned.add(name)
            log.warning("warning: %s %s", self._run / ATTEMPTS / name, what)


class BudgetWatch:
    """Stops the run before it passes its budget."""

    def __init__(self, record: AttemptRecord, launch: Launch) -> None:
        self._record = record
        self._launch = launch
        self._reason: str | None = None
        self._timer: threading.Timer | None = None

    def start(self) -> End | None:
        """Return how the attempt ends where the budget is used up already; None where it may go on.

        The ranks are then asked to save and stop before it is used up.
        """
        left = self._left()
        if left is None:
            return None
        seconds = left.seconds - SAVE_SECONDS
        if seconds <= 0:
            return self._end(left)
        self._timer = threading.Timer(seconds, self._stop_ranks, [left])
        self._timer.daemon = True
        self._timer.start()
        return None

    def stop(self, end: End) -> End:
        """Return how the attempt ended, which is `end` unless the budget was the cause of it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reason is not None and end.code == INTERRUPTED_EXIT_CODE:
            return End(code=1, reason=self._reason, cause="own")  # another attempt would not get further
        return end

    def _left(self) -> Left | None:
        launch = self._launch
        if launch.options.budget == NO_BUDGET:
            return None
        return launch.options.budget.left(
            self._record.spent(), row=launch.instance, capacity=launch.capacity, nnodes=launch.node.nnodes
        )

    def _end(self, left: Left) -> End:
        run_id = self._launch.run.key.strip("/").rpartition("/")[2]
        self._reason = reached(left, self._record.spent(), run_id=run_id, capacity=self._launch.capacity)
        return End(code=1, reason=self._reason, cause="own")

    def _stop_ranks(self, left: Left) -> None:
        """End as before a reclaim: on SIGTERM the launcher asks the ranks to save and stop."""
        self._end(left)
        shutdown.end_self(f"budget: {left.key} {left.limit:g} is nearly used up")


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
    """Add up what the attempts took, at the recorded prices, which makes it an estimate.

    `on_instance` is False where the job runs on some other machine than the instance type it names.
    """
    team, _, run_id = run.key.strip("/").rpartition("/")
    so_far = spent(attempts)
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
        estimate_note=_estimate_note(attempts, instance, on_instance=on_instance),
        result=dict(result),
    )


def _estimate_note(attempts: list[Attempt], instance: InstanceType, *, on_instance: bool) -> str:
    """Say what the receipt's figures are an estimate of, and what they leave out."""
    rows = {attempt.instance_type: instance_type(attempt.instance_type) for attempt in attempts}
    prices = " and ".join(f"the {row.name} prices recorded on {row.price_date}" for row in rows.values())
    note = (
        f"An estimate: instance hours times {prices}. It leaves out the instance's start-up, storage and transfer, and "
        "Spot prices change."
    )
    if on_instance:
        return note
    return (
        f"{note} These minutes were not spent on {instance.name} but on the machine that stood in for it "
        f"({attempts[-1].accelerator}); there they would have been others."
    )


def _json(model: BaseModel) -> bytes:
    return (json.dumps(model.model_dump(mode="json"), indent=2) + "\n").encode()
