"""Account for an attempt on the main node: write its record and the run's receipt to S3, and watch the budget.

The record (attempts/N.json) and the receipt over all attempts are written at the start, every 30 seconds, and at the
end, so that an attempt whose node is lost leaves its last heartbeat. A run that nears its budget saves and stops.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from jobs.aws import s3 as object_store
from jobs.container.channel import RankStatus, read_collected, read_result, read_verdict
from jobs.container.environment import job_id, ran_with
from jobs.container.instance import zone
from jobs.container.launcher.outcome import End
from jobs.container.launcher.request import Launch
from jobs.container.launcher.utilization import Utilization
from jobs.container.rank import one_line
from jobs.container.saving import interruption as shutdown
from jobs.container.saving.manifest import complete_steps, list_steps
from jobs.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.core.instance_types import InstanceType, instance_type
from jobs.core.locations import S3Location
from jobs.core.records import Attempt, Receipt, read_attempt
from jobs.core.run import ATTEMPTS, CHECKPOINTS, RECEIPT, UTILIZATION, recorded_number
from jobs.money.budget import SAVE_SECONDS, Budget, RemainingBudget, Spent, budget_stop_reason, spent, usd_per_hour
from jobs.money.receipt import sums

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

HEARTBEAT_SECONDS = 30.0

_LAST_HEARTBEAT_SECONDS = 5.0

NO_BUDGET = Budget()

State = Literal["running", "interrupted", "succeeded", "failed"]


class AttemptRecord:
    """The record of this attempt, kept up to date on S3 from `start` to `finish`."""

    def __init__(
        self,
        launch: Launch,
        *,
        accelerator: str,
        scratch: Path,
        utilization: Utilization,
        waited_instance_seconds: float = 0.0,
    ) -> None:
        """Find the number of the attempt in its run. Raises TrainyardError if the run's records cannot be read."""
        self._s3 = object_store.connect()
        self._launch = launch
        self._scratch = scratch
        self._utilization = utilization
        self._minutes_written = 0
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
            spot_usd_per_hour=launch.options.spot_usd_per_hour,
            zone=zone(os.environ, on_instance=launch.on_instance),
            accelerator=accelerator,
            nnodes=launch.node.nnodes,
            world_size=launch.world_size,
            waited_instance_seconds=waited_instance_seconds,
            ran_with=ran_with(),
        )
        self._earlier: list[Attempt] | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="attempt-record", daemon=True)

    @property
    def number(self) -> int:
        """The number of the attempt in its run."""
        return self._attempt.number

    def set_versions(self, versions: dict[str, str]) -> None:
        """Record the versions of the main packages of a script that does not use the image's."""
        of_image = {name: value for name, value in self._attempt.ran_with.items() if name.startswith("image")}
        self._attempt = self._attempt.model_copy(update={"ran_with": {**of_image, **versions}})

    def start(self) -> None:
        """Write the first record. Raises TrainyardError if that fails, so that the run fails before it costs hours."""
        self._write("running")
        self._thread.start()

    def spent(self) -> Spent:
        """Return the cost and hours of the run so far, over all its attempts."""
        now = self._attempt.model_copy(update={"last_seen_at": self._clock.now()})
        if self._earlier is None:  # read once: they no longer change, and S3 might fail the next time
            self._earlier = [item for item in self._recorded.read() if item.number != now.number]
        return spent([*self._earlier, now])

    def with_outlook(self, end: End, *, rejoins: bool) -> End:
        """Add to the reason what happens to the run next, as far as S3's records show.

        An attempt is not retried if a newer attempt of the run has already started. With `rejoins` it is retried,
        because its node then joins the newer attempt.
        """
        try:
            newest = max(self._recorded.numbers(), default=0)
            if newest <= self.number:
                return replace(end, reason=f"{end.reason}; {self._next_start()}") if end.is_retried else end
        except TrainyardError:
            return end
        if end.code == 0:
            return end
        if rejoins:
            return replace(end, code=INTERRUPTED_EXIT_CODE)
        if end.code != INTERRUPTED_EXIT_CODE:
            return end
        return replace(end, code=1, reason=f"{end.reason}; attempt {newest} continues the run")

    def _next_start(self) -> str:
        """Return where another attempt would start, if Batch retries the job."""
        status = RankStatus.read(self._scratch)
        if status.starts_over:
            where = "starts over: its script loads no checkpoint"
        elif complete_steps(list_steps(self._s3, self._launch.run / CHECKPOINTS)):
            reads_itself = status.restored_step is not None
            where = (
                "finds its newest checkpoint in its folder" if reads_itself else "resumes from the newest checkpoint"
            )
        elif self._launch.kind.makes is not None and status.last_step:
            where = "continues with the unfinished work"
        else:
            where = "starts over: no checkpoint was saved"
        return f"if retried, it {where}"

    def finish(self, end: End) -> None:
        """Write how the attempt ended. Raises TrainyardError if a success cannot be recorded."""
        self._finished.set()
        if self._thread.is_alive():
            # Not longer: the thread may still be retrying S3 while Batch's grace period runs out.
            self._thread.join(_LAST_HEARTBEAT_SECONDS)
        state: State = {0: "succeeded", INTERRUPTED_EXIT_CODE: "interrupted"}.get(end.code, "failed")  # type: ignore[assignment]
        ended = {"finished_at": self._clock.now(), "exit_code": end.code, "reason": end.reason}
        self._attempt = self._attempt.model_copy(update=ended)
        try:
            self._write(state)
        except TrainyardError as error:
            if end.code == 0:
                raise
            # The exit code decides whether Batch retries the job. An incomplete record must not change it.
            log.warning("warning: the attempt's record is incomplete: %s", error.args[0])

    def _beat(self) -> None:
        while not self._finished.wait(HEARTBEAT_SECONDS):
            try:
                self._write("running")
            except Exception as error:  # noqa: BLE001, PERF203 - without heartbeats the attempt would count as lost
                log.warning("warning: the attempt's record is late: %s", one_line(error))

    def _write(self, state: State) -> None:
        status = RankStatus.read(self._scratch)
        self._attempt = self._attempt.model_copy(
            update={
                "last_seen_at": self._clock.now(),
                "training_started_at": status.training_started_at,
                "resumed_from_step": status.resumed_from_step,
                "restored_step": status.restored_step,
                "repeats_from_step": status.repeats_from_step,
                "saved_at": status.saved_at,
                "last_step": status.last_step,
                "compiling_seconds": round(status.compiling_seconds, 3),
                "saving_seconds": round(status.saving_seconds, 3),
                "changed": status.changed,
                "cards": self._utilization.record(working_since=status.training_started_at),
            }
        )
        run = self._launch.run
        self._write_utilization(run)
        object_store.write(self._s3, run / ATTEMPTS / f"{self.number}.json", _json(self._attempt))
        attempts = {self.number: self._attempt}
        for other in self._recorded.read():
            attempts.setdefault(other.number, other)
        if max(attempts) > self.number:
            return  # a newer attempt writes the receipt
        bill = receipt(
            run,
            [attempts[number] for number in sorted(attempts)],
            job=self._launch.kind.name,
            instance=self._launch.instance,
            state=state,
            result={**read_collected(self._scratch), **status.result, **read_result(self._scratch)},
            budget=self._launch.options.budget,
            on_instance=self._launch.on_instance,
        ).model_copy(update={"halving": read_verdict(self._scratch)})
        object_store.write(self._s3, run / RECEIPT, _json(bill))

    def _write_utilization(self, run: S3Location) -> None:
        """Write the utilization file if it has new lines. S3 cannot append, so the whole file is written."""
        lines = self._utilization.lines()
        if len(lines) > self._minutes_written:
            content = "".join(f"{json.dumps(line)}\n" for line in lines)
            object_store.write(self._s3, run / UTILIZATION / f"{self.number}.jsonl", content.encode())
            self._minutes_written = len(lines)


