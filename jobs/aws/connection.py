"""The connection to AWS or to the emulator.

boto3's settings determine the endpoint: AWS_ENDPOINT_URL, AWS_PROFILE and the others work as in the AWS CLI. A loopback
endpoint is the emulator. boto3 is imported when the first client is created.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jobs.aws.errors import is_loopback
from jobs.core.urls import check_endpoints

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
_QUICK_SECONDS = 4.0

CONNECTIONS = 16
"""Connections that a client keeps, and the maximum number of threads that share a client: with more threads, requests
would have to open further connections."""


@dataclass(frozen=True)
class Aws:
    """A connection with one set of credentials in one region; all clients share one session."""

    profile: str | None = None
    """Profile of the AWS configuration. Default: AWS_PROFILE, else boto3's default chain."""
    region: str | None = None
    """Region of every client. Default: AWS_REGION, else the profile's region."""
    quick: bool = False
    """Give up each request within seconds, without retries."""

    @cached_property
    def batch(self) -> "BatchClient":
        return self._session.client("batch", config=self._config(), region_name=self._region)

    @cached_property
    def batch_without_retries(self) -> "BatchClient":
        """Return a client for SubmitJob, which has no idempotency token: a retry could start a second job."""
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
    def quick_ec2(self) -> "EC2Client":
        """Return a client for optional requests, which gives up within seconds."""
        return self._session.client(
            "ec2", config=self._config(attempts=1, seconds=_QUICK_SECONDS), region_name=self._region
        )

    @cached_property
    def pricing(self) -> Any:
        """Return a client for the Price List API, which gives up within seconds.

        The API has endpoints in only a few regions, including us-east-1, and covers all regions (API reference,
        "Endpoints").
        """
        return self._session.client(
            "pricing", config=self._config(attempts=1, seconds=_QUICK_SECONDS), region_name="us-east-1"
        )

    @cached_property
    def ecs(self) -> "ECSClient":
        return self._session.client("ecs", config=self._config(), region_name=self._region)

    @cached_property
    def ecr(self) -> "ECRClient":
        return self._session.client("ecr", config=self._config(), region_name=self._region)

    @cached_property
    def quotas(self) -> "ServiceQuotasClient":
        return self._session.client("service-quotas", config=self._config(), region_name=self._region)

    def in_region(self, region: str) -> "Aws":
        """Return the connection with the same credentials to another region."""
        if region == self.region_name:
            return self
        return self._others.setdefault(region, replace(self, region=region))

    @cached_property
    def _others(self) -> "dict[str, Aws]":
        return {}

    def client(self, service: str) -> Any:
        """Return a client for a service that only a few commands use; common services have properties."""
        make: Any = self._session.client
        return make(service, config=self._config(), region_name=self._region)

    @cached_property
    def account(self) -> str:
        """Return the twelve-digit id of the account."""
        account: str = self.client("sts").get_caller_identity()["Account"]
        return account

    @property
    def region_name(self) -> str:
        return self.batch.meta.region_name

    @cached_property
    def caller(self) -> str:
        """Return the caller's identity in AWS: `user/alice`, or `assumed-role/research/alice`.

        GetCallerIdentity needs no permission
        (https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html).
        """
        return self._identity(self._config())

    @cached_property
    def caller_if_known(self) -> str:
        """Return `caller`, or an empty string if AWS does not answer within seconds."""
        with suppress(Exception):
            return self._identity(self._config(attempts=1, seconds=_QUICK_SECONDS))
        return ""

    def _identity(self, config: "Config") -> str:
        sts: Any = self._session.client("sts", config=config, region_name=self._region)
        return str(sts.get_caller_identity()["Arn"]).split(":", 5)[-1]

    @property
    def endpoint(self) -> str:
        """Return the URL of the Batch endpoint."""
        return self.batch.meta.endpoint_url

    @cached_property
    def emulated(self) -> bool:
        """Return whether the endpoint is the emulator, that is, on loopback."""
        return is_loopback(self.endpoint)

    @cached_property
    def runs_containers(self) -> bool:
        """Return whether jobs run in containers: always on AWS; on the emulator, if it has a Docker engine."""
        if not self.emulated:
            return True
        import json
        from urllib.request import ProxyHandler, build_opener

        try:
            url = f"{self.endpoint}/trainyard/health"
            with build_opener(ProxyHandler({})).open(url, timeout=_HEALTH_SECONDS) as answer:
                return bool(json.load(answer)["executor"] == "docker")
        except (OSError, ValueError, KeyError):
            return False

    def post_to_emulator(self, path: str, body: object) -> dict[str, Any] | None:
        """Send a request to an emulator-only path and return its response; None if the path does not exist."""
        import json
        from urllib.error import HTTPError
        from urllib.parse import quote
        from urllib.request import ProxyHandler, Request, build_opener

        credentials = self._session.get_credentials()
        token = credentials.secret_key if credentials else ""
        request = Request(  # noqa: S310 - loopback
            f"{self.endpoint}{quote(path)}",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=_HEALTH_SECONDS) as answer:
                answered: dict[str, Any] = json.load(answer)
                return answered
        except HTTPError as error:
            if error.code == 404:
                return None
            raise

    @cached_property
    def _session(self) -> "Session":
        from boto3.session import Session

        check_endpoints(os.environ)
        return Session(profile_name=self.profile, region_name=self.region)

    @cached_property
    def _region(self) -> str | None:
        # boto3 reads only AWS_DEFAULT_REGION; the AWS CLI and the other SDKs read AWS_REGION first.
        return self.region or os.environ.get("AWS_REGION") or None

    def _config(self, *, attempts: int = 5, seconds: float | None = None) -> "Config":
        """Return a client configuration. `seconds`: timeout for connecting and reading. Default: 10 and 60."""
        from botocore.config import Config

        if self.quick:
            attempts, seconds = 1, _QUICK_SECONDS
        retries: Any = {"mode": "standard", "total_max_attempts": attempts}
        return Config(
            retries=retries,
            connect_timeout=seconds or 10,
            read_timeout=seconds or 60,
            max_pool_connections=CONNECTIONS,
        )
