"""Who the embedded AWS lets in: its user's programs by their credentials, no web page, nobody else of the machine."""

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

from infra.emulator import client
from infra.emulator.credentials import Credentials
from tests.support.embedded_aws import EmbeddedAws, run_embedded_aws
from tests.support.emulator.web_page import REBOUND_NAME, web_page

STACK = {"Resources": {"Bucket": {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": "of-a-page"}}}}
SCOPE = "20261123/us-east-1/{service}/aws4_request, SignedHeaders=host, Signature=0"


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    with run_embedded_aws(tmp_path_factory.mktemp("access")) as server:
        server.client("s3").create_bucket(Bucket="there")
        server.client("s3").put_object(Bucket="there", Key="a/file", Body=b"content")
        yield server
        assert server.health()["server_errors"] == []


def ask(aws: EmbeddedAws, path: str, *, method: str = "GET", body: str = "", **headers: str) -> tuple[int, Any, bytes]:
    """Send a request made by hand; return its status, headers and content. `sec_fetch_site` is Sec-Fetch-Site."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(aws.endpoint).port or 0, timeout=30)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Host": urlsplit(aws.endpoint).netloc, **sent})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def signed(access_key_id: str, service: str = "s3") -> str:
    return f"AWS4-HMAC-SHA256 Credential={access_key_id}/{SCOPE.format(service=service)}"


def buckets(aws: EmbeddedAws) -> list[str]:
    return [bucket["Name"] for bucket in aws.client("s3").list_buckets()["Buckets"]]


@pytest.mark.parametrize(
    "host", ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "there.localhost:{port}", "localhost"]
)
def test_every_name_of_this_machine_is_answered(aws: EmbeddedAws, host: str) -> None:
    authorization = signed(aws.credentials.access_key_id)
    name = host.format(port=urlsplit(aws.endpoint).port)
    assert ask(aws, "/", Host=name, Authorization=authorization)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0:{port}",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/trainyard/health", "/moto-api/reset", "/trainyard/jobs/any/reclaim"])
def test_no_other_name_is_answered_whatever_the_credentials(aws: EmbeddedAws, host: str, path: str) -> None:
    name = host.format(port=urlsplit(aws.endpoint).port)
    for authorization in (signed(aws.credentials.access_key_id), f"Bearer {aws.credentials.secret_access_key}"):
        assert ask(aws, path, method="POST", Host=name, Authorization=authorization)[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://localhost"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_no_request_of_a_page_is_answered_whatever_the_credentials(
    aws: EmbeddedAws, method: str, headers: dict[str, str]
) -> None:
    for path, authorization in (
        ("/", signed(aws.credentials.access_key_id)),
        ("/trainyard/health", f"Bearer {aws.credentials.secret_access_key}"),
    ):
        status, answered, _ = ask(aws, path, method=method, Authorization=authorization, **headers)
        assert status == 403
        assert not [name for name in answered if name.lower().startswith("access-control-")]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/moto-api/reset"),
        ("GET", "/moto-api/data.json"),
        ("POST", "/trainyard/jobs/any/reclaim"),
        ("POST", "/trainyard/events"),
    ],
)
def test_what_acts_needs_the_token(aws: EmbeddedAws, method: str, path: str) -> None:
    key = aws.credentials.access_key_id
    for authorization in ("", "Bearer ", f"Bearer {key}", signed(key), aws.credentials.secret_access_key):
        assert ask(aws, path, method=method, Authorization=authorization)[0] == 403
    assert "there" in buckets(aws)
    if "reset" not in path:
        token = f"Bearer {aws.credentials.secret_access_key}"
        assert ask(aws, path, method=method, body="{}", Authorization=token)[0] in (200, 400, 404)


@pytest.mark.parametrize(
    ("service", "call"), [("s3", "list_buckets"), ("batch", "describe_job_queues"), ("iam", "list_roles")]
)
@pytest.mark.parametrize("key", ["AKIAIOSFODNN7EXAMPLE", "TRAINYARD", "x"])
def test_other_credentials_are_refused_by_every_service(aws: EmbeddedAws, service: str, call: str, key: str) -> None:
    stranger = client.client(service, aws.endpoint, Credentials(key, aws.credentials.secret_access_key))
    with pytest.raises(ClientError, match="trainyard local env") as refused:
        getattr(stranger, call)()
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_unsigned_requests_are_refused(aws: EmbeddedAws) -> None:
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    create = urlencode({"Action": "CreateStack", "StackName": "page", "TemplateBody": json.dumps(STACK)})
    assert ask(aws, "/", method="POST", body=create, **form)[0] == 403
    web_identity = urlencode({"Action": "AssumeRoleWithWebIdentity", "RoleArn": "arn:aws:iam::123456789012:role/any"})
    assert ask(aws, "/", method="POST", body=web_identity, **form)[0] == 403
    assert ask(aws, "/there", method="POST", body="key=of-a-form")[0] == 403
    assert ask(aws, "/there/a/file")[0] == 403
    assert buckets(aws) == ["there"]


@pytest.mark.parametrize("version", ["s3v4", "s3"])
def test_presigned_addresses_work_and_lose_their_key_with_their_credentials(aws: EmbeddedAws, version: str) -> None:
    s3 = aws.session.client("s3", endpoint_url=aws.endpoint, config=Config(signature_version=version))
    get = s3.generate_presigned_url("get_object", Params={"Bucket": "there", "Key": "a/file"})
    with urllib.request.urlopen(get, timeout=30) as answer:
        assert answer.read() == b"content"
    parts = urlsplit(get.replace(aws.credentials.access_key_id, "test"))
    assert ask(aws, f"{parts.path}?{parts.query}")[0] == 403


def test_its_own_key_is_that_of_a_user_called_as_who_started_it(aws: EmbeddedAws) -> None:
    # As the API reference of GetCallerIdentity shows the answer to a user's key: jobs are cancelled in this name.
    identity = aws.client("sts").get_caller_identity()
    assert identity["Arn"] == f"arn:aws:iam::123456789012:user/{getpass.getuser()}"
    assert re.fullmatch("AIDA[A-Z0-9]{17}", identity["UserId"])
    assert identity["Account"] == "123456789012"


def test_roles_that_are_assumed_with_the_credentials_have_some_of_their_own(aws: EmbeddedAws) -> None:
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


def test_each_server_has_credentials_of_its_own(aws: EmbeddedAws, fresh_aws: EmbeddedAws) -> None:
    assert fresh_aws.credentials != aws.credentials
    assert len(fresh_aws.credentials.access_key_id) > 32
    assert len(fresh_aws.credentials.secret_access_key) == 40
    for server in (aws, fresh_aws):
        assert server.credentials.secret_access_key not in server.log.read_text()
        assert server.credentials.secret_access_key not in repr(server)


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
"""What a page can try, given even the credentials: every method to every kind of path, with and without a preflight."""


@pytest.fixture
def page() -> Iterator[Page]:
    with web_page() as page:
        yield page


def test_no_page_in_a_browser_can_do_or_read_anything(aws: EmbeddedAws, page: Page) -> None:
    credentials = [aws.credentials.access_key_id, aws.credentials.secret_access_key]
    # WHEN a page of another origin tries everything, at the usual address and at another name of it
    for endpoint in (aws.endpoint, aws.endpoint.replace("localhost", "127.0.0.1")):
        answers = page.evaluate(ATTACK, [endpoint, *credentials])
        # THEN none of its requests had an answer that it could read
        assert len(answers) > 100
        assert {answer.split()[2] for answer in answers} == {"failed", "opaque"}
    # WHEN its form is sent, which takes it to the answer
    page.evaluate("action => { form.action = action; form.submit() }", f"{aws.endpoint}/there")
    page.wait_for_url(f"{aws.endpoint}/**")
    assert "AccessDenied" in page.content()
    # THEN nothing has happened
    assert buckets(aws) == ["there"]
    assert [item["Key"] for item in aws.client("s3").list_objects_v2(Bucket="there", Prefix="a")["Contents"]] == [
        "a/file"
    ]


def test_a_page_whose_name_is_rebound_to_this_machine_is_not_answered(aws: EmbeddedAws, page: Page) -> None:
    # GIVEN a page whose own name leads to the embedded AWS by now: for the browser both are the same origin
    rebound = aws.endpoint.replace("localhost", REBOUND_NAME)
    page.goto(f"{rebound}/trainyard/health", wait_until="networkidle")
    assert "AccessDenied" in page.content()
    before = refusals_of(aws, REBOUND_NAME)
    answers = page.evaluate(ATTACK, [rebound, aws.credentials.access_key_id, aws.credentials.secret_access_key])
    # THEN the browser gives the sandboxed page no answer that it can read
    assert {answer.split()[-1] for answer in answers} <= {"403", "0", "failed"}
    # AND by the server's own log each of its requests was refused, or the preflight that would have let it through
    assert len(answers) > 100
    assert refusals_of(aws, REBOUND_NAME) - before == len(answers)
    assert buckets(aws) == ["there"]


def refusals_of(aws: EmbeddedAws, host: str) -> int:
    """Return how many requests to `host` the server says that it has answered with 403."""
    return len(
        re.findall(rf"refused \S+: the embedded AWS answers to localhost, not to '{host}:\d+'", aws.log.read_text())
    )


HTML = b"""<title>waiting</title><form id="form" method="post" action="/moto-api/reset"></form><script>
  document.title = "ran";
  const key = new URLSearchParams(location.search).get("X-Amz-Credential");
  const aws = {Authorization: `AWS4-HMAC-SHA256 Credential=${key}, SignedHeaders=host, Signature=0`};
  fetch("/of-a-page", {method: "PUT", headers: aws}).finally(() => { document.title = "sent"; });
</script>"""
"""A page that knows the key: it stands in its own address."""


def test_html_on_s3_that_its_user_opens_runs_no_script(aws: EmbeddedAws, page: Page) -> None:
    aws.client("s3").put_object(Bucket="there", Key="page.html", Body=HTML, ContentType="text/html")
    s3 = aws.session.client("s3", endpoint_url=aws.endpoint, config=Config(signature_version="s3v4"))
    address = s3.generate_presigned_url("get_object", Params={"Bucket": "there", "Key": "page.html"})
    answer = page.goto(address)
    assert answer is not None
    assert (answer.status, answer.headers["content-security-policy"]) == (200, "sandbox")
    page.wait_for_load_state("networkidle")
    assert page.title() == "waiting"
    assert buckets(aws) == ["there"]


def test_every_answer_tells_browsers_to_run_nothing_of_it(aws: EmbeddedAws) -> None:
    key, token = signed(aws.credentials.access_key_id), f"Bearer {aws.credentials.secret_access_key}"
    for path, method, authorization in (
        ("/", "GET", key),
        ("/there/a/file", "GET", key),
        ("/there/nothing", "GET", key),
        ("/", "GET", ""),
        ("/trainyard/health", "GET", ""),
        ("/trainyard/nothing", "GET", token),
        ("/moto-api/", "GET", token),
        ("/", "OPTIONS", key),
    ):
        _, answered, _ = ask(aws, path, method=method, Authorization=authorization)
        assert answered.get_all("Content-Security-Policy") == ["sandbox"], (path, method)
