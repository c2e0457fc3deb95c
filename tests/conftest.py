"""Share the emulator among tests: a real process with its real HTTP API."""

import functools
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

# Hide this module: with it, moto's jsonschema loads a grammar of IRIs, two seconds in each process that collects tests.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None hides a module

import botocore.session  # noqa: E402 - needs the line above

from tests.support.collector import collect_rarely  # noqa: E402
from tests.support.running_emulator import Emulator, deploy_stage, run_emulator  # noqa: E402

pytest_plugins = ["tests.support.images.docker_engine"]


ALONE = ("tests/jobs/container/trainer/test_resuming.py", "tests/jobs/container/kinds/test_pretrain_mlm.py")
"""Long files whose tests share nothing. They are split, so that the last process does not work alone at the end."""


TRAININGS = tuple(
    f"tests/jobs/cli/test_{name}.py"
    for name in ("moved_runs", "pretrain_bert", "ready_specs", "submit_script", "sweeps")
)
TOGETHER = {
    "images": ("tests/images/",),
    "demo": ("tests/jobs/cli/test_demo.py",),
    "trainings": TRAININGS,
    "stage": ("tests/jobs/cli/test_", "tests/jobs/runs/", "tests/jobs/aws/"),
}
"""Tests that share expensive fixtures (images, a deployed stage), by prefixes of their paths. The first match wins."""


class SharingScheduling(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """Run the tests of a file in one process, and the tests of a group of `TOGETHER` too."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        shared = (name for name, beginnings in TOGETHER.items() if file.startswith(beginnings))
        return nodeid if file in ALONE else next(shared, file)


def pytest_configure() -> None:
    # All sessions share boto3's models of services: megabytes of JSON, which each would read again.
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    # A shell makes background processes ignore Ctrl-C. Restore it, so that programs started by tests get it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The CDK library's own check of templates takes as long as the rest of a synthesis. tests/infra/test_app.py runs it
    # through cdk.json, and test_templates.py runs cfn-lint on all templates.
    os.environ["CDK_VALIDATION"] = "false"
    # Tests give programs empty home folders, and the library would unpack itself again in each.
    os.environ.setdefault("JSII_RUNTIME_PACKAGE_CACHE_ROOT", str(Path(__file__).parents[1] / ".trainyard/cache/jsii"))
    # There are more processes than cores, and threads that wait for each other would take time from other processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    # Imported modules stay. Garbage collection would search them again and again, a fifth of the collection's time.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        collect_rarely()


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharingScheduling | None:
    return SharingScheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """Return one server for all tests. If it ever answered 500, the last test fails."""
    with run_emulator(tmp_path_factory.mktemp("emulated-aws")) as aws:
        yield aws
        errors = aws.health()["server_errors"]
        if errors:
            pytest.fail(f"the emulator failed inside: {json.dumps(errors, indent=2)}\n{aws.log.read_text()}")


@pytest.fixture
def fresh_aws(tmp_path: Path) -> Iterator[Emulator]:
    """Return a separate server, for a test that breaks it, stops it or counts what is in it."""
    with run_emulator(tmp_path) as aws:
        yield aws


@pytest.fixture(scope="session")
def deployed_aws(emulator: Emulator) -> Emulator:
    """Return the server after the real CDK CLI has deployed the project's stage `dev` to it."""
    deploy_stage(emulator)
    return emulator
