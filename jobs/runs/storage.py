"""The runs in the stage's run bucket, and the files of each: found, read, fetched."""

import difflib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.aws.errors import error_code, is_denied
from jobs.core import records
from jobs.core.errors import NotFoundError, TrainyardError, UsageError, did_you_mean
from jobs.core.folder_listing import Listing, make_links
from jobs.core.locations import S3Location
from jobs.core.records import Attempt, NotebookServer, Receipt, read_attempt, read_json_lines, read_record
from jobs.core.retries import CLAIMS
from jobs.core.run import (
    ATTEMPTS,
    CHECKPOINTS,
    GANG,
    LATEST,
    LISTING_SUFFIX,
    METRICS,
    NOTEBOOK_SERVER,
    RECEIPT,
    SPEC,
    checkpoint_step,
    is_latest,
    is_run_id,
    run_prefix,
    spec_name,
)
from jobs.core.stage import DeployedStage
from jobs.spec.code import CODE_RECORD
from jobs.spec.plan import Plan
from jobs.spec.spec import JobSpec

_OF_THE_PLATFORM = (CLAIMS, GANG)
"""Folders that jobs coordinate themselves by, of no use to anyone else."""


@dataclass(frozen=True, order=True)
class StoredRun:
    """A run by the files it has; ordered by the time in its id."""

    order: str
    run_id: str
    team: str
    location: S3Location


def read_spec_text(aws: Aws, run: S3Location) -> str | None:
    """Read the resolved spec that a run was submitted with; None where there is none.

    Raises UsageError where it is larger than a spec is, or not UTF-8.
    """
    text = object_store.read_once(aws.s3, run / SPEC)
    return None if text is None else decoded_spec(text, place=str(run / SPEC))


