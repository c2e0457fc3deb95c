"""What the ranks write, where it can be written nowhere, and what the kernel counts."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.train.accelerator import Accelerator
from jobs.train.launcher.node_ranks import RankLines, _rank_environment, memory_kills
from jobs.train.launcher.request import Node, parse


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rank_0_does_not_wait_for_a_log_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = RankLines(tmp_path, node=Node(index=0, nnodes=1, main_address="localhost", port=0), nproc_per_node=1)
    assert lines.pipe is not None
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with lines, lines.pipe.open("w") as rank_0:
        rank_0.writelines(f"step {number}\n" for number in range(50_000))  # many times what a pipe holds
    assert lines.last([0])[-1] == "rank 0 of node 0 wrote last: step 49999"


def test_why_a_rank_fails_is_in_the_log_where_its_error_file_cannot_be_written(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "from jobs.train.rank import fail_now; fail_now('no space left for a checkpoint')"],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "lost" / "error.json")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "error: no space left for a checkpoint\n"), ended.stderr


def test_the_ranks_are_told_to_run_no_code_of_a_data_set(tmp_path: Path) -> None:
    flags = ["finetune-classification", "--model=s3://data/model", "--train-data=s3://data/reviews.csv"]
    launch = parse(
        ["--instance-type=dl1.24xlarge", "--nproc-per-node=1", *flags], {"TRAINYARD_RUN_URI": "s3://runs/research/run/"}
    )
    accelerator = Accelerator(name="cpu", devices=0, reason="there is no card here")
    assert _rank_environment(launch, accelerator, tmp_path)["HF_DATASETS_TRUST_REMOTE_CODE"] == "0"


def test_what_the_kernel_has_killed_for_want_of_memory_is_counted(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert memory_kills(vmstat) is None
    vmstat.write_text("nr_free_pages 4021\noom_kill 7\ndrop_pagecache 0\n")
    assert memory_kills(vmstat) == 7
