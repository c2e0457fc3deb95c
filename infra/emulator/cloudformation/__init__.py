"""CloudFormation of the emulator: a stack engine that behaves like AWS's.

`template` resolves, `stack` makes, changes and rolls back, `changes` previews, `responses` is the API. `resources`
makes one resource as its type's row in `*_types` says; `schemas` says which changes take another resource.
"""

from infra.emulator.cloudformation import (
    batch_types,  # noqa: F401 - defines types
    iam_types,
    image_types,  # noqa: F401 - defines types
    network_types,  # noqa: F401 - defines types
    responses,
    service_types,  # noqa: F401 - defines types
    storage_types,
)
from infra.emulator.cloudformation.api import Api
from infra.emulator.cloudformation.responses import recorded_types
from infra.emulator.credentials import Credentials

__all__ = ["install", "recorded_types"]


def install(endpoint: str, credentials: Credentials) -> None:
    """Put this CloudFormation in moto's place. Call it before the server starts, which it will send requests to."""
    Api.endpoint, Api.credentials = endpoint, credentials
    iam_types.install()
    storage_types.install()
    responses.install()
