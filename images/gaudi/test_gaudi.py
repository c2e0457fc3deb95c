"""What the image gaudi and what is built on it must be, beside what every image must (images/checks)."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def test_a_container_asks_for_all_cards_whatever_its_runtime_does_for_one_that_asks_for_none() -> None:
    assert os.getenv("HABANA_VISIBLE_DEVICES") == "all"


@pytest.mark.parametrize("module", ["optimum.habana", "habana_frameworks.torch", "deepspeed"])
def test_what_a_job_on_gaudi_imports_can_be_imported(module: str) -> None:
    importlib.import_module(module)


def test_a_job_can_write_to_the_disks_of_its_instance() -> None:
    Path("/scratch/written").touch()


def test_hccl_can_load_what_reaches_other_nodes() -> None:
    from jobs.container import libfabric

    assert libfabric.providers(libfabric.load_for("hpu"))


def test_two_ranks_train_together_on_its_cards(train_on_cards: Callable[[str], str]) -> None:
    assert train_on_cards("hpu").startswith("2 ranks over hccl on hpu: loss ")
