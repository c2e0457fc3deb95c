"""`trainyard images test` on the cpu image and its children, on one that is broken, and in a browser."""

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from jobs.contract import image_hierarchy as hierarchy
from jobs.contract.releases import release
from jobs.images.lock import locked
from tests.support.images.source_tree import SourceTree, remove_images

# The first one builds three images and tests them.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

RELEASE = release().name

BROWSER_MILLISECONDS = 120_000

BROKEN = """\
FROM {image}
USER 0:0
ENV HF_TOKEN=hf_of_somebody
RUN chmod o+w /opt/trainyard/jobs/contract/errors.py && chown 1000 /opt/trainyard/jobs/contract/plan.py \\
    && printf -- '-----BEGIN PRIVATE KEY-----\\nAAAA\\n' > /etc/ssl/key.pem \\
    && mkdir -p /root/.cache/pip && echo > /usr/local/bin/git && chmod +x /usr/local/bin/git \\
    && rm -r $(python -c 'import transformers; print(transformers.__path__[0])') \\
    && echo > /opt/trainyard/jobs/train/launch.py
LABEL org.opencontainers.image.version=9.9.9
"""

SERVE_NOTEBOOK = """\
import json, sys, time
from pathlib import Path
from torch.utils.tensorboard import SummaryWriter
from jobs.train.kinds.notebook.jupyter import JupyterLab

root = Path.home() / "notebook"
root.mkdir()
(root / "check.ipynb").write_text(sys.argv[1])
with SummaryWriter(str(root / "events")) as writer:
    for step in range(5):
        writer.add_scalar("checked/loss", 1 / (step + 1), step)
with JupyterLab(root, settings=Path.home() / "settings", tensorboard_logdir="events") as lab:
    print(json.dumps([lab.port, lab.token]), flush=True)
    lab.wait(600)
"""

NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    "cells": [
        {
            "id": "one",
            "cell_type": "code",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": "import torch, jobs.train.launch\nprint('sum of', jobs.__name__, torch.ones(3).sum().item())",
        }
    ],
}


@dataclass(frozen=True)
class Images:
    """Images that were built and tested once for all."""

    tree: SourceTree
    done: subprocess.CompletedProcess[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.done.stdout)
        return rows

    def name(self, image: str) -> str:
        return f"trainyard/{image}:{RELEASE}-{self.tree.revision}"


