"""An S3 over HTTP in a separate process, with a bucket for inputs and one for runs."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import boto3

from tests.support.container import warm_launcher

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

DATA, RUNS = "data", "runs"

_ROOT = Path(__file__).parents[3]

_SERVER = """
import gc
import os
import signal
import sys
gc.disable()  # loaded modules are never freed; collecting garbage meanwhile takes almost half of the start
from infra.emulator import s3
from moto.server import ThreadedMotoServer
s3.install()
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
gc.freeze()
gc.set_threshold(20_000, 20, 20)
gc.enable()
print(server.get_host_and_port()[1], flush=True)
nowhere = os.open(os.devnull, os.O_WRONLY)  # a pipe that nobody reads would stop the server when it is full
for number in (1, 2):
    os.dup2(nowhere, number)
signal.sigwait({signal.SIGTERM})
"""


@contextlib.contextmanager
def s3_server(address: str = "127.0.0.1", *, is_fresh: bool = False) -> Iterator[str]:
    """Run a server on `address` for the block, and yield its URL.

    With `is_fresh`, it is a new process with only moto's server and S3, without the emulator's other services.
    """
    command, environment = [sys.executable, "-c", _SERVER, address], {"PATH": os.environ["PATH"]}
    server: subprocess.Popen[str] | warm_launcher.WarmLauncher
    if is_fresh:
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    else:
        server = warm_launcher.start(command, environment)
    assert server.stdout is not None
    with server.stdout as printed:
        try:
            host = "localhost" if address == "127.0.0.1" else address
            yield f"http://{host}:{int(printed.readline())}"
        finally:
            server.terminate()
            server.wait()


@contextlib.contextmanager
def s3_client(endpoint: str) -> Iterator["S3Client"]:
    """Create the buckets of a new server, and yield a client."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    for bucket in (DATA, RUNS):
        client.create_bucket(Bucket=bucket)
    with contextlib.closing(client):
        yield client


def put(s3: "S3Client", path: Path, key: str) -> str:
    """Upload a file or the files of a folder to the bucket for inputs, and return the s3:// location."""
    for file in path.iterdir() if path.is_dir() else [path]:
        s3.upload_file(str(file), DATA, f"{key}/{file.name}" if path.is_dir() else key)
    return f"s3://{DATA}/{key}"
