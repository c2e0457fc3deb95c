"""`trainyard images test` on the cpu image and its children, on a broken image, and in a browser."""

import io
import json
import re
import shutil
from contextlib import closing
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.images.conftest import Built
from tests.support.images.source_tree import release_of

# The first test waits until the cpu image is built.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

BROWSER_MILLISECONDS = 120_000

BROKEN = """\
FROM {image}
USER 0:0
ENV HF_TOKEN=hf_of_somebody
RUN chmod o+w /opt/trainyard/jobs/core/errors.py && chown 1000 /opt/trainyard/jobs/spec/plan.py \\
    && printf -- '-----BEGIN PRIVATE KEY-----\\nAAAA\\n' > /etc/ssl/key.pem \\
    && mkdir -p /root/.cache/pip && echo > /usr/local/bin/git && chmod +x /usr/local/bin/git \\
    && rm -r $(python -c 'import transformers; print(transformers.__path__[0])') \\
    && echo > /opt/trainyard/jobs/container/launch.py
LABEL org.opencontainers.image.version=9.9.9
"""

SERVE_NOTEBOOK = """\
import json, sys, time
from pathlib import Path
from torch.utils.tensorboard import SummaryWriter
from jobs.container.kinds.notebook import JupyterLab

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
            "source": "import torch, jobs.container.launch\nprint('sum of', jobs.__name__, torch.ones(3).sum().item())",
        }
    ],
}


def test_cpu_image_and_its_descendants_pass(built: Built) -> None:
    done = built.tree.images("test", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\S+):$|(\d+) passed", done.stdout, re.MULTILINE) == [
        *(("cpu", ""), ("", "11"), ("", "4")),
        *(("cpu-notebook", ""), ("", "22"), ("", "4")),
    ], done.stdout
    assert not re.search("skipped|failed", done.stdout), done.stdout


def test_broken_image_fails_a_test_for_each_reason(built: Built, docker_engine: Any) -> None:
    # Named cuda, because tests that need an accelerator must not pass on a machine without one.
    tag = f"{release_of('cuda')}-{built.tree.revision}-broken"
    broken = BROKEN.format(image=built.name("cpu")).encode()
    docker_engine.images.build(fileobj=io.BytesIO(broken), tag=f"trainyard/cuda:{tag}", network_mode="none", rm=True)
    done = built.tree.images("test", "cuda", "--no-descendants", "--tag", tag)
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("error: tests of cuda failed\nnext: fix the images, and test again\n")
    for test, found in (
        (
            "labels_match",
            "'org.opencontainers.image.title': 'trainyard/cpu'} != {'org.opencontainers.image.title': ",
        ),
        ("labels_match", "{'org.opencontainers.image.version': '9.9.9'} != "),
        ("container_runs_as", r"assert \(0, 0\) == \(1000, 1000\)"),
        ("command_is", "assert 'jobs.container.launch' in ''"),
        ("no_variable", r"assert \['HF_TOKEN'.*\] == \[\]"),
        ("container_requests_all_accelerators", "assert None == 'all'"),
        ("no_file_has_credentials", r"assert \['/etc/ssl/key.pem'\] == \[\]"),
        ("files_are_writable", "'/opt/trainyard/jobs/core/errors.py'"),
        ("job_user_owns", "'/opt/trainyard/jobs/spec/plan.py'"),
        ("build_left", r"assert \['/root/.cache/pip'\] == \[\]"),
        ("c_compiler_is", "assert {'git'} == {"),
        ("packages_have_the_locked", "'nvidia-nccl-cu[0-9]+': 'missing'"),
        ("modules_of_jobs", "ModuleNotFoundError: No module named 'transformers'"),
        ("sigterm_interrupts", "assert None"),
        ("two_ranks_train_over_gloo", "ModuleNotFoundError: No module named 'transformers'"),
    ):
        report = re.search(rf"^_+ test_{test}\w* _+$(.*?)^_{{5}}", done.stdout + "_____", re.MULTILINE | re.DOTALL)
        assert report, f"{test}: {done.stdout}"
        assert re.search(found, report[1]), f"{test}: {report[1]}"
    assert re.search(r"^SKIPPED .*: the Docker engine has no runtime for the accelerator$", done.stdout, re.M)
    assert "hf_of_somebody" not in done.stdout + done.stderr


def test_notebook_and_tensorboard_work_in_a_browser(built: Built, docker_engine: Any) -> None:
    program = shutil.which("chromium")
    assert program, "no chromium on PATH. Next: .ci/docker-engine installs it"
    # GIVEN JupyterLab in a container, on the host's loopback like on an instance
    container = docker_engine.containers.run(
        built.name("cpu-notebook"),
        ["python", "-c", SERVE_NOTEBOOK, json.dumps(NOTEBOOK)],
        init=True,
        network_mode="host",
        cap_drop=["ALL"],
        detach=True,
    )
    try:
        with closing(container.logs(stream=True, follow=True)) as lines:
            printed = next((line for line in lines if line.startswith(b"[")), None)
        assert printed, container.logs().decode()
        port, token = json.loads(printed)
        with sync_playwright() as playwright:
            # A headless Chromium that makes no requests of its own.
            browser = playwright.chromium.launch(
                executable_path=program,
                args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"],
            )
            _look(browser.new_page(), f"http://127.0.0.1:{port}", token)
            browser.close()
    finally:
        container.remove(force=True)


def _look(page: Page, url: str, token: str) -> None:
    for place in ("lab", "tensorboard/"):
        page.goto(f"{url}/{place}")
        assert "/login" in page.url, "nothing is shown without the token"
    page.goto(f"{url}/lab/tree/check.ipynb?token={token}")
    # A cell that is run before its kernel is ready is not run at all.
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=BROWSER_MILLISECONDS)
    cell = page.locator(".jp-Notebook .jp-CodeCell").first
    cell.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    output = cell.locator(".jp-OutputArea-output")
    expect(output).to_have_text("sum of jobs 3.0", timeout=BROWSER_MILLISECONDS)
    page.goto(f"{url}/tensorboard/#timeseries")
    expect(page.get_by_text("checked/loss", exact=True).first).to_be_visible(timeout=BROWSER_MILLISECONDS)
