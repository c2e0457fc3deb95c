"""The container registry that replaces ECR if the emulator was started with `--registry HOST:PORT`.

Any Docker registry works (Debian's docker-registry, the image registry:2). ECR's sign-in returns this registry instead
of AWS's, and jobs pull ECR images from it. Without a registry, `trainyard images push` leaves images in the Docker
engine, under their names in ECR.
"""

import re
from typing import Any

from moto.ecr.responses import ECRResponse

_ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/")
"""The prefix of image names in ECR."""


def install(registry: str) -> None:
    """Make ECR's sign-in return `registry`. Call it before the server starts."""
    sign_in = ECRResponse.get_authorization_token

    def get_authorization_token(response: ECRResponse) -> Any:
        answer = sign_in(response)
        for data in answer.result["authorizationData"]:
            data["proxyEndpoint"] = f"http://{registry}"
        return answer

    ECRResponse.get_authorization_token = get_authorization_token


def is_in_ecr(image: str) -> bool:
    """Return whether an image name belongs to ECR."""
    return bool(_ECR.match(image))


def in_registry(image: str, registry: str) -> str:
    """Return the name in `registry` of an image in ECR."""
    return _ECR.sub(f"{registry}/", image, count=1)
