"""Checks of the Dockerfiles without a Docker engine: that they agree with the release rows and with each other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.core.git import NOT_SOURCES, SOURCES
from jobs.core.images import image, images, release, releases, with_descendants
from jobs.core.instance_types import INSTANCE_TYPES, SCRATCH
from jobs.images.check import ACCELERATORS
from jobs.images.lock import lock_file, locked

ROOT = Path(__file__).parents[2]

DOCKERFILES = sorted((ROOT / "images").glob("*/Dockerfile"))
CHILDREN = {one.folder for one in images().values() if one.parent}
ROOTS = [path for path in DOCKERFILES if path.parent.name not in CHILDREN]

SECRET = re.compile(r"secret|token|passw|credential|api_?key|access_?key|private|auth", re.IGNORECASE)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_default_arguments_are_the_default_release(dockerfile: Path) -> None:
    name = dockerfile.parent.name
    rows = release(of="gaudi" if name in CHILDREN else name).build_arguments
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile.read_text(), flags=re.MULTILINE))
    given = {name: value for name, value in defaults.items() if name in rows and value != "unknown"}
    assert given
    assert given == {name: rows[name] for name in given}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_arguments_are_known_and_none_could_leave_a_secret(dockerfile: Path) -> None:
    """Arguments and variables are in an image's history, visible to everyone who may pull it."""
    text = dockerfile.read_text()
    own = {"PARENT_IMAGE", "PARENT_PACKAGES", "PARENT", "BASE_IMAGE", "REVISION"}
    own |= {"TORCH_INDEX", "PIP_EXTRA_INDEX_URL", "EFA_MIRROR"}
    assert set(re.findall(r"^ARG (\w+)", text, flags=re.MULTILINE)) <= own | set(release().build_arguments)
    joined = re.sub(r"\\\n", " ", text)
    instructions = re.findall(r"^(?:ARG|ENV|LABEL)\s+(.*)$", joined, flags=re.MULTILINE)
    names = {name for rest in instructions for name in re.findall(r"^([\w.-]+)$|([\w.-]+)=", rest)}
    assert names
    assert [name for name in names if SECRET.search("".join(name))] == []
    # Nor are other files of the build machine copied: only these names of the context.
    copied = re.findall(r"^COPY (?!--from)(\S+) ", text, flags=re.MULTILINE)
    assert all(re.fullmatch(r"jobs|trainyard|images/locks/\$\{RELEASE\}/\S+\.txt", source) for source in copied)
    assert not re.search(r"^ADD\b", text, flags=re.MULTILINE)


@pytest.mark.parametrize("dockerfile", ROOTS, ids=lambda path: path.parent.name)
def test_root_image_ends_with_the_code_and_its_user(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert text.index("install-packages") < text.index("COPY jobs ") < text.index("install-jobs")
    # An argument that changes with every commit would rerun every RUN after it, and so rebuild the packages.
    assert "RUN" not in text[text.index("ARG REVISION") :]
    # Data sets on the hub must not run code.
    assert re.search(r"^ENV (?:.*\\\n)*.*HF_DATASETS_TRUST_REMOTE_CODE=0\b", text, re.MULTILINE)
    # Images built on the stage of the packages have the same user.
    for stage in text.split("\nFROM packages\n"):
        users = re.findall(r"^USER (\S+)$", stage, flags=re.MULTILINE)
        assert users[-1:] == ([] if dockerfile.parent.name == "gaudi" else ["1000:1000"])


@pytest.mark.parametrize("folder", sorted(CHILDREN))
def test_child_keeps_its_parents_user_and_command(folder: str) -> None:
    text = (ROOT / "images" / folder / "Dockerfile").read_text()
    before, _, stage = text.rpartition("FROM ${PARENT_PACKAGES}\n")
    assert before
    assert not re.findall(r"^(?:USER|WORKDIR|CMD|ENTRYPOINT)\b.*", stage, flags=re.MULTILINE)
    # The code is the parent's, in layers above the packages, so that edits leave these cached.
    assert re.findall(r"^COPY (.*) \S+$", stage, flags=re.MULTILINE) == [
        f"--from=packages /opt/trainyard/{folder}",
        "--from=parent /opt/trainyard/jobs",
        "--from=parent /opt/trainyard/trainyard",
    ]


@pytest.mark.parametrize(
    ("plugin", "complaint"),
    [
        (f"{release().name}.{release().build}", None),
        (f"{release().name}0.1", f"{release().name}0.1"),  # would belong to a release 1.21.00
        (None, "missing"),
    ],
)
def test_base_of_another_release_is_refused(tmp_path: Path, plugin: str | None, complaint: str | None) -> None:
    if plugin:
        metadata = tmp_path / f"habana_torch_plugin-{plugin}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: {plugin}\n")
    text = (ROOT / "images/gaudi/Dockerfile").read_text()
    assert re.findall(r"^(?:RUN|COPY) .*", text, flags=re.MULTILINE)[0].endswith('/mnt/check-base "${RELEASE}"')
    environment = {"PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(ROOT / "images/shared/check-base"), release().name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    error = (
        f"error: the base is not Habana's image of release {release().name}: its habana-torch-plugin is {complaint}\n"
    )
    assert (done.returncode, done.stderr) == ((1, error) if complaint else (0, ""))


