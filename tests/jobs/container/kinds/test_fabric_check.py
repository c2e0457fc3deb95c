"""A fabric-check over real gloo ranks: healthy ones, and a wrong, hanging or slow one."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.container import libfabric
from jobs.container.accelerator import Accelerator
from jobs.container.kinds.fabric_check import (
    contribution,
    own_values,
    preferred_providers,
    wrong_gathering,
    wrong_sum,
)
from jobs.container.kinds.fabric_report import FabricReport, Measurement, below_minimum, slow_nodes
from jobs.container.rank import Rank
from jobs.core.locations import S3Location
from tests.support.container.launching import Run, two_nodes


def test_two_nodes_are_measured_alone_and_together(run: Run) -> None:
    """A bandwidth below the minimum also fails the job, after everything is measured."""
    sizes = ("--smallest-message-bytes=64", "--largest-message-bytes=65536", "--growth=1024")
    flags = (*sizes, "--seconds-per-measurement=0.02", "--minimum-bus-gigabytes-per-second-across-nodes=1000")
    started = [run.start(*flags, kind="fabric-check", nproc=2, **node) for node in two_nodes()]
    assert started[0].wait() == 1, started[0].output
    started[1].wait()

    lines = started[0].lines
    assert "fabric: 4 ranks on 2 nodes over gloo, values checked in float32 and bfloat16\n" in lines
    assert [line for line in lines if line.startswith("fabric: ")][1:] == [
        "fabric: within nodes\n",
        "fabric: across nodes\n",
        "fabric: all ranks\n",
    ]
    found = json.loads(run.read("fabric.json"))
    assert found["wrong"] == []
    measured = {(item["phase"], item["group"], item["ranks"]) for item in found["measurements"]}
    assert measured == {
        ("within nodes", "node 0", 2),
        ("within nodes", "node 1", 2),
        ("across nodes", "card 0 of every node", 2),
        ("across nodes", "card 1 of every node", 2),
        ("all ranks", "all ranks", 4),
    }
    assert lines[-1].startswith("error: all-reduce of 64 KiB, card 0 of every node: ")
    assert "less than the minimum of 1000; all-reduce of 64 KiB, card 1 of every node: " in lines[-1]
    assert "Traceback" not in started[0].output


FAULTY_RANKS = """
import os, time
if os.environ.get("RANK") == "1":
    import torch.distributed as dist
    intact = dist.all_reduce
    def all_reduce(tensor, *arguments, **named):
        {fault}
        return intact(tensor, *arguments, **named)
    dist.all_reduce = all_reduce
