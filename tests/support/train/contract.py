"""The code in the container against the packages of every release, as a table.

    make contract                        all rows of images/releases.toml
    make contract RELEASE=1.23.0         one
    python -m tests.support.train.contract [RELEASE …]
    python -m tests.support.train.contract --row-pytorch [RELEASE …]   with each row's version of PyTorch too, 3 GB each

For each: the tests marked `every_release`, those of the HPU's two branches with the gaudi image's packages, the others
with the cpu image's. The real GaudiTrainer, and the real Trainer with what it does on an HPU, train on a CPU;
optimum_habana_on_cpu.py and transformers_on_hpu.py say what stands in for Habana's own packages. Python is the laptop's
in every row, and so is PyTorch where the row's is not asked for; column `torch` names the latter.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from jobs.contract.errors import TrainyardError
from jobs.contract.releases import Release, release, releases
from jobs.images.lock import ROOT
from tests.support.train.image_environment import RELEASE_VARIABLE, ROW_PYTORCH_VARIABLE, python_of

BRANCHES = {
    "GaudiTrainer": "test_optimum_habana_contract",
    "Trainer on HPU": "test_plain_hpu_contract",
    "Trainer": "",
}
"""Each branch of the code, and its file of tests; the last one has all others."""

HEADINGS = ("release", "optimum-habana", "transformers", "accelerate", "torch", *BRANCHES, "seconds")

ROW_SECONDS = 1800


@dataclass(frozen=True)
class Result:
    """The result for one branch of the code: how many tests there were, and how many of them did not pass."""

    tests: int = 0
    failed: int = 0

    @property
    def passed(self) -> bool:
        return self.tests > 0 and self.failed == 0

    def __str__(self) -> str:
        return f"{self.failed} of {self.tests} FAILED" if self.failed else f"{self.tests} passed"

    def __add__(self, other: "Result") -> "Result":
        return Result(self.tests + other.tests, self.failed + other.failed)


def results(report: Path) -> list[Result]:
    """Read pytest's JUnit report: the result of each branch. What a release does not have is no test of it."""
    found = dict.fromkeys(BRANCHES, Result())
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {child.tag for child in case}
        branch = next(name for name, file in BRANCHES.items() if file in case.get("classname", ""))
        if "skipped" not in ends:
            found[branch] += Result(1, int(bool(ends & {"failure", "error"})))
    return list(found.values())


def test(row: Release) -> list[Result]:
    """Run the tests for a release. Their output goes to stderr. Raises TrainyardError where they cannot be run."""
    for name in ("gaudi", "cpu"):
        python_of(name, row.name)
    with tempfile.TemporaryDirectory(prefix="contract-") as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-m", "every_release", "-p", "no:cacheprovider", "--quiet"),
                *(f"--junitxml={report}", str(ROOT / "tests/jobs/train")),
            ],
            env={**os.environ, RELEASE_VARIABLE: row.name},
            cwd=ROOT,
            stdout=sys.stderr,
            timeout=ROW_SECONDS,
            check=False,
        )
        if not report.exists():
            raise TrainyardError("pytest left no report; its output says why")
        return results(report)


def main() -> int:
    """Test the rows that were named, print the table, and return 0 where every row passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.train.contract", description="jobs/train, per release."
    )
    parser.add_argument("releases", metavar="RELEASE", nargs="*", help="rows of images/releases.toml; none: all")
    parser.add_argument("--row-pytorch", action="store_true", help="upstream's PyTorch of the row's version, with CUDA")
    arguments = parser.parse_args()
    if arguments.row_pytorch:
        os.environ[ROW_PYTORCH_VARIABLE] = "1"
    rows = [release(name) for name in arguments.releases] or list(releases().values())
    _print(HEADINGS)
    all_passed = True
    for row in rows:
        print(f"==> release {row.name}", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            found = test(row)
            all_passed = all_passed and all(each.passed for each in found)
            _print((*_versions(row), *map(str, found), f"{time.monotonic() - started:.0f}"))
        except (TrainyardError, subprocess.TimeoutExpired) as error:
            all_passed = False
            _print((*_versions(row), f"not run: {error}".replace("\n", " ")))
    return 0 if all_passed else 1


def _versions(row: Release) -> tuple[str, ...]:
    pytorch = row.pytorch if ROW_PYTORCH_VARIABLE in os.environ else importlib.metadata.version("torch")
    return row.name, row.optimum_habana, row.transformers, row.accelerate or "", pytorch


def _print(cells: tuple[str, ...]) -> None:
    widths = [max(len(heading), 10) for heading in HEADINGS]
    print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)).rstrip(), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrainyardError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
