"""`trainyard data put`, `ls`, `show` and `rm` against the deployed stage."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.aws.connection import Aws
from jobs.cli.app import app
from jobs.core.errors import UsageError
from jobs.core.stage import DeployedStage


def trainyard(*arguments: str | Path) -> tuple[str, str]:
    said = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    if said.exception is not None and not isinstance(said.exception, SystemExit):
        raise said.exception
    assert said.exit_code == 0, said.output
    return said.stdout, said.stderr


@pytest.mark.usefixtures("emulated")
def test_data_are_put_listed_shown_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: Aws, stage: DeployedStage
) -> None:
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "films.csv"
    table.write_text("text,label\ngood,1\nbad,0\n")
    printed, said = trainyard("put", table, "data://research/films/")
    assert printed == "data://research/films/films.csv\n"
    assert said.startswith("1 file; fingerprint ")
    fingerprint = said.split()[-1]
    assert trainyard("put", table, "data://research/films/")[1].startswith("1 file, 1 of them there already; ")
    [listed] = json.loads(trainyard("ls", "data://research/films", "-o", "json")[0])
    assert listed == {"location": printed.strip(), "files": 1, "size": 24, "fingerprint": fingerprint}
    assert f"1     24  {fingerprint}  data://research/films/films.csv" in trainyard("ls", "data://research/films")[0]
    assert trainyard("show", printed.strip())[0].startswith("2 training examples, 2 classes\n")
    odd = "data://research/films/what? #2;100%25 a+b.csv"
    assert trainyard("put", table, odd)[0] == f"{odd}\n"
    assert trainyard("show", odd)[0].startswith("2 training examples, 2 classes\n")
    trainyard("rm", odd, "--yes")
    (tmp_path / "german.csv").write_text("text;label\ngut, nicht?;1\nschlecht;0\n")
    warned = trainyard("put", "german.csv", "data://research/films/")[1].splitlines()
    assert warned[0] == "warning: german.csv, line 1: its columns are parted by ';', not by ',' as its name says"
    assert warned[1].startswith("next: save it with ',' between the columns: python3 -c ")
    trainyard("rm", "data://research/films/german.csv", "--yes")
    with pytest.raises(UsageError, match=r"^nothing was removed: 1 file, 24 bytes, at data://research/films\n"):
        trainyard("rm", "data://research/films")
    trainyard("rm", "data://research/films", "--yes")
    assert not connected.s3.list_objects_v2(Bucket=stage.data_bucket, Prefix="research/films").get("Contents")
    with pytest.raises(UsageError, match=r"data://research/ names all data of a team"):
        trainyard("put", table, "data://research/")
