"""What can be said of the Dockerfiles without a Docker engine: that they agree with the rows and with each other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.contract.image_hierarchy import Image, image, images
from jobs.contract.instance_types import INSTANCE_TYPES, SCRATCH
from jobs.contract.releases import Release, release, releases
from jobs.contract.revision import NOT_SOURCES, SOURCES
from jobs.images.checks.configuration import CARDS_VARIABLE
from jobs.images.checks.processes import ACCELERATORS
from jobs.images.lock import lock_file, locked

ROOT = Path(__file__).parents[2]

INSIDE = ROOT / "jobs/images/checks/inside"

DOCKERFILES = sorted((ROOT / "images").glob("*/Dockerfile"))
CHILDREN = {path for path in DOCKERFILES if path.parent.name in {one.folder for one in images().values() if one.parent}}
ROOTS = [path for path in DOCKERFILES if path not in CHILDREN]


def _arguments(dockerfile: Path) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile.read_text(), flags=re.MULTILINE))


def test_every_instance_type_has_its_image() -> None:
    assert {row.image for row in INSTANCE_TYPES.values()} <= {path.parent.name for path in DOCKERFILES}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_without_arguments_it_is_the_default_release(dockerfile: Path) -> None:
    rows = release().build_arguments
    given = {name: value for name, value in _arguments(dockerfile).items() if name in rows and value != "unknown"}
    assert given
    assert given == {name: rows[name] for name in given}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_argument_is_one_that_builds_give(dockerfile: Path) -> None:
    parent = {"PARENT_IMAGE", "PARENT_PACKAGES", "PARENT"}
    own = {*parent, "BASE_IMAGE", "REVISION", "TORCH_INDEX", "PIP_EXTRA_INDEX_URL", "EFA_MIRROR"}
    declared = set(re.findall(r"^ARG (\w+)", dockerfile.read_text(), flags=re.MULTILINE))
    assert declared <= own | set(release().build_arguments)


@pytest.mark.parametrize("dockerfile", ROOTS, ids=lambda path: path.parent.name)
def test_data_sets_of_the_hub_run_no_code_whoever_reads_them(dockerfile: Path) -> None:
    assert re.search(r"^ENV (?:.*\\\n)*.*HF_DATASETS_TRUST_REMOTE_CODE=0\b", dockerfile.read_text(), re.MULTILINE)


@pytest.mark.parametrize("dockerfile", ROOTS, ids=lambda path: path.parent.name)
def test_editing_code_rebuilds_no_layer_of_packages(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert text.index("install-packages") < text.index("COPY jobs ") < text.index("install-jobs")
    # An argument that changes with every commit would do the same, in any RUN that follows it.
    assert "RUN" not in text[text.index("ARG REVISION") :]


@pytest.mark.parametrize(
    ("plugin", "complaint"),
    [
        (f"{release().name}.{release().build}", None),
        ("1.18.0.524", "1.18.0.524"),
        (f"{release().name}0.1", f"{release().name}0.1"),  # of 1.21.00, if there were one
        (None, "missing"),
    ],
)
def test_a_base_of_another_release_is_refused(tmp_path: Path, plugin: str | None, complaint: str | None) -> None:
    """By the first instruction of images/gaudi, and by the test of an image that was built some other way."""
    if plugin:
        metadata = tmp_path / f"habana_torch_plugin-{plugin}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: {plugin}\n")
    name = release().name
    text = (ROOT / "images/gaudi/Dockerfile").read_text()
    assert re.findall(r"^(?:RUN|COPY) .*", text, flags=re.MULTILINE)[0].endswith('/mnt/check-base "${RELEASE}"')
    commands: list[tuple[list[str | Path], str]] = [
        (
            [ROOT / "images/shared/check-base", name],
            f"error: the base is not Habana's image of release {name}: its habana-torch-plugin is {complaint}\n",
        ),
        (
            [sys.executable, INSIDE / "versions.py", json.dumps({"habana-torch-plugin": f"{name}.*"})],
            f"habana-torch-plugin is {complaint}, not {name}.*\n",
        ),
    ]
    for command, said in commands:
        environment = {"PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == ((1, said) if complaint else (0, ""))


def test_a_container_asks_for_its_cards_by_what_its_image_says() -> None:
    """Job definitions have no environment, and Habana's image says nothing."""
    for name, variable in CARDS_VARIABLE.items():
        joined = re.sub(r"\\\n", " ", (ROOT / "images" / name / "Dockerfile").read_text())
        assert re.search(rf"^ENV .*\b{variable}=all\b", joined, flags=re.MULTILINE), name
    # The test of an image adds nothing that a job on Batch does not have.
    assert all("environment" not in options for _, _, options in ACCELERATORS.values())


