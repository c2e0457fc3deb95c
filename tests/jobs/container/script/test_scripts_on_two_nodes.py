"""A script on two nodes: both have its packages and checkpoints, and save their output."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.jobs.container.script.test_what_scripts_get import put_wheels
from tests.support.container.launching import Launched, Run
from tests.support.container.scripts import script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MEETS = """
import os, sys, time
from datetime import timedelta
import of_mine
import torch
import torch.distributed as dist

node, folder = os.environ["TRAINYARD_NODE"], os.environ["TRAINYARD_CHECKPOINTS"]
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
found = os.path.exists(f"{folder}/step")
print(f"node {node} of {int(total)} with {of_mine.NAME}, begun before: {found}", flush=True)
with open(os.path.join(os.environ["TRAINYARD_OUTPUT"], f"of-{node}-{found}"), "w") as file:
    file.write(sys.argv[1])
if not found:
    if node == "0":
        with open(f"{folder}/.step", "w") as file:
            file.write("1")
        os.rename(f"{folder}/.step", f"{folder}/step")
    time.sleep(600)
dist.barrier()
"""


def test_both_nodes_get_the_inputs_and_save_their_output(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train.py": MEETS, "r.txt": "of_mine\n"})
    wheels = put_wheels(s3, tmp_path / "wheels", f"{tmp_path.name}/wheels", of_mine="")
    flags = script_flags(s3, code, "train.py {node}/{nnodes}", requirements="r.txt", wheelhouse=wheels)

    def nodes(attempt: int) -> list[Launched]:
        environment: dict[str, Any] = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
        main: dict[str, Any] = {"AWS_BATCH_JOB_ID": "5c1f#0", "AWS_BATCH_JOB_NODE_INDEX": "0"}
        other: dict[str, Any] = {
            "AWS_BATCH_JOB_ID": "5c1f#1",
            "AWS_BATCH_JOB_NODE_INDEX": "1",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1",
        }
        return [run.start(*flags, kind="script", attempt=attempt, **environment, **own) for own in (main, other)]

    # WHEN a node is reclaimed after the first checkpoint of the main node
    first = nodes(1)
    first[0].wait_for_line("node 0 of 2 with of_mine, begun before: False")
    first[0].wait_for_line("checkpoint: step (number 1)")
    assert any(line.startswith("packages: of_mine in ") for line in first[0].lines)
    first[1].process.send_signal(signal.SIGTERM)
    # THEN both end, to be retried
    assert [node.wait() for node in first] == [75, 75], "".join(node.output for node in first)
    assert any(line.startswith("packages: r.txt restored from S3") for line in first[1].lines), "it has waited"
    run.wait_until_gone()

    # WHEN the run is retried
    second = nodes(2)
    # THEN both find that checkpoint, and the output of each is saved separately
    assert [node.wait() for node in second] == [0, 0], "".join(node.output for node in second)
    for number, node in enumerate(second):
        assert f"node {number} of 2 with of_mine, begun before: True\n" in "".join(node.lines).replace("[rank 1] ", "")
    assert {name for name in run.keys("output") if not name.endswith("-listing.json")} == {
        f"output{of_node}/of-{number}-{found}"
        for number, of_node in enumerate(("", "-of-node-1"))
        for found in (False, True)
    }
    assert run.read("output-of-node-1/of-1-True") == b"1/2"
    assert run.recorded_attempt(2).nnodes == 2