@dataclass(frozen=True)
class Address:
    """The address of a JupyterLab, and its token."""

    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def tested(options: Sequence[str], docker_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    tree = SourceTree(tmp_path_factory.mktemp("image-test") / "tree")
    yield Images(tree, tree.images("test", "cpu", *options, "-o", "json"))
    remove_images(docker_engine, tree.revision)


def test_the_cpu_image_and_its_descendants_pass(tested: Images) -> None:
    assert tested.done.returncode == 0, tested.done.stdout + tested.done.stderr
    assert {row["outcome"] for row in tested.rows} == {"ok"}
    assert {row["revision"] for row in tested.rows} == {tested.tree.revision}
    checks: dict[str, set[str]] = {}
    for row in tested.rows:
        checks.setdefault(row["image"], set()).add(row["check"])
    assert set(checks) == {"cpu", "cpu-notebook"}
    everywhere = {
        "labels",
        "user",
        "command",
        "secrets",
        "world-writable",
        "versions",
        "pip check",
        "imports",
        "SIGTERM",
    }
    assert all(everywhere <= of_image for of_image in checks.values())
    assert {"two ranks"} <= checks["cpu"] - checks["cpu-notebook"]
    assert checks["cpu-notebook"] - checks["cpu"] == {"notebook"}
    found = {(row["image"], row["check"]): row["found"] for row in tested.rows}
    assert found["cpu", "two ranks"].startswith("2 ranks over gloo on cpu: loss ")
    assert "exit code 75" in found["cpu-notebook", "SIGTERM"]


def test_its_document_lists_what_a_job_runs_on(tested: Images, tmp_path: Path) -> None:
    done = tested.tree.images("sbom", "cpu", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads(Path(done.stdout.strip()).read_text())
    found = {package["name"]: package.get("versionInfo") for package in document["packages"]}
    pins = locked(hierarchy.image("cpu"), release())
    assert {name: found.get(name) for name in ("torch", "transformers")} == {
        name: pins[name] for name in ("torch", "transformers")
    }


def test_a_broken_image_fails_with_a_row_for_each_reason(tested: Images, docker_engine: Any) -> None:
    # Called cuda: what a check needs an accelerator for must not be called good where there is none.
    tag = f"{RELEASE}-{tested.tree.revision}-broken"
    _build(docker_engine, BROKEN.format(image=tested.name("cpu")), f"trainyard/cuda:{tag}")
    done = tested.tree.images("test", "cuda", "--no-descendants", "--tag", tag)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[0].split() == ["IMAGE", "CHECK", "TOOK", "FOUND"]
    rows = " ".join(done.stdout.split())  # a long row is folded
    for check, found in (
        ("labels", "image.title is 'trainyard/cpu', not 'trainyard/cuda'"),
        ("labels", "image.version is '9.9.9', not"),
        ("user", "it runs as 0:0, and images/cuda/Dockerfile says 1000:1000"),
        ("command", "its own command is not the help of jobs.train.launch"),
        ("environment", "looks like a secret: HF_TOKEN"),
        ("cards", "NVIDIA_VISIBLE_DEVICES is not set, not all: a container of it may get no card"),
        ("secrets", "looks like a secret: /etc/ssl/key.pem"),
        ("world-writable", "everybody may write: /opt/trainyard/jobs/contract/errors.py"),
        ("ownership", "the job's user owns what lies outside /home/trainyard: /opt/trainyard/jobs/contract/plan.py"),
        ("leftovers", "left behind by the build: /root/.cache/pip"),
        ("build tools", "nothing but C is compiled in it: /usr/local/bin/git"),
        ("versions", "nvidia-nccl-cu[0-9]+ is missing, not"),
        ("imports", "import transformers: ModuleNotFoundError"),
        ("SIGTERM", "the launcher ended before it asked for its run"),
        ("two ranks", "rank [01]: ModuleNotFoundError: No module named 'transformers'"),
    ):
        assert re.search(rf"cuda {check} failed [0-9.]+ s (?:(?!cuda ).)*{found}", rows), f"{check}: {rows}"
    assert "cuda accelerator ok" not in rows
    assert "HF_TOKEN=" not in done.stdout + done.stderr
    assert re.search(r"^error: 1[45] of 18 checks failed: cuda \(labels\), ", done.stderr, re.MULTILINE), done.stderr


@pytest.fixture(scope="module")
def notebook(tested: Images, docker_engine: Any) -> Iterator[Address]:
    """JupyterLab in a container, on the host's loopback as on an instance."""
    container = docker_engine.containers.run(
        tested.name("cpu-notebook"),
        ["python", "-c", SERVE_NOTEBOOK, json.dumps(NOTEBOOK)],
        init=True,
        network_mode="host",
        cap_drop=["ALL"],
        detach=True,
    )
    try:
        with closing(container.logs(stream=True, follow=True)) as lines:
            told = next((line for line in lines if line.startswith(b"[")), None)
        assert told, container.logs().decode()
        yield Address(*json.loads(told))
    finally:
        container.remove(force=True)


@pytest.fixture
def page() -> Iterator[Page]:
    """An empty page of a headless Chromium that asks nobody else for anything."""
    program = shutil.which("chromium")
    assert program, "no chromium on PATH. Next: .ci/docker-engine installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"],
        )
        yield browser.new_page()
        browser.close()


def test_a_notebook_runs_a_cell_in_a_browser(notebook: Address, page: Page) -> None:
    page.goto(f"{notebook.url}/lab")
    assert "/login" in page.url, "without its token there is nothing to see"
    page.goto(f"{notebook.url}/lab/tree/check.ipynb?token={notebook.token}")
    # A cell that is run before its kernel is there is not run at all.
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=BROWSER_MILLISECONDS)
    cell = page.locator(".jp-Notebook .jp-CodeCell").first
    cell.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    output = cell.locator(".jp-OutputArea-output")
    expect(output).to_have_text("sum of jobs 3.0", timeout=BROWSER_MILLISECONDS)


def test_tensorboard_shows_a_scalar_in_a_browser(notebook: Address, page: Page) -> None:
    page.goto(f"{notebook.url}/tensorboard/")
    assert "/login" in page.url, "without the token there is nothing to see"
    page.goto(f"{notebook.url}/lab?token={notebook.token}")
    page.goto(f"{notebook.url}/tensorboard/#timeseries")
    expect(page.get_by_text("checked/loss", exact=True).first).to_be_visible(timeout=BROWSER_MILLISECONDS)


def _build(engine: Any, dockerfile: str, name: str) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(dockerfile.encode())
        tar.addfile(entry, io.BytesIO(dockerfile.encode()))
    context.seek(0)
    engine.images.build(fileobj=context, custom_context=True, tag=name, network_mode="none", rm=True, forcerm=True)
