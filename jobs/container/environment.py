"""Read a container's environment: its Batch job, its image, and the versions of its main packages."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException

from jobs.core.records import IMAGE_DIGEST

IMAGE_VARIABLE = "TRAINYARD_IMAGE"
"""Name, release and code revision of the image (jobs.core.git). Set in every image, not on a laptop."""

METADATA_VARIABLE = "ECS_CONTAINER_METADATA_URI_V4"
"""Address of the container's task metadata endpoint, version 4. Set by ECS (developer guide)."""

_ANSWER_SECONDS = 1.0

MAIN_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "optimum-habana")


def ran_with() -> dict[str, str]:
    """Return the image that the code runs in, if there is one, and the versions of Python and the main packages."""
    image, digest = os.environ.get(IMAGE_VARIABLE), _image_digest()
    found = {**({"image": image} if image else {}), **({IMAGE_DIGEST: digest} if digest else {})}
    found["python"] = platform.python_version()
    for package in MAIN_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _image_digest() -> str | None:
    """Return the digest of the container's image, or None outside ECS or if the job named the image by a tag."""
    return (_ecs_metadata("", "Image", os.environ) or "").partition("@")[2] or None


def task_zone(environment: Mapping[str, str]) -> str | None:
    """Return the availability zone of the container's ECS task, or None if ECS does not report it.

    ECS's guide promises it on Fargate only; on EC2, the ECS agent fills it too (agent/handlers/v4/response.go of
    aws/amazon-ecs-agent).
    """
    return _ecs_metadata("/task", "AvailabilityZone", environment)


def _ecs_metadata(path: str, key: str, environment: Mapping[str, str]) -> str | None:
    """Return a value from the task metadata endpoint, or None outside ECS or if there is none."""
    address = environment.get(METADATA_VARIABLE)
    if not address:
        return None
    # No proxy reaches the agent's link-local address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address}{path}", timeout=_ANSWER_SECONDS) as answer:
            return str(json.load(answer)[key]) or None
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return None


def attempt_number(environment: Mapping[str, str] = os.environ) -> int:
    """Return the Batch job's attempt number, which starts at 1."""
    return int(environment.get("AWS_BATCH_JOB_ATTEMPT", "1"))


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the Batch job without the number of the node or child, or None outside Batch."""
    return re.split("[#:]", environment.get("AWS_BATCH_JOB_ID", ""))[0] or None
