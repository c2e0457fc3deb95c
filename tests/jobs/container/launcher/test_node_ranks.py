"""The output of ranks, also if it cannot be written, their environment, and how their ends are judged."""

import errno
import io
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jobs.container.accelerator import Accelerator, Name
from jobs.container.channel import write_stopped
from jobs.container.launcher import rank_lines
from jobs.container.launcher.node_ranks import _end_of_script, _failure, oom_kills, rank_environment
from jobs.container.launcher.outcome import End, with_full_disk
from jobs.container.launcher.rank_lines import RankLines
from jobs.container.launcher.request import Launch, Node, parse
from jobs.container.rank import report_failure


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rank_0_does_not_block_on_an_unwritable_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = RankLines(tmp_path, node=Node(index=0, nnodes=1, main_address="127.0.0.1", port=0), nproc_per_node=1)
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with lines, lines.pipes[0].open("w") as rank_0:
        rank_0.writelines(f"step {number}\n" for number in range(50_000))  # many times the capacity of a pipe
    assert lines.last([0])[-1] == "rank 0 of node 0 wrote last: step 49999"


def test_a_flood_of_lines_is_thinned_out_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_lines, "LOG_BYTES", 1000)
    lines = RankLines(tmp_path, node=Node(index=1, nnodes=2, main_address="127.0.0.1", port=0), nproc_per_node=2)
    with lines, lines.pipes[0].open("w") as rank_2, lines.pipes[1].open("w") as rank_3:
        for number in range(50_000):
            rank_2.write(f"line {number}\n")
        rank_2.write("[progress] 3/10\n")
        rank_2.flush()
        rank_3.write("the other\n")
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["[rank 2] line 0", "[rank 2] line 1", "[rank 2] line 2"]
    [warning] = [line for line in printed if line.startswith("warning: ")]
    assert "node 1 have printed 0.001 MB. From now on the log has one line in 1000" in warning
    before, after = printed[: printed.index(warning)], printed[printed.index(warning) + 1 :]
    assert len("\n".join(before)) <= 1000 + len("[rank 2] ") * len(before)
    assert "[rank 2] [progress] 3/10" in after
    assert 50 <= len(after) <= 80, "some of the fifty thousand"
    end = next(number for number, line in enumerate(after) if line.startswith("log: "))
    assert re.fullmatch(r"log: 49\d{3} lines \(0\.5 MB\) were left out; the last lines:", after[end])
    assert after[end + 9 : end + 12] == ["[rank 2] line 49999", "[rank 2] [progress] 3/10", "[rank 3] the other"]
    # The last lines of a rank are known, whether they are in the log or not.
    assert lines.last([2])[-2:] == (
        "rank 2 of node 1 wrote last: line 49999",
        "rank 2 of node 1 wrote last: [progress] 3/10",
    )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "no rank fills the disk with what it prints"


def test_a_failure_is_logged_if_the_error_file_is_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "lost" / "error.json"))
    report_failure("no space left for a checkpoint")
    assert capsys.readouterr().out == "error: no space left for a checkpoint\n"


def test_the_last_line_is_the_reason_without_an_error_file() -> None:
    """A rank that PyTorch's watchdog ends (ProcessGroupNCCL, NCCLUtils.cpp) prints stack frames last."""
    aborted: Any = SimpleNamespace(exitcode=-6, timestamp=1, error_file_data={})
    lost = "NCCL error: remote process exited or there was a network error, NCCL version 2.20.5"
    found = _failure(aborted, ["step 41", lost, *["frame #1: <unknown function> + 0x8609"] * 30])
    assert (found.message, found.lost_peers) == (lost, True)
    failed: Any = SimpleNamespace(exitcode=1, timestamp=1, error_file_data={})
    assert _failure(failed, ["no such label. Next: correct it", " "]).last_line == "no such label."
    assert _failure(failed, ["x" * 300]).last_line == f"{'x' * 199}…"


@pytest.mark.parametrize(
    ("free", "message", "is_named"),
    [
        (0, "ValueError: half a table", True),
        (10**9, "OSError: [Errno 28] No space left on device: 'shard'", True),
        (10**9, "ValueError: half a table", False),
    ],
)
def test_a_full_disk_is_added_to_the_reason(
    free: int, message: str, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**11, used=10**11 - free, free=free))
    failed = End(code=1, reason=f"rank 0 of node 0: {message}", cause="own")
    end = with_full_disk(failed, tmp_path)
    assert (end != failed) == is_named
    if is_named:
        full = f"; the disk of {tmp_path} is full ({free / 1e9:.1f} of 100.0 GB free). Next: give the instance a larger"
        assert end.reason is not None
        assert end.reason.startswith(f"{failed.reason}{full}")
    # A reason with a next step is unchanged
    explained = End(code=1, reason="step-3 could not be written to /scratch (0.0 GB free). Next: …", cause="own")
    assert with_full_disk(explained, tmp_path) == explained


