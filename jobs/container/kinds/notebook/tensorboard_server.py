"""TensorBoard on a Unix socket: it asks for no token, so it is left to whoever has a right to the socket to show it.

    python -m jobs.container.kinds.notebook.tensorboard_server --socket=PATH --logdir=FOLDER

JupyterLab starts it when it is first opened (jobs.container.kinds.notebook.jupyter) and hands it on to those who have
its own token.
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
    """The server that TensorBoard runs on, with a Unix socket in place of a TCP port."""

    daemon_threads = True

    def __init__(self, application: Any, _flags: argparse.Namespace, *, socket: str) -> None:
        super().__init__(f"unix://{socket}", 0, application)

    def get_url(self) -> str:
        return self.host


def plugins() -> list[Any]:
    """Return TensorBoard's own plugins, and those of other packages that can be loaded.

    What a base image happens to hold, maybe for another version, must not keep it from starting.
    """
    found = list(get_static_plugins())
    for entry_point in entry_points(group="tensorboard_plugins"):
        try:
            found.append(entry_point.load())
        except Exception as error:  # noqa: BLE001, PERF203 - anybody's code
            log.warning("warning: TensorBoard's plugin '%s' is left out: %s", entry_point.name, error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.container.kinds.notebook.tensorboard_server", description="Serve TensorBoard."
    )
    parser.add_argument("--socket", required=True, metavar="PATH", help="where it listens")
    parser.add_argument("--logdir", required=True, metavar="FOLDER", help="local, or s3://…")
    given = parser.parse_args()
    os.umask(0o077)  # the socket is for this user only
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line for each request
    board = TensorBoard(plugins(), server_class=functools.partial(SocketServer, socket=given.socket))
    # Its faster loader is a second server, on a TCP port that asks for no token.
    board.configure(logdir=given.logdir, load_fast="false")
    board.launch()
    signal.pause()


if __name__ == "__main__":
    main()
