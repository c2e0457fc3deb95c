"""A script's requirements: installed once, from wheels only, without replacing packages of the image."""

import logging
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.container.packages import Environment, fingerprint
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.run import CACHE_TAG
from jobs.spec.requirements import read_requirements
from tests.support.container.scripts import write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def wheel(folder: Path, name: str, *, needs: str = "") -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"NAME = '{name}'\n")
        needed = f"Requires-Dist: {needs}\n" if needs else ""
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def environment(s3: "S3Client", folder: Path, requirements: str) -> Environment:
    (folder / "code").mkdir(parents=True)
    (folder / "code/r.txt").write_text(requirements)
    run = S3Location("runs", "packages/a-run/")
    return Environment(s3, run, folder / "packages", code=folder / "code", requirements="r.txt")


def test_equal_requirements_are_installed_once(
    s3: "S3Client", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wheels = tmp_path / "wheels"
    wheel(wheels, "of_mine", needs="pydantic>=2")
    environment(s3, tmp_path / "one", "of_mine\n").make(wheels=wheels, installs=True)
    other = environment(s3, tmp_path / "two", "of_mine\n").make(wheels=wheels, installs=False)
    assert [line.split(" in ")[0] for line in caplog.messages] == [
        "packages: of_mine",
        "packages: r.txt restored from S3",
    ]
    shown = [sys.executable, "-c", "import of_mine; print(of_mine.NAME, of_mine.__file__)"]
    found = subprocess.run(shown, env=other, capture_output=True, text=True, check=True).stdout.split()
    assert found[0] == "of_mine"
    assert Path(found[1]).is_relative_to(tmp_path / "two/packages")
    assert not list((tmp_path / "one/packages").rglob("pydantic*")), "the image has it"
    [archive] = s3.list_objects_v2(Bucket="runs", Prefix="packages/")["Contents"]
    tags = s3.get_object_tagging(Bucket="runs", Key=archive["Key"])["TagSet"]
    assert [(tag["Key"], tag["Value"]) for tag in tags] == [CACHE_TAG], "it would stay for ever"


def test_replacing_a_package_of_the_image_is_refused(s3: "S3Client", tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "greedy", needs="pydantic>=99")
    with pytest.raises(UsageError) as refused:
        environment(s3, tmp_path / "one", "greedy\n").make(wheels=tmp_path / "wheels", installs=True)
    message = str(refused.value)
    assert message.startswith("r.txt cannot be installed on top of the image's packages: "), message
    assert ": Because all versions of greedy depend on pydantic>=99" in message
    assert "\nNext: " in message


def test_wheels_and_constraints_of_the_code_are_used(s3: "S3Client", tmp_path: Path) -> None:
    def prints(place: Path) -> str:
        return fingerprint(place, read_requirements(place, "r.txt"), {}, {})

    for name in ("one", "other wheel", "other constraint", "other script"):
        write_files(tmp_path / name, {"r.txt": "a.whl\n./a.whl; python_version > '3'\n-c pins.txt", "pins.txt": "x<2"})
        write_files(tmp_path / name, {"a.whl": "1", "train.py": "1"})
    (tmp_path / "other wheel/a.whl").write_text("2")
    (tmp_path / "other constraint/pins.txt").write_text("x<3")
    (tmp_path / "other script/train.py").write_text("2")
    assert prints(tmp_path / "other script") == prints(tmp_path / "one")
    assert len({prints(path) for path in tmp_path.iterdir()}) == 3
    # The installation of a folder may use any file of the code
    for name in ("one", "other script"):
        write_files(tmp_path / name, {"r.txt": "-r base.txt", "base.txt": "-e .  # the code", "pyproject.toml": ""})
    assert prints(tmp_path / "other script") != prints(tmp_path / "one")
