"""The environment that a job's code runs in: its image, with the revision of the code, and the packages that matter."""

import importlib.metadata
import json
import os
import platform
import urllib.request
from http.client import HTTPException

from jobs.core.records import IMAGE_DIGEST

IMAGE_VARIABLE = "TRAINYARD_IMAGE"
"""Set in every image: name, release and revision of the code (jobs.core.git); on a laptop there is none."""

METADATA_VARIABLE = "ECS_CONTAINER_METADATA_URI_V4"
"""Set by ECS in each container: where its agent tells of it (developer guide, task metadata endpoint version 4)."""

_ANSWER_SECONDS = 1.0

_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "optimum-habana")


def ran_with() -> dict[str, str]:
    """Return the image that the code runs in, where it is one, and the versions of what it runs with."""
    image = os.environ.get(IMAGE_VARIABLE)
    digest = _image_digest()
    return {
        **({"image": image} if image else {}),
        **({IMAGE_DIGEST: digest} if digest else {}),
        **_versions(),
    }


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203 - six of them
            continue
    return found


def _image_digest() -> str | None:
    """Return the digest that the container's image was named by; None where it was named by a tag, or nobody says."""
    address = os.environ.get(METADATA_VARIABLE)
    if not address:
        return None
    # No proxy reaches the agent's link-local address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=_ANSWER_SECONDS) as answer:
            return str(json.load(answer)["Image"]).partition("@")[2] or None
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return None
