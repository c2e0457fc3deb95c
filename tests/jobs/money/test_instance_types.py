import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto import mock_aws

from jobs.core import instance_types as recorded
from jobs.core.errors import ConfigurationError, NotFoundError, UsageError
from jobs.money.instance_types import main

SOURCE = ["--source", "moto 5.2.5's copy of EC2's answers"]


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "instance_types.json"
    path.write_text(recorded.PATH.read_text())
    monkeypatch.setattr(recorded, "PATH", path)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", "http://localhost:1")  # moto has no prices
    with mock_aws():
        yield path


def test_the_file_is_what_ec2_answers(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # GIVEN a file in which a row differs from EC2's data, and one of a type that EC2 does not list
    written = copy.read_text()
    copy.write_text(written.replace('"card_memory_mib": 45776', '"card_memory_mib": 1'))
    # THEN the command restores the recorded file, and says what EC2 did not tell
    assert main(SOURCE) == 0
    assert copy.read_text() == written
    said = capsys.readouterr().err
    assert "dl1.24xlarge: EC2 does not list it; its row stays\n" in said
    assert re.search(r"^AWS gave no price of g5.xlarge, .*, p4d.24xlarge, .*; the recorded ones stay$", said, re.M)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("g6e.24xlarge", ConfigurationError, "g6e.24xlarge: AWS gave no price\nNext: allow pricing:GetProducts"),
        (
            "g4dn.xlarge",
            ConfigurationError,
            "g4dn.xlarge: its family g4dn is new\nNext: add a row to QUOTAS",
        ),
        ("g9.xlarge", NotFoundError, "EC2 lists no g9.xlarge in us-east-1, us-east-2, us-west-2"),
    ],
)
def test_refuses_a_type_without_its_facts(copy: Path, name: str, error: type[Exception], message: str) -> None:
    written = copy.read_text()
    with pytest.raises(error, match=message):
        main([*SOURCE, "--add", name])
    assert copy.read_text() == written


def test_asks_for_the_source_of_an_emulators_answers(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:4566")
    with pytest.raises(UsageError, match="an emulator's answers are not EC2's\nNext: name their source with --source"):
        main([])
    assert json.loads(copy.read_text())["types"]
