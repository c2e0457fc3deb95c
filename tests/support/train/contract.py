"""The code in the container against the packages of every release, as a table.

    make contract                        all rows of images/releases.toml
    make contract RELEASE=1.20.0         one
    python -m tests.support.train.contract [RELEASE …]
    python -m tests.support.train.contract --row-pytorch [RELEASE …]   with each row's version of PyTorch too, 3 GB each

For each: the tests marked `every_release`, those of the HPU branch with the gaudi image's packages, the others with the
cpu image's. The real GaudiTrainer trains on a CPU; optimum_habana_on_cpu.py says what stands in for Habana's own
packages. Python is the laptop's in every row, and so is PyTorch where the row's is not asked for; column `torch` names
the latter.
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

HPU_TESTS = "test_optimum_habana_contract"

HEADINGS = ("release", "optimum-habana", "transformers", "accelerate", "torch", "GaudiTrainer", "Trainer", "seconds")

ROW_SECONDS = 1800


@dataclass(frozen=True)
class Result:
    """The result for one branch of the code: how many tests there were, and how many of them did not pass."""

    tests: int
    failed: int

    @property
    def passed(self) -> bool:
        return self.tests > 0 and self.failed == 0

    def __str__(self) -> str:
        return f"{self.failed} of {self.tests} FAILED" if self.failed else f"{self.tests} passed"


def results(report: Path) -> tuple[Result, Result]:
    """Read pytest's JUnit report: the results of the HPU branch and of the others."""
    cases = list(ElementTree.parse(report).iter("testcase"))

    def result(*, hpu: bool) -> Result:
        chosen = [case for case in cases if (HPU_TESTS in case.get("classname", "")) == hpu]
        return Result(len(chosen), sum(any(child.tag in ("failure", "error") for child in case) for case in chosen))

    return result(hpu=True), result(hpu=False)


def test(row: Release) -> tuple[Result, Result]:
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
            hpu, plain = test(row)
            all_passed = all_passed and hpu.passed and plain.passed
            _print((*_versions(row), str(hpu), str(plain), f"{time.monotonic() - started:.0f}"))
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
