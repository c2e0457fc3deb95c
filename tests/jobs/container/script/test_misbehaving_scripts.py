"""Scripts that fail, hang, ignore SIGTERM, or are not Python: the log names the cause, and no process is left."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from jobs.aws import s3 as object_store
from jobs.container.script import inputs, job
from jobs.core.errors import TrainyardError, UsageError
from jobs.spec.kinds.script import Script
from tests.jobs.container.saving.test_interruption import HASTY_LAUNCHER
from tests.support.container.launching import Run
from tests.support.container.scripts import WARM, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

FAILS = """
import os, sys, time
sys.stdout.buffer.write(bytes(range(128, 256)) + b"\\n")
for share in range(50):
    print(f"\\r{share} %", end="")
print("x" * 200_000)
if os.environ["RANK"] == "1":
    raise ValueError("no such column")
time.sleep(600)
"""

LEAVES_EARLY = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit()
time.sleep(2)
raise RuntimeError("Connection closed by peer")
"""

DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
print("child", subprocess.Popen(sleeps).pid, flush=True)
time.sleep(600)
"""

NESTED = """
import os
import trainyard

if "RANK" in os.environ:
    import torch.distributed as dist

    dist.init_process_group("gloo")
run = trainyard.Run(total_steps=3)
while run.steps_done < 3:
    run.step()
run.log(3, loss=0.5, ranks=int(os.environ.get("WORLD_SIZE", "0")))
run.save(3, words=["any", "thing"])
"""


def test_the_first_failed_rank_is_named_with_its_last_lines(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": FAILS}), "train.py")
    failed = run.attempt(*flags, expect=1, nproc=2, kind="script")
    assert failed.lines[-1] == "error: rank 1 of node 0: ValueError: no such column\n"
    [own] = [line for line in failed.lines if line.startswith("[rank 1] ") and "in <module>" in line]
    assert 'code/train.py", line 8' in own
    assert "runpy" not in failed.output
    assert any(line.count("\ufffd") > 100 for line in failed.lines), "bytes that are no text become a line"
    assert "jobs/container" not in failed.output
    # The log has only some of the bar's states. How many depends on time.
    assert len([line for line in failed.lines if re.match(r"\d+ %", line)]) < 10
    assert run.recorded_attempt(1).reason == "rank 1 of node 0: ValueError: no such column"


def test_ranks_that_left_before_their_peers_are_named(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": LEAVES_EARLY}), "train.py")
    failed = run.attempt(*flags, expect=1, nproc=2, kind="script")
    assert failed.lines[-1] == (
        "error: rank 0 of node 0: RuntimeError: Connection closed by peer; rank 1 of node 0 had already ended without "
        "an error. Next: make all ranks run the same number of steps\n"
    )


def test_a_script_that_ignores_sigterm_is_killed_with_children(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": DEAF}), "train.py")
    deaf = run.start(*flags, kind="script", program=("-c", HASTY_LAUNCHER))
    child = psutil.Process(int(deaf.wait_for_line("child ").split()[1]))
    assert deaf.kill(signal.SIGTERM) == 75
    # It saves nothing, so no checkpoint is reported
    assert re.fullmatch(
        r"interrupted: SIGTERM; the script had not ended \d+ s after SIGTERM, and was killed; "
        r"if retried, it starts over: no checkpoint was saved\n",
        deaf.lines[-1],
    )
    assert psutil.wait_procs([child], timeout=10)[1] == []
    run.wait_until_gone()


def test_a_script_without_files_or_evaluations_gets_warnings(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train.py": "import sys, torch\nprint('hello')\nsys.exit()\n"})
    halving = '--halving={"from_step": 10, "metric": "eval_loss", "smaller_is_better": true}'
    done = run.attempt(*script_flags(s3, code, "train.py"), nproc=2, options=[halving], **WARM)
    warnings = [line for line in done.lines if line.startswith("warning: ")]
    assert len(warnings) == 2, done.output
    assert warnings[0].startswith(
        "warning: the script succeeded, but it has saved no files. Next: make the script write"
    )
    assert warnings[1].startswith("warning: this point was not compared with the others: no evaluation between step 10")
    assert run.receipt().state == "succeeded"


LONE = """
import time, torch
weight = torch.ones(1, requires_grad=True)
{joins}
for step in range(100):
    loss = (weight * torch.ones(500, 500)).sum()
    loss.backward()
    time.sleep(0.02)
"""

HASTY = (
    "import runpy, sys; from jobs.container.kinds import script; script.LONE_SECONDS = 0.5; "
    "script._LOOK_SECONDS = 0.001; script._watch_for_lone_ranks(2); runpy.run_path(sys.argv[1])"
)


@pytest.mark.parametrize("joins", [False, True])
def test_ranks_that_train_without_a_process_group_get_a_warning(joins: bool, tmp_path: Path) -> None:
    group = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
    (tmp_path / "train.py").write_text(LONE.replace("{joins}", group if joins else ""))
    done = subprocess.run(
        [sys.executable, "-c", HASTY, tmp_path / "train.py"], capture_output=True, text=True, check=True, timeout=300
    )
    warned = "warning: 2 ranks train without a process group: each trains a separate model" in done.stdout
    assert warned is not joins, done.stdout


def test_an_error_of_cuda_names_the_page_about_gaudi(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train.py": "import torch\ntorch.cuda.set_device(0)\n"})
    failed = run.attempt(*script_flags(s3, code, "train.py"), expect=1, **WARM)
    assert "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'" in failed.lines[-1]
    assert "see 'From a CUDA script to Gaudi' in jobs/docs/scripts.md" in failed.lines[-1]


def test_too_little_disk_space_is_reported_before_the_start(
    run: Run, s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket="data", Key=f"{tmp_path.name}/large", Body=b"123456")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10, used=5, free=5))
    with pytest.raises(UsageError, match=r"^inputs\.big: s3://data/.*/large is 0\.0 GB; this node's disk has 0\.0"):
        inputs.fetch(s3, "big", f"s3://data/{tmp_path.name}/large", tmp_path)

    def unpack(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(job, "unpack", unpack)
    monkeypatch.setattr(object_store, "connect", lambda: s3)
    arguments = Script.model_validate({"code": "s3://runs/code.tar.gz", "command": "train.py"})
    options = {"node": 0, "nnodes": 1, "nproc_per_node": 1, "main_address": "", "cards": 0, "allow_changes": False}
    with pytest.raises(
        TrainyardError, match=r"(?s)code, packages and inputs do not fit on the disk of .*Next: stream the lar"
    ):
        job.ScriptJob(arguments, run.location, tmp_path, **options).prepare()  # type: ignore[arg-type]


def test_a_script_that_is_silent_for_too_long_has_hung(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train.py": "import time\ntime.sleep(600)\n"})
    flags = script_flags(s3, code, "train.py", silence_timeout_seconds=3)
    hung = run.attempt(*flags, expect=75, kind="script")
    assert re.search(r"interrupted: the script has printed nothing and written no file for [34] s; ", hung.lines[-1])
    assert 'code/train.py", line 2' in hung.output, "where it stands"


def test_ranks_started_by_a_program_can_use_the_library(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    """A script that is not a rank gets no torchrun variables, with which nanoGPT, for example, would require CUDA."""
    code = write_files(tmp_path / "code", {"train.py": NESTED})
    command = "torchrun --standalone --nproc-per-node 2 train.py"
    run.attempt(*script_flags(s3, code, command, processes=1), kind="script")
    assert run.receipt().result["ranks"] == 2
    assert run.complete_checkpoints() == [3]
