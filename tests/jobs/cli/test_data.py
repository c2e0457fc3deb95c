"""`trainyard data put`, `ls`, `show` and `rm` on the deployed stage."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.aws.connection import Aws
from jobs.cli.app import app
from jobs.core.errors import UsageError
from jobs.core.stage import DeployedStage


def trainyard(*arguments: str | Path) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.usefixtures("emulated")
def test_data_is_uploaded_listed_shown_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: Aws, stage: DeployedStage
) -> None:
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "films.csv"
    table.write_text("text,label\ngood,1\nbad,0\n")
    printed, messages = trainyard("put", table, "data://research/films/")
    assert printed == "data://research/films/films.csv\n"
    assert messages.startswith("1 file; fingerprint ")
    fingerprint = messages.split()[-1]
    assert trainyard("put", table, "data://research/films/")[1].startswith("1 file, 1 already uploaded; ")
    [listed] = json.loads(trainyard("ls", "data://research/films", "-o", "json")[0])
    whole = json.loads(trainyard("ls", "-o", "json")[0])
    assert "data://research/films/" in [entry["location"] for entry in whole]
    assert listed == {"location": printed.strip(), "files": 1, "size": 24, "fingerprint": fingerprint}
    assert f"1     24  {fingerprint}  data://research/films/films.csv" in trainyard("ls", "data://research/films")[0]
    assert trainyard("show", printed.strip())[0].startswith("2 training examples, 2 classes\n")
    odd = "data://research/films/what? #2;100%25 a+b.csv"
    assert trainyard("put", table, odd)[0] == f"{odd}\n"
    assert trainyard("show", odd)[0].startswith("2 training examples, 2 classes\n")
    trainyard("rm", odd, "--yes")
    (tmp_path / "german.csv").write_text("text;label\ngut, nicht?;1\nschlecht;0\n")
    warned = trainyard("put", "german.csv", "data://research/films/")[1].splitlines()
    assert warned[0] == "warning: german.csv, line 1: its columns are separated by ';', not by ','"
    assert warned[1] == "next: set delimiter: ';'"
    with pytest.raises(UsageError, match=r"separated by ';', not by ','\nNext: add --delimiter ';'"):
        trainyard("show", "german.csv")
    trainyard("rm", "data://research/films/german.csv", "--yes")
    with pytest.raises(UsageError, match=r"^nothing was deleted: 1 file, 24 bytes, at data://research/films\n"):
        trainyard("rm", "data://research/films")
    trainyard("rm", "data://research/films", "--yes")
    assert not connected.s3.list_objects_v2(Bucket=stage.data_bucket, Prefix="research/films").get("Contents")
    with pytest.raises(UsageError, match=r"data://research/ is the folder of all of the team's data"):
        trainyard("put", table, "data://research/")
