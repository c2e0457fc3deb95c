"""What torch.compile has compiled, kept for the next attempt of a run."""

import io
import logging
import os
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.container.launcher import compiled_graphs
from jobs.container.launcher.compiled_graphs import CompiledGraphs, fingerprint
from jobs.core.locations import S3Location
from tests.support.container.launching import PATIENCE_SECONDS, Run, environment_of
from tests.support.container.scripts import WARM, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

COMPILES = """
import os
import time
import torch
from torch._dynamo.utils import counters

result = torch.compile(lambda x: (x * 2).sin())(torch.ones(8))
print("result", result.sum().item(), "hits", counters["inductor"]["fxgraph_cache_hit"], flush=True)
while os.environ["AWS_BATCH_JOB_ATTEMPT"] == "1":
    time.sleep(0.1)
"""


def test_a_killed_script_resumes_with_its_compiled_graphs(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": COMPILES}), "train.py")
    alone: dict[str, Any] = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # its processes would import PyTorch first

    first = run.start(*flags, **alone, **WARM)
    compiled = first.wait_for_line("result ")
    # The first archive may have been saved while it compiled.
    wait_until(lambda: any("/fxgraph/" in name for name in names_in(run)))
    first.kill(signal.SIGKILL)
    run.wait_until_gone()
    assert compiled.endswith(" hits 0\n")

    second = run.attempt(*flags, attempt=2, **alone, **WARM)
    assert any(line.startswith("restored: ") and line.endswith(" of compiled graphs\n") for line in second.lines)
    assert compiled.replace("hits 0", "hits 1") in second.lines
    assert not any(line.startswith("saved: ") for line in second.lines), "nothing was compiled"


def names_in(run: Run) -> list[str]:
    """Return the names of the files that the run has saved."""
    archives = (io.BytesIO(run.read(key)) for key in run.keys("compiled/"))
    return [name for archive in archives for name in tarfile.open(fileobj=archive).getnames()]


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.05)


NewNode = Callable[..., CompiledGraphs]


@pytest.fixture
def new_node(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewNode:
    for name, value in environment_of(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(compiled_graphs, "LOOK_SECONDS", 0.2)

    def new(folder: str, *, is_stopping: bool = False) -> CompiledGraphs:
        place = S3Location("runs", f"research/{tmp_path.name}/")
        return CompiledGraphs(
            place, tmp_path / folder, "0a1b", attempt=None, saves=True, is_stopping=lambda: is_stopping
        )

    return new


def is_saved(s3: "S3Client", folder: Path) -> bool:
    return "Contents" in s3.list_objects_v2(Bucket="runs", Prefix=f"research/{folder.name}/compiled/0a1b.tar.gz")


def test_only_finished_files_are_saved_and_none_after_a_notice(
    new_node: NewNode, s3: "S3Client", tmp_path: Path
) -> None:
    kernel, growing = tmp_path / "here/inductor/ab/kernel.so", tmp_path / "here/inductor/ab/growing.so"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"\x7fELF")
    kernel.chmod(0o755)
    growing.write_bytes(b"")
    os.utime(growing, (time.time() + 60,) * 2)

    with new_node("here", is_stopping=True):
        time.sleep(1.0)
    assert not is_saved(s3, tmp_path)
    with new_node("here"):
        wait_until(lambda: is_saved(s3, tmp_path))
    with new_node("there"):
        pass
    assert [path.name for path in (tmp_path / "there/inductor/ab").iterdir()] == ["kernel.so"]
    restored = tmp_path / "there/inductor/ab/kernel.so"
    assert restored.read_bytes() == b"\x7fELF"
    assert restored.stat().st_mode & 0o777 == 0o700


def packed(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"code" * 100) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, "/etc/passwd", len(content)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("good"))
        archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (packed("../outside"), "'../outside', which is not a file of the folder"),
        (packed("/tmp/outside"), "'/tmp/outside', which is not a file"),
        (packed("link", tarfile.SYMTYPE, b""), "'link', which is not a file"),
        (packed("link", tarfile.LNKTYPE, b""), "'link', which is not a file"),
        (packed("big", content=bytes(5000)), "its files have more than "),
        (packed("cut")[:-20], "end-of-stream"),
        (b"no archive", "Not a gzipped file"),
    ],
)
def test_other_archives_are_not_unpacked(
    archive: bytes,
    why: str,
    new_node: NewNode,
    s3: "S3Client",
    tmp_path: Path,
    *,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "trainyard")
    monkeypatch.setattr(compiled_graphs, "MAX_BYTES", 4096)
    s3.put_object(Bucket="runs", Key=f"research/{tmp_path.name}/compiled/0a1b.tar.gz", Body=archive)
    with new_node("here"):
        pass
    [message] = caplog.messages
    assert message.startswith("warning: compiled graphs of earlier attempts are not used: ")
    assert why in message
    assert not any((tmp_path / name).exists() for name in ("here", "here.unpacked"))


def test_another_image_or_instance_type_has_other_graphs() -> None:
    first = fingerprint({"image_digest": "sha256:1", "torch": "2.13.0"}, instance_type="p5.48xlarge")
    assert first == fingerprint({"torch": "2.13.0", "image_digest": "sha256:1"}, instance_type="p5.48xlarge")
    assert first != fingerprint({"image_digest": "sha256:2", "torch": "2.13.0"}, instance_type="p5.48xlarge")
    assert first != fingerprint({"image_digest": "sha256:1", "torch": "2.13.0"}, instance_type="g6.xlarge")
