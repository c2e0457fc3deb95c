"""The container registry that stands in for ECR's, where the emulator is given one: `--registry HOST:PORT`.

It is whatever speaks Docker's registry protocol there (docker-registry of Debian, the image registry:2): ECR's sign-in
names it in place of AWS's own, and containers whose image lies in ECR are pulled from it. Without one, images are where
`trainyard images push` then leaves them: in the Docker engine, under the names that they have in ECR.
"""

import re
from typing import Any

from moto.ecr.responses import ECRResponse

_ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/")
"""How ECR's own names of images begin."""


def install(registry: str) -> None:
    """Have ECR's sign-in name `registry`. Call it before the server starts."""
    sign_in = ECRResponse.get_authorization_token

    def get_authorization_token(response: ECRResponse) -> Any:
        answer = sign_in(response)
        for data in answer.result["authorizationData"]:
            data["proxyEndpoint"] = f"http://{registry}"
        return answer

    ECRResponse.get_authorization_token = get_authorization_token


def is_in_ecr(image: str) -> bool:
    """Say whether an image lies in ECR, by its name."""
    return bool(_ECR.match(image))


def in_registry(image: str, registry: str) -> str:
    """Return what an image that lies in ECR is called in `registry`."""
    return _ECR.sub(f"{registry}/", image, count=1)
