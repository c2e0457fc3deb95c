"""What tests of several folders share: the emulator, as a real process with its real HTTP API."""

import gc
import json
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# moto's jsonschema loads a grammar of IRIs where it finds one: two seconds in each process that collects tests.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None: not to be found

from tests.support import service_models  # noqa: E402 - after that
from tests.support.collector import seldom_collect  # noqa: E402
from tests.support.running_emulator import Emulator, deploy_stage, run_emulator  # noqa: E402

pytest_plugins = ["tests.support.images.docker_engine"]


ALONE = ("tests/jobs/container/trainer/test_resuming.py", "tests/jobs/container/kinds/test_pretrain_mlm.py")
"""Long files at the end of a run whose tests share nothing: the last process to work would work alone."""


TRAININGS = tuple(
    f"tests/jobs/cli/test_{name}.py"
    for name in ("moved_runs", "pretrain_bert", "ready_specs", "submit_script", "sweeps")
)
TOGETHER = {
    "images": ("tests/images/",),
    "demo": ("tests/jobs/cli/test_demo.py",),
    "trainings": TRAININGS,
    "stage": ("tests/jobs/cli/test_", "tests/jobs/runs/", "tests/jobs/aws/", "tests/jobs/core/test_retries.py"),
}
"""Tests that share what is costly to make, images or a deployed stage, by how their paths begin. The first counts."""


class SharingScheduling(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """Tests of a file run in one process, and those that are `TOGETHER` in one too."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        shared = (name for name, beginnings in TOGETHER.items() if file.startswith(beginnings))
        return nodeid if file in ALONE else next(shared, file)


def pytest_configure() -> None:
    service_models.share()
    # Programs that tests start get Ctrl-C as users' do: a shell starts what runs in the background without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The CDK library's own check of templates takes as long as the rest of a synthesis. The test that runs the app as
    # cdk.json says has it made (tests/infra/test_app.py), and cfn-lint looks at all templates (test_templates.py).
    os.environ["CDK_VALIDATION"] = "false"
    # Tests give programs empty homes, in each of which the library would unpack itself anew.
    os.environ.setdefault("JSII_RUNTIME_PACKAGE_CACHE_ROOT", str(Path(__file__).parents[1] / ".trainyard/cache/jsii"))
    # More processes work than there are cores: threads that wait for each other in one would take the others' time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    # What is imported stays: to search it for what can be freed, again and again, takes a fifth of the collection.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        seldom_collect()


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharingScheduling | None:
    return SharingScheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """One server for all tests. Any answer of 500 it ever gave fails the last of them."""
    with run_emulator(tmp_path_factory.mktemp("emulated-aws")) as aws:
        yield aws
        errors = aws.health()["server_errors"]
        if errors:
            pytest.fail(f"the emulator failed inside: {json.dumps(errors, indent=2)}\n{aws.log.read_text()}")


@pytest.fixture
def fresh_aws(tmp_path: Path) -> Iterator[Emulator]:
    """A server for one test alone: one that breaks it, stops it or counts what is in it."""
    with run_emulator(tmp_path) as aws:
        yield aws


@pytest.fixture(scope="session")
def deployed_aws(emulator: Emulator) -> Emulator:
    """The server with the project's stage `dev` deployed to it by the real CDK CLI."""
    deploy_stage(emulator)
    return emulator
