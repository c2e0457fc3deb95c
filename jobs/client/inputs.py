"""Inputs of a job are looked for before it is submitted, and before anything is paid for."""

import json
import os
from pathlib import Path

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.contract.arguments import ARTIFACT_FOLDER, FILES_FOLDER, MODEL_FOLDER
from jobs.contract.artifact import POINTER
from jobs.contract.errors import NotFoundError, UsageError
from jobs.contract.locations import HUB, S3, S3Location, hub_suggestion
from jobs.contract.plan import Plan
from jobs.contract.run import MANIFEST


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
    text = _record(aws, place)
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
        if object_store.is_missing(aws.s3, place, error):
            return False
        raise
    return True


def _holds_files(aws: Aws, bucket: str, folder: str) -> bool:
    try:
        return bool(aws.s3.list_objects_v2(Bucket=bucket, Prefix=folder, MaxKeys=1).get("Contents"))
    except Exception as error:
        if error_code(error) == "NoSuchBucket":
            return False
        raise


def _record(aws: Aws, place: S3Location) -> bytes | None:
    """Return the manifest of the artifact at `place`, or what points to it; None where there is neither."""
    try:
        return object_store.read_once(aws.s3, place / MANIFEST) or object_store.read_once(aws.s3, place / POINTER)
    except Exception as error:
        if error_code(error) == "NoSuchBucket":
            return None
        raise
