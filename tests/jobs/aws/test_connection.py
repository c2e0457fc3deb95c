from pathlib import Path

import pytest
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import BotoCoreError, ClientError

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code, explain, is_loopback, is_refused_connection, is_transient
from jobs.core.errors import ConfigurationError, NotFoundError, TrainyardError
from jobs.runs.batch import read_stage
from tests.support.jobs.proxies import Fault, FaultyProxy


@pytest.mark.parametrize(
    ("code", "kind", "words", "next_words"),
    [
        ("ExpiredTokenException", ConfigurationError, "the AWS credentials have expired", "aws sso login"),
        ("UnrecognizedClientException", ConfigurationError, "AWS rejected the credentials", "--profile"),
        ("AccessDeniedException", ConfigurationError, "AWS denied GetParametersByPath", "--stage"),
        ("ValidationException", ConfigurationError, "AWS rejected GetParametersByPath", None),
        ("NoSuchBucket", NotFoundError, "GetParametersByPath", "deploy the stage again"),
    ],
)
def test_error_response_is_explained(
    *,
    refusing_service: FaultyProxy,
    refusing_aws: Aws,
    code: str,
    kind: type[TrainyardError],
    words: str,
    next_words: str | None,
) -> None:
    refusing_service.faults["getparametersbypath"].append(Fault("answer", status=400, code=code))
    with pytest.raises(ClientError) as raised:
        read_stage(refusing_aws, "dev")
    explained = explain(raised.value)
    assert type(explained) is kind
    assert words in str(explained.args[0])
    assert (next_words or "") in (explained.next_step or "")
    assert error_code(raised.value) == code
    assert not is_transient(raised.value)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("answer", status=500),
        Fault("answer", status=400, code="ThrottlingException"),
        Fault("cut"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.code}",
)
def test_transient_errors_are_retried(refusing_service: FaultyProxy, refusing_aws: Aws, fault: Fault) -> None:
    refusing_service.faults["submitjob"].append(fault)
    with pytest.raises((ClientError, BotoCoreError)) as raised:
        refusing_aws.batch_without_retries.submit_job(jobName="a", jobQueue="b", jobDefinition="c")
    assert is_transient(raised.value)
    assert refusing_service.seen == ["submitjob"]

    refusing_service.faults["describejobs"].extend([fault, Fault("answer", status=400, code="ClientException")])
    with pytest.raises(ClientError):
        refusing_aws.batch.describe_jobs(jobs=["a"])
    assert refusing_service.seen == ["submitjob", "describejobs", "describejobs"]


def test_failed_upload_is_explained_by_its_cause(
    refusing_service: FaultyProxy, refusing_aws: Aws, tmp_path: Path
) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"weights")
    refusing_service.faults["model.bin"].append(Fault("answer", status=403, code="AccessDenied"))
    with pytest.raises(S3UploadFailedError) as raised:
        refusing_aws.s3.upload_file(str(file), "bucket", "model.bin")
    explained = explain(raised.value)
    assert isinstance(explained, ConfigurationError)
    assert "denied" in str(explained)


def test_closed_loopback_port_means_the_emulator_is_down(
    monkeypatch: pytest.MonkeyPatch, refusing_service: FaultyProxy
) -> None:
    with refusing_service:
        pass
    aws = Aws()
    with pytest.raises(BotoCoreError) as raised:
        aws.batch_without_retries.describe_job_queues()
    assert is_refused_connection(raised.value)
    explained = explain(raised.value)
    assert explained is not None
    assert explained.args[0] == f"the emulator at {refusing_service.url} does not respond"
    assert explained.next_step == "trainyard local up"
    assert explain(ValueError("a defect")) is None
    assert not is_transient(ValueError("a defect"))


def test_region_variable_of_other_sdks_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert Aws().batch.meta.region_name == "us-west-2"
    assert Aws(region="us-east-1").batch.meta.region_name == "us-east-1"
    assert not Aws().emulated
    assert all(map(is_loopback, ("http://localhost:5000", "http://127.0.0.1:5000/", "http://[::1]:5000")))
    assert not is_loopback("http://localhost.example.com")
