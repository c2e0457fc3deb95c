"""What a script finds when it starts, through the real launcher: its packages, and its inputs where they are named."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.train.script import inputs
from tests.jobs.train.test_packages import wheel
from tests.support.train.launching import NewRun, Run
from tests.support.train.scripts import script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

TELLS = """
import json, os, sys
import of_mine
found = {name: value for name, value in os.environ.items() if name.startswith("TRAINYARD_INPUT_")}
texts = sorted(os.listdir(found["TRAINYARD_INPUT_TEXTS"]))
print("found", json.dumps([of_mine.NAME, sys.argv[1:], found, texts]), flush=True)
open(os.path.join(os.environ["TRAINYARD_OUTPUT"], os.environ["RANK"]), "w").close()
"""


def put_wheels(s3: "S3Client", folder: Path, place: str, **needs: str) -> str:
    for name, needed in needs.items():
        wheel(folder, name, needs=needed)
    for path in folder.iterdir():
        s3.put_object(Bucket="data", Key=f"{place}/{path.name}", Body=path.read_bytes())
    return f"s3://data/{place}"


def test_it_has_its_packages_and_its_inputs_by_path_or_by_address(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train.py": TELLS, "r.txt": "of_mine\n"})
    for name in ("one.txt", "two.txt"):
        s3.put_object(Bucket="data", Key=f"{tmp_path.name}/texts/{name}", Body=b"text")
    flags = script_flags(
        s3,
        code,
        "train.py {inputs.texts} {inputs.large-table}",
        inputs={"texts": f"s3://data/{tmp_path.name}/texts", "large-table": "s3://data/nobody/reads/this.csv"},
        streamed_inputs=["large-table"],
        requirements="r.txt",
        wheelhouse=put_wheels(s3, tmp_path / "wheels", f"{tmp_path.name}/wheels", of_mine=""),
    )
    first = run.attempt(*flags, kind="script", nproc=2)
    found = [json.loads(line.partition("found ")[2]) for line in first.lines if "found " in line]
    assert len(found) == 2, "one of each rank"
    assert found[0] == found[1]
    package, words, environment, texts = found[0]
    assert package == "of_mine"
    assert words == [environment["TRAINYARD_INPUT_TEXTS"], "s3://data/nobody/reads/this.csv"]
    assert environment["TRAINYARD_INPUT_LARGE_TABLE"] == "s3://data/nobody/reads/this.csv"
    assert texts == ["one.txt", "two.txt"]
    assert any(line.startswith("packages: of_mine in ") for line in first.lines), first.output
    assert set(run.keys("output/")) == {"output/0", "output/1"}
    # What it has read can be told from any other data; nobody has looked into what it streams.
    assert [*json.loads(run.read("inputs.json"))["fingerprints"]] == [f"s3://data/{tmp_path.name}/texts"]

    second = run.attempt(*flags, kind="script", nproc=2, attempt=2)
    assert any(line.startswith("packages: those of r.txt, made before, in ") for line in second.lines), second.output
    assert not any(line.startswith("packages: of_mine in ") for line in second.lines)


def test_requirements_that_cannot_be_met_end_the_attempt_before_any_rank_starts(
    new_run: NewRun, s3: "S3Client", tmp_path: Path
) -> None:
    wheels = put_wheels(s3, tmp_path / "wheels", f"{tmp_path.name}/wheels", greedy="pydantic>=99")
    runs = {}
    for requirement in ("greedy", "nobody-has-made-this"):
        files = {"train.py": "print('a rank runs')\n", "r.txt": f"{requirement}\n"}
        code = write_files(tmp_path / requirement, files)
        flags = script_flags(s3, code, "train.py", requirements="r.txt", wheelhouse=wheels)
        runs[requirement] = new_run().start(*flags, kind="script")
    assert [launched.wait() for launched in runs.values()] == [1, 1]
    said = {requirement: launched.lines[-1] for requirement, launched in runs.items()}
    for requirement, line in said.items():
        assert line.startswith("error: r.txt cannot be installed on top of the image's packages: "), line
        assert ". Next: " in line
        assert "a rank runs" not in runs[requirement].output
        assert "Traceback" not in runs[requirement].output
    assert "pydantic" in said["greedy"]
    assert "No matching distribution found for nobody-has-made-this" in said["nobody-has-made-this"]


def test_an_input_that_takes_long_tells_how_far_it_is(
    s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="trainyard")
    monkeypatch.setattr(inputs, "PROGRESS_SECONDS", 0.0)
    for name in ("a", "b"):
        s3.put_object(Bucket="data", Key=f"{tmp_path.name}/{name}", Body=b"x" * 1_000_000)
    found = inputs.bring(s3, "texts", f"s3://data/{tmp_path.name}", tmp_path)
    assert sorted(path.name for path in found.iterdir()) == ["a", "b"]
    assert "input texts: 2 MB of 2 MB fetched" in caplog.messages
