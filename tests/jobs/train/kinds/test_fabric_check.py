"""A fabric-check over real gloo ranks: what it says of healthy ones, and of one that is wrong, hung or slow."""

import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.contract.locations import S3Location
from jobs.train import libfabric
from jobs.train.accelerator import Accelerator
from jobs.train.kinds.fabric_check import entrypoint, probe
from jobs.train.kinds.fabric_check.report import FabricReport, Measurement, below_minimum, laggards
from jobs.train.rank import Rank
from tests.support.train.launching import FRESH_RANKS, Run
from tests.support.train.listeners import open_to_the_network

QUICK = ("--smallest-message-bytes=64", "--largest-message-bytes=65536", "--growth=1024")


def report_of(run: Run) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run.read("fabric.json"))
    return report


def test_two_nodes_are_measured_each_by_itself_and_between_them(run: Run) -> None:
    """Also: a bandwidth below what was asked for fails the job, once everything is measured."""
    flags = (*QUICK, "--seconds-per-measurement=0.02", "--minimum-bus-gigabytes-per-second-across-nodes=1000")
    nodes: dict[str, Any] = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
    main: dict[str, Any] = {"AWS_BATCH_JOB_ID": "fabric#0", "AWS_BATCH_JOB_NODE_INDEX": "0"}
    child: dict[str, Any] = {
        "AWS_BATCH_JOB_ID": "fabric#1",
        "AWS_BATCH_JOB_NODE_INDEX": "1",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1",
    }
    started = [run.start(*flags, kind="fabric-check", nproc=2, **nodes, **own) for own in (main, child)]
    assert started[0].wait() == 1, started[0].output
    started[1].wait()

    lines = started[0].lines
    assert "fabric: 4 ranks on 2 nodes over gloo, values checked in float32 and bfloat16\n" in lines
    assert [line for line in lines if line.startswith("fabric: ")][1:] == [
        "fabric: within nodes\n",
        "fabric: across nodes\n",
        "fabric: all ranks\n",
    ]
    report = report_of(run)
    assert report["wrong"] == []
    measured = {(item["phase"], item["group"], item["ranks"]) for item in report["measurements"]}
    assert measured == {
        ("within nodes", "node 0", 2),
        ("within nodes", "node 1", 2),
        ("across nodes", "card 0 of every node", 2),
        ("across nodes", "card 1 of every node", 2),
        ("all ranks", "all ranks", 4),
    }
    assert lines[-1].startswith("error: all-reduce of 64 KiB, card 0 of every node: ")
    assert "less than the 1000 asked for; all-reduce of 64 KiB, card 1 of every node: " in lines[-1]
    assert "Traceback" not in started[0].output


def test_the_provider_of_each_node_is_asked_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]  # re-exported from C++
    answers = iter([["efa", "tcp"], ["tcp", "shm"]])
    monkeypatch.setattr(libfabric, "load", lambda name: None if name == "cpu" else object())
    monkeypatch.setattr(libfabric, "providers", lambda _: next(answers))
    barrier: Any = SimpleNamespace(step=lambda *_: contextlib.nullcontext())

    def providers(node: int, nnodes: int = 2, name: Any = "hpu") -> list[str]:
        rank = Rank(
            rank=node,
            local_rank=0,
            world_size=nnodes,
            local_world_size=1,
            node=node,
            nnodes=nnodes,
            run=S3Location.parse("s3://bucket/run/"),
            scratch=tmp_path,
        )
        rank.__dict__["store"] = store
        return entrypoint._providers(rank, Accelerator(name=name, devices=1, reason="asked for"), barrier)

    assert providers(0, nnodes=1) == []
    assert providers(0, name="cpu") == []
    with ThreadPoolExecutor() as nodes:
        # One after the other into the library's answers, and then each waits for the other's.
        first = nodes.submit(providers, 0)
        store.get("fabric/provider/0")
        assert providers(1) == first.result() == ["efa", "tcp"]


FAULTY_RANKS = """
import os
if os.environ.get("RANK") == "1":
    import torch.distributed as dist
    intact = dist.all_reduce
    def all_reduce(tensor, *arguments, **named):
        return intact(tensor.zero_() if tensor.numel() > 100 else tensor, *arguments, **named)
    dist.all_reduce = all_reduce
"""
"""What Python runs first in each process: rank 1 loses what it should send."""


def test_a_rank_whose_part_gets_lost_is_named_and_fails_the_job(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULTY_RANKS)
    flags = ("--smallest-message-bytes=64", "--largest-message-bytes=1048576", "--growth=100000")

    launched = run.attempt(
        *(*flags, "--seconds-per-measurement=0.01"),
        kind="fabric-check",
        nproc=3,
        expect=1,
        program=FRESH_RANKS,
        PYTHONPATH=str(tmp_path),
    )

    lost = "rank 1's part is missing (43691 of 43691 values); seen by ranks 0, 1, 2"
    assert launched.lines[-1].startswith(f"error: a result was wrong: all-reduce of 1 MiB, node 0, float32: {lost}")
    # float32 and bfloat16 (which has twice the values), and nothing of the small message and the other collectives.
    report = report_of(run)
    assert len(report["wrong"]) == 2
    assert all(line.startswith("all-reduce of 1 MiB") for line in report["wrong"])
    assert run.receipt().result["wrong_results"] == 2
    assert run.receipt().state == "failed"
    assert "Traceback" not in launched.output


