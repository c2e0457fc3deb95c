"""The WSGI application: moto's services, the server's paths under /trainyard/, and the record of server errors."""

import functools
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.wrappers import Response

from infra.emulator import ACCOUNT_ID, REGION, batch, cloudformation, events, s3
from infra.emulator.access import HEALTH_PATH, METADATA, Gate
from infra.emulator.credentials import Credentials
from infra.emulator.errors import record_error, record_exception, recorded_errors

logger = logging.getLogger(__name__)

StartResponse = Callable[..., Any]
_RECLAIM = re.compile(r"/trainyard/jobs/([^/]+)/reclaim")
_ENTER = re.compile(r"/trainyard/jobs/([^/]+)/enter")
PATHS = (
    "GET /trainyard/health",
    "GET /trainyard/instances/<id>/latest/meta-data/<path>",
    "POST /trainyard/jobs/<id>/reclaim",
    "POST /trainyard/jobs/<id>/enter",
    "POST /trainyard/events",
)
_POLICY = "Content-Security-Policy"
_CREDENTIAL_SCOPE = re.compile(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/")


class Application:
    """Answers every request to the emulator."""

    def __init__(self, executor: str, credentials: Credentials) -> None:
        self._gate = Gate(credentials)
        self._aws = DomainDispatcherApplication(create_backend_app)
        self._executor = executor
        self._started_at = datetime.now(timezone.utc)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        return self._answer(environ, _sandboxed(start_response))

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        refusal = self._gate.refusal(environ)
        if refusal is not None:
            logger.warning("refused %s: %s", _operation(environ), refusal.message)
            return _failure(refusal.code, refusal.message, environ, status=403)(environ, start_response)
        path = environ.get("PATH_INFO", "")
        if path.startswith("/trainyard/"):
            return self._trainyard(environ["REQUEST_METHOD"], path, environ)(environ, start_response)
        return self._service(environ, start_response)

    def _trainyard(self, method: str, path: str, environ: Mapping[str, Any]) -> Response:
        if (method, path) == ("GET", HEALTH_PATH):
            return _json(self.health())
        if metadata := METADATA.fullmatch(path):
            return _metadata(*metadata.groups())
        if (method, path) == ("POST", "/trainyard/events"):
            return _inject_event(_body(environ))
        reclaim = _RECLAIM.fullmatch(path)
        if method == "POST" and reclaim:
            job_id = reclaim[1]
            if batch.reclaim(job_id):
                return _json({"jobId": job_id, "reclaimed": True})
            return _json({"message": f"job {job_id} is not running on an instance"}, status=404)
        enter = _ENTER.fullmatch(path)
        if method == "POST" and enter:
            return _enter(enter[1], _body(environ))
        return _json({"message": f"unknown path {method} {path}; known paths: {', '.join(PATHS)}"}, 404)

    def health(self) -> dict[str, Any]:
        """Return the body of GET /trainyard/health."""
        return {
            "executor": self._executor,
            "pid": os.getpid(),
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "jobs": batch.job_counts(),
            "server_errors": recorded_errors(),
            "unproven": cloudformation.recorded_types(),
            "undelivered": events.undelivered(),
        }

    def _service(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path, operation = environ.get("PATH_INFO", ""), _operation(environ)

        def watch(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if status.startswith("500"):
                record_error(path, operation, status)
            # moto lets pages of every origin read the response.
            kept = [(name, value) for name, value in headers if not name.lower().startswith("access-control-")]
            return start_response(status, kept, *rest)

        try:
            answer: Iterable[bytes] = self._aws(environ, watch)
            s3.write_changes()
        except Exception as error:  # noqa: BLE001 - the server answers every request and keeps running
            record_exception(path, operation, error)
            message = f"the emulator failed in {operation}: {type(error).__name__}: {error}"
            failure = _failure("InternalFailure", message, environ, status=500)
            # moto may have started a response, but nothing has been sent yet.
            return failure(environ, functools.partial(start_response, exc_info=sys.exc_info()))
        return answer


def _sandboxed(start_response: StartResponse) -> StartResponse:
    """Add a policy that makes browsers run no scripts in a response and give it a separate origin.

    Otherwise scripts in HTML from S3, opened through a presigned URL, would run in the server's origin and could send
    any request with the key id in that URL (Content Security Policy Level 3, 6.3.2 sandbox).
    """

    def start(status: str, headers: list[tuple[str, str]], *rest: Any, **options: Any) -> Any:
        kept = [(name, value) for name, value in headers if name.lower() != _POLICY.lower()]
        return start_response(status, [*kept, (_POLICY, "sandbox")], *rest, **options)

    return start


def _metadata(instance_id: str, path: str) -> Response:
    """Answer like an instance's metadata service (EC2 user guide, "Use the Instance Metadata Service"), with any token.

    It has no Spot notices: a reclaim happens on request, without notice.
    """
    answers = {"api/token": "token"}
    answers |= {f"meta-data/{name}": value for name, value in (batch.instance_metadata(instance_id) or {}).items()}
    found = answers.get(path)
    return Response(found or "", status=404 if found is None else 200, mimetype="text/plain")


def _enter(job_id: str, request: Any) -> Response:
    """Return how to enter a job's container, like ECS's ExecuteCommand, and log who runs which command."""
    target = batch.exec_target(job_id)
    if target is None:
        return _json(
            {"message": f"job {job_id} is not running, or its definition does not set enableExecuteCommand"}, status=404
        )
    body = request if isinstance(request, Mapping) else {}
    logger.info("%r runs %r in job %s", body.get("user", ""), body.get("command", ""), job_id)
    return _json(target)


def _inject_event(event: Any) -> Response:
    """Put an event on the default bus like an AWS service; PutEvents refuses clients that use an AWS source."""
    if not isinstance(event, Mapping) or not {"source", "detail-type", "detail"} <= event.keys():
        return _json({"message": "an event needs the keys source, detail-type and detail"}, status=400)
    event_id = events.emit(
        account_id=event.get("account", ACCOUNT_ID),
        region=event.get("region", REGION),
        source=event["source"],
        detail_type=event["detail-type"],
        detail=event["detail"],
        resources=tuple(event.get("resources", ())),
    )
    return _json({"id": event_id})


def _body(environ: Mapping[str, Any]) -> Any:
    """Return the JSON body of a request, or None if it has none."""
    try:
        return json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    except ValueError:
        return None


def _operation(environ: dict[str, Any]) -> str:
    """Return service and operation of a request: `cloudformation:CreateStack`, `s3:PUT`."""
    scope = _CREDENTIAL_SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    service = scope[1] if scope else "unsigned"
    target = environ.get("HTTP_X_AMZ_TARGET")
    if target:
        return f"{service}:{target.rsplit('.', 1)[-1]}"
    query = environ.get("QUERY_STRING", "")
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)  # moto reads the body again
        query = body.decode(errors="replace")
    action = parse_qs(query).get("Action")
    return f"{service}:{action[0] if action else environ.get('REQUEST_METHOD')}"


def _failure(code: str, message: str, environ: Mapping[str, Any], *, status: int) -> Response:
    """Return an error in the format of the client's service: JSON or XML."""
    if "HTTP_X_AMZ_TARGET" in environ or "json" in environ.get("CONTENT_TYPE", ""):
        return _json({"__type": code, "message": message}, status=status)
    error = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return Response(f"<ErrorResponse>{error}</ErrorResponse>", status=status, mimetype="text/xml")


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body) + "\n", status=status, mimetype="application/json")