def test_images_of_instance_types_have_a_writable_scratch() -> None:
    """Docker gives a new volume the mode of the folder that it covers (docs.docker.com, Volumes)."""
    assert {row.image for row in INSTANCE_TYPES.values()} <= {path.parent.name for path in DOCKERFILES}
    for name in {row.image for row in INSTANCE_TYPES.values() if row.nvme_disks} - {"gaudi"}:  # gaudi runs as root
        assert f"mkdir --mode 1777 {SCRATCH}\n" in (ROOT / "images" / name / "Dockerfile").read_text()


def test_images_request_their_accelerators_by_variable() -> None:
    """Job definitions have no environment, and Habana's image does not set the variable."""
    for name, (runtime, options) in ACCELERATORS.items():
        joined = re.sub(r"\\\n", " ", (ROOT / "images" / name / "Dockerfile").read_text())
        assert re.search(rf"^ENV .*\b{runtime.upper()}_VISIBLE_DEVICES=all\b", joined, flags=re.MULTILINE), name
        # The check of an image must not add anything that a job on Batch lacks.
        assert "environment" not in options


def test_build_context_is_what_the_revision_covers() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1:] == ["*", *(f"!{name}" for name in SOURCES), *NOT_SOURCES]


def test_every_image_copies_its_lock_for_every_release() -> None:
    for row in releases().values():
        for one in with_descendants(row.image):
            written = one.dockerfile.read_text().replace("${RELEASE}", row.name).replace("${PARENT}", one.parent or "")
            assert f"COPY {lock_file(one, row).relative_to(ROOT)} /opt/trainyard/" in written
            parent = locked(image(one.parent), row) if one.parent else {}
            assert not set(locked(one, row)) & set(parent), "a child must not change its parent"


def test_hadolint_passes_and_its_exceptions_are_explained() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    dockerfiles = [*DOCKERFILES, *(ROOT / "tests").rglob("Dockerfile")]
    linted = subprocess.run([hadolint, "--no-color", *dockerfiles], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")
    for dockerfile in dockerfiles:
        lines = dockerfile.read_text().splitlines()
        ignored = [number for number, line in enumerate(lines) if line.startswith("# hadolint ")]
        assert [lines[number] for number in ignored if not re.match(r"# (?!hadolint)\S", lines[number - 1])] == []


def test_shellcheck_passes_for_the_shared_scripts() -> None:
    scripts = sorted(path for path in (ROOT / "images" / "shared").iterdir() if path.suffix != ".sha256")
    assert scripts
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), *scripts], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "")
    assert all(os.access(script, os.X_OK) for script in scripts)
