import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomllib

from jobs.core.errors import ConfigurationError, UsageError
from jobs.core.images import MINIMUM_PYTHON, Release, history, release, release_for, releases, table
from jobs.core.instance_types import INSTANCE_TYPES

DL1 = INSTANCE_TYPES["dl1.24xlarge"]
ROOT = Path(__file__).parents[3]

TUTORIALS = ["1.5.0", "1.4.1"]

FIRST_GENERATION = [row.name for row in releases().values() if 1 in row.gaudi]


def test_default_release_supports_first_generation_gaudi() -> None:
    assert release().name in FIRST_GENERATION
    assert release() == release(release().name)


def test_base_image_is_habanas_published_image() -> None:
    assert release("1.21.0").base_image.partition("@")[0] == (
        "vault.habana.ai/gaudi-docker/1.21.0/ubuntu22.04/habanalabs/pytorch-installer-2.6.0:1.21.0-555"
    )
    assert release("1.21.0").optimum_habana == "1.18.1"


def test_rows_are_ordered_from_new_to_old() -> None:
    numbers = [tuple(map(int, name.split("."))) for name in releases()]
    assert numbers == sorted(numbers, reverse=True)
    # The last release that supports the first generation is not the latest release.
    assert FIRST_GENERATION[0] == "1.21.0"
    assert list(releases())[-len(FIRST_GENERATION) :] == FIRST_GENERATION


@pytest.mark.parametrize("row", releases().values(), ids=lambda row: row.name)
def test_row_is_complete_and_has_a_reason(row: Release) -> None:
    assert row.why
    assert row.build > 0
    assert row.os == "ubuntu22.04"
    # The code in the container needs 3.10.
    assert row.python == "3.10"
    for version in (row.name, row.pytorch, row.optimum_habana, row.transformers, row.accelerate):
        assert re.fullmatch(r"\d+\.\d+\.\d+", version or "")
    # The fork has a tag for each minor release.
    assert row.deepspeed in {row.name, f"{row.name.rpartition('.')[0]}.0"}
    assert "" not in row.build_arguments.values()


def test_laptop_uses_the_default_releases_transformers() -> None:
    laptop = re.findall(r"^(\S+==\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert {f"transformers=={release().transformers}", f"accelerate=={release().accelerate}"} <= set(laptop)


def test_known_commit_of_deepspeed_is_installed() -> None:
    assert release().build_arguments["DEEPSPEED"] == release().deepspeed
    assert replace(release(), deepspeed_commit="0" * 40).build_arguments["DEEPSPEED"] == "0" * 40


@pytest.mark.parametrize("row", history().values(), ids=lambda row: row.name)
def test_past_release_is_rejected_with_the_reason(row: Release) -> None:
    reason = (
        "its image has Python 3.8, but jobs/container needs 3.10" if row.name in TUTORIALS else "it has no lock files"
    )
    with pytest.raises(ConfigurationError) as caught:
        release_for(DL1, row.name)
    assert str(caught.value).startswith(
        f"release '{row.name}' is no longer available: {reason}\nNext: choose one of {', '.join(releases())}"
    )


def test_history_has_the_releases_of_the_tutorials() -> None:
    assert [row.name for row in history().values() if row.python != MINIMUM_PYTHON] == TUTORIALS
    assert history()["1.4.1"].base_image == (
        "vault.habana.ai/gaudi-docker/1.4.1/ubuntu20.04/habanalabs/pytorch-installer-1.10.2:1.4.1-11"
    )
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject["project"]["requires-python"] == f">={MINIMUM_PYTHON}"


@pytest.mark.parametrize("name", FIRST_GENERATION)
def test_dl1_runs_every_release_up_to_1_21(name: str) -> None:
    assert release_for(DL1, name) == release(name)


@pytest.mark.parametrize("name", [name for name in releases() if name not in FIRST_GENERATION])
def test_dl1_rejects_releases_without_its_generation(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        release_for(DL1, name)
    assert str(caught.value) == (
        f"release '{name}' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1\n"
        f"Next: choose one of {', '.join(FIRST_GENERATION)}"
    )
    assert caught.value.exit_code == 3


def test_other_types_run_releases_that_dl1_does_not() -> None:
    assert release_for(replace(DL1, gaudi_generation=2), "1.23.0").name == "1.23.0"
    assert release_for(INSTANCE_TYPES["m6i.4xlarge"], "1.23.0").name == "1.23.0"
    assert release_for(INSTANCE_TYPES["m6i.4xlarge"]) == release()


def test_unknown_release_is_rejected_with_the_closest_one() -> None:
    with pytest.raises(UsageError, match=r"^unknown release '1\.21'; did you mean '1\.21\.0'\?$"):
        release_for(DL1, "1.21")


@pytest.mark.parametrize("page", ["images/README.md"])
def test_pages_contain_the_printed_table(page: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "jobs.core.images", "--table"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    held = (ROOT / page).read_text().partition("<!-- releases -->")[2].partition("<!-- /releases -->")[0]
    assert held.strip() == printed.strip(), f"python -m jobs.core.images --table, into {page}"
    assert printed.count("\n| ") + 1 == 2 + len(releases()), "a line a row"


def test_table_shows_where_releases_are_rejected() -> None:
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip("| ") for line in table().splitlines()}
    assert cells[f"**{release().name}** (default)"] == ""
    assert cells["1.23.0"] == "on dl1.24xlarge, which has Gaudi 1"
    assert not set(history()) & set(cells)
