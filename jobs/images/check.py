"""Test an image by running pytest in one of its containers.

    trainyard images test cpu           cpu and all images built on it

images/checks has the tests for every image, and images/<folder>/test_*.py the tests for one image and its children.
They are copied into a container together with pytest, which images lack, and with facts.json, which has the image's
expected properties and those that the engine reports. The container has no network and no capabilities, and cannot gain
privileges, so the features that pass do not need them.
"""

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound
from docker.models.images import Image as DockerImage
from docker.types import DeviceRequest

from jobs.core.errors import ConfigurationError, NotFoundError
from jobs.core.git import image_tag, local_name
from jobs.core.images import IMAGES_FOLDER, Image, Release, image
from jobs.core.instance_types import INSTANCE_TYPES, SCRATCH
from jobs.images.build import BASE_LABEL, COMMIT_LABEL
from jobs.images.lock import contents, locked
from jobs.spec.catalog import CATALOG

FOLDER = "/trainyard-checks"
"""The folder in the container that holds the tests, facts.json and pytest."""

_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
"""pytest and its dependencies, all pure Python. The image's own versions take precedence."""

_START = f"""
import sys
sys.path.append({FOLDER + "/packages"!r})
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""

_OPTIONS = (
    *("-c", "pytest.ini", "--import-mode=importlib", "--color=no"),
    *("-p", "no:cacheprovider", "-vv", "--no-header", "--disable-warnings", "-rs"),
    # A longer traceback would print variables, and with them any secret that a test finds. For the same reason no test
    # compares the result of a method of os.environ: pytest would print all of it.
    "--tb=short",
)

_FILES = "test_files.py"
"""Tests that read every file. They run as root, with the capability to ignore file modes."""

_AS_A_JOB: Mapping[str, Any] = {"cap_drop": ["ALL"], "shm_size": "1g"}
_AS_ROOT: Mapping[str, Any] = {"user": "0:0", "cap_drop": ["ALL"], "cap_add": ["DAC_READ_SEARCH"]}

ACCELERATORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gaudi": ("habana", {"runtime": "habana", "ipc_mode": "host"}),
    "cuda": ("nvidia", {"device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])], "ipc_mode": "host"}),
}
"""Per root image: its accelerator's container runtime, and the extra parameters that Batch sets."""

_OF_EVERY_IMAGE = ("torch", "transformers", "accelerate", "datasets", "boto3", "tensorboard", "jobs.container.launch")


def check(
    img: Image, *, release: Release, revision: str, client: docker.DockerClient, report: Callable[[str], None]
) -> bool:
    """Run all tests of an image and return whether they passed. `report` gets pytest's lines as they arrive.

    Raises NotFoundError if the engine does not have the image, ConfigurationError if pytest is not installed, and
    docker's errors.
    """
    name = local_name(img.name, image_tag(release.name, revision))
    try:
        found = client.images.get(name)
    except ImageNotFound:
        raise NotFoundError(
            f"the Docker engine has no image {name}", next_step=f"trainyard images build {img.name}"
        ) from None
    runtime, options = ACCELERATORS.get(img.root, (None, {}))
    has_card = runtime is not None and runtime in client.info()["Runtimes"]
    as_a_job = {**_AS_A_JOB, **({**options, "cap_drop": None} if has_card else {})}
    if runtime:
        as_a_job["volumes"] = [SCRATCH]
    tests = tests_of(img)
    archive = _archive(tests, _facts(img, found, release=release, revision=revision) | {"has_card": has_card})
    of_processes = [path.name for path in tests if path.name.startswith("test_") and path.name != _FILES]
    passed = [
        _run(client, found.id, archive, names, report, **how)
        for names, how in ((of_processes, as_a_job), ([_FILES], _AS_ROOT))
    ]
    return all(passed)


def tests_of(img: Image) -> list[Path]:
    """Return an image's test files, from images/checks, its root's folder and its own folder."""
    folders = dict.fromkeys(("checks", img.root, img.folder))
    return [path for folder in folders for path in sorted((IMAGES_FOLDER / folder).glob("*.py"))]


