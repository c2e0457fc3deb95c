"""Ranks that are forked from one process: they look, print and end as those that were started anew."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENTRYPOINT = """
import json, os, signal, sys, tempfile, threading, time
def preload(arguments):
    sys.modules["shared_by_ranks"] = sys
    if os.environ.get("PRELOAD") == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if os.environ.get("PRELOAD") == "error":
        raise ValueError("what is to be imported is broken")
if __name__ == "__main__":
    way = sys.argv[1]
    print(json.dumps({
        "argv": sys.argv[1:], "rank": os.environ["RANK"], "stray": os.environ.get("STRAY"),
        "path": os.path.abspath(sys.path[0]),
        "temporary": tempfile.gettempdir(), "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "spec": __spec__.name, "interrupt": str(signal.getsignal(signal.SIGINT)),
        "terminate": str(signal.getsignal(signal.SIGTERM)), "handlers": len(__import__("logging").root.handlers),
        "encoding": sys.stdout.encoding, "through": sys.stdout.write_through,
        "files": sorted(os.listdir("/proc/self/fd")),
        "session": getattr(sys.modules.get("boto3"), "DEFAULT_SESSION", None),
    }))
    print("forked" if "shared_by_ranks" in sys.modules else "fresh", file=sys.stderr)
    if way == "fails":
        sys.exit(3)
    if way == "says why":
        sys.exit("no such thing")
    if way == "raises":
        raise ValueError("unexpected")
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    if way == "waits":
        signal.pause()
"""

LAUNCHER = """
import contextlib, json, os, signal, sys
from dataclasses import replace
from pathlib import Path
from jobs.train.launcher.fork_server import fork_server
from jobs.train.launcher.request import parse

folder, ways = Path(sys.argv[1]), sys.argv[2:]
launch = parse(
    ["--instance-type=dl1.24xlarge", "--nproc-per-node=8", "finetune-classification",
     "--model=s3://data/model", "--train-data=s3://data/reviews.csv"],
    {"TRAINYARD_RUN_URI": "s3://runs/research/run/", "TRAINYARD_ACCELERATOR": "cpu"},
)
launch = replace(launch, kind=replace(launch.kind, entrypoint="behaving"))

def started(start, handler, ways):
    handlers = [
        handler(
            entrypoint=sys.executable, args=("-m", "behaving", way, "--flag=a b"), env={"RANK": str(number)},
            stdout=str(folder / f"{start}-{number}.out"), stderr=str(folder / f"{start}-{number}.err"),
            local_rank_id=number, numa_options=None,
        )
        for number, way in enumerate(ways)
    ]
    waits = handlers[-1]
    with contextlib.suppress(Exception):
        waits.proc.wait(0.3)
    running = waits.proc.poll()
    name = Path(f"/proc/{waits.proc.pid}/cmdline").read_text().replace("\\0", " ")
    while b"forked" not in (text := (folder / f"{start}-{len(ways) - 1}.err").read_bytes()) and b"fresh" not in text:
        pass
    waits.close(signal.SIGTERM)
    return {"codes": [item.proc.wait(60) for item in handlers], "running": running, "name": name}

os.environ["TMPDIR"] = str(folder)
found = {}
for preload, those in (("", ways), ("thread", ["done", "waits"]), ("error", ["done", "waits"])):
    os.environ |= {"PRELOAD": preload, "STRAY": "the launcher has it no more when the ranks are started"}
    with fork_server(launch) as server:
        from torch.distributed.elastic.multiprocessing import api
        fresh = api.get_subprocess_handler
        del os.environ["STRAY"]
        server.begin(folder)
        server.replace_start_of(len(those))
        found[f"forked{preload}"] = started(f"forked{preload}", api.get_subprocess_handler, those)
        api.get_subprocess_handler = fresh
found["fresh"] = started("fresh", fresh, ways)
print(json.dumps(found))
"""

WORKER = """
import os, signal, subprocess, sys, threading
from jobs.train.launcher.fork_server import fork_module

