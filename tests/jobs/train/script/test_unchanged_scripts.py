"""Scripts that know nothing of the platform: started, kept, interrupted, gone on with, and told what is wrong."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.train.launching import Run
from tests.support.train.scripts import script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

COUNTS = """
import json, os, sys, time
from pathlib import Path

import words.more                                        # a module beside the script

folder = Path(sys.argv[1])
newest = max(folder.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)
step = int((newest / "step").read_text()) if newest else 0
print(f"begins at {step} with {Path(os.environ['TRAINYARD_INPUT_TEXTS']).read_text()!r}", sys.argv[2:], flush=True)
Path(os.environ["TRAINYARD_OUTPUT"], f"begun-{step}").write_text("")
assert os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "1" and __name__ == "__main__"
while step < int(sys.argv[2]):
    step += 1
    part = folder / f".step-{step}"
    part.mkdir()
    (part / "step").write_text(str(step))
    half = folder / f"half-{step}"                       # of which the rest is never written
    half.mkdir()
    (half / "step").write_text(str(step))
    part.rename(folder / f"step-{step}")
    if step == 3:
        print("three", flush=True)
        time.sleep(float(sys.argv[3]))
Path(os.environ["TRAINYARD_OUTPUT"], "model").mkdir()
Path(os.environ["TRAINYARD_OUTPUT"], "model", "weights").write_text(str(step))
print("done", words.more.WORD)
"""


def test_it_runs_as_it_is_and_goes_on_from_what_it_had_completed(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train/count.py": COUNTS, "train/words/more.py": "WORD = 'words'\n"})
    s3.put_object(Bucket="data", Key="texts.txt", Body=b"text")
    inputs = {"texts": "s3://data/texts.txt"}

    # WHEN it is asked to end in its midst
    flags = script_flags(s3, code, "train/count.py {checkpoints} 5 600", inputs=inputs)
    first = run.start(*flags, kind="script")
    first.wait_for_line("three")
    first.wait_for_line("checkpoint: step 3 (step-3)")
    assert first.kill(signal.SIGTERM) == 75
    # THEN it got the signal, and what it had completed is kept, and no half of one
    again = "if it is started again, it finds its newest checkpoint in its folder"
    assert first.lines[-1] == f"interrupted: SIGTERM; the script got SIGTERM; {again}\n", first.output
    assert "begins at 0 with 'text' ['5', '600']\n" in first.lines
    assert run.complete_checkpoints() == [1, 2, 3]
    assert not any("half-" in name for name in run.keys("checkpoints/"))
    assert run.recorded_attempt(1).last_step == 3

    # WHEN it is started again
    second = run.attempt(*flags, attempt=2, kind="script")
    # THEN it finds them where they lay, and ends
    assert "begins at 3 with 'text' ['5', '600']\n" in second.lines
    assert "done words\n" in second.lines
    assert set(run.keys("output/")) == {"output/begun-0", "output/begun-3", "output/model/weights"}
    assert run.read("output/model/weights") == b"5"
    # What it leaves at its good end is kept, whatever it looks like
    assert run.complete_checkpoints()[:5] == [1, 2, 3, 4, 5]
    assert len([name for name in run.keys("checkpoints/") if "half-" in name]) == 2, "those of this attempt"
    assert run.receipt().state == "succeeded"
    # Nobody has seen it read the checkpoint
    before, last = run.receipt().attempts
    assert before.put_back_step == last.resumed_from_step == 0
    assert before.saved_at is not None
    assert last.put_back_step == 3
    assert last.may_repeat
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())


LEAVES_EVENTS = """
import os, sys, time
from pathlib import Path

output = Path(os.environ["TRAINYARD_OUTPUT"])
found = sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())
print("found", found, flush=True)
(output / "runs").mkdir(exist_ok=True)
(output / "runs" / f"events.out.tfevents.{len(found)}").touch()
if not found:
    (output / "notes.txt").touch()
    print("waits", flush=True)
    time.sleep(600)
"""


def test_where_no_checkpoint_was_saved_the_next_attempt_finds_no_events_of_what_it_does_again(
    run: Run, s3: "S3Client", tmp_path: Path
) -> None:
    """With them run_glue.py, run_mlm.py and run_clm.py would refuse the folder."""
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": LEAVES_EVENTS}), "train.py")
    first = run.start(*flags, kind="script")
    first.wait_for_line("waits")
    assert first.kill(signal.SIGTERM) == 75
    assert set(run.keys("output/")) == {"output/notes.txt", "output/runs/events.out.tfevents.0"}
    second = run.attempt(*flags, attempt=2, kind="script")
    assert "found ['notes.txt']\n" in second.lines
    assert set(run.keys("output/")) == {"output/notes.txt", "output/runs/events.out.tfevents.1"}
