"""What it takes to make and to open the report of a run with three attempts and 10,000 lines of metrics.

python -m tests.benchmarks.report              five rounds of each
python -m tests.benchmarks.report --rounds 9   more

`trainyard report RUN` is run as a user does, against an embedded AWS that has the run's files, and the page is opened
in Chromium on a phone, a tablet and a desk. The medians count:

    first      the command where Vega has not been put together on this machine yet
    command    the command from then on: Python, the imports, the files from S3, the page
    page       the page alone, of records that are read already
    shift      the browser's sum of what moved on the page (Cumulative Layout Shift; under 0.1 counts as good)

On two cores, one of which did other work, the command took 1.5 s by the clock, 1.4 s of a processor. The first time it
took 2.5 s, and 3.3 s over both cores, since Vega is put together beside all else. The page alone took 0.2 s. It has
1.11 MB, all charts were there 1.3 to 1.5 s after it was opened, and the shift was 0.0004 at most.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from playwright.sync_api import sync_playwright

from jobs.aws.connection import Aws
from jobs.client import batch
from jobs.contract.stage import DEFAULT_STAGE
from jobs.report.page import run_page
from tests.support.embedded_aws import deploy_stage, environment_of, run_embedded_aws
from tests.support.jobs.pages import OpenedPage
from tests.support.jobs.recorded_runs import files_of, three_attempts
from tests.support.jobs.terminal import TRAINYARD

WIDTHS = (380, 900, 1400)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    run = three_attempts()
    with tempfile.TemporaryDirectory() as name, run_embedded_aws(Path(name)) as aws:
        folder = Path(name)
        deploy_stage(aws)
        os.environ.update(environment_of(aws.endpoint))
        bucket = batch.read_stage(Aws(), DEFAULT_STAGE).run_bucket
        for file, content in files_of(run).items():
            aws.client("s3").put_object(Bucket=bucket, Key=f"research/{run.run_id}/{file}", Body=content)
        first = _median(rounds, lambda number: _command(folder, cache=folder / f"empty-{number}"))
        command = _median(rounds, lambda _: _command(folder, cache=folder / "empty-0"))
        page = folder / "runs" / run.run_id / "report.html"
        alone = _median(rounds, lambda _: run_page(run, now=datetime.now(timezone.utc)))
        print(f"{len(run.metrics):,} lines of metrics, {len(run.attempts)} attempts")
        print(f"first {first}\ncommand {command}\npage {alone}\n{page.stat().st_size / 1e6:.2f} MB")
        for width, (seconds, shift) in _opened(page).items():
            print(f"{width:>5} pixels: all charts after {seconds:.2f} s, shift {shift:.4f}")


def _median(rounds: int, what: Callable[[int], object]) -> str:
    """The median time, and that of the processors; a round before them takes what is loaded once."""
    found = []
    what(rounds)
    for number in range(rounds):
        started, busy = time.perf_counter(), _processor_seconds()
        what(number)
        found.append((time.perf_counter() - started, _processor_seconds() - busy))
    wall, processors = (statistics.median(values) for values in zip(*found, strict=True))
    return f"{wall:.2f} s ({processors:.2f} s of a processor)"


def _processor_seconds() -> float:
    """Those of this process and of the commands that it ran."""
    return sum(os.times()[:4])


def _command(folder: Path, *, cache: Path) -> None:
    subprocess.run(
        [TRAINYARD, "report", "massive"],
        cwd=folder,
        # As users run it: what Python has compiled is there from the second time on.
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "XDG_CACHE_HOME": str(cache),
        },
        stdout=subprocess.DEVNULL,
        check=True,
    )


def _opened(path: Path) -> dict[int, tuple[float, float]]:
    """By the page's width: the time until all is drawn, and how much moved meanwhile."""
    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        opened = OpenedPage(browser)
        for width in WIDTHS:
            started = time.perf_counter()
            page = opened.open(path, width=width)
            found[width] = (time.perf_counter() - started, opened.layout_shift(page))
        opened.close()
        browser.close()
    return found


if __name__ == "__main__":
    main()
