"""The health check of a node before its ranks start, with real processes, on healthy and bad nodes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.container.accelerator import choose
from jobs.container.launcher import health
from jobs.container.launcher.health import Measured, driver_fault, measured_faults, summary
from jobs.core.instance_types import instance_type
from jobs.spec.launcher_options import BAD_NODE_FILE, Health
from tests.support.container.launching import Run, two_nodes
from tests.support.container.metadata_service import MetadataService

QUICK = ("--largest-message-bytes=4096", "--seconds-per-measurement=0.01")
INSTANCE_ID = "/latest/meta-data/instance-id"


def option(**values: float) -> str:
    return f"--health={json.dumps(values)}"


def test_a_bad_node_ends_the_attempt_and_is_reported(run: Run, tmp_path: Path) -> None:
    # WHEN the second node is slower than its required minimum
    disks = tmp_path / "disks"
    disks.mkdir()
    program = (
        f"import pathlib, sys; from jobs.container import launch; sys.exit(launch.main(disks=pathlib.Path('{disks}')))"
    )
    checks = (option(seconds=0.2), option(seconds=0.2, min_teraflops=1e6))
    with MetadataService() as metadata:
        metadata.news[INSTANCE_ID] = "i-0abc"
        nodes = [
            run.start(
                *QUICK,
                kind="fabric-check",
                nproc=1,
                attempt=1,
                program=("-c", program),
                options=[check],
                TRAINYARD_ACCELERATOR="cpu",
                **node,
                **metadata.environment,
            )
            for node, check in zip(two_nodes(), checks, strict=True)
        ]
        assert [node.wait() for node in nodes] == [75, 75]
    # THEN the attempt is retried, and the reason names node, instance, rank, speed and minimum
    assert "health: node 0 is healthy: " in nodes[0].output
    assert "TFLOP/s on the slowest; " in nodes[0].output
    reason = run.recorded_attempt(1).reason or ""
    assert reason.startswith("node 1 (i-0abc) is bad: rank 0 multiplies at ")
    assert "TFLOP/s, less than 1e+06; if retried" in reason
    assert run.receipt().state == "interrupted"
    # The ranks never started, and the host finds the report
    assert "fabric: " not in nodes[0].output
    assert (disks / BAD_NODE_FILE).read_text().startswith("node 1 (i-0abc): rank 0 multiplies at ")
    run.wait_until_gone()


def test_the_fault_of_a_card_is_reported_with_its_number() -> None:
    fast, slow = Measured(teraflops=100, gigabytes_per_second=5), Measured(teraflops=40, gigabytes_per_second=4)
    faults = measured_faults([fast, fast, slow], Health(), card="HPU")
    # There are no published values for a Gaudi, so it is compared with the other cards
    assert faults == ["HPU 2 multiplies at 40 TFLOP/s, less than 50"]
    assert measured_faults([fast, fast, slow], Health(min_teraflops=30), card="HPU") == []
    floors = Health(min_teraflops=30, min_gigabytes_per_second=8)
    assert measured_faults([fast, slow], floors, card="GPU") == [
        "an all-reduce among its GPUs runs at 4 GB/s, less than 8"
    ]
    assert summary([fast, slow], floors) == "40 TFLOP/s on the slowest (at least 30), all-reduce at 4 GB/s (at least 8)"
    wrong = Measured(teraflops=100, fault="returns wrong products")
    assert measured_faults([fast, wrong], Health(), card="GPU") == ["GPU 1 returns wrong products"]


def test_a_check_process_that_dies_or_hangs_is_a_bad_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = choose("cpu", nproc_per_node=1)
    monkeypatch.setattr(sys, "executable", "false")
    (dead,) = health.measure(1, cpu, tmp_path, seconds=0.1)
    assert dead.fault == "failed with exit code 1 during the multiplication of the health check"
    stuck_program = tmp_path / "stuck"
    stuck_program.write_text("#!/bin/sh\nexec sleep 60\n")
    stuck_program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck_program))
    monkeypatch.setattr(health, "START_SECONDS", 0.2)
    (stuck,) = health.measure(1, cpu, tmp_path, seconds=0.1)
    assert stuck.fault == "did not finish during the multiplication of the health check"


def test_the_driver_is_compared_with_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tool = tmp_path / "hl-smi"
    tool.write_text(
        "#!/bin/sh\ncat <<'TABLE'\n"
        "| HL-SMI Version:                              hl-1.20.0-fw-58.1.1.1          |\n"
        "| Driver Version:                                     1.20.0-bd87f71          |\n"
        "| Nic Driver Version:                                 1.20.0-e4fe12d          |\nTABLE\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert health.driver_version() == "1.20.0"
    assert driver_fault("1.20.0", "1.20.1.97") is None
    assert driver_fault("1.20.0", "1.21.0.555") == "its driver is 1.20.0, but the image's release is 1.21.0.555"
    assert driver_fault(None, "1.21.0.555") is None  # an unknown driver is not a fault
    tool.write_text("#!/bin/sh\necho 'Failed to open the driver' >&2\nexit 7\n")
    assert health.driver_version() is None
    assert caplog.messages[-1] == "warning: hl-smi reported no driver version (exit code 7): Failed to open the driver"


def test_missing_cards_are_a_node_fault_only_if_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from jobs.container import accelerator
    from jobs.core.errors import UsageError

    monkeypatch.setattr(accelerator, "_hpus", lambda: (7, ""))
    assert choose("hpu", nproc_per_node=8, cards=8).devices == 7
    with pytest.raises(UsageError, match="8 ranks need a card each, but this node has 7"):
        choose("hpu", nproc_per_node=8)
    monkeypatch.setattr(accelerator, "_hpus", lambda: (8, ""))
    with pytest.raises(UsageError, match="9 ranks need a card each"):  # not a fault of the node
        choose("hpu", nproc_per_node=9, cards=8)


@pytest.mark.parametrize(("name", "on_instance", "seconds"), [("hpu", True, 10), ("cpu", True, 0), ("cuda", False, 0)])
def test_only_instances_with_accelerators_are_checked_by_default(name: Any, on_instance: bool, seconds: float) -> None:
    assert Health().seconds_on(name, on_instance=on_instance) == seconds
    assert Health(seconds=0).seconds_on(name, on_instance=on_instance) == 0


def test_floors_default_to_those_of_the_instance_type() -> None:
    a100 = instance_type("p4d.24xlarge")
    found = Health().with_floors_of(a100, "cuda")
    assert (found.min_teraflops, found.min_gigabytes_per_second) == (156, 30)
    assert Health(min_teraflops=1).with_floors_of(a100, "cuda").min_teraflops == 1
    # Floors of an instance type do not apply to a laptop
    assert Health().with_floors_of(a100, "cpu") == Health()