def expected_versions(img: Image, row: Release) -> dict[str, str]:
    """Return the required version of each package, from the lock and the row. `1.21.0.*` is a version prefix.

    Raises ConfigurationError if there is no lock file.
    """
    parent = locked(image(img.parent), row) if img.parent else {}
    expected = {**parent, **locked(img, row), "transformers": row.transformers, "accelerate": row.accelerate}
    if contents(img).torch == "base":
        expected |= {
            "torch": row.pytorch,
            "optimum-habana": row.optimum_habana,
            "habana-torch-plugin": f"{row.name}.*",
        }
    return expected


def _dockerfile_user(img: Image) -> tuple[int, str]:
    """Return the id and home of the user in the root image's Dockerfile. Default: root."""
    text = image(img.root).dockerfile.read_text()
    users = re.findall(r"^USER (\d+)", text, re.MULTILINE)
    homes = re.findall(r"--home-dir (\S+)", text)
    return (int(users[-1]), homes[-1]) if users else (0, "/root")


def _run(
    client: docker.DockerClient,
    image_id: str,
    archive: bytes,
    names: Sequence[str],
    report: Callable[[str], None],
    **how: Any,
) -> bool:
    """Run test files in a container and return whether they passed. `how` is passed to docker's SDK."""
    container = client.containers.create(
        image_id,
        ["python", "-c", _START, *_OPTIONS, *names],
        working_dir=FOLDER,
        init=True,
        network_mode="none",
        security_opt=["no-new-privileges"],
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        **how,
    )
    try:
        container.put_archive("/", archive)
        container.start()
        for line in _lines(container):
            report(line)
        return int(container.wait()["StatusCode"]) == 0
    finally:
        container.remove(force=True, v=True)


def _facts(img: Image, found: DockerImage, *, release: Release, revision: str) -> dict[str, Any]:
    configuration = found.attrs["Config"]
    user, home = _dockerfile_user(img)
    labels = {
        "org.opencontainers.image.title": f"trainyard/{img.name}",
        "org.opencontainers.image.version": release.name,
        "org.opencontainers.image.revision": revision,
    }
    if img.parent:
        labels["org.opencontainers.image.base.name"] = local_name(img.parent, image_tag(release.name, revision))
    arguments = {name.lower().replace("_", "-"): value for name, value in release.build_arguments.items()}
    own = [name for name in configuration.get("Labels") or () if name.startswith("trainyard.")]
    labels |= {name: arguments.get(name.removeprefix("trainyard."), "") for name in own}
    for name in (BASE_LABEL, COMMIT_LABEL):
        labels.pop(name, None)
    return {
        "image": img.name,
        "labels": {"expected": labels, "found": configuration.get("Labels") or {}},
        "environment": configuration.get("Env") or [],
        "entrypoint": configuration.get("Entrypoint"),
        "command": configuration.get("Cmd"),
        "history": [entry["CreatedBy"] for entry in found.history()],
        "user": user,
        "home": home,
        "versions": expected_versions(img, release),
        "modules": [*_OF_EVERY_IMAGE, *(kind.entrypoint for kind in CATALOG.values())],
        "instance_type": next((row.name for row in INSTANCE_TYPES.values() if row.image == img.root), None),
    }


def _archive(tests: Sequence[Path], facts: Mapping[str, Any]) -> bytes:
    """Return a tar archive of FOLDER with the tests, the facts and pytest, readable by any user."""
    files = {path.name: path.read_bytes() for path in tests}
    files |= {"facts.json": json.dumps(facts).encode(), "pytest.ini": b"[pytest]\n"}
    try:
        for name in _PYTEST:
            for file in distribution(name).files or ():
                if file.suffix == ".py":
                    files[f"packages/{file}"] = file.read_binary()
    except PackageNotFoundError as error:
        raise ConfigurationError(
            f"testing images needs pytest, but {error.name} is not installed",
            next_step="make install, or python -m pip install pytest",
        ) from None
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{FOLDER}/{name}")
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def _lines(container: Any) -> Iterator[str]:
    """Yield the lines of a container's output as they arrive."""
    rest = b""
    for part in container.logs(stream=True, follow=True):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
