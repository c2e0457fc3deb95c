"""Run a sweep's points in a worker, one after the other, each in a separate launcher, until no point is left.

A worker claims a point with an object that S3 creates only if it does not exist (claims/JOB/N.json), so that no two
workers run the same point. A worker that is retried after a reclaim first continues its point. If a point fails with
its own error, the worker takes the next one. The budget is for the whole sweep, so each worker regularly adds up the
cost of all points.
"""

import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.container.accelerator import AUTO
from jobs.container.environment import job_id
from jobs.container.instance import billed_capacity
from jobs.core.errors import INTERRUPTED_EXIT_CODE, SWEEP_OVER_EXIT_CODE, NotFoundError, TrainyardError
from jobs.core.instance_types import instance_type
from jobs.core.locations import S3Location
from jobs.core.records import Receipt, Verdict, parse_record
from jobs.core.run import RECEIPT
from jobs.money.budget import (
    MIN_SECONDS,
    SAVE_SECONDS,
    Budget,
    RemainingBudget,
    Spent,
    budget_stop_reason,
    spent,
    usd_per_hour,
)
from jobs.spec.arguments import JobKind
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE, RUN_URI_VARIABLE, LauncherOptions
from jobs.spec.sweep import (
    SWEEP,
    SWEEP_CLAIMS,
    Claim,
    PointRecord,
    SweepRecord,
    claim_name,
    claimed,
    stop_name,
    values_text,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

LOOK_SECONDS = 30.0
"""Interval at which the worker reads the cost of all points. The points write it at the same interval."""

_LAUNCHER = "jobs.container.launch"

_LEAST_PAUSE_SECONDS = 0.5

_READERS = 8

Ended = Literal["succeeded", "stopped early", "failed", "stopped"]


class Worker:
    """One worker of a sweep: a child of its array job, or its only job."""

    def __init__(
        self, options: LauncherOptions, kind: JobKind, sweep: S3Location, environment: Mapping[str, str]
    ) -> None:
        """Read the sweep's points. Raises TrainyardError if they cannot be read."""
        self._options = options
        self._kind = kind
        self._sweep = sweep
        self._environment = dict(environment)
        self._job = job_id(environment) or "local"
        self._child = int(environment.get("AWS_BATCH_JOB_ARRAY_INDEX", "0"))
        self._s3 = object_store.connect()
        self._points = {point.number: point for point in _read_sweep(self._s3, sweep).points}
        self._spending = Spending(self._s3, sweep, self._points, job=self._job, halves=options.halving is not None)
        on_instance = environment.get(ACCELERATOR_VARIABLE, AUTO) != AUTO
        self._capacity = billed_capacity(options.capacity, environment, on_instance=on_instance)
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        """The signals received. After the first, the worker ends once its point has saved."""

    def work(self) -> int:
        """Run points until none is left or the budget is used up.

        Returns the exit code for Batch: `SWEEP_OVER_EXIT_CODE` if a point of this worker failed, or if the budget does
        not allow the remaining points. This code and 0 mean that no point is left for other workers.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        claims = self._claims()
        ends: list[Ended] = []
        for number, claim in sorted(claims.items()):
            if claim.child == self._child:
                ended = claim.ended or self._run(self._points[number], claim)
                if ended is None:
                    return INTERRUPTED_EXIT_CODE
                ends.append(ended)
        for number, point in self._points.items():
            if "stopped" in ends:
                break
            if self._signals:
                return INTERRUPTED_EXIT_CODE
            if number in claims or self._spending.is_done(number):
                continue
            if (over := self._over(of_new_point=True)) is not None:
                reason = f"point {number} was not started: {over}"
                print(f"error: {reason}", flush=True)
                stop = Claim(child=self._child, ended="stopped", reason=reason)
                object_store.write(self._s3, self._sweep / stop_name(self._job), stop.model_dump_json().encode())
                return SWEEP_OVER_EXIT_CODE
            taken = self._claim(number)
            if taken is None:
                continue
            ended = self._run(point, taken)
            if ended is None:
                return INTERRUPTED_EXIT_CODE
            ends.append(ended)
        return 0 if all(ended in ("succeeded", "stopped early") for ended in ends) else SWEEP_OVER_EXIT_CODE

    def _claims(self) -> dict[int, Claim]:
        """Return the claims of all workers of this job, by the number of the point."""
        names = object_store.sizes(self._s3, self._sweep / f"{SWEEP_CLAIMS}{self._job}")
        numbers = [number for _, number in claimed([f"{self._job}/{name}" for name in names])]
        with ThreadPoolExecutor(_READERS) as threads:
            return dict(zip(numbers, threads.map(self._read_claim, numbers), strict=True))

    def _read_claim(self, number: int) -> Claim:
        place = self._sweep / claim_name(self._job, number)
        return parse_record(Claim, object_store.read(self._s3, place) or b"{}", place=place)

    def _claim(self, number: int) -> Claim | None:
        """Claim a point. Returns None if another worker has it."""
        wanted = Claim(child=self._child)
        place = self._sweep / claim_name(self._job, number)
        object_store.create(self._s3, place, wanted.model_dump_json().encode())
        found = self._read_claim(number)
        return found if found == wanted else None

    def _run(self, point: PointRecord, claim: Claim) -> Ended | None:
        """Run a claimed point. Returns how it ended, or None if it continues when the worker is retried."""
        attempts = self._options.sweep_attempts or 1
        if claim.starts >= attempts:
            return self._end(point, claim, "failed", _interrupted(attempts))
        over = self._over()
        if over is not None:
            return self._end(point, claim, "stopped", over)
        if self._signals:
            return None
        claim.starts += 1
        self._write(point, claim)
        log.info("sweep: point %s of %s (%s)", point.number, len(self._points), values_text(point.values))
        code, over = self._launch(point, claim.starts)
        self._process = None
        if code == 0:
            verdict = self._spending.stopped_early(point.number)
            if verdict is not None:
                return self._end(point, claim, "stopped early", verdict.text)
            return self._end(point, claim, "succeeded", "")
        if over is not None:
            return self._end(point, claim, "stopped" if over.startswith("budget") else "failed", over)
        interrupted = code == INTERRUPTED_EXIT_CODE or (bool(self._signals) and code == -signal.SIGTERM)
        if not interrupted:
            return self._end(point, claim, "failed", f"exit code {code}")
        if claim.starts >= attempts and not self._signals:
            return self._end(point, claim, "failed", _interrupted(attempts))
        return None

    def _launch(self, point: PointRecord, start: int) -> tuple[int, str | None]:
        """Run the launcher of a point. Returns its exit code, and the reason if this worker stopped it, else None."""
        place = S3Location(self._sweep.bucket, f"{self._sweep.key.rstrip('/').rpartition('/')[0]}/{point.run_id}/")
        unset = {"sweep_attempts": None, "sweep_timeout_seconds": None, "max_usd": None, "max_hours": None}
        arguments = self._kind.arguments.model_validate(point.arguments)
        flags = [*self._options.model_copy(update=unset).to_flags(), self._kind.name, *arguments.to_flags()]
        environment = {**self._environment, RUN_URI_VARIABLE: str(place), "AWS_BATCH_JOB_ATTEMPT": str(start)}
        self._process = self._start_launcher(flags, environment)
        if self._signals:
            self._process.terminate()
        limit = self._options.sweep_timeout_seconds
        until = None if limit is None else time.monotonic() + limit
        while True:
            budget = self._left()
            pauses = [LOOK_SECONDS]
            pauses += [(budget[0].seconds - SAVE_SECONDS) / 2] if budget is not None else []
            pauses += [until - time.monotonic()] if until is not None else []
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(max(_LEAST_PAUSE_SECONDS, min(pauses))), None
            why = self._over()
            if why is None and until is not None and time.monotonic() >= until:
                why = f"it exceeded timeout_hours: {(limit or 0) / 3600:g}"
            if why is not None:
                self._process.terminate()
                return self._process.wait(), why

    def _start_launcher(self, flags: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        """Start a launcher in a separate session, so that signals reach it only through this process."""
        return subprocess.Popen([sys.executable, "-m", _LAUNCHER, *flags], env=environment, start_new_session=True)

    def _end(self, point: PointRecord, claim: Claim, ended: Ended, reason: str) -> Ended:
        """Record and log how a point ended."""
        claim.ended, claim.reason = ended, reason
        self._write(point, claim)
        log.info("sweep: point %s %s%s", point.number, ended, f": {reason}" if reason else "")
        return ended

    def _write(self, point: PointRecord, claim: Claim) -> None:
        place = self._sweep / claim_name(self._job, point.number)
        object_store.write(self._s3, place, claim.model_dump_json().encode())

    def _left(self, *, of_new_point: bool = False) -> tuple[RemainingBudget, Spent, int] | None:
        """Return each running point's share of what is left, the cost so far, and the number of running points.

        None without a budget, or if S3 fails.
        """
        budget = self._options.budget
        if budget == Budget():
            return None
        try:
            so_far, running = self._spending.now()
        except TrainyardError as error:  # S3 failed for minutes; the next call may succeed
            log.warning("warning: the cost of the sweep so far is unknown: %s", str(error).splitlines()[0])
            return None
        price = usd_per_hour(
            instance_type(self._options.instance_type),
            self._capacity,
            spot_usd_per_hour=self._options.spot_usd_per_hour,
        )
        left = budget.left(so_far, usd_per_hour=price, nnodes=max(1, running + of_new_point))
        return None if left is None else (left, so_far, running)

    def _over(self, *, of_new_point: bool = False) -> str | None:
        """Return why no point may continue (with `of_new_point`: start) within the budget, or None if it may."""
        budget = self._left(of_new_point=of_new_point)
        if budget is None or budget[0].seconds > (MIN_SECONDS if of_new_point else SAVE_SECONDS):
            return None
        left, so_far, running = budget
        return budget_stop_reason(
            left,
            so_far,
            run_id=self._sweep.key.strip("/").rpartition("/")[2],
            capacity=self._capacity,
            spot_usd_per_hour=self._options.spot_usd_per_hour,
            points=running,
            of_new_point=of_new_point,
        )

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


class Spending:
    """The cost of all points of a sweep, from their receipts. The receipt of a point that has ended is read once."""

    def __init__(
        self, s3: "S3Client", sweep: S3Location, points: Mapping[int, PointRecord], *, job: str, halves: bool
    ) -> None:
        """With `halves`, points that successive halving has stopped count as done. Otherwise they continue."""
        self._halves = halves
        self._s3 = s3
        self._sweep = sweep
        self._points = points
        self._job = job
        self._ended: dict[int, Receipt] = {}

    def now(self) -> tuple[Spent, int]:
        """Return the cost so far and the number of running points. Raises TrainyardError if S3 fails."""
        names = list(object_store.sizes(self._s3, self._sweep / SWEEP_CLAIMS))
        started = {number for _, number in claimed(names) if number in self._points}
        with ThreadPoolExecutor(_READERS) as threads:
            receipts = [receipt for receipt in threads.map(self._receipt, started) if receipt is not None]
        running = sum(receipt.state == "running" and self._is_of_job(receipt) for receipt in receipts)
        return spent(attempt for receipt in receipts for attempt in receipt.attempts), running

    def is_done(self, number: int) -> bool:
        receipt = self._receipt(number)
        return receipt is not None and self._is_done(receipt)

    def stopped_early(self, number: int) -> Verdict | None:
        """Return the verdict by which successive halving has stopped a point, or None."""
        receipt = self._receipt(number)
        return receipt.halving if receipt is not None and receipt.stopped_early else None

    def _is_done(self, receipt: Receipt) -> bool:
        return receipt.state == "succeeded" and (self._halves or not receipt.stopped_early)

    def _receipt(self, number: int) -> Receipt | None:
        if number in self._ended:
            return self._ended[number]
        team = self._sweep.key.rstrip("/").rpartition("/")[0]
        place = S3Location(self._sweep.bucket, f"{team}/{self._points[number].run_id}/{RECEIPT}")
        content = object_store.read(self._s3, place)
        if content is None:
            return None
        try:
            receipt = Receipt.model_validate_json(content)
        except ValidationError:
            log.warning("warning: %s cannot be read: the cost of that point is left out", place)
            return None
        if self._is_done(receipt) or (receipt.state == "failed" and self._is_of_job(receipt)):
            self._ended[number] = receipt
        return receipt

    def _is_of_job(self, receipt: Receipt) -> bool:
        return (receipt.attempts[-1].job_id or "local") == self._job if receipt.attempts else False


def _interrupted(attempts: int) -> str:
    return f"all {attempts} attempts were interrupted" if attempts > 1 else "it was interrupted"


def _read_sweep(s3: "S3Client", sweep: S3Location) -> SweepRecord:
    content = object_store.read(s3, sweep / SWEEP)
    if content is None:
        raise NotFoundError(
            f"{sweep / SWEEP}, the file of the sweep's points, is missing", next_step="submit the sweep again"
        )
    return parse_record(SweepRecord, content, place=sweep / SWEEP)
