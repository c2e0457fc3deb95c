"""Lambda functions that really run: results, failures, environment, cleanup."""

import io
import json
import os
import signal
import textwrap
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError

from tests.support.emulator.batch_calls import until
from tests.support.emulator.event_calls import messages, queue_of
from tests.support.running_emulator import Emulator, run_emulator


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    settings = {"TRAINYARD_FUNCTION_RETRY_SECONDS": 0.05}
    with run_emulator(tmp_path_factory.mktemp("functions"), environment=settings) as server:
        yield server
        health = server.health()
        assert not health["server_errors"], f"{health['server_errors']}\n{server.log.read_text()}"


def function(aws: Emulator, source: str, *, files: dict[str, str] | None = None, **more: Any) -> str:
    """Create a function; return its name."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for file, text in {"index.py": source, **(files or {})}.items():
            archive.writestr(file, textwrap.dedent(text))
    iam, name = aws.client("iam"), f"function-{uuid.uuid4().hex[:8]}"
    role = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    settings = {"Runtime": "python3.13", "Handler": "index.handler", "Code": {"ZipFile": whole.getvalue()}, **more}
    aws.client("lambda").create_function(FunctionName=name, Role=role, **settings)
    return name


def invoke(aws: Emulator, name: str, event: Any = None, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Invoke a function, and return the result and the rest of the response."""
    answer = aws.client("lambda").invoke(FunctionName=name, Payload=json.dumps(event), **more)
    return json.loads(answer.pop("Payload").read() or "null"), answer


def log_lines(aws: Emulator, group: str) -> list[str]:
    return [event["message"] for event in aws.client("logs").filter_log_events(logGroupName=group)["events"]]


def test_function_gets_event_context_and_environment(aws: Emulator) -> None:
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
                "arn": context.invoked_function_arn,
                "time left": 1000 < context.get_remaining_time_in_millis() <= 20000,
                "of the server": os.environ.get("TRAINYARD_FUNCTION_RETRY_SECONDS"),
            }
    """
    variables, group = {"GREETER": "a function"}, "/shared/functions"
    name = function(
        aws,
        source,
        files={"beside.py": "DOUBLE = 2"},
        Timeout=20,
        Environment={"Variables": variables},
        LoggingConfig={"LogGroup": group},
    )
    result, answer = invoke(aws, name, {"number": 21})
    assert "FunctionError" not in answer
    assert result == {
        "doubled": 42,
        "account": "123456789012",
        "name": name,
        "name in environment": name,
        "group": group,
        "arn": aws.client("lambda").get_function(FunctionName=name)["Configuration"]["FunctionArn"],
        "time left": True,
        "of the server": None,
    }
    lines = log_lines(aws, group)
    assert [line.split()[0] for line in lines] == ["START", "hello", "END", "REPORT"]


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("def handler(event, context): raise KeyError('job')", "KeyError", "job"),
        ("import infra\ndef handler(event, context): pass", "Runtime.ImportModuleError", "No module named 'infra'"),
        ("def other(event, context): pass", "Runtime.HandlerNotFound", "Handler 'handler' missing"),
        ("import os\ndef handler(event, context): os._exit(7)", "Runtime.ExitError", "exit status 7"),
        (
            "import time\ndef handler(event, context): time.sleep(60)",
            "Sandbox.Timedout",
            "timed out after 1.00 seconds",
        ),
    ],
)
def test_errors_are_in_the_response_and_in_the_log(aws: Emulator, source: str, kind: str, words: str) -> None:
    name = function(aws, source, Timeout=1)
    result, answer = invoke(aws, name)
    assert answer["FunctionError"] == "Unhandled"
    assert result["errorType"] == kind
    assert words in result["errorMessage"]
    assert any(words in line for line in log_lines(aws, f"/aws/lambda/{name}"))


def test_leftover_process_of_a_function_is_killed(aws: Emulator, tmp_path: Path) -> None:
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


def test_unsupported_requests_are_refused(aws: Emulator) -> None:
    result, answer = invoke(aws, function(aws, "", Runtime="nodejs22.x"))
    assert answer["FunctionError"] == "Unhandled"
    assert "runs only Python functions, not nodejs22.x" in result["errorMessage"]
    name, client = function(aws, "def handler(event, context): pass"), aws.client("lambda")
    with pytest.raises(ClientError, match="Could not parse request body"):
        client.invoke(FunctionName=name, Payload=b"{")
    with pytest.raises(ClientError, match="NoSuchBucket"):
        client.update_function_code(FunctionName=name, S3Bucket="not-there", S3Key="code.zip")
    with pytest.raises(ClientError, match="does not send results to destinations"):
        client.put_function_event_invoke_config(
            FunctionName=name, DestinationConfig={"OnFailure": {"Destination": "arn:aws:sqs:us-east-1:1:queue"}}
        )


def test_asynchronous_failure_is_retried_then_a_dead_letter(aws: Emulator) -> None:
    dead, arn = queue_of(aws)
    failing = "def handler(event, context): raise ValueError('again')"
    name = function(aws, failing, DeadLetterConfig={"TargetArn": arn})
    tries = 0
    for retries in (2, 1):  # default: 2
        _, answer = invoke(aws, name, {"n": retries}, InvocationType="Event")
        assert answer["StatusCode"] == 202
        assert messages(aws, dead, 1) == [{"n": retries}]
        tries += 1 + retries
        starts = [line for line in log_lines(aws, f"/aws/lambda/{name}") if line.startswith("START")]
        assert len(starts) == tries
        aws.client("lambda").put_function_event_invoke_config(FunctionName=name, MaximumRetryAttempts=1)


def test_no_function_outlives_the_server(fresh_aws: Emulator, tmp_path: Path) -> None:
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
    os.kill(fresh_aws.process.pid, signal.SIGKILL)
    fresh_aws.process.wait(20)
    until(lambda: None if psutil.pid_exists(pid) else True, "the function is gone")


def test_function_host_is_restarted_if_it_dies(aws: Emulator) -> None:
    name = function(aws, "import os, signal\ndef handler(event, context): os.kill(os.getppid(), signal.SIGKILL)")
    assert "exit status 137" in invoke(aws, name)[0]["errorMessage"]
    assert invoke(aws, function(aws, "def handler(event, context): return 1"))[0] == 1
