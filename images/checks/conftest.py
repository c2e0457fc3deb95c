"""Fixtures for the checks of an image, which `trainyard images test` copies into a container to run pytest there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

BUILD_TOOLS = (
    *("as", "bazel", "c++", "cargo", "cc", "clang", "clang++", "cmake", "g++", "gcc", "git", "go", "javac", "ld"),
    *("make", "meson", "ninja", "node", "npm", "nvcc", "rustc", "yarn"),
)

TRAINING_SECONDS = 500
"""Timeout of the training, which takes 20 to 60 s on two idle cores."""


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """The image's expected properties, and those that the engine reports (`_facts` in jobs/images/check.py)."""
    facts: dict[str, Any] = json.loads((HERE / "facts.json").read_text())
    return facts


@pytest.fixture
def build_tools() -> set[str]:
    return {tool for tool in BUILD_TOOLS if shutil.which(tool)}


@pytest.fixture
def train() -> Callable[[str], str]:
    """Train on two ranks with an accelerator (cpu, cuda or hpu), and return the first rank's report."""

    def train(requested: str) -> str:
        from jobs.container import accelerator

        chosen = accelerator.choose(requested, nproc_per_node=2)
        ranks = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *ranks, "--local-addr=localhost", HERE / "two_ranks.py"],
            env={**os.environ, **chosen.environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TRAINING_SECONDS,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout.splitlines()[-1]

    return train


@pytest.fixture
def train_on_cards(facts: dict[str, Any], train: Callable[[str], str]) -> Callable[[str], str]:
    if not facts["has_card"]:
        pytest.skip("the Docker engine has no runtime for the accelerator")
    return train