def variables_of_ranks(launch: Launch, scratch: Path, name: Name = "cpu") -> dict[str, str]:
    return rank_environment(launch, Accelerator(name=name, devices=8, reason="asked for"), scratch)


def sockets_of_ranks(launch: Launch, scratch: Path) -> dict[str, str]:
    found = variables_of_ranks(launch, scratch)
    return {name: value for name, value in found.items() if name.endswith("_SOCKET_IFNAME")}


@pytest.fixture
def launch() -> Launch:
    return parse(
        ["--instance-type=dl1.24xlarge", "--nproc-per-node=8", "fabric-check"],
        {"TRAINYARD_RUN_URI": "s3://runs/research/run/"},
    )


CHOSEN: list[tuple[str, Name, str, Name]] = [
    ("PT_HPU_RECIPE_CACHE_CONFIG", "hpu", "{scratch}/recipes,false,8192", "cpu"),
    ("TORCHINDUCTOR_CACHE_DIR", "cuda", "{scratch}/compiled/inductor", "hpu"),
    ("TRITON_HOME", "cpu", "{scratch}/compiled", "hpu"),
    ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "cuda", "1000", "hpu"),
]


@pytest.mark.parametrize(("variable", "name", "value", "other"), CHOSEN)
def test_variables_of_a_card_are_set_for_that_card_only(
    launch: Launch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    variable: str,
    name: Name,
    value: str,
    other: Name,
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert variables_of_ranks(launch, tmp_path, name)[variable] == value.format(scratch=tmp_path)
    assert variable not in variables_of_ranks(launch, tmp_path, other)
    monkeypatch.setenv(variable, "the image's")
    assert variable not in variables_of_ranks(launch, tmp_path, name)


def test_ranks_of_several_nodes_use_one_network_interface(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert sockets_of_ranks(launch, tmp_path) == loopback
    assert variables_of_ranks(launch, tmp_path)["HF_DATASETS_TRUST_REMOTE_CODE"] == "0"

    # WHEN the main node has an address of this machine, THEN the interface with that address is used
    several = replace(launch, node=Node(index=1, nnodes=2, main_address="127.0.0.1", port=29500))
    assert sockets_of_ranks(several, tmp_path) == loopback
    # WHEN the main node is remote, THEN the interface with the source address towards it is used
    addresses = {"lo": ["127.0.0.1"], "eth0": ["172.17.0.2"], "eth1": ["fe80::1%eth1", "10.0.1.7"], "eth10": []}
    carried = {name: [SimpleNamespace(address=one) for one in found] for name, found in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: carried)
    towards: list[tuple[str | None, int]] = []

    def from_eth1(host: str | None, port: int) -> str:
        towards.append((host, port))
        return "10.0.1.7"

    monkeypatch.setattr("jobs.container.launcher.node_ranks.source_address", from_eth1)
    several = replace(launch, node=Node(index=1, nnodes=2, main_address="10.0.1.9", port=29500))
    assert sockets_of_ranks(several, tmp_path) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert towards == [("10.0.1.9", 29500)]
    # A variable that is already set is kept
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    assert sockets_of_ranks(several, tmp_path) == {"GLOO_SOCKET_IFNAME": "eth1"}
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    # WHEN no interface has the address, as behind NAT, THEN the libraries choose
    carried["eth1"] = []
    assert sockets_of_ranks(several, tmp_path) == {}


def test_kills_by_the_oom_killer_are_counted(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert oom_kills(vmstat) is None
    vmstat.write_text("nr_free_pages 4021\noom_kill 7\ndrop_pagecache 0\n")
    assert oom_kills(vmstat) == 7


def test_a_script_that_saved_and_stopped_early_is_retried(tmp_path: Path) -> None:
    script: Any = SimpleNamespace(refusal=None, finish=lambda **_: None)
    stopping: Any = SimpleNamespace(has_signalled=False)
    done = End(code=0, reason=None, cause="done")
    assert _end_of_script(script, done, stopping, tmp_path) == done
    write_stopped(tmp_path, "SIGTERM; saved step 7")
    assert _end_of_script(script, done, stopping, tmp_path) == replace(done, code=75, reason="SIGTERM; saved step 7")
    failed = End(code=1, reason="no such label", cause="own")
    assert _end_of_script(script, failed, stopping, tmp_path) == failed
