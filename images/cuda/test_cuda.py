"""Checks of the image cuda and its children, in addition to those of every image (images/checks)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

C_COMPILER = {"as", "cc", "gcc", "ld"}
"""Programs of Debian's gcc."""

EFA = Path("/opt/trainyard/efa")
"""File that images/shared/install-efa writes in an image with EFA."""


def test_container_requests_all_accelerators() -> None:
    assert os.getenv("NVIDIA_VISIBLE_DEVICES") == "all"


def test_c_compiler_is_the_only_build_tool(build_tools: set[str]) -> None:
    assert build_tools == C_COMPILER


def test_job_can_write_to_scratch() -> None:
    Path("/scratch/written").touch()


def test_nccl_can_load_efa() -> None:
    if not EFA.exists():
        pytest.skip("the image was built without EFA (EFA_MIRROR was empty), so NCCL uses TCP")
    from jobs.container import libfabric

    assert libfabric.providers(libfabric.load_for("cuda"))


def test_two_ranks_train_on_accelerators(train_on_cards: Callable[[str], str]) -> None:
    assert train_on_cards("cuda").startswith("2 ranks over nccl on cuda: loss ")
