"""Checks of notebook images: JupyterLab, started like a notebook job, and TensorBoard behind the same token."""

import http.client
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 240
"""Longer than the proxy waits for TensorBoard to start (jobs/container/kinds/notebook.py)."""

LIMIT_BYTES = 250_000_000
"""Maximum size that a notebook adds to its parent. JupyterLab takes 140 to 180 MB."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from torch.utils.tensorboard import SummaryWriter

    from jobs.container.kinds.notebook import JupyterLab

    root = tmp_path_factory.mktemp("notebook")
    with SummaryWriter(str(root / "events")) as writer:
        writer.add_scalar("checked/loss", 0.5, 1)
    with JupyterLab(root, settings=tmp_path_factory.mktemp("settings") / "own", tensorboard_logdir="events") as lab:
        yield lab


def get(lab: Any, path: str, *, token: bool) -> tuple[int, str]:
    """Return the status of the answer, and its body or, for a redirect, its target."""
    connection = http.client.HTTPConnection("127.0.0.1", lab.port, timeout=SECONDS)
    connection.request("GET", f"/{path}", headers={"Authorization": f"token {lab.token}"} if token else {})
    answer = connection.getresponse()
    body = answer.read().decode(errors="replace")
    connection.close()
    return answer.status, answer.headers.get("Location") or body


@pytest.mark.parametrize(
    ("path", "shown"),
    [("lab", "JupyterLab"), ("tensorboard/", "TensorBoard"), ("tensorboard/data/plugin/scalars/tags", "checked/loss")],
)
def test_page_requires_the_token(lab: Any, path: str, shown: str) -> None:
    status, place = get(lab, path, token=False)
    assert status == 403 or (status == 302 and "/login" in place)
    status, body = get(lab, path, token=True)
    assert (status, shown in body) == (200, True), body[:200]


def test_files_require_the_token(lab: Any) -> None:
    assert get(lab, "api/contents", token=False)[0] == 403


@pytest.mark.usefixtures("lab")
def test_server_listens_only_on_loopback() -> None:
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    # /proc/net has addresses in hexadecimal; state 0A is LISTEN.
    assert {fields[1].split(":")[0] for fields in lines if fields[3] == "0A"} == {"0100007F"}


def test_cell_runs() -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=SECONDS)
    try:
        code = "import torch, transformers, jobs.container.accelerator; assert torch.ones(2).sum() == 2"
        content = client.execute_interactive(code, timeout=SECONDS)["content"]
        assert content["status"] == "ok", content
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("module", ["jupyterlab", "jupyter_server_proxy", "ipykernel", "tensorboard.program"])
def test_notebook_modules_can_be_imported(module: str) -> None:
    importlib.import_module(module)


def test_notebook_adds_at_most_250_mb() -> None:
    files = [path for path in Path("/opt/trainyard/notebook").rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) <= LIMIT_BYTES