def test_a_rank_that_hangs_is_named_within_the_timeout(run: Run) -> None:
    launched = run.start(
        *QUICK, "--seconds-per-measurement=1", "--peer-timeout-seconds=4", kind="fabric-check", nproc=2
    )
    launched.wait_for_line("[progress] 1/2")
    assert open_to_the_network(launched.process.pid) == []
    healthy, hung = launched.ranks()
    hung.suspend()
    healthy.wait(60)
    hung.resume()  # or the launcher waits 30 s before it kills it

    assert launched.wait() == 1
    assert re.match(
        r"error: (all-reduce|broadcast|all-gather) of 64 KiB, node 0: (rank 1 \(node 0, last at .*\) did not arrive|"
        r"all of its 2 ranks arrived, but it did not end) within 4 s",
        launched.lines[-1],
    )
    assert "Traceback" not in launched.output


def test_a_rank_that_never_starts_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        'import os, time\nif os.environ.get("RANK") == "1":\n    time.sleep(60)\n'
    )
    quick = (*QUICK, "--peer-timeout-seconds=2")
    launched = run.start(*quick, kind="fabric-check", nproc=2, program=FRESH_RANKS, PYTHONPATH=str(tmp_path))
    assert launched.wait() == 1
    assert launched.lines[-1].startswith("error: the start: rank 1 (node 0, never seen) did not arrive within 2 s.")


MEMBERS = (4, 5, 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ((4, 5, 6), None),
        ((4, 6), "rank 5's part is missing (67 of 67 values)"),
        ((4, 5, 6, 6), "rank 6's part is counted twice (67 of 67 values)"),
        ((4, 4, 6), "rank 4's part is counted twice (67 of 67 values), rank 5's part is missing (67 of 67 values)"),
    ],
)
def test_a_sum_tells_whose_part_is_wrong(dtype: str, parts: tuple[int, ...], fault: str | None) -> None:
    import torch

    count = 3 * 133
    total = torch.zeros(count, dtype=getattr(torch, dtype))
    for rank in parts:
        total += probe.contribution(rank, MEMBERS, count, total.dtype)
    assert probe.wrong_sum(total, MEMBERS) == fault


def test_one_damaged_value_is_found_and_laid_to_a_rank() -> None:
    import torch

    total = sum(probe.contribution(rank, MEMBERS, 3 * 133, torch.float32) for rank in MEMBERS)
    assert isinstance(total, torch.Tensor)
    total[6 * 3 + 1] += 1
    assert probe.wrong_sum(total, MEMBERS) == "rank 5's part is damaged (1 of 67 values)"
    total[6 * 3 + 1] -= 1
    total[3 * 3] += 1
    assert probe.wrong_sum(total, MEMBERS) == "what all ranks add up to is wrong (1 values)"


def test_gathered_values_tell_whose_place_they_are_in() -> None:
    import torch

    parts = [probe.own_values(rank, 500, torch.bfloat16) for rank in MEMBERS]
    assert probe.wrong_gathering(torch.cat(parts), MEMBERS) is None
    parts[1] = parts[0]
    assert probe.wrong_gathering(torch.cat(parts), MEMBERS) == "in place of rank 5's values there are rank 4's"
    parts[1] = torch.zeros_like(parts[0])
    assert probe.wrong_gathering(torch.cat(parts), MEMBERS) == "rank 5's values are damaged (500 of 500)"


@pytest.mark.parametrize(
    ("collective", "bus"),
    [("all-reduce", 1.75), ("all-gather", 0.875), ("broadcast", 1.0)],
    ids=str,
)
def test_bandwidths_are_those_of_nccl_tests(collective: Any, bus: float) -> None:
    """8 ranks, 1 MB in 1 ms: 1 GB/s of algorithm bandwidth, times the factor of doc/PERFORMANCE.md there."""
    measured = measurement("node 0", 1000.0, collective=collective)
    assert measured.algorithm_gigabytes_per_second == pytest.approx(1.0)
    assert measured.bus_gigabytes_per_second == pytest.approx(bus)


def measurement(group: str, microseconds: float, *, collective: Any = "all-reduce") -> Measurement:
    return Measurement(
        phase="within nodes",
        group=group,
        ranks=8,
        collective=collective,
        message_bytes=1_000_000,
        microseconds=microseconds,
    )


def report(measurements: list[Measurement]) -> FabricReport:
    return FabricReport(
        accelerator="cpu", backend="gloo", world_size=8, nnodes=2, dtypes=["float32"], measurements=measurements
    )


def test_a_slow_node_is_named_and_those_that_wait_for_it_are_not() -> None:
    found = report([measurement("node 0", 1000.0), measurement("node 1", 5000.0), measurement("node 2", 1100.0)])
    assert laggards(found) == ["node 1 is slow: its all-reduce reaches 0.35 GB/s, the others' 1.67 GB/s"]
    assert below_minimum(found, 1.0, 99.0) == [
        "all-reduce of 976.6 KiB, node 1: 0.35 GB/s of bus bandwidth, less than the 1 asked for"
    ]
    assert below_minimum(found, None, None) == []
    assert laggards(report([measurement("node 0", 1000.0), measurement("node 1", 1500.0)])) == []
