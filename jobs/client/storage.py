"""The runs in the stage's run bucket, and the files of each: found, read, fetched."""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.contract.errors import NotFoundError, TrainyardError, UsageError
from jobs.contract.locations import S3Location
from jobs.contract.notebook_server import NotebookServer
from jobs.contract.plan import Plan
from jobs.contract.records import Receipt
from jobs.contract.run import (
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    METRICS,
    NOTEBOOK_SERVER,
    RECEIPT,
    SPEC,
    is_run_id,
    run_prefix,
    spec_name,
)
from jobs.contract.stage import DeployedStage

_CHECKPOINT = re.compile(rf"{CHECKPOINTS}step-(\d+)/{re.escape(MANIFEST)}")


@dataclass(frozen=True, order=True)
class StoredRun:
    """A run by the files it has; ordered by the time in its id."""

    order: str
    run_id: str
    team: str
    location: S3Location


def read_spec_text(aws: Aws, run: S3Location) -> str | None:
    """Read the resolved spec that a run was submitted with; None where there is none."""
    text = object_store.read_once(aws.s3, run / SPEC)
    return None if text is None else text.decode()


def put_spec(aws: Aws, plan: Plan, text: str | None = None) -> None:
    """Write the resolved spec where the run's files will lie, before the run exists; or the one that was there."""
    import yaml

    place = plan.run_location / SPEC
    if text is None:
        text = yaml.safe_dump(plan.spec.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)
    aws.s3.put_object(Bucket=place.bucket, Key=place.key, Body=text.encode(), ContentType="application/yaml")


def delete_spec(aws: Aws, plan: Plan) -> None:
    """Take back `put_spec` where Batch refused the job: without it there would seem to be a run."""
    place = plan.run_location / SPEC
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
            if error_code(error) not in object_store.DENIED:
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

    Raises NotFoundError where there is none, UsageError where `text` is the beginning of several ids.
    """
    runs = stored_runs(aws, stage, prefix="" if text == LATEST else text)
    same_name = [run for run in runs if text in (LATEST, run.run_id, spec_name(run.run_id))]
    if same_name:
        return same_name[-1]
    if len(runs) == 1:
        return runs[0]
    if runs:
        newest = ", ".join(run.run_id for run in reversed(runs[-5:]))
        raise UsageError(
            f"'{text}' begins {len(runs)} run ids, the newest of them {newest}", next_step="type more of it"
        )
    if text == LATEST:
        raise NotFoundError(f"stage '{stage.name}' has no runs yet", next_step="trainyard submit SPEC")
    known = {name for run in stored_runs(aws, stage) for name in (run.run_id, spec_name(run.run_id))}
    close = difflib.get_close_matches(text, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise NotFoundError(f"run '{text}' not found in stage '{stage.name}'{hint}", next_step="trainyard list")


def newest_checkpoint(aws: Aws, run: S3Location) -> int | None:
    """Return the step of the newest checkpoint that has its manifest; None where there is none."""
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=run.bucket, Prefix=(run / CHECKPOINTS).key)
    keys = (item["Key"].removeprefix(run.key) for page in pages for item in page.get("Contents", []))
    steps = [int(match[1]) for key in keys if (match := _CHECKPOINT.fullmatch(key))]
    return max(steps, default=None)


def read_receipt(aws: Aws, run: S3Location) -> Receipt | None:
    """Read the receipt that a run has written so far; None where it has written none."""
    text = object_store.read_once(aws.s3, run / RECEIPT)
    if text is None:
        return None
    try:
        return Receipt.model_validate_json(text)
    except ValidationError as error:
        raise TrainyardError(
            f"{run / RECEIPT} is no receipt that this release reads: {error.errors()[0]['msg']}",
            next_step="read it with the release that wrote it, or as JSON: trainyard fetch",
        ) from None


def read_metrics(aws: Aws, run: S3Location) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl so far."""
    text = object_store.read_once(aws.s3, run / METRICS) or b""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def read_notebook(aws: Aws, run: S3Location) -> NotebookServer | None:
    """Read where the run's notebook answers; None where it has said nothing of that."""
    text = object_store.read_once(aws.s3, run / NOTEBOOK_SERVER)
    return None if text is None else NotebookServer.model_validate_json(text)


def fetch(aws: Aws, run: S3Location, target: Path, *, checkpoints: bool = False) -> Iterator[Path]:
    """Download a run's files below `target`, yielding each path once its file is whole.

    Checkpoints, most of a run's bytes and of no use once there is a model, come along only where asked for.
    Raises UsageError for a key that would land outside `target`, OSError with the path where it cannot be written.
    """
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=run.bucket, Prefix=run.key)
    for page in pages:
        for item in page.get("Contents", []):
            name = item["Key"].removeprefix(run.key)
            if name.endswith("/") or (name.startswith(CHECKPOINTS) and not checkpoints):
                continue
            path = object_store.path_below(target, run, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                aws.s3.download_file(run.bucket, item["Key"], str(path))  # beside it, and renamed once it is whole
            except OSError as error:
                error.filename = error.filename or str(path)  # a full disk's error names no file
                raise
            yield path
