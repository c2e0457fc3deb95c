"""Credentials of one emulator, and boto3 clients that use them and ignore the user's AWS environment.

The server generates the credentials. Clients read them from its state file or from environment variables.
"""

import base64
import os
import secrets
from dataclasses import dataclass, field
from typing import Any

import boto3
import botocore.session
from botocore.config import Config

from infra.emulator import REGION
from infra.emulator.errors import ConfigurationError

NEXT_STEP = 'eval "$(trainyard local env)"'

_RANDOM_BYTES = 20


@dataclass(frozen=True)
class Credentials:
    """The access key of one server."""

    access_key_id: str
    secret_access_key: str = field(repr=False)

    @classmethod
    def random(cls) -> "Credentials":
        """Generate credentials that cannot be guessed."""
        return cls(f"TRAINYARD{random_letters()}", secrets.token_hex(_RANDOM_BYTES))

    @classmethod
    def from_environment(cls) -> "Credentials":
        """Read the variables that `trainyard local env` prints. Raises ConfigurationError if one is not set."""
        try:
            return cls(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        except KeyError as error:
            raise ConfigurationError(
                f"{error.args[0]} is not set: the credentials of the emulator are missing", next_step=NEXT_STEP
            ) from None

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that a client needs besides AWS_ENDPOINT_URL."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
        }


def random_letters() -> str:
    """Return 32 random letters and digits."""
    return base64.b32encode(secrets.token_bytes(_RANDOM_BYTES)).decode()


def session(credentials: Credentials) -> boto3.Session:
    """Return a session that ignores AWS_PROFILE, which may name a missing profile."""
    return boto3.Session(
        aws_access_key_id=credentials.access_key_id,
        aws_secret_access_key=credentials.secret_access_key,
        region_name=REGION,
        botocore_session=botocore.session.Session(session_vars={"profile": (None, None, None, None)}),
    )


def client(
    service: str, endpoint: str, credentials: Credentials, config: Config | None = None, *, region: str = REGION
) -> Any:
    """Return a boto3 client for one service."""
    make: Any = session(credentials).client  # the stubs type it by the name of the service
    return make(service, endpoint_url=endpoint, config=config, region_name=region)
