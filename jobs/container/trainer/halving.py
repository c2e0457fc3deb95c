"""Stop a sweep's point if it is worse than the others at a rung of successive halving (jobs.spec.sweep).

Rank 0 queries S3, and all ranks get its verdict. A point writes its value before it reads the others', so if two points
reach a rung at the same time, at least one of them reads both values.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.channel import read_comparison, write_verdict
from jobs.container.trainer.heartbeat import Heartbeats
from jobs.core.errors import NotFoundError, TrainyardError
from jobs.core.locations import S3Location
from jobs.core.records import Verdict, parse_record
from jobs.spec.sweep import MEMBER_OF, Comparison, MemberOf, RungValue, value_name, values_folder, verdict_name

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")


class Rungs:
    """One rank's part in the comparisons of its point. All ranks call the same methods in the same order."""

    def __init__(self, rank: "Rank", s3: "S3Client | None", comparison: Comparison, heartbeats: Heartbeats) -> None:
        self._rank = rank
        self._s3 = s3
        self._comparison = comparison
        self._heartbeats = heartbeats
        self._verdict: Verdict | None = None
        self._queries = 0

    @classmethod
    def of(cls, rank: "Rank", s3: "S3Client | None", heartbeats: Heartbeats) -> "Rungs | None":
        """Return the rungs of this run, or None if it is not compared with others. Rank 0 needs `s3`."""
        comparison = read_comparison(rank.scratch)
        return None if comparison is None else cls(rank, s3, comparison, heartbeats)

    def was_stopped(self, step: int) -> bool:
        """Return whether an earlier attempt stopped the point at the step from which this one resumes."""
        return self._query(step, {})

    def is_stopped(self, step: int, evaluation: Mapping[str, Any]) -> bool:
        """Return whether the point should stop at this step, given the step's evaluation."""
        if self._comparison.metric not in evaluation:
            return False
        return self._query(step, evaluation)

    def _query(self, step: int, evaluation: Mapping[str, Any]) -> bool:
        rung = self._comparison.rung(step)
        if rung is None:
            return False
        if self._verdict is None or self._verdict.rung != rung:
            self._heartbeats.busy(0)  # S3 is retried for minutes, which is not a hang
            self._queries += 1
            found = self._rank.once(f"halving/{self._queries}", lambda: self._verdict_at(rung, step, evaluation))
            self._verdict = None if found is None else Verdict.model_validate(found)
        return self._verdict is not None and self._verdict.stops

    def report_stop(self) -> None:
        """Report that the training ends because its point is stopped."""
        if self._rank.is_first and self._verdict is not None:
            write_verdict(self._rank.scratch, self._verdict)

    def _verdict_at(self, rung: int, step: int, evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return, on rank 0, the verdict at a rung, or None if there is none yet or S3 fails."""
        assert self._s3 is not None  # noqa: S101 - rank 0 has one
        try:
            found = self._stored_verdict(self._s3, rung, step, evaluation)
        except TrainyardError as error:
            log.warning("warning: halving: not compared at step %s; continuing: %s", step, str(error).splitlines()[0])
            return None
        if found is None:
            return None
        if not found.stops:
            write_verdict(self._rank.scratch, found)
        return found.model_dump(mode="json")

    def _stored_verdict(self, s3: "S3Client", rung: int, step: int, evaluation: Mapping[str, Any]) -> Verdict | None:
        sweep, number = self._place(s3)
        place = sweep / verdict_name(rung, number)
        decided = object_store.read(s3, place)
        if decided is None:
            if not evaluation:
                return None
            own = RungValue.of(step, evaluation[self._comparison.metric])
            verdict = self._decide(s3, sweep, number, rung, own)
            object_store.create(s3, place, verdict.model_dump_json().encode())
            decided = object_store.read(s3, place)  # a lost attempt may have written one first
        verdict = parse_record(Verdict, decided or b"", place=place)
        log.info("halving: %s; the point %s", verdict.text, "stops" if verdict.stops else "continues")
        return verdict

    def _decide(self, s3: "S3Client", sweep: S3Location, number: int, rung: int, own: RungValue) -> Verdict:
        object_store.create(s3, sweep / value_name(rung, number), own.model_dump_json().encode())
        folder = sweep / values_folder(rung)
        values = {
            name: parse_record(RungValue, content, place=folder / name)
            for name, content in object_store.in_threads(
                lambda name: (name, object_store.read(s3, folder / name)), object_store.sizes(s3, folder)
            )
            if content is not None
        }
        own = values.pop(f"{number}.json", own)
        return self._comparison.verdict(own, values.values(), rung=rung)

    def _place(self, s3: "S3Client") -> tuple[S3Location, int]:
        """Return the sweep's location and this point's number in it."""
        content = object_store.read(s3, self._rank.run / MEMBER_OF)
        if content is None:
            raise NotFoundError(f"{self._rank.run / MEMBER_OF}, which names this point's sweep, is missing")
        of = parse_record(MemberOf, content, place=self._rank.run / MEMBER_OF)
        team = self._rank.run.key.rstrip("/").rpartition("/")[0]
        return S3Location(self._rank.run.bucket, f"{team}/{of.sweep}/"), of.number
