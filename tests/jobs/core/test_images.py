import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomllib

from jobs.core.errors import ConfigurationError, UsageError
from jobs.core.images import (
    MINIMUM_PYTHON,
    Release,
    chosen_releases,
    history,
    release,
    release_for,
    releases,
    releases_of,
    table,
)
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
    for root in ("gaudi", "cuda", "cpu"):
        numbers = [tuple(map(int, re.findall(r"\d+", name))) for name in releases_of(root)]
        assert numbers == sorted(numbers, reverse=True)
    # The last release that supports the first generation is not the latest release.
    assert FIRST_GENERATION[0] == "1.21.0"
    assert releases_of("gaudi")[-len(FIRST_GENERATION) :] == FIRST_GENERATION


@pytest.mark.parametrize("row", releases().values(), ids=lambda row: row.name)
def test_row_is_complete_and_has_a_reason(row: Release) -> None:
    assert row.why
    assert tuple(map(int, row.python.split("."))) >= (3, 10), "the code in the container needs it"
    for version in (row.pytorch, row.transformers, row.accelerate):
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    if row.image == "gaudi":
        assert row.build > 0
        assert row.os == "ubuntu22.04"
        for version in (row.name, row.optimum_habana, row.deepspeed):
            assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert row.build_arguments["HABANA_IMAGE"].endswith(f":{row.name}-{row.build}")
    else:
        assert re.fullmatch(rf"{row.image}-\d{{4}}\.\d\d", row.name)
        assert not {"HABANA_IMAGE", "OPTIMUM_HABANA", "DEEPSPEED"} & set(row.build_arguments)


def test_laptop_trains_with_the_packages_of_the_cpu_image() -> None:
    laptop, row = re.findall(r"^(\S+==\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE), release(of="cpu")
    packages = {f"torch=={row.pytorch}", f"transformers=={row.transformers}", f"accelerate=={row.accelerate}"}
    assert packages <= set(laptop)


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
        f"release '{row.name}' is no longer available: {reason}\nNext: choose one of {', '.join(releases_of('gaudi'))}"
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


@pytest.mark.parametrize("name", [name for name in releases_of("gaudi") if name not in FIRST_GENERATION])
def test_dl1_rejects_releases_without_its_generation(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        release_for(DL1, name)
    assert str(caught.value) == (
        f"release '{name}' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1\n"
        f"Next: choose one of {', '.join(FIRST_GENERATION)}"
    )
    assert caught.value.exit_code == 3


def test_other_types_run_releases_that_dl1_does_not() -> None:
    assert release_for(replace(DL1, gaudi_generation=2), "1.24.0").name == "1.24.0"
    assert release_for(INSTANCE_TYPES["m6i.4xlarge"]) == release(of="cpu")
    assert release_for(INSTANCE_TYPES["p4d.24xlarge"]) == release(of="cuda")


def test_release_of_another_accelerator_is_rejected() -> None:
    with pytest.raises(ConfigurationError) as caught:
        release_for(INSTANCE_TYPES["p4d.24xlarge"], "1.21.0")
    assert str(caught.value) == (
        f"release '1.21.0' is for image 'gaudi', not 'cuda'\nNext: choose one of {', '.join(releases_of('cuda'))}"
    )


def test_named_release_is_chosen_for_its_image_only() -> None:
    chosen = chosen_releases("1.24.0", {"cpu": "cpu-2026.11", "gaudi": "1.21.0"})
    assert {root: row.name for root, row in chosen.items()} == {
        "gaudi": "1.24.0",
        "cuda": release(of="cuda").name,
        "cpu": "cpu-2026.11",
    }


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
    assert cells["1.24.0"] == "on dl1.24xlarge, which has Gaudi 1"
    assert not set(history()) & set(cells)
