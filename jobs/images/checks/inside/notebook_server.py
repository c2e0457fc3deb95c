"""Starts JupyterLab as a notebook job does, and asks it, and TensorBoard behind it, with and without its token."""

import sys
import tempfile
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

from jupyter_client.manager import start_new_kernel
from torch.utils.tensorboard import SummaryWriter

from jobs.train.kinds.notebook.jupyter import TENSORBOARD, JupyterLab
from jobs.train.store import LOOPBACK

SECONDS = 240
"""Longer than the proxy in front of TensorBoard waits for its start (jobs/train/kinds/notebook/jupyter.py)."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def ask(url: str, token: str | None = None) -> tuple[int, str]:
    """Return status and body of the answer; of a redirection, status and target."""
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"} if token else {})  # noqa: S310
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        with opener.open(request, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Location") or ""


def listeners() -> list[str]:
    """Return the addresses that something listens on, in the kernel's notation, without their ports."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [fields[1].split(":")[0] for fields in lines if fields[3] == "0A"]


def check(lab: JupyterLab) -> str:
    base = f"http://{LOOPBACK}:{lab.port}"
    pages = {"JupyterLab": f"{base}/lab", "TensorBoard": f"{base}/{TENSORBOARD}/"}
    for name, url in pages.items():
        status, place = ask(url)
        if status != HTTPStatus.FORBIDDEN and not (status == HTTPStatus.FOUND and "/login" in place):
            return f"{name} answers {status} without the token"
        status, body = ask(url, lab.token)
        if status != HTTPStatus.OK or name.lower() not in body.lower():
            return f"{name} answers {status} to its token: {body[:200]}"
    if (status := ask(f"{base}/api/contents")[0]) != HTTPStatus.FORBIDDEN:
        return f"the files are answered with {status} without the token"
    _, tags = ask(f"{pages['TensorBoard']}data/plugin/scalars/tags", lab.token)
    if "checked/loss" not in tags:
        return f"TensorBoard does not show the scalar that was logged: {tags[:200]}"
    addresses = listeners()
    if not addresses or set(addresses) != {"0100007F"}:
        return f"it listens on more than loopback: {', '.join(addresses) or 'nothing'}"
    return ""


def run_cell() -> str:
    manager, client = start_new_kernel(startup_timeout=SECONDS)
    try:
        reply = client.execute_interactive(
            "import torch, transformers, jobs.train.accelerator; assert torch.ones(2).sum() == 2", timeout=SECONDS
        )
        content = reply["content"]
        return "" if content["status"] == "ok" else f"a cell failed: {content['ename']}: {content['evalue']}"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "notebook")
        root.mkdir()
        with SummaryWriter(str(root / "events")) as writer:
            writer.add_scalar("checked/loss", 0.5, 1)
        with JupyterLab(root, settings=Path(folder, "jupyter"), tensorboard_logdir="events") as lab:
            failure = check(lab)
    if failure := failure or run_cell():
        sys.exit(failure)
    print("JupyterLab and TensorBoard answer to the token alone, on 127.0.0.1 alone; a cell runs")


if __name__ == "__main__":
    main()