"""
"""The sitecustomize module of each process: rank 1 has a fault in large messages."""


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        (
            "tensor.numel() > 100 and tensor.zero_()",
            1,
            r"error: a result was wrong: all-reduce of 1 MiB, node 0, float32: rank 1's values are missing; seen by ",
        ),
        (
            "tensor.numel() > 100 and time.sleep(60)",
            75,
            r"interrupted: (rank \d of node 0 \(last seen all-reduce of 1 MiB, node 0 after step 1\)(; )?)+: no step ",
        ),
    ],
    ids=["lost", "hung"],
)
def test_a_rank_with_missing_values_or_a_hang_is_named(
    run: Run, tmp_path: Path, fault: str, code: int, reason: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULTY_RANKS.format(fault=fault))
    flags = ("--smallest-message-bytes=64", "--largest-message-bytes=1048576", "--growth=100000")
    launched = run.attempt(
        *(*flags, "--seconds-per-measurement=0.01"),
        kind="fabric-check",
        nproc=3,
        expect=code,
        options=["--hang-timeout-seconds=8"] if code == 75 else [],
        PYTHONPATH=str(tmp_path),
    )
    assert re.match(reason, launched.lines[-1]), launched.output
    assert "Traceback" not in launched.output
    if code == 1:
        # In float32 and bfloat16, but not for the small message and the other collectives.
        wrong = json.loads(run.read("fabric.json"))["wrong"]
        assert [line.partition(", node")[0] for line in wrong] == ["all-reduce of 1 MiB"] * 2
        assert run.receipt().result["wrong_results"] == 2


def test_the_provider_of_each_node_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]  # re-exported from C++
    answers = iter([["efa", "tcp"], ["tcp", "shm"]])
    monkeypatch.setattr(libfabric, "load", lambda name: None if name == "cpu" else object())
    monkeypatch.setattr(libfabric, "providers", lambda _: next(answers))

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
        return preferred_providers(rank, Accelerator(name=name, devices=1, reason="asked for"))

    assert providers(0, nnodes=1) == []
    assert providers(0, name="cpu") == []
    with ThreadPoolExecutor() as nodes:
        # Each node first publishes its provider, then waits for the other's.
        first = nodes.submit(providers, 0)
        store.get("fabric/provider/0")
        assert providers(1) == first.result() == ["efa", "tcp"]


MEMBERS = (4, 5, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ((4, 5, 6), None),
        ((4, 6), "rank 5's values are missing"),
        ((4, 5, 6, 6), "rank 6's values are damaged (133 of 133)"),
        ((4, 4, 6), "rank 4's values are damaged (133 of 133), rank 5's values are missing"),
    ],
)
def test_a_wrong_sum_names_the_rank_with_the_wrong_part(
    dtype: torch.dtype, parts: tuple[int, ...], fault: str | None
) -> None:
    count = 2 * 3 * 133
    total = torch.zeros(count, dtype=dtype)
    for rank in parts:
        total += contribution(rank, MEMBERS, count, dtype)
    assert wrong_sum(total, MEMBERS) == fault
    if fault is None:
        total[-1] += 1
        assert wrong_sum(total, MEMBERS) == "the sum over all ranks is wrong (1 values)"


def test_swapped_gathered_values_are_reported() -> None:
    parts = [own_values(rank, 500, torch.bfloat16) for rank in MEMBERS]
    assert wrong_gathering(torch.cat(parts), MEMBERS) is None
    parts[1] = parts[0]
    assert wrong_gathering(torch.cat(parts), MEMBERS) == "rank 4's values instead of rank 5's"


def measurement(group: str, microseconds: float, *, collective: Any = "all-reduce") -> Measurement:
    return Measurement(
        phase="within nodes",
        group=group,
        ranks=8,
        collective=collective,
        message_bytes=1_000_000,
        microseconds=microseconds,
    )


@pytest.mark.parametrize(("collective", "bus"), [("all-reduce", 1.75), ("all-gather", 0.875), ("broadcast", 1.0)])
def test_bandwidths_are_defined_as_in_nccl_tests(collective: Any, bus: float) -> None:
    """8 ranks, 1 MB in 1 ms: 1 GB/s of algorithm bandwidth, times the factor in their doc/PERFORMANCE.md."""
    measured = measurement("node 0", 1000.0, collective=collective)
    assert measured.bus_gigabytes_per_second == pytest.approx(bus)


def report(*measurements: Measurement) -> FabricReport:
    return FabricReport(
        accelerator="cpu", backend="gloo", world_size=8, nnodes=2, dtypes=["float32"], measurements=list(measurements)
    )


def test_only_the_slow_node_is_named() -> None:
    found = report(measurement("node 0", 1000.0), measurement("node 1", 5000.0), measurement("node 2", 1100.0))
    assert slow_nodes(found) == ["node 1 is slow: its all-reduce reaches 0.35 GB/s, the others' median is 1.67 GB/s"]
    assert below_minimum(found, 1.0, 99.0) == [
        "all-reduce of 976.6 KiB, node 1: 0.35 GB/s of bus bandwidth, less than the minimum of 1"
    ]
    assert below_minimum(found, None, None) == []
    assert slow_nodes(report(measurement("node 0", 1000.0), measurement("node 1", 1500.0))) == []
