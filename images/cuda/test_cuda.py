"""What the image cuda and what is built on it must be, beside what every image must (images/checks)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

C_COMPILER = {"as", "cc", "gcc", "ld"}
"""Programs that Debian's gcc brings."""

EFA = Path("/opt/trainyard/efa")
"""What images/shared/install-efa leaves in an image that has EFA."""


def test_a_container_asks_for_all_cards_whatever_its_runtime_does_for_one_that_asks_for_none() -> None:
    assert os.getenv("NVIDIA_VISIBLE_DEVICES") == "all"


def test_there_is_the_c_compiler_that_torch_compile_needs_and_no_other_build_tool(build_tools: set[str]) -> None:
    assert build_tools == C_COMPILER


def test_a_job_can_write_to_the_disks_of_its_instance() -> None:
    Path("/scratch/written").touch()


def test_nccl_can_load_what_reaches_other_nodes_over_efa() -> None:
    if not EFA.exists():
        pytest.skip("it was built without EFA (EFA_MIRROR was empty): NCCL talks to other nodes over TCP")
    from jobs.container import libfabric

    assert libfabric.providers(libfabric.load_for("cuda"))


def test_two_ranks_train_together_on_its_cards(train_on_cards: Callable[[str], str]) -> None:
    assert train_on_cards("cuda").startswith("2 ranks over nccl on cuda: loss ")
