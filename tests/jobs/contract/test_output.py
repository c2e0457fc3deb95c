"""What becomes of a program whose standard output, or another stream, is closed, full, or read by nobody."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from jobs.contract.output import run_program

def main():
    print("a line")
    sys.stderr.write(f"{sys.stdin.read()}said")
    return 7

run_program(main)
"""


def run(redirections: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {redirections}', sys.executable, PROGRAM],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("redirections", "stdout"), [("", "a line\n"), ("2>&-", "a line\n"), ("<&-", "a line\n")])
def test_a_program_ends_with_its_own_code_and_streams_stay_apart(redirections: str, stdout: str) -> None:
    finished = run(redirections)
    assert (finished.returncode, finished.stdout) == (7, stdout)


@pytest.mark.parametrize(
    ("redirections", "error"),
    [
        (">&-", "error: standard output is closed\nNext: "),
        (">/dev/full", "error: the output cannot be written: No space left on device\nNext: "),
    ],
)
def test_an_output_that_takes_nothing_is_one_sentence(redirections: str, error: str) -> None:
    finished = run(redirections)
    assert finished.returncode == 1
    assert finished.stderr.startswith(error)
    assert len(finished.stderr.splitlines()) == 2


def test_a_reader_that_has_gone_is_no_error() -> None:
    assert run("| true").stderr in ("said", "")
    assert "Traceback" not in run("| true").stderr
