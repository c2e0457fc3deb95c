"""What the ranks write, where it can be written nowhere, and what the kernel counts."""

import errno
import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jobs.kinds.prepare_corpus import PrepareCorpus
from jobs.train.accelerator import Accelerator, Name
from jobs.train.launcher import rank_lines
from jobs.train.launcher.node_ranks import memory_kills
from jobs.train.launcher.outcome import End, with_full_disk
from jobs.train.launcher.rank_environment import rank_environment
from jobs.train.launcher.rank_lines import RankLines
from jobs.train.launcher.request import Launch, Node, parse
from tests.support.train.launching import FRESH_RANKS, Run


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rank_0_does_not_wait_for_a_log_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = RankLines(tmp_path, node=Node(index=0, nnodes=1, main_address="127.0.0.1", port=0), nproc_per_node=1)
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with lines, lines.pipes[0].open("w") as rank_0:
        rank_0.writelines(f"step {number}\n" for number in range(50_000))  # many times what a pipe holds
    assert lines.last([0])[-1] == "rank 0 of node 0 wrote last: step 49999"


def test_of_a_flood_the_log_has_the_beginning_some_lines_and_the_end(
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
    assert "node 1 have printed 0.001 MB. From here on one line in 1000 is in the log" in warning
    before, after = printed[: printed.index(warning)], printed[printed.index(warning) + 1 :]
    assert len("\n".join(before)) <= 1000 + len("[rank 2] ") * len(before)
    assert "[rank 2] [progress] 3/10" in after
    assert 50 <= len(after) <= 80, "some of the fifty thousand"
    end = next(number for number, line in enumerate(after) if line.startswith("log: "))
    assert re.fullmatch(r"log: 49\d{3} lines \(0\.5 MB\) were left out of it; the last:", after[end])
    assert after[end + 9 : end + 12] == ["[rank 2] line 49999", "[rank 2] [progress] 3/10", "[rank 3] the other"]
    # All of it counts as the rank's own last words, whether it is in the log or not.
    assert lines.last([2])[-2:] == (
        "rank 2 of node 1 wrote last: line 49999",
        "rank 2 of node 1 wrote last: [progress] 3/10",
    )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "no rank fills the disk with what it prints"


def test_why_a_rank_fails_is_in_the_log_where_its_error_file_cannot_be_written(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "from jobs.train.rank import fail_now; fail_now('no space left for a checkpoint')"],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "lost" / "error.json")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "error: no space left for a checkpoint\n"), ended.stderr


def test_ranks_start_with_more_arguments_than_a_command_line_holds(run: Run, tmp_path: Path) -> None:
    texts = [tmp_path / f"{number:0120}.txt" for number in range(1200)]
    for number, path in enumerate(texts):
        path.write_text(f"text {number}\n")
    arguments = PrepareCorpus(data=[str(path) for path in texts], held_out_fraction=0.1)
    [flag] = [flag for flag in arguments.to_flags() if flag.startswith("--data=")]
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["true", flag], check=True)
    run.write("arguments/0f.json", arguments.model_dump_json(exclude_none=True).encode())

    run.attempt(kind="prepare-corpus", options=["--arguments-file=arguments/0f.json"])

    result = run.receipt().result
    assert result["documents"] + result["held_out_documents"] == 1200


WATCHDOG = """
import os, sys
if os.environ.get("RANK"):
    what = (
        "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: "
        "NCCL error: remote process exited or there was a network error, NCCL version 2.20.5\\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\\n"
        "Last error:\\nsocketProgress: Connection closed by remote peer ip-10-0-1-7<39102>\\n"
    )
    frames = [f"frame #{number}: <unknown function> + 0x8609 (0x7f9a2b in libpthread.so.0)\\n" for number in range(30)]
    sys.stderr.write("terminate called after throwing an instance of 'c10::DistBackendError'\\n  what():  " + what)
    sys.stderr.writelines(["Exception raised from checkForNCCLErrorsInternal (most recent call first):\\n", *frames])
    sys.stderr.flush()
    os.abort()
"""
"""What Python runs first in each process: a rank ends as by PyTorch's watchdog (ProcessGroupNCCL, NCCLUtils.cpp)."""


def test_a_rank_that_aborts_since_its_peers_are_gone_is_started_again(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCHDOG)
    launched = run.attempt(kind="fabric-check", expect=75, program=FRESH_RANKS, PYTHONPATH=str(tmp_path))
    assert re.match(
        r"interrupted: rank 0 of node 0 lost its peers: .*remote process exited or there was a network error.*"
        r"; if it is started again, it starts over: it has saved no checkpoint\n",
        launched.lines[-1],
    ), launched.output
    assert run.recorded_attempt(1).exit_code == 75


