"""Lambda functions that really run: results, failures, what they see, and what is left of them."""

import base64
import io
import json
import os
import signal
import textwrap
import urllib.error
import urllib.request
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError

from tests.support.embedded_aws import EmbeddedAws, run_embedded_aws
from tests.support.emulator.batch_calls import until
from tests.support.emulator.event_calls import messages, queue_of, rule


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    settings = {"TRAINYARD_FUNCTION_RETRY_SECONDS": 0.05}
    with run_embedded_aws(tmp_path_factory.mktemp("functions"), environment=settings) as server:
        yield server
        health = server.health()
        assert not health["server_errors"], f"{health['server_errors']}\n{server.log.read_text()}"


def zipped(source: str, **files: str) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, text in {"index.py": source, **files}.items():
            archive.writestr(name, textwrap.dedent(text))
    return whole.getvalue()


def function(aws: EmbeddedAws, source: str, *, files: dict[str, str] | None = None, **more: Any) -> str:
    """Make a function; return its name."""
    iam = aws.client("iam")
    role = iam.create_role(RoleName=f"role-{uuid.uuid4().hex[:8]}", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    name = f"function-{uuid.uuid4().hex[:8]}"
    settings = {"Runtime": "python3.13", "Handler": "index.handler", **more}
    aws.client("lambda").create_function(
        FunctionName=name, Role=role, Code={"ZipFile": zipped(textwrap.dedent(source), **(files or {}))}, **settings
    )
    return name


def invoke(aws: EmbeddedAws, name: str, event: Any = None, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Invoke a function; return the result, and the rest of the answer."""
    answer = aws.client("lambda").invoke(FunctionName=name, Payload=json.dumps(event), **more)
    return json.loads(answer.pop("Payload").read() or "null"), answer


def log_lines(aws: EmbeddedAws, group: str) -> list[str]:
    logs = aws.client("logs")
    try:
        return [event["message"] for event in logs.filter_log_events(logGroupName=group)["events"]]
    except logs.exceptions.ResourceNotFoundException:
        return []


def test_a_function_gets_event_context_and_environment(aws: EmbeddedAws) -> None:
    source = """
        import os
        import boto3
        from beside import DOUBLE

        def handler(event, context):
            print("hello from", os.environ["GREETER"])
            return {
                "doubled": event["number"] * DOUBLE,
                "account": boto3.client("sts").get_caller_identity()["Account"],
                "name": context.function_name,
                "name in environment": os.environ["AWS_LAMBDA_FUNCTION_NAME"],
                "group": context.log_group_name,
                "group in environment": os.environ["AWS_LAMBDA_LOG_GROUP_NAME"],
                "arn": context.invoked_function_arn,
                "time left": 1000 < context.get_remaining_time_in_millis() <= 20000,
                "secret of the server": os.environ.get("TRAINYARD_SECRET"),
            }
    """
    name = function(
        aws,
        source,
        files={"beside.py": "DOUBLE = 2"},
        Timeout=20,
        Environment={"Variables": {"GREETER": "a function"}},
        LoggingConfig={"LogGroup": "/shared/functions"},
    )
    result, answer = invoke(aws, name, {"number": 21})
    assert "FunctionError" not in answer
    assert result == {
        "doubled": 42,
        "account": "123456789012",
        "name": name,
        "name in environment": name,
        "group": "/shared/functions",
        "group in environment": "/shared/functions",
        "arn": aws.client("lambda").get_function(FunctionName=name)["Configuration"]["FunctionArn"],
        "time left": True,
        "secret of the server": None,
    }
    lines = log_lines(aws, "/shared/functions")
    assert lines[0].startswith("START RequestId: ")
    assert lines[1] == "hello from a function"
    assert lines[-1].startswith("REPORT RequestId: ")


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("def handler(event, context): raise KeyError('job')", "KeyError", "job"),
        (
            "import pydantic\ndef handler(event, context): pass",
            "Runtime.ImportModuleError",
            "No module named 'pydantic'",
        ),
        ("import infra\ndef handler(event, context): pass", "Runtime.ImportModuleError", "No module named 'infra'"),
        ("def other(event, context): pass", "Runtime.HandlerNotFound", "Handler 'handler' missing"),
        ("def handler(event, context) pass", "Runtime.UserCodeSyntaxError", "expected ':'"),
        ("import os\ndef handler(event, context): os._exit(7)", "Runtime.ExitError", "exit status 7"),
        (
            "import time\ndef handler(event, context): time.sleep(60)",
            "Sandbox.Timedout",
            "timed out after 1.00 seconds",
        ),
        ("def handler(event, context): return {1, 2}", "TypeError", "not JSON serializable"),
    ],
)
def test_what_goes_wrong_is_the_answer_and_in_the_log(aws: EmbeddedAws, source: str, kind: str, words: str) -> None:
    name = function(aws, source, Timeout=1)
    result, answer = invoke(aws, name)
    assert answer["FunctionError"] == "Unhandled"
    assert answer["StatusCode"] == 200
    assert result["errorType"] == kind
    assert words in result["errorMessage"]
    assert any(words in line for line in log_lines(aws, f"/aws/lambda/{name}"))


def test_a_function_that_forgot_its_child_leaves_nothing(aws: EmbeddedAws, tmp_path: Path) -> None:
    note = tmp_path / "child"
    source = f"""
        import subprocess
        from pathlib import Path
        def handler(event, context):
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            Path({str(note)!r}).write_text(str(child.pid))
            return "done"
    """
    result, _ = invoke(aws, function(aws, source))
    assert result == "done"
    assert not psutil.pid_exists(int(note.read_text()))


def test_only_python_from_a_zip_file_runs(aws: EmbeddedAws) -> None:
    result, answer = invoke(aws, function(aws, "", Runtime="nodejs22.x"))
    assert answer["FunctionError"] == "Unhandled"
    assert "runs Python functions only, not nodejs22.x" in result["errorMessage"]


def test_an_asynchronous_invocation_is_tried_three_times_then_goes_to_both_ends(aws: EmbeddedAws) -> None:
    dead, dead_arn = queue_of(aws)
    failed, failed_arn = queue_of(aws)
    name = function(
        aws, "def handler(event, context): raise ValueError('again')", DeadLetterConfig={"TargetArn": dead_arn}
    )
    aws.client("lambda").put_function_event_invoke_config(
        FunctionName=name, DestinationConfig={"OnFailure": {"Destination": failed_arn}}
    )
    _, answer = invoke(aws, name, {"n": 1}, InvocationType="Event")
    assert answer["StatusCode"] == 202
    assert messages(aws, dead, 1) == [{"n": 1}]
    (record,) = messages(aws, failed, 1)
    assert record["requestContext"]["condition"] == "RetriesExhausted"
    assert record["requestContext"]["approximateInvokeCount"] == 3
    assert record["requestPayload"] == {"n": 1}
    assert record["responsePayload"]["errorMessage"] == "again"
    lines = log_lines(aws, f"/aws/lambda/{name}")
    assert sum(line.startswith("START") for line in lines) == 3


def test_the_number_of_retries_can_be_set_and_success_has_a_destination(aws: EmbeddedAws) -> None:
    done, done_arn = queue_of(aws)
    name = function(aws, "def handler(event, context): return event['n'] + 1")
    client = aws.client("lambda")
    client.put_function_event_invoke_config(FunctionName=name, MaximumRetryAttempts=2)
    client.put_function_event_invoke_config(
        FunctionName=name, MaximumRetryAttempts=0, DestinationConfig={"OnSuccess": {"Destination": done_arn}}
    )
    assert client.get_function_event_invoke_config(FunctionName=name)["MaximumRetryAttempts"] == 0
    invoke(aws, name, {"n": 1}, InvocationType="Event")
    (record,) = messages(aws, done, 1)
    assert record["requestContext"]["condition"] == "Success"
    assert record["responsePayload"] == 2


ECHO = """
    import boto3
    def handler(event, context):
        boto3.client("sqs").send_message(QueueUrl=%r, MessageBody=__import__("json").dumps(event))
"""


def test_events_and_topics_invoke_what_lets_them(aws: EmbeddedAws) -> None:
    url, _ = queue_of(aws)
    name = function(aws, ECHO % url, Timeout=20)
    client, sns = aws.client("lambda"), aws.client("sns")
    arn = client.get_function(FunctionName=name)["Configuration"]["FunctionArn"]
    source = f"test.{uuid.uuid4().hex[:8]}"
    pattern = {"source": [source]}
    allowed, refused = rule(aws, pattern, {"Arn": arn}), rule(aws, pattern, {"Arn": arn, "Input": '"refused"'})
    topic = sns.create_topic(Name=f"topic-{uuid.uuid4().hex[:8]}")["TopicArn"]
    sns.subscribe(TopicArn=topic, Protocol="lambda", Endpoint=arn)
    for service, source_arn in (
        ("events.amazonaws.com", f"arn:aws:events:us-east-1:123456789012:rule/{allowed}"),
        ("sns.amazonaws.com", topic),
    ):
        client.add_permission(
            FunctionName=name,
            StatementId=service.split(".")[0],
            Action="lambda:InvokeFunction",
            Principal=service,
            SourceArn=source_arn,
        )
    aws.client("events").put_events(Entries=[{"Source": source, "DetailType": "Any", "Detail": '{"a": 1}'}])
    (event,) = messages(aws, url, 1)
    assert event["detail"] == {"a": 1}
    until(lambda: [line for line in aws.health()["undelivered"] if refused in line] or None, "the other rule may not")

    sns.publish(
        TopicArn=topic,
        Subject="Budget",
        Message="80 %",
        MessageAttributes={"team": {"DataType": "String", "StringValue": "research"}},
    )
    (notification,) = messages(aws, url, 1)
    (record,) = notification["Records"]
    assert record["EventSource"] == "aws:sns"
    assert {key: record["Sns"][key] for key in ("TopicArn", "Subject", "Message", "MessageAttributes")} == {
        "TopicArn": topic,
        "Subject": "Budget",
        "Message": "80 %",
        "MessageAttributes": {"team": {"Type": "String", "Value": "research"}},
    }


def test_a_payload_that_is_no_json_and_code_that_is_not_there_are_refused(aws: EmbeddedAws) -> None:
    name = function(aws, "def handler(event, context): pass")
    with pytest.raises(ClientError, match="Could not parse request body"):
        aws.client("lambda").invoke(FunctionName=name, Payload=b"{")
    with pytest.raises(ClientError, match="NoSuchBucket"):
        aws.client("lambda").update_function_code(FunctionName=name, S3Bucket="not-there", S3Key="code.zip")


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_no_function_outlives_the_server(fresh_aws: EmbeddedAws, tmp_path: Path, ending: signal.Signals) -> None:
    note = tmp_path / "pid"
    source = f"""
        import os, time
        from pathlib import Path
        def handler(event, context):
            Path({str(note)!r} + ".new").write_text(str(os.getpid()))
            os.rename({str(note)!r} + ".new", {str(note)!r})
            time.sleep(600)
    """
    invoke(fresh_aws, function(fresh_aws, source, Timeout=900), InvocationType="Event")
    pid = int(until(lambda: note.read_text() if note.exists() else None, "the function runs"))
    os.kill(fresh_aws.process.pid, ending)
    fresh_aws.process.wait(20)
    until(lambda: None if psutil.pid_exists(pid) else True, "the function is gone")


def test_many_invocations_take_a_bounded_number_of_threads(aws: EmbeddedAws) -> None:
    server = psutil.Process(aws.process.pid)
    quick = function(aws, "def handler(event, context): pass")
    failing = function(aws, "def handler(event, context): raise ValueError")
    for number in range(60):
        invoke(aws, failing if number % 3 == 0 else quick, InvocationType="Event")
    most = server.num_threads()

    def all_started() -> bool | None:
        nonlocal most
        most = max(most, server.num_threads())
        lines = [line for name in (quick, failing) for line in log_lines(aws, f"/aws/lambda/{name}")]
        return sum(line.startswith("END") for line in lines) == 40 + 20 * 3 or None

    until(all_started, "all of them and all their retries have run")
    assert most < 60


def test_only_what_runs_has_work_and_a_result(aws: EmbeddedAws) -> None:
    for what, data in (("code", None), ("next", None), ("result", b'{"payload": "1"}')):
        token = {"Authorization": f"Bearer {aws.credentials.secret_access_key}"}
        request = urllib.request.Request(f"{aws.endpoint}/trainyard/environments/none/{what}", data, token)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request, timeout=10)


COUNTER = """
    import os
    count = 0
    print("loaded")
    def handler(event, context):
        global count
        count += 1
        print(f"call {count} of {context.aws_request_id}")
        if event == "fail":
            raise ValueError(event)
        if event == "exit":
            os._exit(3)
        return [os.getpid(), count, os.environ.get("MODE"), os.environ["AWS_LAMBDA_LOG_STREAM_NAME"]]
"""


def test_a_function_stays_warm_until_it_changes_or_ends(aws: EmbeddedAws) -> None:
    name = function(aws, COUNTER)
    client = aws.client("lambda")
    first, answer = invoke(aws, name, LogType="Tail")
    assert base64.b64decode(answer["LogResult"]).decode().splitlines()[1].startswith("loaded")
    second, answer = invoke(aws, name, LogType="Tail")
    assert (second[0], second[1]) == (first[0], 2)
    assert second[3] != first[3]
    log = base64.b64decode(answer["LogResult"]).decode().splitlines()
    assert [line.split()[0] for line in log] == ["START", "call", "END", "REPORT"]

    failed, _ = invoke(aws, name, "fail")
    assert failed["errorType"] == "ValueError"
    assert invoke(aws, name)[0][:2] == [first[0], 4]

    client.update_function_configuration(FunctionName=name, Environment={"Variables": {"MODE": "new"}})
    changed, _ = invoke(aws, name)
    assert changed[0] != first[0]
    assert changed[1:3] == [1, "new"]
    client.update_function_code(FunctionName=name, ZipFile=zipped(COUNTER.replace("count = 0", "count = 10")))
    assert invoke(aws, name)[0][1] == 11

    ended, _ = invoke(aws, name, "exit")
    assert "exit status 3" in ended["errorMessage"]
    assert invoke(aws, name)[0][1] == 11
