"""`trainyard images build`, `list` and `sbom` with a Docker engine, from a copy of the source that the tests edit."""

import json
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.images.conftest import Built
from tests.support.images.source_tree import SourceTree, release_of, rows_of

# The first test waits until the base and the cpu image are built, which takes minutes.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

QUICK = "ARG BASE_IMAGE\nFROM ${BASE_IMAGE} AS packages\nRUN touch /begun\nFROM packages\nARG REVISION\n"
"""The Dockerfile of an image that builds quickly; tests add instructions."""

CHILD = (
    "ARG PARENT_IMAGE\nARG PARENT_PACKAGES=${PARENT_IMAGE}\nFROM ${PARENT_PACKAGES}\n"
    "ARG PARENT\nRUN echo ${PARENT} > /parent\n"
)


@pytest.fixture
def base(base_image: str) -> Sequence[str]:
    return ("--build-arg", f"BASE_IMAGE={base_image}", "--network", "none")


PROBE = release_of("probe")


def names(engine: Any, image: str, tree: SourceTree) -> set[str]:
    """Return the engine's names of an image that was built from `tree`."""
    found = {name for one in engine.images.list(name=f"trainyard/{image}") for name in one.tags}
    return {name for name in found if tree.revision in name}


def test_edit_of_code_rebuilds_only_the_last_layers(
    built: Built, tree: SourceTree, options: Sequence[str], docker_engine: Any
) -> None:
    first = built.rows[0]
    assert [row["image"] for row in built.rows] == ["cpu", "cpu-notebook"]
    assert first["name"] == built.name("cpu")
    image = docker_engine.images.get(first["name"])
    assert (image.id, image.attrs["Size"]) == (first["id"], first["size_bytes"])
    assert image.labels["trainyard.commit"] == built.tree.git("rev-parse", "HEAD")

    tree.append("jobs/container/launch.py", "# edited\n")
    [edited] = rows_of(tree.images("build", "cpu", *options, "-o", "json"))
    assert re.fullmatch(rf"{release_of('cpu')}-{tree.revision}-dirty-[0-9a-f]{{8}}", edited["tag"])
    other = docker_engine.images.get(edited["name"])
    layers, others = image.attrs["RootFS"]["Layers"], other.attrs["RootFS"]["Layers"]
    # jobs/, trainyard/, and their compiled modules
    assert layers[:-3] == others[:-3]
    assert layers[-3] != others[-3]
    last_line = ["tail", "-n", "1", "/opt/trainyard/jobs/container/launch.py"]
    output = docker_engine.containers.run(edited["name"], last_line, network_mode="none", remove=True)
    assert output == b"# edited\n"
    assert "trainyard.commit" not in other.labels


def test_parents_are_built_first_if_missing_or_on_another_base(
    tree: SourceTree, base: Sequence[str], base_image: str, docker_engine: Any, tmp_path: Path
) -> None:
    tree.add_image("probe", QUICK)
    for child in ("more", "other"):
        tree.add_image(child, CHILD, parent="probe")
    (tree.root / "images/notebook/Dockerfile").unlink()  # the real one has no lock for this parent
    tree.commit()
    rows = rows_of(tree.images("build", "probe-more", *base, "-o", "json"))
    assert [row["image"] for row in rows] == ["probe", "probe-more"]
    for row in rows:
        assert docker_engine.images.get(row["name"]).labels["trainyard.base"] == base_image
    child = rows[1]["name"]
    files = docker_engine.containers.run(child, ["cat", "/begun", "/parent"], network_mode="none", remove=True)
    assert files == b"probe\n"
    # Now the parent exists. After a commit that does not change the sources, the child is the same.
    again = rows_of(tree.images("build", "probe-more", *base, "-o", "json"))
    assert [(row["image"], row["id"]) for row in again] == [("probe-more", rows[1]["id"])]
    tree.git("commit", "--quiet", "--allow-empty", "--message", "another")
    done = tree.images("build", "probe", "--all-descendants", *base)
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["IMAGE", "TAG", "SIZE", "TOOK"]
    assert [line.split()[0] for line in lines] == ["probe", "probe-more", "probe-other"], done.stderr
    assert docker_engine.images.get(child).labels["trainyard.commit"] == tree.git("rev-parse", "HEAD")
    table = tree.images("list").stdout
    assert re.search(rf"^probe +{PROBE} +current +{PROBE}-{tree.revision} +\d+ MB", table, re.MULTILINE), table
    # The SBOM lists its packages.
    sbom = tree.images("sbom", "probe", "--folder", str(tmp_path / "documents"))
    path = tmp_path / "documents" / f"probe-{PROBE}-{tree.revision}.spdx.json"
    assert (sbom.stdout, list(path.parent.iterdir())) == (f"{path}\n", [path]), sbom.stderr
    packages = {package["name"]: package for package in json.loads(path.read_text())["packages"]}
    assert packages["trainyard/probe"]["versionInfo"] == f"{PROBE}-{tree.revision}"
    origins = {
        name: {reference["referenceLocator"].partition("/")[0] for reference in package.get("externalRefs", ())}
        for name, package in packages.items()
    }
    assert "pkg:deb" in origins["ca-certificates"]
    assert "pkg:pypi" in origins["pip"]
    # For another base, which cannot be pulled here, the parent has to be rebuilt.
    missing = "localhost:1/python:3.11"
    done = tree.images("build", "probe-more", "--build-arg", f"BASE_IMAGE={missing}")
    assert done.returncode == 1
    assert missing in done.stderr
    assert "error: 'probe' was not built, and no image was tagged" in done.stderr
    assert "name a mirror with --build-arg BASE_IMAGE=…" in done.stderr


def test_failed_step_is_shown_and_complete_images_are_kept(
    tree: SourceTree, base: Sequence[str], docker_engine: Any
) -> None:
    tree.add_image("probe", QUICK)
    tree.add_image("more", CHILD + "RUN echo nothing like it >&2; false\n", parent="probe")
    tree.commit()
    done = tree.images("build", "probe-more", *base)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"^#\d+ [\d.]+ nothing like it$", done.stderr, re.MULTILINE)
    assert "error: 'probe-more' was not built, and no image was tagged: docker build ended with exit code 1" in (
        done.stderr
    )
    assert names(docker_engine, "probe", tree) == {f"trainyard/probe:{PROBE}-{tree.revision}"}
    assert names(docker_engine, "probe-more", tree) == set()


def test_ctrl_c_stops_the_build_and_tags_nothing(tree: SourceTree, base: Sequence[str], docker_engine: Any) -> None:
    tree.add_image("probe", QUICK + "RUN echo ${REVISION}; sleep 250\n")
    process = subprocess.Popen(
        tree.command("build", "probe", *base),
        cwd=tree.root,
        env=tree.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    try:
        output = [next(line for line in process.stderr if "sleep 250" in line)]
        process.send_signal(signal.SIGINT)
        output += process.stderr.read().splitlines(keepends=True)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert output[-1] == "error: stopped: 'probe' was not built, and no image was tagged\n"
    assert names(docker_engine, "probe", tree) == set()
