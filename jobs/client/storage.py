"""What lies in the stage's buckets: the inputs of a job before it is submitted, and the files of its run."""

import difflib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.contract.arguments import ARTIFACT_FOLDER, FILES_FOLDER, MODEL_FOLDER
from jobs.contract.artifact import POINTER
from jobs.contract.errors import NotFoundError, TrainyardError, UsageError
from jobs.contract.locations import HUB, S3, S3Location, hub_suggestion
from jobs.contract.notebook_server import NotebookServer
from jobs.contract.plan import Plan
from jobs.contract.records import Receipt
from jobs.contract.run import (
    CHECKPOINTS,
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

LATEST = "latest"
"""In place of a run id: the newest run of the stage."""

_CHECKPOINT = re.compile(rf"{CHECKPOINTS}step-(\d+)/{re.escape(MANIFEST)}")

_DENIED = ("403", "AccessDenied")


@dataclass(frozen=True, order=True)
class StoredRun:
    """A run by the files it has; ordered by the time in its id."""

    order: str
    run_id: str
    team: str
    location: S3Location


def check_inputs(aws: Aws, plan: Plan, *, embedded: bool) -> None:
    """Look for everything the job will read, before anything is paid for.

    What a run writes that has not ended is not looked for. Raises NotFoundError where an input is missing, UsageError
    where the job's container could not reach it. What a hub name stands for is the container's to find out.
    """
    awaited = {argument for run in plan.awaited for argument in run.arguments}
    for argument, location, what in plan.inputs:
        if location.startswith(HUB) or argument in awaited:
            continue
        if location.startswith(S3):
            if what == ARTIFACT_FOLDER:
                _check_artifact(aws, argument, location, plan.spec.entrypoint_arguments().artifact_kind(argument))
            else:
                _check_object(aws, argument, location, what)
        elif not Path(location).exists():
            # Specs are read with their paths made absolute; what was written is what is left of the working directory.
            suggestion = hub_suggestion(os.path.relpath(location)) if what == MODEL_FOLDER else ""
            raise NotFoundError(
                f"arguments.{argument}: {what} was expected at {location}, where there is nothing{suggestion}",
                next_step="correct the path, which counts from the working directory, "
                "or begin it with hf://, s3:// or data:// where it lies elsewhere",
            )
        elif not embedded:
            raise UsageError(
                f"arguments.{argument}: {location} lies on this machine, where the job's container cannot read it",
                next_step=f"aws s3 cp {location} s3://…, and name it as s3://… or data://… in the spec",
            )


def _check_object(aws: Aws, argument: str, location: str, what: str) -> None:
    place = S3Location.parse(location)
    folder = place.key.rstrip("/") + "/" if place.key else ""
    wanted = folder + "config.json" if what == MODEL_FOLDER else place.key
    if what != FILES_FOLDER and _exists(aws, S3Location(place.bucket, wanted)):
        return
    below = _holds_files(aws, place.bucket, folder)
    if what == MODEL_FOLDER and below:
        raise NotFoundError(
            f"arguments.{argument}: {location} holds files but no config.json, so it is no {what.removeprefix('a ')}",
            next_step="upload what save_pretrained() wrote, or correct the location",
        )
    if not below:
        raise NotFoundError(
            f"arguments.{argument}: {what} was expected at {location}, where there is nothing",
            next_step=f"aws s3 cp {'--recursive ' if what in (FILES_FOLDER, MODEL_FOLDER) else ''}SOURCE {location}, "
            "or correct the location",
        )


def _check_artifact(aws: Aws, argument: str, location: str, wanted: str | None) -> None:
    place = S3Location.parse(location)
    text = _read(aws, place / MANIFEST) or _read(aws, place / POINTER)
    if text is None:
        raise NotFoundError(
            f"arguments.{argument}: {ARTIFACT_FOLDER} was expected at {location}, where there is neither {POINTER} nor "
            f"{MANIFEST}",
            next_step="name a run that makes one, or where one lies",
        )
    try:
        kind = json.loads(text)["kind"]
    except (ValueError, LookupError, TypeError):
        return  # what it is instead, the job says
    if wanted not in (None, kind):
        raise UsageError(f"arguments.{argument}: {location} is a '{kind}', not a '{wanted}'")


def _exists(aws: Aws, place: S3Location) -> bool:
    try:
        aws.s3.head_object(Bucket=place.bucket, Key=place.key)
    except Exception as error:
        if _is_missing(aws, place, error):
            return False
        raise
    return True


def _is_missing(aws: Aws, place: S3Location, error: Exception) -> bool:
    """Whether S3's answer means that nothing is there.

    To whoever may list under one team's prefix only, S3 says that a missing object is forbidden, and so is another
    team's; a listing of that very key tells the two apart.
    """
    if error_code(error) not in _DENIED:
        return error_code(error) in ("404", "NoSuchKey", "NoSuchBucket")
    try:
        found = aws.s3.list_objects_v2(Bucket=place.bucket, Prefix=place.key, MaxKeys=1).get("Contents", [])
    except Exception as refusal:
        if error_code(refusal) in _DENIED:
            return False
        raise
    return all(item["Key"] != place.key for item in found)


def _holds_files(aws: Aws, bucket: str, folder: str) -> bool:
    try:
        return bool(aws.s3.list_objects_v2(Bucket=bucket, Prefix=folder, MaxKeys=1).get("Contents"))
    except Exception as error:
        if error_code(error) == "NoSuchBucket":
            return False
        raise


def read_spec_text(aws: Aws, run: S3Location) -> str | None:
    """The resolved spec that a run was submitted with; None where there is none."""
    return _read(aws, run / SPEC)


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
    """The runs whose ids begin with `prefix`, the oldest first, however long ago Batch forgot them.

    Of the teams whose runs the caller may list; where there is none, raises what S3 said to that.
    """
    found, denials = list[StoredRun](), list[Exception]()
    for team in stage.teams:
        try:
            found += runs_of_team(aws, stage, team, prefix=prefix)
        except Exception as error:  # noqa: PERF203 - one team's denial is not another's
            if error_code(error) not in _DENIED:
                raise
            denials.append(error)
    if denials and len(denials) == len(stage.teams):
        raise denials[0]
    return sorted(found)


def runs_of_team(aws: Aws, stage: DeployedStage, team: str, *, prefix: str = "") -> list[StoredRun]:
    """The runs of one team whose ids begin with `prefix`, the oldest first."""
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
    """The run that `text` names: its id, the beginning of one id, a spec's name (its newest run), or `latest`.

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
    """Step of the newest checkpoint that has its manifest; None where there is none."""
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=run.bucket, Prefix=(run / CHECKPOINTS).key)
    keys = (item["Key"].removeprefix(run.key) for page in pages for item in page.get("Contents", []))
    steps = [int(match[1]) for key in keys if (match := _CHECKPOINT.fullmatch(key))]
    return max(steps, default=None)


def read_receipt(aws: Aws, run: S3Location) -> Receipt | None:
    """The receipt a run has written so far; None where it has written none."""
    text = _read(aws, run / RECEIPT)
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
    """The lines of metrics.jsonl so far."""
    text = _read(aws, run / METRICS) or ""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _read(aws: Aws, place: S3Location) -> str | None:
    try:
        return aws.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read().decode()
    except Exception as error:
        if _is_missing(aws, place, error):
            return None
        raise


def read_notebook(aws: Aws, run: S3Location) -> NotebookServer | None:
    """Where the run's notebook answers; None where it has said nothing of that."""
    text = _read(aws, run / NOTEBOOK_SERVER)
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
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise UsageError(f"s3://{run.bucket}/{item['Key']} would be written outside {target}")
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".part")
            try:
                aws.s3.download_file(run.bucket, item["Key"], str(partial))
                partial.replace(path)
            except OSError as error:
                error.filename = error.filename or str(path)  # a full disk's error names no file
                raise
            finally:
                partial.unlink(missing_ok=True)
            yield path
