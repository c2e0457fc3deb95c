"""Ranges of an object: the bytes that S3 gives (API reference of GetObject, RFC 9110), and no more read than these."""

import random

import psutil
import pytest

from tests.support.running_emulator import Emulator

SIZE_BYTES = 24 << 20
"""More than moto keeps in memory."""


@pytest.fixture(scope="module")
def content(emulator: Emulator) -> bytes:
    content = random.Random(1).randbytes(SIZE_BYTES)
    s3 = emulator.client("s3")
    s3.create_bucket(Bucket="of-ranges")
    s3.put_object(Bucket="of-ranges", Key="weights", Body=content)
    return content


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-99", slice(0, 100)),
        (f"bytes={SIZE_BYTES - 7}-", slice(SIZE_BYTES - 7, None)),
        ("bytes=-7", slice(SIZE_BYTES - 7, None)),
        (f"bytes={SIZE_BYTES - 7}-{2 * SIZE_BYTES}", slice(SIZE_BYTES - 7, None)),
    ],
)
def test_a_range_is_what_it_names_and_nothing_else_is_read(
    emulator: Emulator, content: bytes, asked: str, part: slice
) -> None:
    server = psutil.Process(emulator.process.pid)
    before = server.io_counters().read_chars
    answer = emulator.client("s3").get_object(Bucket="of-ranges", Key="weights", Range=asked)
    wanted = content[part]
    first = part.indices(SIZE_BYTES)[0]
    assert answer["Body"].read() == wanted
    assert answer["ContentRange"] == f"bytes {first}-{first + len(wanted) - 1}/{SIZE_BYTES}"
    assert answer["ContentLength"] == len(wanted)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert server.io_counters().read_chars - before < 1 << 20


@pytest.mark.parametrize("asked", [None, "bytes=5-2", "bytes=0-1,4-5"])
def test_what_is_no_single_range_gets_the_whole_object(emulator: Emulator, content: bytes, asked: str | None) -> None:
    more = {"Range": asked} if asked else {}
    assert emulator.client("s3").get_object(Bucket="of-ranges", Key="weights", **more)["Body"].read() == content
