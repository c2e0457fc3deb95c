"""Watch an attempt from outside: its output lines, its requests to S3, its checkpoint folders."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.container.faulty_s3 import FaultyS3
from tests.support.container.launching import Launched

LOOK_SECONDS = 0.001


class Watched:
    """Watch one attempt, which must be the only user of its scratch folder and its S3 server."""

    def __init__(self, launched: Launched, scratch: Path, s3: FaultyS3) -> None:
        self.shown: list[tuple[float, str]] = []
        """Seconds since the start, and the kind, of each event."""
        self._launched = launched
        self._scratch = scratch
        self._requests: list[str] = []
        self._lines_read = self._requests_read = 0
        self._folders: set[str] = set()
        self._started = time.monotonic()
        s3.breaks = lambda method, path: self._requests.append(f"{method} {path}")

    def until_the_end(self) -> Iterator[None]:
        """Look every millisecond while the attempt runs."""
        while self._launched.process.poll() is None:
            self._look()
            yield
            time.sleep(LOOK_SECONDS)

    def counts(self) -> Counter[str]:
        return Counter(kind for _, kind in self.shown)

    def _look(self) -> None:
        lines, requests = self._launched.lines[self._lines_read :], self._requests[self._requests_read :]
        self._lines_read += len(lines)
        self._requests_read += len(requests)
        folders = {path.name for path in self._scratch.glob("trainyard-*/checkpoints/*")} - self._folders
        self._folders |= folders
        kinds = [
            *map(_kind_of_line, lines),
            *map(_kind_of_request, requests),
            *["folder of a checkpoint"] * len(folders),
        ]
        self.shown += [(time.monotonic() - self._started, kind) for kind in kinds]


def _kind_of_line(line: str) -> str:
    """Return 'line' and the line's first word if that names its topic, such as 'line evaluation:'."""
    first = line.split(maxsplit=1)[:1]
    return f"line {first[0]}" if first and re.fullmatch(r"\[?[a-z]+[]:]", first[0]) else "line of another sort"


def _kind_of_request(request: str) -> str:
    """Return the method and the run's subfolder, such as 'request PUT checkpoints'."""
    method, _, path = request.partition(" ")
    found = re.search(r"/benchmark-[^/]+/([\w.]+)", path)
    return f"request {method} {found[1] if found else 'what it reads'}"
