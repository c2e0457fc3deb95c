"""`trainyard tensorboard`: events of runs, fetched and shown on loopback until Ctrl-C."""

import json
import signal
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from torch.utils.tensorboard import SummaryWriter

from jobs.aws.connection import Aws
from tests.support.jobs.submitting import RunCommand
from tests.support.jobs.terminal import TRAINYARD, Terminal
from tests.support.train.scripts import write_files


def events_of(folder: Path, loss: float) -> Path:
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("train/loss", loss, 1)
    [path] = folder.iterdir()
    return path


def ask(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)


def test_events_are_fetched_and_shown_until_ctrl_c(
    run_command: RunCommand,
    embedded: Aws,
    clean_environment: dict[str, str],
    deployed_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    run = run_command(["true"])
    run_id, place = run.plan.run_id, run.plan.run_location / "tensorboard/"
    path = events_of(tmp_path / "made", 0.5)
    embedded.s3.upload_file(str(path), place.bucket, place.key + path.name)
    own = events_of(tmp_path / "of a script", 0.75)
    embedded.s3.upload_file(str(own), place.bucket, f"{run.plan.run_location.key}output/logs/{own.name}")
    embedded.s3.put_object(Bucket=place.bucket, Key=f"{run.plan.run_location.key}output/model", Body=b"large")
    other = events_of(tmp_path / "runs/another-20260131-120000-00ab/tensorboard", 0.25)
    assert other.is_file()
    # A folder of somebody else's may have a module of that name, which must not be run.
    write_files(tmp_path, {"tensorboard/__init__.py": "raise SystemExit"})

    with Terminal(
        [TRAINYARD, "tensorboard", run_id],
        environment={**clean_environment, **deployed_environment},
        folder=tmp_path,
    ) as terminal:
        terminal.wait_until_shown("until Ctrl-C", timeout_seconds=120)
        address = next(word for word in terminal.shown.split() if word.startswith("http://127.0.0.1:"))
        give_up_at = time.monotonic() + 60
        while not (tags := ask(f"{address}data/plugin/scalars/tags")) and time.monotonic() < give_up_at:
            time.sleep(0.2)
        shown = {run_id: ["train/loss"], f"{run_id}.output.logs": ["train/loss"]}
        assert {name: list(found) for name, found in tags.items()} == shown
        root = "/".join(address.split("/")[:3])
        with pytest.raises(HTTPError) as refused:
            ask(f"{root}/data/plugin/scalars/tags")
        assert refused.value.code == 404, "without its path nobody gets in"
        shown_to_all = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not [line for line in shown_to_all if urlsplit(address).path.strip("/").encode() in line]
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait() == 0
    with pytest.raises(OSError, match="refused"):
        ask(address)
    assert (tmp_path / "runs" / run_id / "tensorboard" / path.name).is_file()
    assert not (tmp_path / "runs" / run_id / "spec.yaml").exists(), "events alone are fetched"
    assert not (tmp_path / "runs" / run_id / "output/model").exists()
    assert "Traceback" not in terminal.shown
