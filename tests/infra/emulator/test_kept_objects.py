"""What S3 holds outlives the server where it is told to keep it, also a server that was killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

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
    """Make the stack; returns the name of its bucket."""
    cloudformation = aws.client("cloudformation")
    cloudformation.create_stack(StackName="storage", TemplateBody=TEMPLATE)
    [bucket] = cloudformation.describe_stack_resources(StackName="storage")["StackResources"]
    return str(bucket["PhysicalResourceId"])


def held(s3: Any, bucket: str) -> dict[str, Any]:
    """All that a client can learn of each object, by its key."""
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
    aws.state_file.unlink()  # of a killed server
    with run_emulator(tmp_path, *keep) as aws:
        assert deploy(aws) == bucket
        s3 = aws.client("s3")
        assert held(s3, bucket) == before
        assert len(before) == 5
        # And it goes on being kept.
        s3.put_object(Bucket=bucket, Key="a/plain.txt", Body=b"three")
        assert not aws.health()["server_errors"]
    with run_emulator(tmp_path, *keep) as aws:
        assert held(aws.client("s3"), deploy(aws))["a/plain.txt"]["body"] == b"three"
    bodies = [path for path in (tmp_path / "kept/buckets" / bucket).iterdir() if path.suffix != ".json"]
    assert len(bodies) == 5, "what was replaced or deleted takes no room"


def test_a_client_is_told_where_the_disk_does_not_take_an_object(tmp_path: Path) -> None:
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
    assert "Next: stop that one" in refused.stderr