def decoded_spec(content: bytes, *, place: str) -> str:
    """Return the text of a stored spec. Raises UsageError if it is larger than a spec is, or not UTF-8."""
    from jobs.spec.spec_yaml import MAX_SPEC_BYTES

    if len(content) > MAX_SPEC_BYTES:
        raise UsageError(f"{place}: it is larger than {MAX_SPEC_BYTES // 1_000_000} MB, so it is no spec")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: byte {content[error.start]:#04x} is not UTF-8") from None


def spec_text(spec: JobSpec) -> str:
    """Return a resolved spec as its file holds it."""
    from jobs.spec.spec_yaml import dump_spec

    return dump_spec(spec.model_dump(mode="json", exclude_none=True))


def put_spec(aws: Aws, plan: Plan, text: str | None = None) -> None:
    """Write the resolved spec where the run's files will lie, before the run exists; or the one that was there.

    Arguments that are too long for the job's command line lie beside it.
    Raises TrainyardError if the run is new and another submission has its id: S3 writes the spec of one of them.
    """
    if plan.arguments_file is not None:  # it is named by its content: it is never another submission's
        place = plan.run_location / plan.arguments_file.name
        aws.s3.put_object(Bucket=place.bucket, Key=place.key, Body=plan.arguments_file.content)
    place = plan.run_location / SPEC
    content = (spec_text(plan.spec) if text is None else text).encode()
    if text is not None or plan.resumed is not None:
        aws.s3.put_object(Bucket=place.bucket, Key=place.key, Body=content, ContentType="application/yaml")
    elif not _create(aws, place, content):
        raise TrainyardError(
            f"another run was submitted as {plan.run_id} in the same second; nothing was submitted",
            next_step="submit again: it gets another id",
        )


def _create(aws: Aws, place: S3Location, content: bytes) -> bool:
    """Write a spec where there is none. Return whether the one that is there is of this submission."""
    own = {"submission": uuid.uuid4().hex}  # two submissions may have the same content
    try:
        aws.s3.put_object(
            Bucket=place.bucket,
            Key=place.key,
            Body=content,
            ContentType="application/yaml",
            Metadata=own,
            IfNoneMatch="*",
        )
    except Exception as error:
        # The second: two wrote at the very same time. A first try whose answer was lost is refused at its repetition.
        if error_code(error) not in ("PreconditionFailed", "ConditionalRequestConflict"):
            raise
        return aws.s3.head_object(Bucket=place.bucket, Key=place.key).get("Metadata") == own
    return True


def delete_spec(aws: Aws, plan: Plan) -> None:
    """Take back `put_spec` where Batch refused the job: without it there would seem to be a run."""
    arguments = [plan.arguments_file.name] if plan.arguments_file is not None else []
    for name in (SPEC, *arguments, *([CODE_RECORD] if plan.pack is not None else [])):
        place = plan.run_location / name
        aws.s3.delete_object(Bucket=place.bucket, Key=place.key)


def stored_runs(aws: Aws, stage: DeployedStage, *, prefix: str = "") -> list[StoredRun]:
    """Return the runs whose ids begin with `prefix`, the oldest first, however long ago Batch forgot them.

    Teams whose runs the caller may not list are left out; where there is no other, raises what S3 said to that.
    """
    found, denials = list[StoredRun](), list[Exception]()
    for team in stage.teams:
        try:
            found += runs_of_team(aws, stage, team, prefix=prefix)
        except Exception as error:  # noqa: PERF203 - one team's denial is not another's
            if not is_denied(error):
                raise
            denials.append(error)
    if denials and len(denials) == len(stage.teams):
        raise denials[0]
    return sorted(found)


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
                found.append(StoredRun(run_id[-20:], run_id, team, location))
    return sorted(found)


def find_run(aws: Aws, stage: DeployedStage, text: str) -> StoredRun:
    """Return the run that `text` names: its id, the beginning of one id, a spec's name (its newest run), or `latest`.

    The last is the newest run of the team that specs have by default, or of another one: `TEAM/latest`.
    Raises NotFoundError where there is none, UsageError where `text` is the beginning of several ids.
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
            f"'{text}' begins {len(runs)} run ids, the newest of them {newest}", next_step="type more of it"
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
    """Return the step of the newest checkpoint that has its manifest; None where there is none."""
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=run.bucket, Prefix=(run / CHECKPOINTS).key)
    keys = (item["Key"].removeprefix(run.key) for page in pages for item in page.get("Contents", []))
    return max((step for key in keys if (step := checkpoint_step(key)) is not None), default=None)


def read_receipt(aws: Aws, run: S3Location) -> Receipt | None:
    """Read the receipt that a run has written so far; None where it has written none.

    Raises UnreadableError where it is damaged, or another release's.
    """
    text = object_store.read_once(aws.s3, run / RECEIPT)
    return None if text is None else records.parse_receipt(text, place=run / RECEIPT)


def readable_receipt(aws: Aws, run: S3Location) -> Receipt | None:
    """Read the receipt as far as there is one that can be read: for those who tell of more than of it."""
    return records.read_receipt(object_store.read_once(aws.s3, run / RECEIPT), place=run / RECEIPT)


def read_attempts(aws: Aws, run: S3Location) -> list[Attempt]:
    """Read the records of a run's attempts, in their order, as far as they can be read."""
    attempts = []
    for item in object_store.listing(aws.s3, run, prefix=(run / ATTEMPTS).key):
        place = S3Location(run.bucket, item["Key"])
        content = object_store.read_once(aws.s3, place)
        if content is not None and (attempt := read_attempt(content, place=place)) is not None:
            attempts.append(attempt)
    return sorted(attempts, key=lambda attempt: attempt.number)


def read_metrics(aws: Aws, run: S3Location) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl so far, those that can be read."""
    return read_json_lines(object_store.read_once(aws.s3, run / METRICS), place=run / METRICS)


def read_notebook(aws: Aws, run: S3Location) -> NotebookServer | None:
    """Read where the run's notebook answers; None where it has said nothing of that, or nothing that can be read."""
    return read_record(
        NotebookServer, object_store.read_once(aws.s3, run / NOTEBOOK_SERVER), place=run / NOTEBOOK_SERVER
    )


def fetch(
    aws: Aws,
    run: S3Location,
    target: Path,
    *,
    checkpoints: bool = False,
) -> Iterator[Path]:
    """Download a run's files below `target`, yielding each path once its file is whole.

    What jobs coordinate themselves by does not come along, and checkpoints only where asked for: they are most of a
    run's bytes, and of no use once there is a model.
    Links of the run's folders are made again once their files are there.
    Raises UsageError for a key that would land outside `target`, OSError with the path where it cannot be written.
    """
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=run.bucket, Prefix=run.key)
    listings = []
    for page in pages:
        for item in page.get("Contents", []):
            name = item["Key"].removeprefix(run.key)
            left_out = _OF_THE_PLATFORM if checkpoints else (*_OF_THE_PLATFORM, CHECKPOINTS)
            if name.endswith("/") or name.startswith(left_out):
                continue
            path = object_store.path_below(target, run, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                aws.s3.download_file(run.bucket, item["Key"], str(path))  # beside it, and renamed once it is whole
            except OSError as error:
                error.filename = error.filename or str(path)  # a full disk's error names no file
                raise
            yield path
            if "/" not in name and name.endswith(LISTING_SUFFIX):
                listings.append(path)
    for path in listings:
        found = read_record(Listing, path.read_bytes(), place=path)
        if found is not None:
            make_links(path.with_name(path.name.removesuffix(LISTING_SUFFIX)), found.links)
