"""Which checkpoint an attempt resumes from: the newest intact one, or none if that is unknown."""

import hashlib
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pytest

from jobs.aws import s3 as object_store
from jobs.container.rank import Rank, one_line
from jobs.container.saving.manifest import File, Manifest, Throughput, fingerprint
from jobs.container.saving.resume import newest_complete
from jobs.core.errors import TrainyardError
from jobs.core.locations import S3Location
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from tests.support.container.faulty_s3 import FaultyS3

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

ARGUMENTS = PretrainMlm(data="run://tokens")
WEIGHTS = "model.safetensors"


def put_checkpoint(s3: "S3Client", run: S3Location, step: int, arguments: PretrainMlm) -> S3Location:
    """Write a complete checkpoint of eight ranks and return its folder."""
    content = f"weights of step {step}".encode()
    manifest = Manifest(
        step=step,
        world_size=8,
        fingerprint=fingerprint(arguments.fixed_arguments()),
        arguments=arguments.fixed_arguments(),
        written_at=datetime.now(timezone.utc),
        throughput=Throughput(),
        files={WEIGHTS: File(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())},
    )
    folder = run / "checkpoints" / f"step-{step}"
    object_store.write(s3, folder / WEIGHTS, content)
    object_store.write(s3, folder / "manifest.json", manifest.model_dump_json(indent=2).encode())
    return folder


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (WEIGHTS, lambda _: None, "model.safetensors is missing"),
        (WEIGHTS, lambda content: content.upper(), "the checksum of model.safetensors does not match"),
        ("manifest.json", lambda content: content[: len(content) // 2], "its manifest is damaged: Invalid JSON: EOF"),
        ("manifest.json", lambda _: None, "it has no manifest: its upload was interrupted"),
    ],
)
def test_damaged_checkpoint_is_skipped_with_a_warning(
    *,
    name: str,
    damage: Callable[[bytes], bytes | None],
    reason: str,
    first_rank: Callable[[int], Rank],
    s3: "S3Client",
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = first_rank(8)
    for step in (8, 16):
        newest = put_checkpoint(s3, rank.run, step, ARGUMENTS)
    content = object_store.read(s3, newest / name)
    assert content is not None
    damaged = damage(content)
    if damaged is None:
        object_store.delete_all(s3, newest, [name])
    else:
        object_store.write(s3, newest / name, damaged)

    found = newest_complete(rank, s3, ARGUMENTS)

    assert found is not None
    assert (found.step, (found.folder / WEIGHTS).read_bytes()) == (8, b"weights of step 8")
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"warning: checkpoint step-16 is skipped: {reason}")


def test_denied_checkpoint_ends_the_attempt(
    first_rank: Callable[[int], Rank], s3: "S3Client", faulty: FaultyS3
) -> None:
    rank = first_rank(8)
    for step in (8, 16):
        newest = put_checkpoint(s3, rank.run, step, ARGUMENTS)
    faulty.denies = lambda _method, path: path.endswith(f"/step-16/{WEIGHTS}")
    with pytest.raises(TrainyardError) as refused:
        newest_complete(rank, object_store.connect(), ARGUMENTS)
    assert one_line(refused.value).startswith(f"cannot read {newest / WEIGHTS}: AWS denied ")


def test_resume_with_another_number_of_ranks_is_logged(
    first_rank: Callable[[int], Rank], s3: "S3Client", caplog: pytest.LogCaptureFixture
) -> None:
    put_checkpoint(s3, first_rank(8).run, 16, ARGUMENTS)
    caplog.set_level("INFO", "trainyard")
    found = newest_complete(first_rank(4), s3, ARGUMENTS)
    assert found is not None
    assert (found.folder / WEIGHTS).read_bytes() == b"weights of step 16"
    assert "checkpoint step-16 was made by 8 ranks and continues on 4" in caplog.text
