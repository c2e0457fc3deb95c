"""The first step after a resume has the gradients that it has in a run that nobody interrupted, to the bit."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.container.launching import PATIENCE_SECONDS


def test_gradients_of_four_ranks_do_not_depend_on_the_steps_before(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.container.four_ranks", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Where the first were true, nothing would be left to mend.
    assert json.loads(ended.stdout) == {"as it is": False, "arranged": True}
