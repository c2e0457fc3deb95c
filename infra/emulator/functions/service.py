"""The operations of Lambda that moto does not run: invocations, and the settings of asynchronous ones."""

import base64
import json
from typing import Any

import moto.awslambda.models
from moto.awslambda.exceptions import InvalidParameterValueException
from moto.awslambda.models import EventInvokeConfig, LambdaBackend, lambda_backends
from moto.utilities.arns import parse_arn

from infra.emulator.credentials import Credentials
from infra.emulator.functions.function import Function
from infra.emulator.functions.invocation import invoke_later, run


class InvokableFunction(Function):
    """A function that the Invoke operation runs."""

    def invoke(self, body: Any, request_headers: Any, response_headers: Any) -> bytes:
        """Do what the Invoke operation does. Raises InvalidParameterValueException for a payload that is no JSON."""
        text = body.decode() if isinstance(body, bytes) else body or "{}"
        try:
            json.loads(text)
        except ValueError as error:
            raise InvalidParameterValueException(f"Could not parse request body into json: {error}") from None
        headers = {str(name).lower(): value for name, value in dict(request_headers).items()}
        if headers.get("x-amz-invocation-type", "RequestResponse") == "Event":
            invoke_later(self, text)
            return b""
        outcome = run(self, text)
        if outcome.failed:
            response_headers["x-amz-function-error"] = "Unhandled"
        response_headers["x-amz-log-result"] = base64.b64encode(outcome.log_tail).decode()
        return outcome.payload.encode()


def install(endpoint: str, credentials: Credentials) -> None:
    """Have moto make functions that run. Call it before the server starts; `endpoint` is where it will answer."""
    Function.endpoint = endpoint
    Function.credentials = credentials
    moto.awslambda.models.LambdaFunction = InvokableFunction
    LambdaBackend.put_function_event_invoke_config = _put_event_invoke_config


def find(arn: str) -> Function:
    """Return the function of an ARN. Raises moto's UnknownFunctionException."""
    place = parse_arn(arn)
    function: Function = lambda_backends[place.account][place.region].get_function(arn)
    return function


def _put_event_invoke_config(backend: Any, function_name: str, config: dict[str, Any]) -> Any:
    """Put the one configuration that there is; moto adds another and continues with the first."""
    if config.get("DestinationConfig"):
        raise InvalidParameterValueException("the emulator sends no results to destinations")
    function = backend.get_function(function_name)
    settings = {name: config[name] for name in ("MaximumRetryAttempts", "MaximumEventAgeInSeconds") if name in config}
    function.event_invoke_config[:] = [EventInvokeConfig(function.function_arn, function.last_modified, settings)]
    return function.event_invoke_config[0].response()
