import os
import signal
import subprocess
import sys

import pytest

from tests.support.infra.synthesis import ROOT


@pytest.mark.parametrize(
    "program",
    ["infra.rules", "infra.idle_costs"],
)
def test_a_reader_that_goes_away_ends_the_program_without_a_word(program: str) -> None:
    # GIVEN a pipe whose reader is gone, as `head` is after ten lines
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", program],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
    finally:
        os.close(writer)
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == -signal.SIGPIPE
