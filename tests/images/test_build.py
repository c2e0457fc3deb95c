"""`trainyard images build` and `list` with a Docker engine, from a copy of the source that nobody else edits."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from jobs.contract.releases import release
from tests.support.images.source_tree import SourceTree, rows_of

# The first to ask for the base and the cpu image waits until they are there, which takes minutes.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

RELEASE = release().name

QUICK = "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nARG REVISION\nRUN touch /begun\n"
"""The Dockerfile of an image that takes a moment; tests add instructions."""

CHILD = "ARG PARENT_IMAGE\nFROM ${PARENT_IMAGE}\nARG PARENT\nRUN echo ${PARENT} > /parent\n"


@pytest.fixture
def base(base_image: str) -> Sequence[str]:
    return ("--build-arg", f"BASE_IMAGE={base_image}", "--network", "none")


def names(engine: Any, image: str, tree: SourceTree) -> set[str]:
    """Return the names of an image that was built from `tree`, as the engine has them."""
    found = {name for one in engine.images.list(name=f"trainyard/{image}") for name in one.tags}
    return {name for name in found if tree.revision in name}


def test_the_cpu_image_is_built_and_a_code_edit_rebuilds_its_last_layers(
    tree: SourceTree, options: Sequence[str], base_image: str, docker_engine: Any
) -> None:
    (first,) = rows_of(tree.images("build", "cpu", *options, "-o", "json"))
    assert first["name"] == f"trainyard/cpu:{RELEASE}-{tree.revision}"
    image = docker_engine.images.get(first["name"])
    assert image.id == first["id"]
    assert image.labels["org.opencontainers.image.revision"] == tree.revision
    assert image.labels["org.opencontainers.image.version"] == RELEASE
    assert image.labels["trainyard.commit"] == tree.git("rev-parse", "HEAD")
    base_size = docker_engine.images.get(base_image).attrs["Size"]
    assert first["size_bytes"] == image.attrs["Size"] == base_size + first["added_bytes"]

    tree.append("jobs/train/launch.py", "# edited\n")
    edited = tree.images("build", "cpu", *options)
    assert edited.returncode == 0, edited.stderr
    assert re.search(r"^cpu: packages 5/5 cached$", edited.stderr, re.MULTILINE), edited.stderr
    header, row = edited.stdout.splitlines()
    assert header.split() == ["IMAGE", "TAG", "SIZE", "OVER", "BASE", "TOOK", "LAYERS"]
    tag = re.fullmatch(r"cpu +(\S+) +\d+ MB +\d+ MB +[\d.]+ s +3 of 7 rebuilt", row)
    assert tag, row
    assert re.fullmatch(rf"{RELEASE}-{tree.revision}-dirty-[0-9a-f]{{8}}", tag[1])
    seen = docker_engine.containers.run(
        f"trainyard/cpu:{tag[1]}",
        ["tail", "-n", "1", "/opt/trainyard/jobs/train/launch.py"],
        network_mode="none",
        remove=True,
    )
    assert seen == b"# edited\n"
    assert "trainyard.commit" not in docker_engine.images.get(f"trainyard/cpu:{tag[1]}").labels


def test_a_failure_half_way_names_image_and_step_and_leaves_no_name(
    tree: SourceTree, options: Sequence[str], docker_engine: Any
) -> None:
    launch = tree.root / "jobs/train/launch.py"
    launch.write_text(f"import nothing_like_it\n{launch.read_text()}")
    done = tree.images("build", "cpu", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "error: 'cpu' was not built, and no image got its name; step stage-1 3/3, RUN /mnt/install-jobs:" in done.stderr
    )
    assert "error: ModuleNotFoundError: No module named 'nothing_like_it'" in done.stderr
    assert names(docker_engine, "cpu", tree) == set()


def test_parents_are_built_first_and_only_where_they_are_missing(
    tree: SourceTree, base: Sequence[str], docker_engine: Any
) -> None:
    tree.add_image("probe", QUICK)
    tree.add_image("more", CHILD, parent="probe")
    tree.commit()
    rows = rows_of(tree.images("build", "probe-more", *base, "-o", "json"))
    assert [row["image"] for row in rows] == ["probe", "probe-more"]
    child = rows[1]["name"]
    assert (
        docker_engine.containers.run(child, ["cat", "/begun", "/parent"], network_mode="none", remove=True)
        == b"probe\n"
    )
    again = rows_of(tree.images("build", "probe-more", *base, "-o", "json"))
    assert [(row["image"], row["rebuilt_layers"]) for row in again] == [("probe-more", 0)]
    assert again[0]["id"] == rows[1]["id"]
    # After a commit that changes nothing of the sources, the layers stay, of the child too.
    tree.git("commit", "--quiet", "--allow-empty", "--message", "another")
    later = rows_of(tree.images("build", "probe", "probe-more", *base, "-o", "json"))
    assert [(row["image"], row["rebuilt_layers"]) for row in later] == [("probe", 0), ("probe-more", 0)]
    assert docker_engine.images.get(child).labels["trainyard.commit"] == tree.git("rev-parse", "HEAD")


def test_what_was_complete_before_a_failure_is_named(tree: SourceTree, base: Sequence[str], docker_engine: Any) -> None:
    tree.add_image("probe", QUICK)
    tree.add_image("more", CHILD + "RUN false\n", parent="probe")
    tree.commit()
    done = tree.images("build", "probe-more", *base)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: 'probe-more' was not built, and no image got its name; step " in done.stderr
    whole = f"trainyard/probe:{RELEASE}-{tree.revision}"
    assert done.stderr.endswith(f"error: what was complete before stays: {whole}\n")
    assert names(docker_engine, "probe", tree) == {whole}
    assert names(docker_engine, "probe-more", tree) == set()


def test_an_image_tells_the_base_that_it_is_built_on(
    tree: SourceTree, base: Sequence[str], base_image: str, docker_engine: Any
) -> None:
    tree.add_image("probe", QUICK)
    tree.add_image("more", CHILD, parent="probe")
    tree.commit()
    for row in rows_of(tree.images("build", "probe-more", *base, "-o", "json")):
        assert docker_engine.images.get(row["name"]).labels["trainyard.base"] == base_image
    # A child is not built on what is there as if it were on another base.
    done = tree.images("build", "probe-more", "--build-arg", "BASE_IMAGE=localhost:1/python:3.11")
    assert done.returncode == 2
    assert f"trainyard/probe:{RELEASE}-{tree.revision} is there already, built on {base_image}" in done.stderr


def test_a_builder_of_the_users_own_is_left_out_and_one_that_keeps_images_is_told(
    tree: SourceTree, base: Sequence[str], docker_engine: Any, tmp_path: Path
) -> None:
    # GIVEN a docker command as buildx has it with a builder in a container: it ends well, and the engine has nothing
    command = tmp_path / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(
        "#!/bin/sh\n"
        "case $* in *--help*) echo '      --progress string'; exit;; esac\n"
        '[ -z "$BUILDX_BUILDER" ] || { echo "ERROR: no builder $BUILDX_BUILDER found" >&2; exit 1; }\n'
    )
    command.chmod(0o755)
    tree.add_image("probe", QUICK)
    environment = {"PATH": f"{command.parent}:{os.environ['PATH']}", "BUILDX_BUILDER": "of-the-users"}
    done = tree.images("build", "probe", *base, environment=environment)
    assert (done.returncode, done.stdout) == (3, "")
    assert "error: 'probe' was built, and the Docker engine does not have it" in done.stderr
    assert "next: docker buildx ls, then docker buildx use" in done.stderr


def test_all_descendants_need_one_word(tree: SourceTree, base: Sequence[str], docker_engine: Any) -> None:
    tree.add_image("probe", QUICK)
    for child in ("more", "other"):
        tree.add_image(child, CHILD, parent="probe")
    (tree.root / "images/notebook/Dockerfile").unlink()  # the real one has no lock for this parent
    done = tree.images("build", "probe", "--all-descendants", *base, "-o", "json")
    assert [row["image"] for row in rows_of(done)] == ["probe", "probe-more", "probe-other"]


def test_an_image_without_a_lock_for_the_release_is_refused(tree: SourceTree, docker_engine: Any) -> None:
    tree.add_image("probe", QUICK, release="1.23.0")
    done = tree.images("build", "probe")
    assert done.returncode == 3
    assert f"no lock file for release {RELEASE}: images/locks/{RELEASE}/probe.txt is missing" in done.stderr
    assert f"next: python -m jobs.images.lock probe {RELEASE}" in done.stderr


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("BASE_IMGE=a", "is in no Dockerfile of cpu; did you mean 'BASE_IMAGE'?"),
        ("PYTORCH=2.0", "PYTORCH is decided by the release and the sources"),
        ("REVISION=1", "REVISION is decided by the release and the sources"),
        ("TORCH_INDEX=https://me:secret@example.com/", "TORCH_INDEX holds a password"),
        ("HTTPS_PROXY=http://me:secret@example.com/", "HTTPS_PROXY holds a password"),
    ],
)
def test_a_build_argument_changes_no_version_and_holds_no_secret(
    tree: SourceTree, docker_engine: Any, argument: str, said: str
) -> None:
    done = tree.images("build", "cpu", "--build-arg", argument)
    assert done.returncode == 2
    assert said in done.stderr
    assert "secret" not in done.stderr


def test_a_base_that_cannot_be_had_is_named(tree: SourceTree, docker_engine: Any) -> None:
    missing = "localhost:1/python:3.11"  # nothing listens there
    done = tree.images("build", "cpu", "--build-arg", f"BASE_IMAGE={missing}")
    assert done.returncode == 3
    assert f"error: the base of 'cpu' cannot be had: {missing}: " in done.stderr
    assert "--build-arg BASE_IMAGE=" in done.stderr.splitlines()[-1]
    assert names(docker_engine, "cpu", tree) == set()


def test_a_full_disk_is_told_with_what_can_go(tree: SourceTree, base: Sequence[str], docker_engine: Any) -> None:
    # /dev/full answers each write as a full disk does.
    tree.add_image("probe", QUICK + "RUN dd if=/dev/zero of=/dev/full count=1\n")
    done = tree.images("build", "probe", *base)
    assert done.returncode == 3
    assert re.search(
        r"^error: 'probe' was not built: the disk of the Docker engine is full.*: .*no space left on device",
        done.stderr,
        re.MULTILINE | re.IGNORECASE,
    ), done.stderr
    assert re.search(r"^next: docker builder prune .* which free \d+ MB and \d+ MB", done.stderr, re.MULTILINE)
    assert names(docker_engine, "probe", tree) == set()


def test_ctrl_c_stops_the_build_and_names_nothing(tree: SourceTree, base: Sequence[str], docker_engine: Any) -> None:
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
        said = [next(line for line in process.stderr if "sleep 250" in line)]
        process.send_signal(signal.SIGINT)
        said += process.stderr.read().splitlines(keepends=True)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert said[-1] == "error: stopped: 'probe' was not built, and no image got its name\n"
    assert names(docker_engine, "probe", tree) == set()


def test_sources_that_change_as_they_are_read_make_no_image(
    tree: SourceTree, base: Sequence[str], docker_engine: Any, tmp_path: Path
) -> None:
    tree.add_image("probe", QUICK + "COPY images/probe /probe\n")
    done = Event()

    def edit() -> None:
        """Edit a file in one move: one that is written in place may be seen empty before the build and after."""
        count = 0
        while not done.wait(0.005):
            (tmp_path / "edited").write_text(str(count := count + 1))
            (tmp_path / "edited").rename(tree.root / "images/probe/edited")

    editor = Thread(target=edit)
    editor.start()
    try:
        ended = tree.images("build", "probe", *base)
    finally:
        done.set()
        editor.join()
    assert ended.returncode == 1, ended.stdout
    assert re.search(rf"error: the sources changed from {tree.revision}-dirty-\S+ to \S+ while 'probe'", ended.stderr)
    assert names(docker_engine, "probe", tree) == set()


def test_the_list_tells_current_from_outdated(tree: SourceTree, base: Sequence[str], docker_engine: Any) -> None:
    def row(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        done = tree.images("list", "-o", "json", environment=environment)
        assert done.returncode == 0, done.stderr
        return next(one for one in json.loads(done.stdout)["images"] if one["image"] == "probe")

    tree.add_image("probe", QUICK)
    tree.commit()
    assert not row()["is_current"]
    (first,) = rows_of(tree.images("build", "probe", *base, "-o", "json"))
    listed = row()
    assert (listed["is_built"], listed["is_current"]) == (True, True)
    assert {key: listed[key] for key in ("tag", "revision", "id", "size_bytes")} == {
        key: first[key] for key in ("tag", "revision", "id", "size_bytes")
    }
    tree.append("jobs/contract/spec.py", "# edited\n")
    assert (row()["tag"], row()["is_current"]) == (first["tag"], False)
    table = tree.images("list").stdout
    assert re.search(rf"^probe +outdated +{re.escape(first['tag'])} +\d+ MB", table, re.MULTILINE)
