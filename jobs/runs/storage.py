"""Find runs in the stage's run bucket, and read or fetch their files."""

import difflib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from jobs.aws import s3 as object_store
from jobs.aws.connection import CONNECTIONS, Aws
from jobs.aws.errors import is_denied
from jobs.core import records
from jobs.core.errors import NotFoundError, UsageError, did_you_mean
from jobs.core.folder_listing import Listing, make_links
from jobs.core.locations import S3Location
from jobs.core.records import Attempt, NotebookServer, Receipt, read_attempt, read_json_lines, read_record
from jobs.core.retries import CLAIMS
from jobs.core.run import (
    ATTEMPTS,
    CHECKPOINTS,
    LATEST,
    LISTING_SUFFIX,
    METRICS,
    NOTEBOOK_SERVER,
    RECEIPT,
    RENDEZVOUS,
    SPEC,
    checkpoint_step,
    is_latest,
    is_run_id,
    run_prefix,
    spec_name,
)
from jobs.core.stage import DeployedStage
from jobs.runs.job import Job
from jobs.spec.code import CODE_RECORD

_COORDINATION = (CLAIMS, RENDEZVOUS)
"""Folders that jobs use for coordination; no other program reads them."""

_SETTLED = timedelta(minutes=10)
"""Time after the end of a job from which its run's receipt is final: longer than any container takes to stop."""

_KEPT_RECEIPTS = 5000
"""Receipts kept on this machine for each stage, the newest ones: 20 MB."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class StoredRun:
    """A run found by its files."""

    run_id: str
    team: str
    location: S3Location


def in_parallel(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Call `work` for each item on a pool of threads, and return the results in order."""
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        return list(threads.map(work, items))


def read_spec_text(aws: Aws, run: S3Location) -> str | None:
    """Read the resolved spec that a run was submitted with. Return None if there is none.

    Raises UsageError if it is too large for a spec, or not UTF-8.
    """
    text = object_store.read_once(aws.s3, run / SPEC)
    return None if text is None else decoded_spec(text, place=str(run / SPEC))