class SteadyClock:
    """A UTC clock that reads the system clock once and then counts elapsed time.

    Otherwise a correction of the system clock during the attempt would change the receipt's hours.
    """

    def __init__(self) -> None:
        self._first = datetime.now(timezone.utc)
        self._since = time.monotonic()

    def now(self) -> datetime:
        return self._first + timedelta(seconds=time.monotonic() - self._since)


class RecordedAttempts:
    """The records of a run's attempts on S3. Unreadable records are skipped with a warning."""

    def __init__(self, s3: "S3Client", run: S3Location) -> None:
        self._s3 = s3
        self._run = run

    def read(self) -> list[Attempt]:
        """Return all readable records. Raises TrainyardError if S3 fails."""
        return [attempt for attempt in self._by_name().values() if attempt is not None]

    def numbers(self) -> list[int]:
        """Return the numbers of all records, readable or not. Raises TrainyardError if S3 fails."""
        return [recorded_number(name) or 0 for name in object_store.sizes(self._s3, self._run / ATTEMPTS)]

    def next_number(self, *, job_id: str | None, attempt: int) -> int:
        """Return the number of a job's attempt in its run, which may have started as another Batch job.

        Numbers continue after all attempts of earlier jobs. Those have ended, so repeated calls return the same number.
        Numbers of unreadable records are not reused, so that nothing is overwritten. Raises TrainyardError if S3 fails.
        """
        before = [0]
        for name, recorded in self._by_name().items():
            if recorded is None:
                before.append(recorded_number(name) or 0)
            elif recorded.job_id != job_id:
                before.append(recorded.number)
        return max(before) + attempt

    def _by_name(self) -> dict[str, Attempt | None]:
        found: dict[str, Attempt | None] = {}
        for name in object_store.sizes(self._s3, self._run / ATTEMPTS):
            place = self._run / ATTEMPTS / name
            content = object_store.read(self._s3, place)
            if content is not None:
                found[name] = read_attempt(content, place=place)
        return found


