"""boto3 for the embedded AWS, whatever the user's own environment says about AWS."""

from typing import Any

import boto3
import botocore.session
from botocore.config import Config

from infra.emulator import CREDENTIALS, REGION


def session() -> boto3.Session:
    """A session with its own credentials that reads no profile: AWS_PROFILE may name one that is not there."""
    own = botocore.session.Session(session_vars={"profile": (None, None, None, None)})
    return boto3.Session(
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=REGION,
        botocore_session=own,
    )


def client(service: str, endpoint: str, config: Config | None = None) -> Any:
    """A client of one service."""
    make: Any = session().client  # typed by service name, of which any may come
    return make(service, endpoint_url=endpoint, config=config)
