"""Secrets of containers: in the environment of the process, and nowhere else."""

import json
import uuid
from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch, main

VALUE = "hf_a-token-that-nobody-may-see"


def run_with_secret(batch: Batch, value_from: str, command: str) -> dict[str, Any]:
    container = {"secrets": [{"name": "HF_TOKEN", "valueFrom": value_from}]}
    definition = batch.definition("sh", "-c", command, container=container)
    return batch.ended(batch.submit(definition, batch.queue()))


def secret(batch: Batch, **more: Any) -> str:
    arn: str = batch.aws.client("secretsmanager").create_secret(Name=f"secret-{uuid.uuid4().hex[:8]}", **more)["ARN"]
    return arn


def test_a_secrets_value_is_in_the_environment_and_nowhere_else(batch: Batch) -> None:
    arn = secret(batch, SecretString=VALUE)
    # The length shows that it is there; the command line of the process shows that it is not there, too.
    job = run_with_secret(batch, arn, 'echo ${#HF_TOKEN}; tr "\\0" " " </proc/$$/cmdline | grep -c "$HF_TOKEN"; true')
    assert job["status"] == "SUCCEEDED"
    shown = main(job)
    assert batch.lines(shown["logStreamName"]) == [str(len(VALUE)), "0"]
    assert shown["secrets"] == [{"name": "HF_TOKEN", "valueFrom": arn}]
    assert VALUE not in json.dumps(job, default=str)
    assert VALUE not in batch.aws.log.read_text()


def test_one_key_of_a_secret_and_a_parameter(batch: Batch) -> None:
    arn = secret(batch, SecretString="{}")
    newer = batch.aws.client("secretsmanager").put_secret_value(SecretId=arn, SecretString='{"token": "newer"}')
    assert batch.output(run_with_secret(batch, f"{arn}:token::", "echo $HF_TOKEN")) == ["newer"]
    batch.aws.client("secretsmanager").put_secret_value(SecretId=arn, SecretString='{"token": "newest"}')
    job = run_with_secret(batch, f"{arn}:token::{newer['VersionId']}", "echo $HF_TOKEN")
    assert batch.output(job) == ["newer"]
    name = f"/secrets/{uuid.uuid4().hex[:8]}"
    batch.aws.client("ssm").put_parameter(Name=name, Value="of ssm", Type="SecureString")
    assert batch.output(run_with_secret(batch, name, "echo $HF_TOKEN")) == ["of ssm"]


@pytest.mark.parametrize(
    "source",
    [
        "{secret}",  # has no value
        "{secret}:token::",
        "arn:aws:secretsmanager:us-east-1:123456789012:secret:not-there-AbCdEf",
        "/secrets/not-there",
    ],
)
def test_a_job_whose_secret_cannot_be_had_fails_before_it_runs(batch: Batch, source: str) -> None:
    job = run_with_secret(batch, source.format(secret=secret(batch)), "echo it ran")
    assert job["status"] == "FAILED"
    assert job["statusReason"].startswith("ResourceInitializationError: unable to pull secrets")
    assert "exitCode" not in main(job["attempts"][0])
