"""S3 objects outlive a killed server with --keep, and ranges are read without the rest of an object.

Source of ranges: API reference of GetObject, RFC 9110.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from moto.s3.models import S3Backend

from infra.emulator import s3
from tests.support.running_emulator import Emulator, run_emulator

TEMPLATE = json.dumps(
    {
        "Resources": {
            "Runs": {
                "Type": "AWS::S3::Bucket",
                "DeletionPolicy": "Retain",
                "Properties": {"VersioningConfiguration": {"Status": "Enabled"}},
            }
        }
    }
)
MEBIBYTE = 2**20


def deploy(aws: Emulator) -> str:
    """Create the stack; return the name of its bucket."""
    cloudformation = aws.client("cloudformation")
    cloudformation.create_stack(StackName="storage", TemplateBody=TEMPLATE)
    [bucket] = cloudformation.describe_stack_resources(StackName="storage")["StackResources"]
    return str(bucket["PhysicalResourceId"])


def held(s3: Any, bucket: str) -> dict[str, Any]:
    """Return all that a client can read of each object, by key."""
    found = {}
    for item in s3.list_objects_v2(Bucket=bucket).get("Contents", []):
        place = {"Bucket": bucket, "Key": item["Key"]}
        answer = s3.get_object(**place, ChecksumMode="ENABLED")
        kept = ("ContentType", "ETag", "LastModified", "Metadata", "ChecksumSHA256", "ServerSideEncryption")
        found[item["Key"]] = {
            **{name: answer.get(name) for name in kept},
            "body": answer["Body"].read(),
            "tags": s3.get_object_tagging(**place)["TagSet"],
            "size": item["Size"],
        }
    return found


def test_objects_outlive_a_killed_server(tmp_path: Path) -> None:
    keep = ("--keep", str(tmp_path / "kept"))
    with run_emulator(tmp_path, *keep) as aws:
        bucket, s3 = deploy(aws), aws.client("s3")
        s3.put_object(Bucket=bucket, Key="a/plain.txt", Body=b"one")
        s3.put_object(Bucket=bucket, Key="a/plain.txt", Body=b"two", ContentType="text/plain", Metadata={"who": "me"})
        s3.put_object(Bucket=bucket, Key="a", Body=b"", ChecksumAlgorithm="SHA256", Tagging="kind=checkpoint")
        s3.put_object_tagging(Bucket=bucket, Key="a", Tagging={"TagSet": [{"Key": "kind", "Value": "kept-checkpoint"}]})
        s3.put_object(Bucket=bucket, Key=f"very/{'long/' * 180}naïve ☃.bin", Body=bytes(range(256)))
        s3.put_object(Bucket=bucket, Key="gone", Body=b"x")
        s3.delete_object(Bucket=bucket, Key="gone")
        s3.put_object(Bucket=bucket, Key="gone too", Body=b"x")
        s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "gone too"}]})
        large = tmp_path / "large"
        large.write_bytes(os.urandom(11 * MEBIBYTE))
        parts = TransferConfig(multipart_threshold=5 * MEBIBYTE, multipart_chunksize=5 * MEBIBYTE)
        s3.upload_file(str(large), bucket, "large", Config=parts)
        s3.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": "a/plain.txt"})
        before = held(s3, bucket)
        assert before["large"]["ETag"].endswith('-3"')
        aws.process.send_signal(signal.SIGKILL)
        aws.process.wait(30)
    aws.state_file.unlink()  # left by the killed server
    with run_emulator(tmp_path, *keep) as aws:
        assert deploy(aws) == bucket
        s3 = aws.client("s3")
        assert held(s3, bucket) == before
        assert len(before) == 5
        # Objects are kept from now on too.
        s3.put_object(Bucket=bucket, Key="a/plain.txt", Body=b"three")
        assert not aws.health()["server_errors"]
    with run_emulator(tmp_path, *keep) as aws:
        assert held(aws.client("s3"), deploy(aws))["a/plain.txt"]["body"] == b"three"
    bodies = [path for path in (tmp_path / "kept/buckets" / bucket).iterdir() if path.suffix != ".json"]
    assert len(bodies) == 5, "replaced and deleted objects take no space"


def test_client_gets_an_error_if_the_disk_refuses_an_object(tmp_path: Path) -> None:
    with run_emulator(tmp_path, "--keep", str(tmp_path / "kept")) as aws:
        bucket = deploy(aws)
        (tmp_path / "kept/buckets" / bucket).write_text("in the way")
        with pytest.raises(ClientError, match=f"the emulator failed in s3:PUT: .*{bucket}"):
            aws.client("s3").put_object(Bucket=bucket, Key="a", Body=b"x")
        (tmp_path / "kept/buckets" / bucket).unlink()
        aws.client("s3").put_object(Bucket=bucket, Key="a", Body=b"x")
        refused = subprocess.run(
            [
                sys.executable,
                "-m",
                "infra.emulator",
                "serve",
                "--keep",
                str(tmp_path / "kept"),
                "--state-file",
                "other",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert refused.returncode == 3
    assert f"{tmp_path}/kept is used by another emulator" in refused.stderr
    assert "Next: stop that emulator" in refused.stderr


SIZE_BYTES = 24 << 20
"""More than moto keeps in memory."""


@pytest.fixture(scope="module")
def content(emulator: Emulator) -> bytes:
    content = random.Random(1).randbytes(SIZE_BYTES)
    s3 = emulator.client("s3")
    s3.create_bucket(Bucket="of-ranges")
    s3.put_object(Bucket="of-ranges", Key="weights", Body=content)
    return content


def test_listings_are_motos_but_without_looking_at_every_object(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = S3Backend("us-east-1", "123456789012")
    bucket = backend.create_bucket("runs", "us-east-1")
    for name in ("a", "a/", "a/b", "a/b/c", "a/b/d", "a/e", "ab/c", "b/a/b", "b"):
        backend.put_object("runs", name, b"")
    looked_at: list[str] = []
    monkeypatch.setattr(s3, "_list_objects", lambda _, given, *__, **___: looked_at.extend(given.keys))
    s3._list_fewer_objects(backend, bucket, "b/", None)
    s3._list_fewer_objects(backend, bucket, "a/", "/")
    assert sorted(looked_at) == ["a/", "a/b", "a/b/d", "a/e", "b/a/b"]
    monkeypatch.undo()
    for prefix in (None, "", "a", "a/", "a/b/", "b/", "c"):
        for delimiter in (None, "/", "b"):
            for later in ({"marker": None, "max_keys": None}, {"marker": "a/b", "max_keys": 2}):
                expected = s3._list_objects(backend, bucket, prefix, delimiter, **later)
                assert s3._list_fewer_objects(backend, bucket, prefix, delimiter, **later) == expected


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-99", slice(0, 100)),
        (f"bytes={SIZE_BYTES - 7}-", slice(SIZE_BYTES - 7, None)),
        ("bytes=-7", slice(SIZE_BYTES - 7, None)),
        (f"bytes={SIZE_BYTES - 7}-{2 * SIZE_BYTES}", slice(SIZE_BYTES - 7, None)),
    ],
)
def test_range_reads_only_its_bytes(emulator: Emulator, content: bytes, asked: str, part: slice) -> None:
    server = psutil.Process(emulator.process.pid)
    before = server.io_counters().read_chars
    answer = emulator.client("s3").get_object(Bucket="of-ranges", Key="weights", Range=asked)
    wanted = content[part]
    first = part.indices(SIZE_BYTES)[0]
    assert answer["Body"].read() == wanted
    assert answer["ContentRange"] == f"bytes {first}-{first + len(wanted) - 1}/{SIZE_BYTES}"
    assert answer["ContentLength"] == len(wanted)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert server.io_counters().read_chars - before < 1 << 20


@pytest.mark.parametrize("asked", [None, "bytes=5-2", "bytes=0-1,4-5"])
def test_anything_but_a_single_range_gets_the_whole_object(
    emulator: Emulator, content: bytes, asked: str | None
) -> None:
    more = {"Range": asked} if asked else {}
    assert emulator.client("s3").get_object(Bucket="of-ranges", Key="weights", **more)["Body"].read() == content
