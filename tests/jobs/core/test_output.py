"""What becomes of a program whose standard output, or another stream, is closed, full, or read by nobody."""

import subprocess
import sys

import pytest

from jobs.core.output import Progress

PROGRAM = """
import sys
from jobs.core.output import run_program

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


@pytest.mark.parametrize("redirections", ["", "2>&-", "<&-"])
def test_a_program_ends_with_its_own_code_and_streams_stay_apart(redirections: str) -> None:
    finished = run(redirections)
    assert (finished.returncode, finished.stdout) == (7, "a line\n")


def test_an_output_that_takes_nothing_is_one_sentence_and_a_reader_that_has_gone_no_error() -> None:
    closed, full, gone = run(">&-"), run(">/dev/full"), run("| true")
    assert closed.stderr.startswith("error: standard output is closed\nNext: ")
    assert full.stderr.startswith("error: the output cannot be written: No space left on device\nNext: ")
    for finished in (closed, full):
        assert (finished.returncode, len(finished.stderr.splitlines())) == (1, 2)
    assert gone.stderr in ("said", "")


def test_progress_is_read_back_out_of_a_line_of_the_log() -> None:
    progress = Progress(25, 100, "loss 0.41")
    assert str(progress) == "[progress] 25/100 loss 0.41"
    assert Progress.parse(f"2026-11-21 12:00:05 {progress}") == progress
    assert Progress.parse(str(Progress(0, 100))) == Progress(0, 100)


@pytest.mark.parametrize("line", ["", "25/100", "[progress] of the war", "[progress] a/100", "progress 25/100"])
def test_other_lines_are_no_progress(line: str) -> None:
    assert Progress.parse(line) is None