@pytest.mark.parametrize(
    ("free", "message", "is_named"),
    [
        (0, "ValueError: half a table", True),
        (10**9, "OSError: [Errno 28] No space left on device: 'shard'", True),
        (10**9, "ValueError: half a table", False),
    ],
)
def test_a_full_disk_is_named_beside_what_failed(
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
    # What says already what is next, a checkpoint that could not be written for instance, is left as it is
    explained = End(code=1, reason="step-3 could not be written to /scratch (0.0 GB free). Next: …", cause="own")
    assert with_full_disk(explained, tmp_path) == explained


def test_a_full_disk_is_named_where_only_the_log_has_what_the_rank_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file for a rank's last word was on that disk too: all that the launcher has for a reason is the code."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**11, used=10**11, free=0))
    printed = ("error: checkpoint step-3 could not be written to /scratch (0.0 GB free). Next: give the instance …",)
    failed = End(code=1, reason="rank 0 of node 0: it ended with exit code 1", cause="own", lines=printed)

    end = with_full_disk(failed, tmp_path)

    assert end.reason is not None
    assert end.reason.startswith(f"{failed.reason}; the disk of {tmp_path} is full (0.0 of 100.0 GB free). Next: give")
    assert end.lines == printed


def test_the_ranks_are_told_to_run_no_code_of_a_data_set(tmp_path: Path) -> None:
    flags = ["finetune-classification", "--model=s3://data/model", "--train-data=s3://data/reviews.csv"]
    launch = parse(
        ["--instance-type=dl1.24xlarge", "--nproc-per-node=1", *flags], {"TRAINYARD_RUN_URI": "s3://runs/research/run/"}
    )
    accelerator = Accelerator(name="cpu", devices=0, reason="there is no card here")
    assert rank_environment(launch, accelerator, tmp_path)["HF_DATASETS_TRUST_REMOTE_CODE"] == "0"


def sockets_of_ranks(launch: Launch, scratch: Path) -> dict[str, str]:
    accelerator = Accelerator(name="cpu", devices=0, reason="there is no card here")
    found = rank_environment(launch, accelerator, scratch)
    return {name: value for name, value in found.items() if name.endswith("_SOCKET_IFNAME")}


def test_the_ranks_of_several_nodes_listen_where_the_others_reach_them_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    one = parse(
        ["--instance-type=dl1.24xlarge", "--nproc-per-node=8", "fabric-check"],
        {"TRAINYARD_RUN_URI": "s3://runs/research/run/"},
    )
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert sockets_of_ranks(one, tmp_path) == loopback

    # WHERE the main node is at a real address of this machine, THEN it is the interface with that address
    several = replace(one, node=Node(index=1, nnodes=2, main_address="127.0.0.1", port=29500))
    assert sockets_of_ranks(several, tmp_path) == loopback
    # WHERE the kernel talks to the main node from an address, THEN it is the interface that carries it among others
    addresses = {"lo": ["127.0.0.1"], "eth0": ["172.17.0.2"], "eth1": ["fe80::1%eth1", "10.0.1.7"], "eth10": []}
    carried = {name: [SimpleNamespace(address=one) for one in found] for name, found in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: carried)
    towards: list[tuple[str | None, int]] = []

    def from_eth1(host: str | None, port: int) -> str:
        towards.append((host, port))
        return "10.0.1.7"

    monkeypatch.setattr("jobs.train.launcher.rank_environment.address_towards", from_eth1)
    several = replace(one, node=Node(index=1, nnodes=2, main_address="10.0.1.9", port=29500))
    assert sockets_of_ranks(several, tmp_path) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert towards == [("10.0.1.9", 29500)]
    # What somebody has said stays
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    assert sockets_of_ranks(several, tmp_path) == {"GLOO_SOCKET_IFNAME": "eth1"}
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    # WHERE no interface has it, as behind NAT, THEN they choose for themselves
    carried["eth1"] = []
    assert sockets_of_ranks(several, tmp_path) == {}


def test_the_cards_of_a_node_share_what_they_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = parse(
        ["--instance-type=dl1.24xlarge", "--nproc-per-node=8", "fabric-check"],
        {"TRAINYARD_RUN_URI": "s3://runs/research/run/"},
    )

    def variable(name: Name) -> str | None:
        accelerator = Accelerator(name=name, devices=8, reason="asked for")
        return rank_environment(launch, accelerator, tmp_path).get("PT_HPU_RECIPE_CACHE_CONFIG")

    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG", raising=False)
    assert variable("hpu") == f"{tmp_path}/recipes,false,8192"
    assert variable("cpu") is None
    # One's own image may say where
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", "/recipes,false,1024")
    assert variable("hpu") == "/recipes,false,1024"


def test_what_the_kernel_has_killed_for_want_of_memory_is_counted(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert memory_kills(vmstat) is None
    vmstat.write_text("nr_free_pages 4021\noom_kill 7\ndrop_pagecache 0\n")
    assert memory_kills(vmstat) == 7


def test_the_cards_that_nccl_connects_end_soon_after_a_peer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H200 with PyTorch 2.11 took 61 s until the rank had ended, of which NCCL's watchdog slept 60."""
    launch = parse(
        ["--instance-type=p4d.24xlarge", "--nproc-per-node=8", "fabric-check"],
        {"TRAINYARD_RUN_URI": "s3://runs/research/run/"},
    )

    def milliseconds(name: Name) -> str | None:
        accelerator = Accelerator(name=name, devices=8, reason="asked for")
        return rank_environment(launch, accelerator, tmp_path).get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")

    monkeypatch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", raising=False)
    assert milliseconds("cuda") == "1000"
    assert milliseconds("hpu") is None
    assert milliseconds("cpu") is None
    # Whoever reads such dumps gives them their time
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")
    assert milliseconds("cuda") is None