import boto3
boto3.DEFAULT_SESSION = "the worker's"
start, *ways = sys.argv[1:]
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: print("the worker's own handler"))
environment = {**os.environ, "RANK": "0"}
os.environ["STRAY"] = "the worker's own"
for way in ways:
    arguments = [way, "--flag=a b"]
    if start == "forked":
        process = fork_module("behaving", arguments, environment)
    else:
        command = [sys.executable, "-m", "behaving", *arguments]
        process = subprocess.Popen(command, env={**environment, "PYTHONUNBUFFERED": "1"}, start_new_session=True)
    if way == "waits":
        process.terminate()
    code = process.wait(60)
    print(f"\\n{way} {code} {process.poll()}", flush=True)  # what is ended at once may be within a line
threading.Thread(target=signal.pause, daemon=True).start()
print(fork_module("behaving", ["done"], environment))
"""

WAYS = ("done", "fails", "says why", "raises", "killed", "interrupted", "waits")


def run_program(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the entrypoint in `folder`."""
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What becomes of ranks that behave in these ways, started anew and forked, by one launcher."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "behaving.py").write_text(ENTRYPOINT)
    ended = run_program(LAUNCHER, folder, str(folder), *WAYS)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    for start, of_start in found.items():
        for name in ("out", "err"):
            ranks = range(len(of_start["codes"]))
            of_start[name] = [(folder / f"{start}-{rank}.{name}").read_text() for rank in ranks]
    return {**found, "folder": folder}


def test_a_forked_rank_is_started_and_ends_as_a_fresh_one(found: dict[str, Any]) -> None:
    fresh, forked = found["fresh"], found["forked"]
    assert forked["codes"] == fresh["codes"] == [0, 3, 1, 1, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM]
    assert forked["running"] is fresh["running"] is None
    assert forked["out"] == fresh["out"]
    assert json.loads(forked["out"][6])["temporary"] == str(found["folder"])
    assert [text.splitlines()[0] for text in fresh["err"]] == ["fresh"] * len(WAYS)
    assert [text.splitlines()[0] for text in forked["err"]] == ["forked"] * len(WAYS)
    assert forked["err"][2].splitlines()[1:] == fresh["err"][2].splitlines()[1:] == ["no such thing"]
    assert forked["err"][3].splitlines()[-1] == fresh["err"][3].splitlines()[-1] == "ValueError: unexpected"
    assert forked["name"].strip() == "python -m behaving [rank 6] waits --flag=a b"


def test_ranks_are_fresh_where_what_they_import_starts_a_thread(found: dict[str, Any]) -> None:
    assert found["forkedthread"]["err"] == ["fresh\n", "fresh\n"]
    assert found["forkedthread"]["codes"] == [0, -signal.SIGTERM]


def test_ranks_find_by_themselves_what_cannot_be_imported(found: dict[str, Any]) -> None:
    assert found["forkederror"]["err"] == ["forked\n", "forked\n"]
    assert found["forkederror"]["codes"] == [0, -signal.SIGTERM]


def test_a_launcher_that_a_worker_forks_is_started_and_ends_as_a_fresh_one(found: dict[str, Any]) -> None:
    def said(start: str) -> tuple[list[str], str]:
        ended = run_program(WORKER, found["folder"], start, "done", "fails", "raises", "killed", "waits")
        # One that is ended at once may have come so far as to print, or not.
        lines = ended.stdout.splitlines()
        return [line for line in lines if line and '"argv": ["waits"' not in line], ended.stderr

    (fresh, errors_fresh), (forked, errors_forked) = said("fresh"), said("forked")
    assert forked == fresh
    assert errors_forked.count("ValueError: unexpected") == errors_fresh.count("ValueError: unexpected") == 1
    codes = [line for line in forked if not line.startswith("{")]
    assert codes == ["done 0 0", "fails 3 3", "raises 1 1", "killed -9 -9", "waits -15 -15", "None"]
