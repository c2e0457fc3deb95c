"""A Lambda function: moto's, with the settings that moto loses, and invocations that run."""

import base64
import json
from typing import Any

import moto.awslambda.models
from moto.awslambda.exceptions import InvalidParameterValueException
from moto.awslambda.models import EventInvokeConfig, LambdaBackend, LambdaFunction, lambda_backends
from moto.utilities.arns import parse_arn

from infra.emulator.functions.asynchronous import invoke_later
from infra.emulator.functions.invocation import run

EVENT_INVOKE_SETTINGS = ("MaximumRetryAttempts", "MaximumEventAgeInSeconds", "DestinationConfig")


def install(endpoint: str) -> None:
    """Make all functions of this kind. Call it before the server starts; `endpoint` is where it will answer."""
    Function.endpoint = endpoint
    moto.awslambda.models.LambdaFunction = Function
    LambdaBackend.put_function_event_invoke_config = _put_event_invoke_config


def find(arn: str) -> "Function":
    """By its ARN, with or without a version. Raises moto's UnknownFunctionException where there is none."""
    place = parse_arn(arn)
    function: Function = lambda_backends[place.account][place.region].get_function(arn)
    return function


class Function(LambdaFunction):
    """A function, or a published version of one."""

    endpoint: str
    """The server's own address; set by `install`."""

    def __init__(self, account_id: str, spec: dict[str, Any], region: str, version: str | int = 1) -> None:
        super().__init__(account_id=account_id, spec=spec, region=region, version=version)
        self.dead_letter_config: dict[str, Any] | None = spec.get("DeadLetterConfig")
        self.logging_config: dict[str, Any] = spec.get("LoggingConfig") or {}

    @property
    def backend(self) -> LambdaBackend:
        return lambda_backends[self.account_id][self.region]

    @property
    def shown_version(self) -> str:
        return str(self.version) if str(self.version).isdigit() else "$LATEST"

    @property
    def default_log_group(self) -> str:
        return f"/aws/lambda/{self.function_name}"

    @property
    def log_group(self) -> str:
        return str(self.logging_config.get("LogGroup") or self.default_log_group)

    @property
    def invoke_config(self) -> dict[str, Any]:
        """How asynchronous invocations are tried again, and where their results go."""
        return self.event_invoke_config[0].config if self.event_invoke_config else {}

    @property
    def why_it_cannot_run(self) -> str | None:
        """What stands in the way of running it here; None where nothing does."""
        if self.package_type != "Zip":
            return "the embedded AWS runs functions from zip files only, not from container images"
        if not str(self.run_time).startswith("python"):
            return f"the embedded AWS runs Python functions only, not {self.run_time}"
        if self.layers:
            return "the embedded AWS runs functions without layers only"
        return None

    def get_configuration(self, on_create: bool = False) -> dict[str, Any]:
        logging = {"LogFormat": "Text", "LogGroup": self.default_log_group, **self.logging_config}
        configuration = {**super().get_configuration(on_create), "LoggingConfig": logging}
        if self.dead_letter_config:
            configuration["DeadLetterConfig"] = self.dead_letter_config
        return configuration

    def update_configuration(self, config_updates: dict[str, Any]) -> dict[str, Any]:
        if "DeadLetterConfig" in config_updates:
            self.dead_letter_config = config_updates["DeadLetterConfig"]
        if "LoggingConfig" in config_updates:
            self.logging_config = config_updates["LoggingConfig"] or {}
        super().update_configuration(config_updates)
        return self.get_configuration()

    def _set_function_code(self, updated_spec: dict[str, Any]) -> None:
        try:
            super()._set_function_code(updated_spec)
        except ValueError as error:  # moto's way to say that the bucket or the object is not there
            raise InvalidParameterValueException(str(error.args[-1])) from None

    def invoke(self, body: Any, request_headers: Any, response_headers: Any) -> bytes:
        """What the Invoke operation does. Raises InvalidParameterValueException on a payload that is no JSON."""
        text = body.decode() if isinstance(body, bytes) else body or "{}"
        try:
            json.loads(text)
        except ValueError as error:
            raise InvalidParameterValueException(f"Could not parse request body into json: {error}") from None
        headers = {str(name).lower(): value for name, value in dict(request_headers).items()}
        kind = headers.get("x-amz-invocation-type", "RequestResponse")
        if kind == "Event":
            invoke_later(self, text)
            return b""
        if kind == "DryRun":
            return b""
        outcome = run(self, text)
        response_headers["x-amz-executed-version"] = self.shown_version
        if outcome.failed:
            response_headers["x-amz-function-error"] = "Unhandled"
        response_headers["x-amz-log-result"] = base64.b64encode(outcome.log_tail).decode()
        return outcome.payload.encode()


def _put_event_invoke_config(backend: Any, function_name: str, config: dict[str, Any]) -> Any:
    """There is one configuration; moto adds another and goes on with the first."""
    function = backend.get_function(function_name)
    settings = {name: config[name] for name in EVENT_INVOKE_SETTINGS if name in config}
    invoke_config = EventInvokeConfig(function.function_arn, function.last_modified, settings)
    function.event_invoke_config[:] = [invoke_config]
    return invoke_config.response()