class BudgetWatch:
    """Stops the run before it exceeds its budget."""

    def __init__(self, record: AttemptRecord, launch: Launch) -> None:
        self._record = record
        self._launch = launch
        self._reason: str | None = None
        self._timer: threading.Timer | None = None

    def start(self) -> End | None:
        """Return how the attempt ends if the budget is already used up, else None.

        Otherwise starts a timer that makes the ranks save and stop before the budget is used up.
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
        """Cancel the timer. Returns `end` unless the budget interrupted the ranks, and otherwise how that ends."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reason is not None and end.code == INTERRUPTED_EXIT_CODE:
            return End(code=1, reason=self._reason, cause="own")  # a retry would have no budget left
        return end

    def _left(self) -> RemainingBudget | None:
        launch = self._launch
        if launch.options.budget == NO_BUDGET:
            return None
        return launch.options.budget.left(
            self._record.spent(),
            usd_per_hour=usd_per_hour(
                launch.instance, launch.capacity, spot_usd_per_hour=launch.options.spot_usd_per_hour
            ),
            nnodes=launch.node.nnodes,
        )

    def _end(self, left: RemainingBudget) -> End:
        run_id = self._launch.run.key.strip("/").rpartition("/")[2]
        self._reason = budget_stop_reason(
            left,
            self._record.spent(),
            run_id=run_id,
            capacity=self._launch.capacity,
            spot_usd_per_hour=self._launch.options.spot_usd_per_hour,
        )
        return End(code=1, reason=self._reason, cause="own")

    def _stop_ranks(self, left: RemainingBudget) -> None:
        """Send SIGTERM to this launcher, which then asks the ranks to save and stop."""
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
    """Return the receipt over a run's attempts. Costs are estimates, from recorded prices and EC2's Spot price.

    `on_instance` is False if the job does not run on the instance type that it names.
    """
    team, _, run_id = run.key.strip("/").rpartition("/")
    return Receipt(
        run_id=run_id,
        team=team,
        job=job,
        state=state,
        attempts=attempts,
        instance_type=instance.name,
        **sums(attempts, on_instance=on_instance),
        budget=budget.text(spent(attempts)),
        price_date=instance.price_date,
        price_source=instance.price_source,
        estimate_note=_estimate_note(attempts, instance, on_instance=on_instance),
        result=dict(result),
    )


def _estimate_note(attempts: list[Attempt], instance: InstanceType, *, on_instance: bool) -> str:
    """Return what the receipt's estimate includes and leaves out."""
    rows = {attempt.instance_type: instance_type(attempt.instance_type) for attempt in attempts}
    others = [f"{row.name} as of {row.price_date}" for row in rows.values() if row.name != instance.name]
    quoted = dict.fromkeys(
        f"{attempt.spot_usd_per_hour:g}" for attempt in attempts if attempt.spot_usd_per_hour is not None
    )
    parts = [
        "without storage, data transfer and the boot time of instances",
        *([f"with the prices of {' and '.join(others)}"] if others else []),
        *([f"Spot at the {' and '.join(quoted)} USD an hour that EC2 reported at submission"] if quoted else []),
        *([] if on_instance else [f"for the hours on another machine ({attempts[-1].accelerator})"]),
    ]
    return ", ".join(parts)


def _json(model: BaseModel) -> bytes:
    return (json.dumps(model.model_dump(mode="json"), indent=2) + "\n").encode()
