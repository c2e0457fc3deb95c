import re
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.errors import ConfigurationError, UsageError
from jobs.instance_types import INSTANCE_TYPES
from jobs.releases import Release, release, release_for, releases

DL1 = INSTANCE_TYPES["dl1.24xlarge"]
ROOT = Path(__file__).parents[2]

FIRST_GENERATION = ["1.21.0", "1.20.0", "1.19.0", "1.18.0", "1.17.1", "1.16.2", "1.15.1", "1.14.0"]


def test_the_default_is_the_newest_that_supports_the_first_generation() -> None:
    assert release().name == "1.21.0"
    assert release() == release("1.21.0")
    assert release().base_image == (
        "vault.habana.ai/gaudi-docker/1.21.0/ubuntu22.04/habanalabs/pytorch-installer-2.6.0:1.21.0-555"
    )
    assert release().optimum_habana == "1.18.1"


def test_rows_are_ordered_from_new_to_old() -> None:
    assert list(releases()) == ["1.23.0", "1.22.0", *FIRST_GENERATION]


@pytest.mark.parametrize("row", releases().values(), ids=lambda row: row.name)
def test_a_row_is_complete(row: Release) -> None:
    assert row.build > 0
    assert row.os == "ubuntu22.04"
    # The code in the container needs 3.10.
    assert row.python == "3.10"
    for version in (row.name, row.pytorch, row.optimum_habana, row.transformers):
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_the_laptop_trains_with_the_default_releases_transformers() -> None:
    assert f"transformers=={release().transformers}" in (ROOT / "requirements.txt").read_text().splitlines()


@pytest.mark.parametrize("name", FIRST_GENERATION)
def test_dl1_runs_every_release_up_to_1_21(name: str) -> None:
    assert release_for(DL1, name) == release(name)


@pytest.mark.parametrize("name", ["1.22.0", "1.23.0"])
def test_dl1_is_refused_what_dropped_its_generation(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        release_for(DL1, name)
    assert str(caught.value) == (
        f"release '{name}' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1\n"
        f"Next: choose one of {', '.join(FIRST_GENERATION)}"
    )
    assert caught.value.exit_code == 3


def test_a_later_generation_and_a_type_without_gaudi_run_what_dl1_does_not() -> None:
    assert release_for(replace(DL1, gaudi_generation=2), "1.23.0").name == "1.23.0"
    assert release_for(INSTANCE_TYPES["m6i.4xlarge"], "1.23.0").name == "1.23.0"
    assert release_for(INSTANCE_TYPES["m6i.4xlarge"]) == release()


def test_a_release_without_a_row_is_refused_with_the_closest_one() -> None:
    with pytest.raises(UsageError, match=r"^release '1\.21' has no row; did you mean '1\.21\.0'\?$"):
        release_for(DL1, "1.21")
