"""A script that says how long it is busy is not taken for hung, at each level; one that says nothing is."""

from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.train.launching import NewRun
from tests.support.train.scripts import WARM, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LIMIT_SECONDS, BUSY_SECONDS = 6, 9

HURRIED_LAUNCHER = (
    "import sys; from jobs.train import launch; from jobs.train.launcher import watchdog; "
    f"watchdog.START_SECONDS = {LIMIT_SECONDS}.0; sys.exit(launch.main())"
)
"""What lies between two steps of a script has 15 minutes otherwise."""

NOTHING = f"""
import time, trainyard
trainyard.busy(600)
time.sleep({BUSY_SECONDS})
"""

LOOP = f"""
import sys, time, trainyard
run = trainyard.Run(total_steps=2)
run.step()
if sys.argv[1:] == ["says", "so"]:
    run.busy(seconds=600)
time.sleep({BUSY_SECONDS})
run.step()
"""


def test_who_says_how_long_it_is_busy_has_not_hung(new_run: NewRun, s3: "S3Client", tmp_path: Path) -> None:
    files = {"nothing.py": NOTHING, "loop.py": LOOP}
    code = write_files(tmp_path / "code", files)
    silence = {"nothing.py": {"silence_timeout_seconds": LIMIT_SECONDS}}
    started = {
        command: new_run().start(
            *script_flags(s3, code, command, **silence.get(command, {})),
            program=("-c", HURRIED_LAUNCHER),
            options=[f"--hang-timeout-seconds={LIMIT_SECONDS}"],
            **WARM,
        )
        for command in ("nothing.py", "loop.py says so", "loop.py")
    }
    codes = {command: launched.wait() for command, launched in started.items()}
    silent = started["loop.py"]
    assert codes == {command: 75 if launched is silent else 0 for command, launched in started.items()}, "".join(
        launched.output for launched in started.values()
    )
    assert f"last seen between steps after step 1): no step for {LIMIT_SECONDS} s" in silent.lines[-1]
