"""The environment that a job's code runs in: its image, with the revision of the code, and the packages that matter."""

import importlib.metadata
import os
import platform

IMAGE_VARIABLE = "TRAINYARD_IMAGE"
"""Set in every image: name, release and revision of the code (jobs.contract.revision); on a laptop there is none."""

_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "optimum-habana")


def ran_with() -> dict[str, str]:
    """Return the image that the code runs in, where it is one, and the versions of what it runs with."""
    image = os.environ.get(IMAGE_VARIABLE)
    found = {**({"image": image} if image else {}), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203 - six of them
            continue
    return found
