"""CloudFormation of the embedded AWS: moto's resource models under a stack engine that behaves like AWS's.

`template` resolves, `stack` makes, changes and rolls back, `service` holds a region's stacks and change sets,
`responses` is the API; `models` finds the code behind each resource type, `unproven` stands in where there is none.
"""

from infra.emulator.cloudformation import (
    api_model,
    build_models,  # noqa: F401 - defines models
    ec2_models,  # noqa: F401 - defines models
    iam_models,
    messaging_models,  # noqa: F401 - defines models
    monitoring_models,  # noqa: F401 - defines models
    responses,
    s3_models,
    secret_models,  # noqa: F401 - defines models
)
from infra.emulator.cloudformation.responses import unproven_types
from infra.emulator.credentials import Credentials

__all__ = ["install", "unproven_types"]


def install(endpoint: str, credentials: Credentials) -> None:
    """Put this CloudFormation in moto's place. Call it before the server starts, which it will send requests to."""
    api_model.install(endpoint, credentials)
    iam_models.install()
    s3_models.install()
    responses.install()
