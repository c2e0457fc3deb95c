"""The container registry that replaces ECR if the emulator was started with `--registry HOST:PORT`.

Any Docker registry works (Debian's docker-registry, the image registry:2). ECR's sign-in returns this registry instead
of AWS's, and jobs pull ECR images from it. Without a registry, `trainyard images push` leaves images in the Docker
engine, under their names in ECR.

Tagged repositories are also listed by the Resource Groups Tagging API, which moto's are not.
"""

import re
from collections.abc import Iterator
from typing import Any

from moto.core.resource_tagging import TaggableResourcesMixin, TaggedResource
from moto.ecr.models import ECRBackend, ecr_backends
from moto.ecr.responses import ECRResponse

_ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/")
"""The prefix of image names in ECR."""


class _Repositories(TaggableResourcesMixin, ECRBackend):
    """Source: Resource Groups Tagging API, "Supported services": Amazon ECR, repositories."""

    SERVICE_NAMESPACE = "ecr"
    __module__ = ECRBackend.__module__  # moto finds the service's paths by it

    def iter_tagged_resources(self) -> Iterator[TaggedResource]:
        for repository in self.repositories.values():
            tags = self.tagger.get_tag_dict_for_resource(repository.arn)
            yield TaggedResource(arn=repository.arn, tags=tags, resource_type="ecr:repository")


def install(registry: str | None) -> None:
    """List tagged repositories. If `registry` is set, return it in ECR's sign-in. Call it before the server starts."""
    ecr_backends.backend = _Repositories
    if not registry:
        return
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
