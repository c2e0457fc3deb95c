"""The connection to AWS, or to the embedded one, and how its errors read.

Where it connects is boto3's own business: AWS_ENDPOINT_URL, AWS_PROFILE and the rest of its settings count as they do
for the AWS CLI. A loopback endpoint is the embedded AWS. boto3 is imported when the first client is made.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jobs.errors import ConfigurationError, NotFoundError, TrainyardError

if TYPE_CHECKING:
    from boto3.session import Session
    from botocore.config import Config
    from mypy_boto3_batch.client import BatchClient
    from mypy_boto3_ec2.client import EC2Client
    from mypy_boto3_ecr.client import ECRClient
    from mypy_boto3_ecs.client import ECSClient
    from mypy_boto3_logs.client import CloudWatchLogsClient
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_service_quotas.client import ServiceQuotasClient
    from mypy_boto3_ssm.client import SSMClient

_HEALTH_SECONDS = 10.0

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


@dataclass(frozen=True)
class Aws:
    """Whose credentials and which region; the clients it hands out share one session."""

    profile: str | None = None
    """None: AWS_PROFILE, else boto3's default chain."""
    region: str | None = None
    """None: AWS_REGION or the profile's."""

    @cached_property
    def batch(self) -> "BatchClient":
        return self._session.client("batch", config=self._config(), region_name=self._region)

    @cached_property
    def batch_without_retries(self) -> "BatchClient":
        """For SubmitJob, which has no idempotency token: sent again by botocore, it would start a second job."""
        return self._session.client("batch", config=self._config(attempts=1), region_name=self._region)

    @cached_property
    def s3(self) -> "S3Client":
        return self._session.client("s3", config=self._config(), region_name=self._region)

    @cached_property
    def ssm(self) -> "SSMClient":
        return self._session.client("ssm", config=self._config(), region_name=self._region)

    @cached_property
    def logs(self) -> "CloudWatchLogsClient":
        return self._session.client("logs", config=self._config(), region_name=self._region)

    @cached_property
    def ec2(self) -> "EC2Client":
        return self._session.client("ec2", config=self._config(), region_name=self._region)

    @cached_property
    def ecs(self) -> "ECSClient":
        return self._session.client("ecs", config=self._config(), region_name=self._region)

    @cached_property
    def ecr(self) -> "ECRClient":
        return self._session.client("ecr", config=self._config(), region_name=self._region)

    @cached_property
    def quotas(self) -> "ServiceQuotasClient":
        return self._session.client("service-quotas", config=self._config(), region_name=self._region)

    @property
    def endpoint(self) -> str:
        """URL that Batch is reached at."""
        return self.batch.meta.endpoint_url

    @cached_property
    def embedded(self) -> bool:
        """Whether the endpoint is the embedded AWS: it lies on loopback."""
        return is_loopback(self.endpoint)

    @cached_property
    def runs_containers(self) -> bool:
        """Whether jobs run in containers of their image: on AWS, and on an embedded AWS with a Docker engine."""
        if not self.embedded:
            return True
        import json
        from urllib.request import urlopen

        try:
            with urlopen(f"{self.endpoint}/trainyard/health", timeout=_HEALTH_SECONDS) as answer:  # noqa: S310 - loopback
                return bool(json.load(answer)["executor"] == "docker")
        except (OSError, ValueError, KeyError):
            return False

    @cached_property
    def _session(self) -> "Session":
        from boto3.session import Session

        return Session(profile_name=self.profile, region_name=self.region)

    @cached_property
    def _region(self) -> str | None:
        # boto3 itself reads AWS_DEFAULT_REGION only; the AWS CLI and the other SDKs read AWS_REGION first.
        return self.region or os.environ.get("AWS_REGION") or None

    @staticmethod
    def _config(*, attempts: int = 5) -> "Config":
        from botocore.config import Config

        return Config(retries={"mode": "standard", "total_max_attempts": attempts}, connect_timeout=10)


def is_loopback(url: str) -> bool:
    return (urlsplit(url).hostname or "") in LOOPBACK_HOSTS


def is_transient(error: Exception) -> bool:
    """Whether `error` is throttling, a fault of the service or of the line: it may pass when tried again."""
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
    """Whether the service refused the request for now: it did nothing with it."""
    return _status(error) == 429 or error_code(error) in _THROTTLED


def is_refused_connection(error: Exception) -> bool:
    """Whether nothing listens at the endpoint."""
    from botocore.exceptions import EndpointConnectionError

    return isinstance(error, EndpointConnectionError)


def error_code(error: Exception) -> str:
    """The service's code of a ClientError, `AccessDenied` for instance; empty for every other error."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _status(error: Exception) -> int:
    """HTTP status of a ClientError; 0 for every other error."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def explain(error: Exception) -> TrainyardError | None:
    """What a user should read in place of boto3's error; None where `error` is not one of boto3's."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as boto

    if isinstance(error, Boto3Error) and isinstance(error.__context__, (boto.ClientError, boto.BotoCoreError)):
        error = error.__context__
    if isinstance(error, boto.ClientError):
        return _explain_answer(error)
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return ConfigurationError(
            "no AWS credentials found" if isinstance(error, boto.NoCredentialsError) else _first_line(error),
            next_step="aws configure, aws sso login, or --profile NAME; "
            "for the embedded AWS, which needs none of yours: trainyard local up, then "
            'eval "$(trainyard local env)"',
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
        return ConfigurationError("no AWS region is set", next_step="--region NAME, or AWS_DEFAULT_REGION")
    if isinstance(error, (boto.ConnectionError, boto.HTTPClientError)):
        return _explain_line(error)
    if isinstance(error, (boto.BotoCoreError, Boto3Error)):
        return ConfigurationError(_first_line(error))
    return None


def _explain_answer(error: Exception) -> TrainyardError:
    """What the service answered."""
    code = error_code(error)
    operation = getattr(error, "operation_name", "the call")
    message = str(getattr(error, "response", {}).get("Error", {}).get("Message", "")) or code
    if code in _EXPIRED:
        return ConfigurationError("the AWS credentials have expired", next_step="aws sso login, or new credentials")
    if code in _UNKNOWN_KEY:
        return ConfigurationError(
            f"AWS does not know these credentials: {message}", next_step="aws sts get-caller-identity, then --profile"
        )
    if code in _DENIED:
        return ConfigurationError(
            f"AWS denied {operation}: {message}",
            next_step="check account and stage (--profile, --stage), or ask its owner for the permission",
        )
    if code == "NoSuchBucket":
        return NotFoundError(
            f"{operation}: {message}", next_step="the stage's buckets are gone or of another account: deploy it again"
        )
    if is_transient(error):
        return TrainyardError(
            f"AWS kept failing with {code} at {operation}: {message}", next_step="try again in some minutes"
        )
    return ConfigurationError(f"AWS refused {operation}: {message} ({code})")


def _explain_line(error: Exception) -> TrainyardError:
    """No answer came."""
    endpoint = str(getattr(error, "kwargs", {}).get("endpoint_url", ""))
    if is_loopback(endpoint):
        base = "{0.scheme}://{0.netloc}".format(urlsplit(endpoint))
        return ConfigurationError(f"the embedded AWS at {base} does not answer", next_step="trainyard local up")
    return ConfigurationError(
        f"AWS does not answer: {_first_line(error)}", next_step="check the network, --region and AWS_ENDPOINT_URL"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
