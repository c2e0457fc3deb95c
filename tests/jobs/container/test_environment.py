"""The image and packages in a job's record."""

from typing import Any

import pytest

from jobs.container.environment import METADATA_VARIABLE, ran_with
from jobs.container.instance import DISABLED_VARIABLE, zone
from jobs.core.records import IMAGE_DIGEST
from tests.support.http_server import JsonHandler, serving

DIGEST = f"sha256:{'5a' * 32}"
NAME = "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainyard/gaudi"


@pytest.mark.parametrize(
    ("status", "answer", "digest"),
    [
        (200, {"Image": f"{NAME}@{DIGEST}", "ImageID": "sha256:of-its-configuration"}, DIGEST),
        (200, {"Image": f"{NAME}:latest", "ImageID": "sha256:of-its-configuration"}, None),
        (200, [], None),
        (500, {}, None),
    ],
    ids=["by digest", "by tag", "of another shape", "failing"],
)
def test_the_image_digest_comes_from_the_ecs_agent(
    monkeypatch: pytest.MonkeyPatch, status: int, answer: Any, digest: str | None
) -> None:
    class Agent(JsonHandler):
        def do_GET(self) -> None:  # noqa: N802 - http.server asks for it by this name
            self.answer(status, answer)

    with serving(Agent) as port:
        monkeypatch.setenv(METADATA_VARIABLE, f"http://127.0.0.1:{port}/v4/0123")
        assert ran_with().get(IMAGE_DIGEST) == digest


def test_the_zone_of_nodes_without_instance_metadata_comes_from_the_ecs_agent() -> None:
    class Agent(JsonHandler):
        def do_GET(self) -> None:  # noqa: N802 - http.server asks for it by this name
            self.answer(200, {"AvailabilityZone": "us-east-1b"} if self.path == "/v4/0123/task" else {})

    with serving(Agent) as port:
        environment = {METADATA_VARIABLE: f"http://127.0.0.1:{port}/v4/0123", DISABLED_VARIABLE: "true"}
        assert zone(environment, on_instance=True) == "us-east-1b"


def test_without_an_ecs_agent_there_is_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METADATA_VARIABLE, raising=False)
    assert IMAGE_DIGEST not in ran_with()
    monkeypatch.setenv(METADATA_VARIABLE, "http://127.0.0.1:9/v4/0123")
    assert IMAGE_DIGEST not in ran_with()
