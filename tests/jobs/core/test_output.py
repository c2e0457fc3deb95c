"""Programs whose standard streams are closed, full or not read; and progress lines."""

import subprocess
import sys

import pytest

from jobs.core.output import Progress

PROGRAM = """
import sys
from jobs.core.output import run_program

def main():
    print("a line")
    sys.stderr.write(f"{sys.stdin.read()}text")
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
def test_program_keeps_its_exit_code_and_separate_streams(redirections: str) -> None:
    finished = run(redirections)
    assert (finished.returncode, finished.stdout) == (7, "a line\n")


def test_unwritable_output_is_an_error_but_a_closed_pipe_is_not() -> None:
    closed, full, gone = run(">&-"), run(">/dev/full"), run("| true")
    assert closed.stderr.startswith("error: standard output is closed\nNext: ")
    assert full.stderr.startswith("error: cannot write to standard output: No space left on device\nNext: ")
    for finished in (closed, full):
        assert (finished.returncode, len(finished.stderr.splitlines())) == (1, 2)
    assert gone.stderr in ("text", "")


def test_progress_is_parsed_from_a_log_line() -> None:
    progress = Progress(25, 100, "loss 0.41")
    assert str(progress) == "[progress] 25/100 loss 0.41"
    assert Progress.parse(f"2026-11-21 12:00:05 {progress}") == progress
    assert Progress.parse(str(Progress(0, 100))) == Progress(0, 100)


@pytest.mark.parametrize("line", ["", "25/100", "[progress] of the war", "[progress] a/100", "progress 25/100"])
def test_other_log_lines_have_no_progress(line: str) -> None:
    assert Progress.parse(line) is None
