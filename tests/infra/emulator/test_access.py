"""Only programs with the credentials may use the emulator, not web pages or other users of the machine."""

import getpass
import http.client
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from playwright.sync_api import Page

from infra.emulator.access import Gate
from infra.emulator.credentials import Credentials, client
from tests.support.emulator.web_page import web_page
from tests.support.running_emulator import Emulator, run_emulator

STACK = {"Resources": {"Bucket": {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": "of-a-page"}}}}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with run_emulator(tmp_path_factory.mktemp("access")) as server:
        server.client("s3").create_bucket(Bucket="there")
        server.client("s3").put_object(Bucket="there", Key="a/file", Body=b"content")
        yield server
        assert server.health()["server_errors"] == []


def ask(aws: Emulator, path: str, *, method: str = "GET", body: str = "", **headers: str) -> tuple[int, Any, bytes]:
    """Send a raw request, and return status, headers and content. `sec_fetch_site` is Sec-Fetch-Site."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(aws.endpoint).port or 0, timeout=30)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Host": urlsplit(aws.endpoint).netloc, **sent})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def buckets(aws: Emulator) -> list[str]:
    return [bucket["Name"] for bucket in aws.client("s3").list_buckets()["Buckets"]]


KEY = Credentials.random()
SIGNED = f"AWS4-HMAC-SHA256 Credential={KEY.access_key_id}/20261123/us-east-1/s3/aws4_request, Signature=0"
TOKEN = f"Bearer {KEY.secret_access_key}"
EVERYTHING = ("/", "/trainyard/health", "/moto-api/reset", "/trainyard/jobs/any/reclaim")


def refused(
    path: str = "/", authorization: str = SIGNED, *, host: str = "localhost:4566", **headers: str
) -> str | None:
    """Return the error code of a refused request, or None. `sec_fetch_site` is Sec-Fetch-Site."""
    environ = {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    path, _, query = path.partition("?")
    refusal = Gate(KEY).refusal(
        {**environ, "HTTP_HOST": host, "PATH_INFO": path, "QUERY_STRING": query, "HTTP_AUTHORIZATION": authorization}
    )
    return refusal.code if refusal else None


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost:4566", True),
        ("127.0.0.1:4566", True),
        ("[::1]:4566", True),
        ("bucket.localhost:4566", True),
        ("localhost", True),
        ("evil.example:4566", False),  # the name of a page, under DNS rebinding
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("0.0.0.0:4566", False),
        ("", False),
    ],
)
def test_only_local_host_names_are_accepted(host: str, is_known: bool) -> None:
    assert (refused(host=host) is None) is is_known
    if not is_known:
        assert {refused(path, right, host=host) for path in EVERYTHING for right in (SIGNED, TOKEN)} == {"AccessDenied"}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://localhost"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_cross_origin_requests_are_refused(headers: dict[str, str]) -> None:
    assert {refused(path, right, **headers) for path in EVERYTHING for right in (SIGNED, TOKEN)} == {"AccessDenied"}
    assert refused(origin="http://localhost:4566", sec_fetch_site="same-origin") is None


@pytest.mark.parametrize("path", ["/moto-api/reset", "/trainyard/jobs/any/reclaim", "/trainyard/events"])
def test_paths_that_act_need_the_token(path: str) -> None:
    assert refused(path, TOKEN) is None
    for other in ("", "Bearer ", f"Bearer {KEY.access_key_id}", SIGNED, KEY.secret_access_key):
        assert refused(path, other) == "AccessDenied"
    assert refused("/trainyard/health", "") is None


@pytest.mark.parametrize("key", ["AKIAIOSFODNN7EXAMPLE", "TRAINYARD", "x", ""])
def test_requests_without_the_key_are_refused(key: str) -> None:
    for authorization in (SIGNED.replace(KEY.access_key_id, key), f"AWS {key}:signature", TOKEN, ""):
        assert refused("/", authorization) == "InvalidClientTokenId"
    for parameter in ("X-Amz-Credential", "AWSAccessKeyId"):
        assert refused(f"/bucket/key?{parameter}={key}%2F20261123", "") == "InvalidClientTokenId"
        assert refused(f"/bucket/key?{parameter}={KEY.access_key_id}%2F20261123", "") is None


def test_server_refuses_like_its_gate_and_sandboxes_responses(aws: Emulator) -> None:
    stranger = client("batch", aws.endpoint, KEY)
    with pytest.raises(ClientError, match="trainyard local env") as answer:
        stranger.describe_job_queues()
    assert answer.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    create = urlencode({"Action": "CreateStack", "StackName": "page", "TemplateBody": json.dumps(STACK)})
    key = SIGNED.replace(KEY.access_key_id, aws.credentials.access_key_id)
    for status, path, method, headers in (
        (403, "/", "POST", form),
        (403, "/there", "POST", {}),
        (403, "/there/a/file", "GET", {}),
        (403, "/trainyard/nothing", "GET", {}),
        (200, "/there/a/file", "GET", {"Authorization": key}),
        (200, "/trainyard/health", "GET", {}),
    ):
        answered, found, _ = ask(aws, path, method=method, body=create, **headers)
        assert (answered, found.get_all("Content-Security-Policy")) == (status, ["sandbox"]), (path, method)
        assert not [name for name in found if name.lower().startswith("access-control-")]
    assert buckets(aws) == ["there"]
    assert aws.credentials.secret_access_key not in aws.log.read_text()
    assert aws.credentials.secret_access_key not in repr(aws)


@pytest.mark.parametrize("version", ["s3v4", "s3"])
def test_presigned_urls_need_the_key(aws: Emulator, version: str) -> None:
    s3 = aws.session.client("s3", endpoint_url=aws.endpoint, config=Config(signature_version=version))
    get = s3.generate_presigned_url("get_object", Params={"Bucket": "there", "Key": "a/file"})
    with urllib.request.urlopen(get, timeout=30) as answer:
        assert answer.read() == b"content"
    parts = urlsplit(get.replace(aws.credentials.access_key_id, "test"))
    assert ask(aws, f"{parts.path}?{parts.query}")[0] == 403


def test_caller_identity_is_named_like_the_local_user(aws: Emulator) -> None:
    # In the format of the API reference of GetCallerIdentity for users. Cancelled jobs record this name.
    identity = aws.client("sts").get_caller_identity()
    assert identity["Arn"] == f"arn:aws:iam::123456789012:user/{getpass.getuser()}"
    assert re.fullmatch("AIDA[A-Z0-9]{17}", identity["UserId"])
    assert identity["Account"] == "123456789012"


def test_assumed_roles_get_separate_credentials(aws: Emulator) -> None:
    role = aws.client("sts").assume_role(RoleArn="arn:aws:iam::123456789012:role/any", RoleSessionName="deploys")
    keys = role["Credentials"]
    assert len(keys["AccessKeyId"]) > 48
    assumed = boto3.client(
        "sts",
        endpoint_url=aws.endpoint,
        aws_access_key_id=keys["AccessKeyId"],
        aws_secret_access_key=keys["SecretAccessKey"],
        aws_session_token=keys["SessionToken"],
        region_name="us-east-1",
    )
    assert assumed.get_caller_identity()["Arn"].endswith(":assumed-role/any/deploys")


ATTACK = """
async ([endpoint, key, token]) => {
  const aws = {Authorization: `AWS4-HMAC-SHA256 Credential=${key}/20261123/us-east-1/s3/aws4_request`};
  const bearer = {Authorization: `Bearer ${token}`};
  const form = "Action=CreateStack&StackName=page&TemplateBody=" + encodeURIComponent(
    JSON.stringify({Resources: {Bucket: {Type: "AWS::S3::Bucket", Properties: {BucketName: "of-a-page"}}}}));
  const simple = {"Content-Type": "application/x-www-form-urlencoded"};
  const answers = [];
  const send = async (path, options) => {
    try {
      const answer = await fetch(endpoint + path, options);
      answers.push(`${options.method} ${path} ${answer.type} ${answer.status}`);
    } catch { answers.push(`${options.method} ${path} failed`); }
  };
  for (const mode of ["cors", "no-cors"]) {
    for (const method of mode == "cors" ? ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"] : ["GET", "HEAD", "POST"]) {
      const body = method == "GET" || method == "HEAD" ? undefined : form;
      for (const headers of mode == "cors" ? [aws, bearer, {...simple, ...aws}, {}] : [simple]) {
        for (const path of ["/", "/of-a-page", "/there/a/file", "/moto-api/reset", "/trainyard/health",
                            "/trainyard/jobs/any/reclaim", "/trainyard/events"]) {
          await send(path, {method, mode, headers, body});
        }
      }
    }
  }
  return answers;
}
"""
"""What a page can try even with the credentials: every method and kind of path, with and without a preflight."""


@pytest.fixture
def page() -> Iterator[Page]:
    with web_page() as page:
        yield page


def test_no_page_in_a_browser_can_do_or_read_anything(aws: Emulator, page: Page) -> None:
    credentials = [aws.credentials.access_key_id, aws.credentials.secret_access_key]
    # WHEN a page of another origin tries everything, at the usual address and at 127.0.0.1
    for endpoint in (aws.endpoint, aws.endpoint.replace("localhost", "127.0.0.1")):
        answers = page.evaluate(ATTACK, [endpoint, *credentials])
        # THEN it can read no answer
        assert len(answers) > 100
        assert {answer.split()[2] for answer in answers} == {"failed", "opaque"}
    # WHEN its form is sent and the browser shows the answer
    page.evaluate("action => { form.action = action; form.submit() }", f"{aws.endpoint}/there")
    page.wait_for_url(f"{aws.endpoint}/**")
    assert "AccessDenied" in page.content()
    # THEN nothing has happened
    assert buckets(aws) == ["there"]
    assert [item["Key"] for item in aws.client("s3").list_objects_v2(Bucket="there", Prefix="a")["Contents"]] == [
        "a/file"
    ]