def decoded_spec(content: bytes, *, place: str) -> str:
    """Return the text of a stored spec. Raises UsageError if it is too large for a spec, or not UTF-8."""
    from jobs.spec.spec_yaml import MAX_SPEC_BYTES

    if len(content) > MAX_SPEC_BYTES:
        raise UsageError(f"{place}: larger than {MAX_SPEC_BYTES // 1_000_000} MB, the limit for a spec")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: byte {content[error.start]:#04x} is not UTF-8") from None


def stored_runs(aws: Aws, stage: DeployedStage, *, prefix: str = "") -> list[StoredRun]:
    """Return the runs whose ids begin with `prefix`, the oldest first, including those that Batch has forgotten.

    Leaves out teams whose runs the caller may not list; if no team remains, raises the S3 error.
    """

    def of_team(team: str) -> list[StoredRun] | Exception:
        try:
            return runs_of_team(aws, stage, team, prefix=prefix)
        except Exception as error:
            if not is_denied(error):
                raise
            return error

    _ = aws.s3  # create the client before the threads share it
    found = in_parallel(of_team, stage.teams)
    denials = [each for each in found if isinstance(each, Exception)]
    if denials and len(denials) == len(found):
        raise denials[0]
    return sorted(chain.from_iterable(each for each in found if isinstance(each, list)), key=_time_in_id)


def runs_of_team(aws: Aws, stage: DeployedStage, team: str, *, prefix: str = "") -> list[StoredRun]:
    """Return the runs of one team whose ids begin with `prefix`, the oldest first."""
    found = []
    pages = aws.s3.get_paginator("list_objects_v2").paginate(
        Bucket=stage.run_bucket, Prefix=f"{team}/{prefix}", Delimiter="/"
    )
    for page in pages:
        for item in page.get("CommonPrefixes", []):
            run_id = PurePosixPath(item["Prefix"]).name
            if is_run_id(run_id):
                location = S3Location(stage.run_bucket, run_prefix(team, run_id))
                found.append(StoredRun(run_id, team, location))
    return sorted(found, key=_time_in_id)


def _time_in_id(run: StoredRun) -> tuple[str, str]:
    """Return a sort key: the time at the end of the run's id, then the id."""
    return run.run_id[-20:], run.run_id


def find_run(aws: Aws, stage: DeployedStage, text: str) -> StoredRun:
    """Return the run that `text` names: its id, a unique beginning of an id, a spec name (its newest run), or `latest`.

    `latest` is the newest run of the default team, `TEAM/latest` that of another team.
    Raises NotFoundError if there is no such run, UsageError if `text` is the beginning of several ids.
    """
    if is_latest(text):
        return _newest_run(aws, stage, text.removesuffix(LATEST).removesuffix("/") or stage.default_team)
    runs = stored_runs(aws, stage, prefix=text)
    same_name = [run for run in runs if text in (run.run_id, spec_name(run.run_id))]
    if same_name:
        return same_name[-1]
    if len(runs) == 1:
        return runs[0]
    if runs:
        newest = ", ".join(run.run_id for run in reversed(runs[-5:]))
        raise UsageError(
            f"{len(runs)} run ids begin with '{text}', the newest of them {newest}", next_step="type more of the id"
        )
    known = {name for run in stored_runs(aws, stage) for name in (run.run_id, spec_name(run.run_id))}
    close = difflib.get_close_matches(text, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise NotFoundError(f"run '{text}' not found in stage '{stage.name}'{hint}", next_step="trainyard list")


def _newest_run(aws: Aws, stage: DeployedStage, team: str) -> StoredRun:
    if team not in stage.teams:
        raise NotFoundError(
            f"team '{team}' not found in stage '{stage.name}'{did_you_mean(team, stage.teams)}",
            next_step=f"choose one of {', '.join(stage.teams)}",
        )
    runs = runs_of_team(aws, stage, team)
    if not runs:
        raise NotFoundError(f"team '{team}' has no runs in stage '{stage.name}' yet", next_step="trainyard submit SPEC")
    return runs[-1]


def newest_checkpoint(aws: Aws, run: S3Location) -> int | None:
    """Return the step of the newest complete checkpoint, which has a manifest, or None."""
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=run.bucket, Prefix=(run / CHECKPOINTS).key)
    keys = (item["Key"].removeprefix(run.key) for page in pages for item in page.get("Contents", []))
    return max((step for key in keys if (step := checkpoint_step(key)) is not None), default=None)


def read_receipt(aws: Aws, run: S3Location) -> Receipt | None:
    """Read a run's receipt so far, or return None if it has not written one.

    Raises UnreadableError if the receipt is damaged or was written by another release.
    """
    text = object_store.read_once(aws.s3, run / RECEIPT)
    return None if text is None else records.parse_receipt(text, place=run / RECEIPT)


class EndedReceipts:
    """The receipts of ended jobs, kept in the user's cache folder, so that each is read from S3 only once.

    No program changes a run's receipt after its job has ended, and a run that continues has another job. Kept is what
    S3 returned, because a later release may read more of it.
    """

    def __init__(self, stage: DeployedStage) -> None:
        folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - may have no home
        self._path = Path(folder, "trainyard", f"receipts-{stage.run_bucket}.json")
        self._kept: dict[str, str] = {}
        self._is_new = False
        with suppress(OSError, ValueError, AttributeError):  # none yet, or damaged: read again
            found = json.loads(self._path.read_bytes())
            self._kept = {job_id: text for job_id, text in found.items() if isinstance(text, str)}

    def read(self, aws: Aws, run: S3Location, job: Job) -> Receipt | None:
        """Read the receipt of a job's run like `read_receipt`. Several threads may call it."""
        text = self._kept.get(job.id)
        if text is None:
            content = object_store.read_once(aws.s3, run / RECEIPT)
            if content is None:
                return None
            text = content.decode(errors="replace")
            if job.ended and job.stopped_at and datetime.now(timezone.utc) - job.stopped_at > _SETTLED:
                self._kept[job.id] = text
                self._is_new = True
        return records.parse_receipt(text.encode(), place=run / RECEIPT)

    def save(self) -> None:
        """Keep what was read for the next command. A folder that cannot be written to is no error."""
        if not self._is_new:
            return
        newest = [*self._kept.items()][-_KEPT_RECEIPTS:]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump(dict(newest), file)
            Path(file.name).replace(self._path)


def readable_receipt(aws: Aws, run: S3Location) -> Receipt | None:
    """Read a run's receipt, or return None if there is none or it cannot be read."""
    return records.read_receipt(object_store.read_once(aws.s3, run / RECEIPT), place=run / RECEIPT)


def read_attempts(aws: Aws, run: S3Location) -> list[Attempt]:
    """Read the records of a run's attempts, in order. Skips unreadable records."""
    attempts = []
    for item in object_store.listing(aws.s3, run, prefix=(run / ATTEMPTS).key):
        place = S3Location(run.bucket, item["Key"])
        content = object_store.read_once(aws.s3, place)
        if content is not None and (attempt := read_attempt(content, place=place)) is not None:
            attempts.append(attempt)
    return sorted(attempts, key=lambda attempt: attempt.number)


def read_metrics(aws: Aws, run: S3Location) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl so far. Skips unreadable lines."""
    return read_json_lines(object_store.read_once(aws.s3, run / METRICS), place=run / METRICS)


def read_notebook(aws: Aws, run: S3Location) -> NotebookServer | None:
    """Read the address of the run's notebook server, or return None if none is recorded or it cannot be read."""
    return read_record(
        NotebookServer, object_store.read_once(aws.s3, run / NOTEBOOK_SERVER), place=run / NOTEBOOK_SERVER
    )


def fetch(
    aws: Aws,
    run: S3Location,
    target: Path,
    *,
    checkpoints: bool = False,
    left_out: Callable[[str, int], object] = lambda _name, _size: None,
) -> Iterator[Path]:
    """Download a run's files to `target`, yielding each path once its file is complete.

    Leaves out the files that jobs use for coordination, and checkpoints unless `checkpoints` is set: they are most of a
    run's bytes and are not needed once there is a model. Of a script without output, the newest checkpoint is included.
    Calls `left_out` with the name and size of a checkpoint's file that stays on S3. Links in the run's folders are
    restored at the end.
    Raises UsageError for a key that would be written outside `target`, and OSError with the path if writing fails.
    """
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=run.bucket, Prefix=run.key)
    sizes = {item["Key"].removeprefix(run.key): item["Size"] for page in pages for item in page.get("Contents", [])}
    only_checkpoints = CODE_RECORD in sizes and not any(name.startswith("output") and "/" in name for name in sizes)
    step = max((step for name in sizes if (step := checkpoint_step(name)) is not None), default=None)
    newest = f"{CHECKPOINTS}step-{step}/"
    listings = []
    for name, size in sizes.items():
        if name.endswith("/") or name.startswith(_COORDINATION):
            continue
        if name.startswith(CHECKPOINTS) and not checkpoints and not (only_checkpoints and name.startswith(newest)):
            left_out(name, size)
            continue
        path = object_store.path_below(target, run, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # To a temporary file, renamed when complete.
            aws.s3.download_file(run.bucket, f"{run.key}{name}", str(path))
        except OSError as error:
            error.filename = error.filename or str(path)  # the error of a full disk names no file
            raise
        yield path
        if "/" not in name and name.endswith(LISTING_SUFFIX):
            listings.append(path)
    for path in listings:
        found = read_record(Listing, path.read_bytes(), place=path)
        if found is not None:
            make_links(path.with_name(path.name.removesuffix(LISTING_SUFFIX)), found.links)
