"""JupyterLab as a child process: its environment, and its last activity."""

import json
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jobs.container.kinds import notebook as entrypoint
from jobs.container.kinds.notebook import JupyterLab, check_installed
from jobs.container.rank import Rank
from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.locations import S3Location
from jobs.spec.kinds.notebook import Notebook
from tests.support.container.launching import environment_of
from tests.support.jobs.notebooks import Browser
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterLab]:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "jupyterlab.py").write_text("raise SystemExit('a file of the user, who may call it so')")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "KEPT": "yes"}.items():
            patch.setenv(name, value)
        # An unreachable proxy must not be used for this machine.
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        with JupyterLab(folder, settings=folder / "settings", tensorboard_logdir=".") as lab:
            yield lab


@pytest.fixture(scope="module")
def browser(lab: JupyterLab) -> Browser:
    return Browser(lab.port, lab.token)


def test_settings_are_private_and_kernels_are_not_ranks(browser: Browser) -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    environment = json.loads(browser.run(browser.start_kernel(), code))
    assert environment["KEPT"] == "yes"
    assert {"RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "JUPYTER_TOKEN"} & environment.keys() == set()
    settings = Path(environment["JUPYTER_CONFIG_DIR"])
    assert stat.S_IMODE(settings.stat().st_mode) == 0o700
    assert stat.S_IMODE((settings / "jupyter_server_config.json").stat().st_mode) == 0o600
    assert browser.token in (settings / "jupyter_server_config.json").read_text()


def works(lab: JupyterLab) -> bool:
    """Whether a cell or command is running now."""
    asked_at = datetime.now(timezone.utc)
    worked_at = lab.last_activity()
    return worked_at is not None and worked_at >= asked_at


def test_running_and_finished_cells_count_as_activity(lab: JupyterLab, browser: Browser) -> None:
    kernel = browser.start_kernel()
    browser.run(kernel, "pass")
    wait_until(lambda: not works(lab), bool)
    worked_at = lab.last_activity()
    assert worked_at is not None
    assert datetime.now(timezone.utc) - timedelta(minutes=1) < worked_at
    # WHEN nothing runs but a browser is open, THEN there is no activity
    browser.json("/api/contents")
    assert lab.last_activity() == worked_at
    # WHEN a cell runs without a browser, THEN there is activity all the time
    browser.run(kernel, "import time; time.sleep(3)", until="busy")
    assert works(lab)
    assert works(lab)
    wait_until(lambda: not works(lab), bool)


def test_a_silent_terminal_command_counts_as_activity(lab: JupyterLab, browser: Browser) -> None:
    browser.type_in_terminal("echo begin''s; sleep 3; exit\r", until="begins")
    wait_until(lambda: works(lab), bool)
    assert works(lab)
    wait_until(lambda: not works(lab), bool)


def test_a_failed_start_of_jupyterlab_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a broken installation
    (tmp_path / "jupyterlab.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lab = JupyterLab(tmp_path, settings=tmp_path / "settings", tensorboard_logdir=".")
    with pytest.raises(TrainyardError, match=r"^JupyterLab exited while starting \(exit code 7\)$"):
        lab.__enter__()


def test_an_image_without_jupyterlab_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes Python report the module as missing.
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    with pytest.raises(ConfigurationError, match=r"^jupyterlab not installed here; .*<root>-notebook"):
        check_installed()


@pytest.mark.parametrize("code", [0, 7])
def test_the_job_fails_if_jupyterlab_fails(
    code: int, s3_endpoint: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("http_proxy", raising=False)  # of the module's JupyterLab
    request.getfixturevalue("s3")  # creates the buckets
    for name, value in environment_of(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(entrypoint, "JupyterLab", lambda *_, **__: nullcontext())
    monkeypatch.setattr(entrypoint, "_announce", lambda *_: None)
    monkeypatch.setattr(entrypoint, "_save_until_end", lambda *_, **__: code)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run = S3Location("runs", f"research/{tmp_path.name}/")
    rank = Rank(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, nnodes=1, run=run, scratch=tmp_path)
    failure = pytest.raises(TrainyardError, match="JupyterLab ended with exit code 7") if code else nullcontext()
    with failure:
        entrypoint.serve(rank, Notebook())
