"""boto3 for the emulator, whatever the user's own environment says about AWS."""

from typing import Any

import boto3
import botocore.session
from botocore.config import Config

from infra.emulator import REGION
from infra.emulator.credentials import Credentials


def session(credentials: Credentials) -> boto3.Session:
    """Make a session with its own credentials that reads no profile: AWS_PROFILE may name one that is not there."""
    own = botocore.session.Session(session_vars={"profile": (None, None, None, None)})
    return boto3.Session(
        aws_access_key_id=credentials.access_key_id,
        aws_secret_access_key=credentials.secret_access_key,
        region_name=REGION,
        botocore_session=own,
    )


def client(service: str, endpoint: str, credentials: Credentials, config: Config | None = None) -> Any:
    """Make a client of one service."""
    make: Any = session(credentials).client  # typed by service name, of which any may come
    return make(service, endpoint_url=endpoint, config=config)
