"""The docker executor accepts or refuses engines by the output of `docker info`.

The excerpts are from engines that are not available here. tests/images/test_job_in_container.py uses a real one.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.emulator.containers.docker_executor import check_host_network
from infra.emulator.errors import ConfigurationError


def test_rootless_engine_is_refused_before_a_job_hangs() -> None:
    info = {"OperatingSystem": "Ubuntu 24.04", "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}
    with pytest.raises(ConfigurationError, match="rootless") as refused:
        check_host_network(info)
    assert "--executor process" in str(refused.value)


@pytest.mark.parametrize(
    ("system", "options", "word"),
    [
        ("Docker Desktop", ["name=seccomp,profile=unconfined"], "host networking"),
        ("Debian GNU/Linux 12 (bookworm)", ["name=apparmor", "name=seccomp,profile=default"], None),
        ("Debian GNU/Linux 12 (bookworm)", None, None),
    ],
)
def test_docker_desktop_is_accepted_with_a_warning(
    system: str, options: list[str] | None, word: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_host_network({"OperatingSystem": system, "SecurityOptions": options})
    assert word in caplog.text if word else caplog.text == ""


def test_missing_engine_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    server = subprocess.run(
        [sys.executable, "-m", "infra.emulator", "serve", "--executor", "docker", "--state-file", str(tmp_path / "s")],
        env={**os.environ, "DOCKER_HOST": "unix:///no/such/socket"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert server.returncode == 3
    assert server.stderr.startswith("error: no Docker engine answers")
    assert "--executor process" in server.stderr
