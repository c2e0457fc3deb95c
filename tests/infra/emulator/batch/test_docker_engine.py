"""Which Docker engines the docker executor takes, by what `docker info` says of them.

The excerpts are of engines that are not at hand here; a real one runs jobs in tests/images/test_job_in_container.py.
"""

import logging

import pytest

from infra.emulator.containers.docker_executor import check_host_network
from infra.emulator.errors import ConfigurationError


def test_a_rootless_engine_is_refused_before_a_job_hangs() -> None:
    info = {"OperatingSystem": "Ubuntu 24.04", "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}
    with pytest.raises(ConfigurationError, match="rootless") as refused:
        check_host_network(info)
    assert "--executor process" in str(refused.value)


def test_docker_desktop_is_taken_with_a_word_on_its_network(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_host_network(
            {"OperatingSystem": "Docker Desktop", "SecurityOptions": ["name=seccomp,profile=unconfined"]}
        )
    assert "host networking" in caplog.text


@pytest.mark.parametrize("options", [None, [], ["name=apparmor", "name=seccomp,profile=default"]])
def test_an_engine_of_this_machine_needs_no_word(options: list[str] | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_host_network({"OperatingSystem": "Debian GNU/Linux 12 (bookworm)", "SecurityOptions": options})
    assert caplog.text == ""
