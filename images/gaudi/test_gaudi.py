"""Checks of the image gaudi and its children, in addition to those of every image (images/checks)."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def test_container_requests_all_accelerators() -> None:
    assert os.getenv("HABANA_VISIBLE_DEVICES") == "all"


@pytest.mark.parametrize("module", ["optimum.habana", "habana_frameworks.torch", "deepspeed"])
def test_gaudi_modules_can_be_imported(module: str) -> None:
    importlib.import_module(module)


def test_job_can_write_to_scratch() -> None:
    Path("/scratch/written").touch()


def test_hccl_can_load_libfabric() -> None:
    from jobs.container import libfabric

    assert libfabric.providers(libfabric.load_for("hpu"))


def test_two_ranks_train_on_accelerators(train_on_cards: Callable[[str], str]) -> None:
    assert train_on_cards("hpu").startswith("2 ranks over hccl on hpu: loss ")
