"""Scripts that know nothing of the platform: they run, are saved, interrupted and resumed, and their errors named."""

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
Path(os.environ["TRAINYARD_OUTPUT"], f"started-{step}").write_text("")
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


def test_an_unchanged_script_resumes_its_last_checkpoint(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train/count.py": COUNTS, "train/words/more.py": "WORD = 'words'\n"})
    s3.put_object(Bucket="data", Key="texts.txt", Body=b"text")
    large = "s3://data/nobody/reads/this.csv"
    inputs = {"texts": "s3://data/texts.txt", "large-table": large}

    # WHEN EC2 reclaims the instance during the training
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
        first.wait_for_line("checkpoint: step-3 (number 3)")
        notice = metadata.give_notice(120)
        assert first.wait() == 75
    # THEN it receives SIGTERM, and its complete checkpoints are saved, but no incomplete one
    again = "if retried, it finds its newest checkpoint in its folder"
    assert first.lines[-1] == f"interrupted: {notice}; the script received SIGTERM; {again}\n", first.output
    assert f"begins at 0 with 'text' ['5', '600', '{large}']\n" in first.lines
    assert run.complete_checkpoints() == [1, 2, 3, 4]
    assert not any("half-" in name for name in run.keys("checkpoints/"))
    assert run.recorded_attempt(1).last_step == 4

    # WHEN it is retried
    second = run.attempt(*flags, attempt=2, kind="script")
    # THEN it finds them at the same path, and finishes
    assert f"begins at 4 with 'text' ['5', '600', '{large}']\n" in second.lines
    # Its inputs have fingerprints, except the streamed one.
    assert [*json.loads(run.read("inputs.json"))["fingerprints"]] == ["s3://data/texts.txt"]
    assert "done words\n" in second.lines
    assert set(run.keys("output/")) == {"output/started-0", "output/started-4", "output/model/weights"}
    assert run.read("output/model/weights") == b"5"
    # After a success all its files are saved
    assert run.complete_checkpoints()[:5] == [1, 2, 3, 4, 5]
    assert len([name for name in run.keys("checkpoints/") if "half-" in name]) == 1, "that of this attempt"
    assert run.receipt().state == "succeeded"
    # The launcher cannot see that it reads the checkpoint
    before, last = run.receipt().attempts
    assert before.restored_step == last.resumed_from_step == 0
    assert before.saved_at is not None
    assert last.restored_step == 4
    assert last.may_repeat
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())


NAMED = """
import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("folder", type=Path)
args = parser.parse_args()
step = 0 if args.resume_from_checkpoint is None else int(Path(args.resume_from_checkpoint, "step").read_text())
print("begins at", step, flush=True)
part = args.folder / "next.part"
part.mkdir()
(part / "step").write_text(str(step + 1))
part.rename(args.folder / f"step-{step + 1}")
(args.folder / "latest").write_text(f"step-{step + 1}")
raise SystemExit(step == 0)
"""


def test_a_command_names_the_newest_checkpoint(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    """The examples of transformers 5 and trl.scripts.sft resume only from the folder that their command names."""
    code = write_files(tmp_path / "code", {"train.py": NAMED})
    flags = script_flags(s3, code, "train.py --resume_from_checkpoint {last_checkpoint} {checkpoints}")
    first = run.attempt(*flags, attempt=1, kind="script", expect=1)
    assert "begins at 0\n" in first.lines
    second = run.attempt(*flags, attempt=2, kind="script")
    assert "begins at 1\n" in second.lines


BESIDE = """
import os, subprocess, sys, time, zipfile
from pathlib import Path

import lib.words                                         # packages of the code's folder and of its src/
import packaged

subprocess.run([sys.executable, "-c", "import lib.words, packaged"], check=True)
assert Path.cwd().name == "one" and sys.argv[1:] == (["--resume"] if Path("snapshot.pt").exists() else [])
assert os.environ["TOKENIZERS_PARALLELISM"] == "true"

def save(path, text):                                    # as torch.save does
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", text)

def read(path):
    return int(zipfile.ZipFile(path).read("data")) if Path(path).exists() else 0

print("begins at", read("snapshot.pt"), read("out/deep/ckpt.pt"), Path("out/half.pt").exists(), flush=True)
Path("out/deep").mkdir(parents=True, exist_ok=True)
Path("out/log.txt").write_text("log")
Path("other.txt").write_text("not kept")
save("out/deep/ckpt.pt", str(read("out/deep/ckpt.pt") + 1))
save("snapshot.pt", str(read("snapshot.pt") + 1))
if read("snapshot.pt") == 1:
    Path("out/half.pt").write_bytes(b"PK and no end")
    time.sleep(600)
"""


def test_what_a_script_writes_beside_itself_survives_a_reclaim(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    """As nanoGPT, minGPT and the examples of PyTorch do, with `resume_arguments` for a script that needs an option."""
    files = {"projects/one/train.py": BESIDE, "lib/words.py": "", "src/packaged/__init__.py": ""}
    flags = script_flags(
        s3,
        write_files(tmp_path / "code", files),
        "python -u train.py",
        workdir="projects/one",
        keep=["out", "snapshot.pt"],
        resume_arguments="--resume",
    )
    options: dict[str, Any] = {"kind": "script", "TOKENIZERS_PARALLELISM": "true"}
    first = run.start(*flags, attempt=1, nproc=1, **options)
    first.wait_for_line("checkpoint: ckpt.pt (number ")
    first.wait_for_line("checkpoint: snapshot.pt (number ")
    assert first.kill(signal.SIGTERM) == 75
    assert first.lines.count("begins at 0 0 False\n") == 1
    second = run.attempt(*flags, attempt=2, **options)
    assert "begins at 1 1 False\n" in second.lines, "without the file that was only half written"
    assert set(run.keys("output/")) == {"output/out/log.txt", "output/out/deep/ckpt.pt", "output/snapshot.pt"}
    assert not any(line.startswith("warning: the script") for line in second.lines)
