"""Serve TensorBoard on a Unix socket, without authentication. Access to the socket must be restricted.

    python -m jobs.container.kinds.tensorboard_server --socket=PATH --logdir=FOLDER

JupyterLab (jobs.container.kinds.notebook) starts this server when TensorBoard is first opened, and forwards it to users
who have JupyterLab's token.
"""

import argparse
import functools
import logging
import os
import signal
from importlib.metadata import entry_points
from typing import Any

from tensorboard.default import get_static_plugins
from tensorboard.program import TensorBoard, TensorBoardServer
from werkzeug.serving import ThreadedWSGIServer

log = logging.getLogger("trainyard")


class SocketServer(ThreadedWSGIServer, TensorBoardServer):  # type: ignore[misc]  # tensorboard has no types
    """The server of TensorBoard, on a Unix socket instead of a TCP port."""

    daemon_threads = True

    def __init__(self, application: Any, _flags: argparse.Namespace, *, socket: str) -> None:
        super().__init__(f"unix://{socket}", 0, application)

    def get_url(self) -> str:
        return self.host


def plugins() -> list[Any]:
    """Return TensorBoard's plugins, and those of other packages that can be loaded.

    A broken plugin of the base image, perhaps for another version, must not prevent the start.
    """
    found = list(get_static_plugins())
    for entry_point in entry_points(group="tensorboard_plugins"):
        try:
            found.append(entry_point.load())
        except Exception as error:  # noqa: BLE001, PERF203 - a plugin may raise anything
            log.warning("warning: TensorBoard's plugin '%s' cannot be loaded: %s", entry_point.name, error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.container.kinds.tensorboard_server", description="Serve TensorBoard."
    )
    parser.add_argument("--socket", required=True, metavar="PATH", help="Unix socket to listen on")
    parser.add_argument("--logdir", required=True, metavar="FOLDER", help="folder of event files: local, or s3://…")
    given = parser.parse_args()
    os.umask(0o077)  # only this user may use the socket
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # no line for each request
    board = TensorBoard(plugins(), server_class=functools.partial(SocketServer, socket=given.socket))
    # The faster loader is a second server, on a TCP port without a token.
    board.configure(logdir=given.logdir, load_fast="false")
    board.launch()
    signal.pause()


if __name__ == "__main__":
    main()
