"""Classifies boto3's errors and turns them into errors with a next step.

botocore is imported when the first error is classified.
"""

from typing import Any
from urllib.parse import urlsplit

from jobs.core.errors import ConfigurationError, NotFoundError, TrainyardError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")

_THROTTLED = frozenset(
    {
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "BandwidthLimitExceeded",
    }
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_DENIED = frozenset(
    {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "NotAuthorized", "AllAccessDisabled", "403"}
)
"""403 is for S3: the response to a HEAD request has no body, so its code is the bare status."""
_UNKNOWN_KEY = frozenset(
    {
        "AuthFailure",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)

_EMULATED_NEXT = 'for the emulator, which needs no account: trainyard local up, then eval "$(trainyard local env)"'


def is_loopback(url: str) -> bool:
    return (urlsplit(url).hostname or "") in LOOPBACK_HOSTS


def is_transient(error: Exception) -> bool:
    """Return whether a retry may help: throttling, or an error of the service or the network."""
    from botocore.exceptions import (
        ClientError,
        ConnectionError,  # noqa: A004 - botocore's own
        HTTPClientError,
        IncompleteReadError,
    )
    from botocore.parsers import ResponseParserError

    if isinstance(error, ClientError):
        return _status(error) >= 500 or is_throttling(error) or error_code(error) == "RequestTimeout"
    return isinstance(error, (ConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError))


def is_throttling(error: Exception) -> bool:
    """Return whether the service throttled the request, so that it had no effect."""
    return _status(error) == 429 or error_code(error) in _THROTTLED


def is_denied(error: BaseException | None) -> bool:
    """Return whether the service denied the request because of missing permissions."""
    return error_code(error) in _DENIED


def is_refused_connection(error: Exception) -> bool:
    """Return whether the error means that nothing listens at the endpoint."""
    from botocore.exceptions import EndpointConnectionError

    return isinstance(error, EndpointConnectionError)


def error_code(error: BaseException | None) -> str:
    """Return the service's code of a ClientError, such as `AccessDenied`; empty for any other error."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _status(error: Exception) -> int:
    """Return the HTTP status of a ClientError; 0 for any other error."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def explain(error: Exception) -> TrainyardError | None:
    """Return a readable error with a next step in place of boto3's; None if `error` is not from boto3."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as boto

    if isinstance(error, Boto3Error) and isinstance(error.__context__, (boto.ClientError, boto.BotoCoreError)):
        error = error.__context__
    if isinstance(error, boto.ClientError):
        return _explain_response(error)
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return ConfigurationError(
            "no AWS credentials found" if isinstance(error, boto.NoCredentialsError) else _first_line(error),
            next_step=f"aws configure, aws sso login, or --profile NAME; {_EMULATED_NEXT}",
        )
    if isinstance(
        error,
        (
            boto.TokenRetrievalError,
            boto.SSOTokenLoadError,
            boto.UnauthorizedSSOTokenError,
            boto.CredentialRetrievalError,
        ),
    ):
        return ConfigurationError(
            f"the AWS credentials could not be renewed: {_first_line(error)}", next_step="aws sso login"
        )
    if isinstance(error, boto.ProfileNotFound):
        return ConfigurationError(
            f"{_first_line(error)} (from --profile or AWS_PROFILE)", next_step="aws configure list-profiles"
        )
    if isinstance(error, boto.NoRegionError):
        return ConfigurationError(
            "no AWS region is set", next_step=f"--region NAME, or AWS_DEFAULT_REGION; {_EMULATED_NEXT}"
        )
    if isinstance(error, (boto.ConnectionError, boto.HTTPClientError)):
        return _explain_connection(error)
    if isinstance(error, (boto.BotoCoreError, Boto3Error)):
        return ConfigurationError(_first_line(error))
    # botocore raises this for an endpoint in the AWS configuration.
    if isinstance(error, ValueError) and str(error).startswith("Invalid endpoint: "):
        return ConfigurationError(
            f"{_first_line(error)} is not an HTTP URL", next_step="correct endpoint_url in the AWS configuration"
        )
    return None


def _explain_response(error: Exception) -> TrainyardError:
    """Explain an error that the service returned."""
    code = error_code(error)
    operation = getattr(error, "operation_name", "the call")
    message = str(getattr(error, "response", {}).get("Error", {}).get("Message", "")) or code
    if code in _EXPIRED:
        return ConfigurationError("the AWS credentials have expired", next_step="aws sso login, or new credentials")
    if code in _UNKNOWN_KEY:
        return ConfigurationError(
            f"AWS rejected the credentials: {message}",
            next_step="run aws sts get-caller-identity; select other credentials with --profile",
        )
    if code in _DENIED:
        return ConfigurationError(
            f"AWS denied {operation}: {message}",
            next_step="check account and stage (--profile, --stage), or ask the account's owner for the permission",
        )
    if code == "NoSuchBucket":
        return NotFoundError(
            f"{operation}: {message}",
            next_step="the stage's buckets were deleted or belong to another account: deploy the stage again",
        )
    if is_transient(error):
        return TrainyardError(
            f"{operation} kept failing with {code}: {message}", next_step="try again in a few minutes"
        )
    return ConfigurationError(f"AWS rejected {operation}: {message} ({code})")


def _explain_connection(error: Exception) -> TrainyardError:
    """Explain why there was no response."""
    endpoint = str(getattr(error, "kwargs", {}).get("endpoint_url", ""))
    if is_loopback(endpoint):
        base = "{0.scheme}://{0.netloc}".format(urlsplit(endpoint))
        return ConfigurationError(f"the emulator at {base} does not respond", next_step="trainyard local up")
    return ConfigurationError(
        f"AWS does not respond: {_first_line(error)}", next_step="check the network, --region and AWS_ENDPOINT_URL"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
