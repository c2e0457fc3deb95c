"""CloudFormation in the emulator: a stack engine that behaves like the one on AWS.

`template` resolves references, `stack` creates, updates, deletes and rolls back, `changes` previews an update, and
`responses` is the API. `resources` handles one resource, as its type in `*_types` declares.
"""

from infra.emulator.cloudformation import (
    compute_types,  # noqa: F401 - adds its types
    responses,
    service_types,
    storage_types,
)
from infra.emulator.cloudformation.api import Api
from infra.emulator.cloudformation.responses import recorded_types
from infra.emulator.credentials import Credentials

__all__ = ["install", "recorded_types"]


def install(endpoint: str, credentials: Credentials) -> None:
    """Replace moto's CloudFormation. Call it before the server starts; `endpoint` is its address."""
    Api.endpoint, Api.credentials = endpoint, credentials
    service_types.install()
    storage_types.install()
    responses.install()
