"""`trainyard fetch`: downloads the files of a run."""

import json
from pathlib import Path

from jobs.aws.connection import Aws
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.submitting import RunCommand


def test_fetch_downloads_everything_except_checkpoints(
    aws_trainyard: Trainyard, emulated: Aws, run_command: RunCommand, tmp_path: Path
) -> None:
    run = run_command(["true"])
    run_id, place = run.plan.run_id, run.plan.run_location
    contents = {"metrics.jsonl": b"{}\n", "model/config.json": b"{}", "checkpoints/step-1/manifest.json": b"{}"}
    odd = "output/\x1b]0;owned\x07.txt"
    links = b'{"links": {"latest": "step-1", "out": "../../../x", "passwd": "/etc/passwd"}}'
    kept = {"output/step-1": b"1", "output-listing.json": links}
    contents |= {odd: b"", "moves/job.json": b"{}", **kept}
    for name, content in contents.items():
        emulated.s3.put_object(Bucket=place.bucket, Key=(place / name).key, Body=content)
    finished = aws_trainyard("fetch", run_id, expect=0)
    folder = Path("runs") / run_id
    expected = {str(folder / name) for name in ("metrics.jsonl", "model/config.json", "spec.yaml", *kept)}
    kept_there = f"kept on S3 only: 1 checkpoint, 2 B; to download: trainyard fetch {run_id} --checkpoints"
    assert finished.stderr.splitlines() == [kept_there]
    # Control characters of a name are escaped.
    shown = str(folder / "output") + r"/\x1b]0;owned\x07.txt"
    assert set(finished.stdout.splitlines()) == {*expected, shown}
    files = {str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    latest = folder / "output/latest"
    assert files == {*expected, str(folder / odd), str(latest)}, "no link that leads out of its folder"
    assert (tmp_path / latest).readlink() == Path("step-1")
    whole = aws_trainyard("fetch", run_id, "--checkpoints", "--to=~/all", "-o", "json")
    assert whole.stderr == ""
    with_checkpoints = json.loads(whole.stdout)
    assert str(tmp_path / f"home/all/{run_id}/checkpoints/step-1/manifest.json") in with_checkpoints

    # Of a script without output, the newest checkpoint is downloaded too.
    for name in ("code.json", "checkpoints/step-2/manifest.json", "checkpoints/step-2/checkpoints/ckpt.pt"):
        emulated.s3.put_object(Bucket=place.bucket, Key=(place / name).key, Body=b"{}")
    assert "checkpoints/" not in aws_trainyard("fetch", run_id).stdout
    for name in kept:
        emulated.s3.delete_object(Bucket=place.bucket, Key=(place / name).key)
    emulated.s3.delete_object(Bucket=place.bucket, Key=(place / odd).key)
    finished = aws_trainyard("fetch", run_id)
    assert str(folder / "checkpoints/step-2/checkpoints/ckpt.pt") in finished.stdout.splitlines()
    assert "step-1/" not in finished.stdout
    assert "the run has no output, so its newest checkpoint was downloaded" in finished.stderr

    emulated.s3.put_object(Bucket=place.bucket, Key=f"{place.key}../../escaped", Body=b"")
    assert "would be written outside" in aws_trainyard("fetch", run_id, expect=2).stderr
    assert not (tmp_path / "escaped").exists()