@pytest.mark.parametrize("dockerfile", ROOTS, ids=lambda path: path.parent.name)
def test_only_gaudi_runs_as_root(dockerfile: Path) -> None:
    packages, image = dockerfile.read_text().split("\nFROM packages\n")
    # Of what is built on its packages, and of the image itself.
    for stage in (packages, image):
        users = re.findall(r"^USER (\S+)$", stage, flags=re.MULTILINE)
        assert users[-1:] == ([] if dockerfile.parent.name == "gaudi" else ["1000:1000"])


def test_an_image_whose_instances_have_disks_lets_its_user_write_to_them() -> None:
    """Docker gives a new volume the mode of the folder that it covers (docs.docker.com, Volumes)."""
    for name in {row.image for row in INSTANCE_TYPES.values() if row.nvme_disks} - {"gaudi"}:  # which runs as root
        assert f"mkdir --mode 1777 {SCRATCH}\n" in (ROOT / "images" / name / "Dockerfile").read_text()


def test_docker_sees_what_the_revision_is_taken_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1:] == ["*", *(f"!{name}" for name in SOURCES), *NOT_SOURCES]


@pytest.mark.parametrize("dockerfile", sorted(CHILDREN), ids=lambda path: path.parent.name)
def test_a_child_leaves_its_parents_user_and_command(dockerfile: Path) -> None:
    before, _, stage = dockerfile.read_text().rpartition("FROM ${PARENT_PACKAGES}\n")
    assert before
    assert not re.findall(r"^(?:USER|WORKDIR|CMD|ENTRYPOINT)\b.*", stage, flags=re.MULTILINE)
    # The code is the parent's, and lies above the packages, which its edits leave as they are.
    copied = re.findall(r"^COPY (.*) \S+$", stage, flags=re.MULTILINE)
    assert copied == [
        f"--from=packages /opt/trainyard/{dockerfile.parent.name}",
        "--from=parent /opt/trainyard/jobs",
        "--from=parent /opt/trainyard/trainyard",
    ]


@pytest.mark.parametrize("row", releases().values(), ids=lambda row: row.name)
@pytest.mark.parametrize("one", images().values(), ids=lambda one: one.name)
def test_every_image_has_a_lock_for_every_release_and_copies_it(one: Image, row: Release) -> None:
    written = one.dockerfile.read_text().replace("${RELEASE}", row.name).replace("${PARENT}", one.parent or "")
    assert f"COPY {lock_file(one, row).relative_to(ROOT)} /opt/trainyard/" in written
    assert lock_file(one, row).is_file()
    if one.parent:
        assert not set(locked(one, row)) & set(locked(image(one.parent), row)), "a child must not change its parent"


@pytest.mark.parametrize(
    "dockerfile", [*DOCKERFILES, *(ROOT / "tests").rglob("Dockerfile")], ids=lambda path: path.parent.name
)
def test_hadolint_finds_nothing_and_what_it_should_ignore_is_explained(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    linted = subprocess.run([hadolint, "--no-color", dockerfile], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")
    lines = dockerfile.read_text().splitlines()
    ignored = [number for number, line in enumerate(lines) if line.startswith("# hadolint ")]
    assert [lines[number] for number in ignored if not re.match(r"# (?!hadolint)\S", lines[number - 1])] == []


def test_shellcheck_finds_nothing_in_the_shared_scripts() -> None:
    scripts = sorted(path for path in (ROOT / "images" / "shared").iterdir() if path.suffix != ".sha256")
    assert scripts
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), *scripts], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "")
    assert all(os.access(script, os.X_OK) for script in scripts)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_no_instruction_could_leave_a_secret_in_the_image(dockerfile: Path) -> None:
    """Arguments and variables are in an image's history, for all who may pull it."""
    text = dockerfile.read_text()
    joined = re.sub(r"\\\n", " ", text)
    instructions = re.findall(r"^(ARG|ENV|LABEL)\s+(.*)$", joined, flags=re.MULTILINE)
    names = {name for _, rest in instructions for name in re.findall(r"([\w.-]+)=", rest)}
    names |= {rest for kind, rest in instructions if kind == "ARG" and "=" not in rest}
    assert names
    secret = re.compile(r"secret|token|passw|credential|api_?key|access_?key|private|auth", re.IGNORECASE)
    assert [name for name in names if secret.search(name)] == []
    # Nor what somebody has on the machine that builds: of the context, only these are named.
    copied = re.findall(r"^COPY (?!--from)(\S+) ", text, flags=re.MULTILINE)
    assert all(re.fullmatch(r"jobs|trainyard|images/locks/\$\{RELEASE\}/\S+\.txt", source) for source in copied)
    assert not re.search(r"^ADD\b", text, flags=re.MULTILINE)
