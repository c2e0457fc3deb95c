"""Scripts that know nothing of the platform: started, kept, interrupted, gone on with, and told what is wrong."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.jobs.container.script.test_interrupted_scripts import EAGER
from tests.support.container.launching import Run
from tests.support.container.metadata_service import MetadataService
from tests.support.container.scripts import script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

COUNTS = """
import json, os, signal, sys, time
from pathlib import Path

import words.more                                        # a module beside the script

folder = Path(sys.argv[1])
newest = max(folder.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)
step = int((newest / "step").read_text()) if newest else 0
print(f"begins at {step} with {Path(os.environ['TRAINYARD_INPUT_TEXTS']).read_text()!r}", sys.argv[2:], flush=True)
Path(os.environ["TRAINYARD_OUTPUT"], f"begun-{step}").write_text("")
assert os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "1" and __name__ == "__main__"

def save(step):
    part = folder / f".step-{step}"
    part.mkdir()
    (part / "step").write_text(str(step))
    half = folder / f"half-{step}"                       # of which the rest is never written
    half.mkdir()
    (half / "step").write_text(str(step))
    part.rename(folder / f"step-{step}")

signal.signal(signal.SIGTERM, lambda *_: save(step + 1) or sys.exit(0))
while step < int(sys.argv[2]):
    step += 1
    save(step)
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
    large = "s3://data/nobody/reads/this.csv"
    inputs = {"texts": "s3://data/texts.txt", "large-table": large}

    # WHEN EC2 takes the instance back in its midst
    flags = script_flags(
        s3,
        code,
        "train/count.py {checkpoints} 5 600 {inputs.large-table}",
        inputs=inputs,
        streamed_inputs=["large-table"],
    )
    with MetadataService() as metadata:
        first = run.start(*flags, attempt=1, nproc=1, kind="script", program=("-c", EAGER), **metadata.environment)
        first.wait_for_line("three")
        first.wait_for_line("checkpoint: step 3 (step-3)")
        notice = metadata.give_notice(120)
        assert first.wait() == 75
    # THEN it got SIGTERM, and what it had completed and saved then is kept, and no half of one
    again = "if it is started again, it finds its newest checkpoint in its folder"
    assert first.lines[-1] == f"interrupted: {notice}; the script got SIGTERM; {again}\n", first.output
    assert f"begins at 0 with 'text' ['5', '600', '{large}']\n" in first.lines
    assert run.complete_checkpoints() == [1, 2, 3, 4]
    assert not any("half-" in name for name in run.keys("checkpoints/"))
    assert run.recorded_attempt(1).last_step == 4

    # WHEN it is started again
    second = run.attempt(*flags, attempt=2, kind="script")
    # THEN it finds them where they lay, and ends
    assert f"begins at 4 with 'text' ['5', '600', '{large}']\n" in second.lines
    # What it has read can be told from any other data; nobody has looked into what it streams.
    assert [*json.loads(run.read("inputs.json"))["fingerprints"]] == ["s3://data/texts.txt"]
    assert "done words\n" in second.lines
    assert set(run.keys("output/")) == {"output/begun-0", "output/begun-4", "output/model/weights"}
    assert run.read("output/model/weights") == b"5"
    # What it leaves at its good end is kept, whatever it looks like
    assert run.complete_checkpoints()[:5] == [1, 2, 3, 4, 5]
    assert len([name for name in run.keys("checkpoints/") if "half-" in name]) == 1, "that of this attempt"
    assert run.receipt().state == "succeeded"
    # Nobody has seen it read the checkpoint
    before, last = run.receipt().attempts
    assert before.restored_step == last.resumed_from_step == 0
    assert before.saved_at is not None
    assert last.restored_step == 4
    assert last.may_repeat
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())
