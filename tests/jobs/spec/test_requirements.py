"""Requirements files, read like pip reads them, with the files that they include."""

from pathlib import Path

import pytest

from jobs.core.errors import UsageError
from jobs.spec.requirements import read_requirements
from tests.support.container.scripts import write_files

FILES = {
    "r.txt": """\
# of ours
--extra-index-url https://wheels.example.com/simple  --pre
peft==0.15.2 \\
    --hash=sha256:00 \\
    --hash=sha256:01  # pinned
-r base/more.txt
--constraint=pins.txt
-e ./pkg[extra]
a.whl ; python_version > "3"
git+https://github.com/org/name@v1#egg=name
other @ https://example.com/other.whl
-f wheels
""",
    "base/more.txt": "trl [quantization]>=0.9 ; sys_platform == 'linux'\n",
    "pins.txt": "numpy<2\n",
    "pkg/pyproject.toml": "",
    "a.whl": "",
    "wheels/b.whl": "",
}


def test_lines_are_read_like_pip_reads_them(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    found = read_requirements(tmp_path, "r.txt")
    assert [(line.file, line.number, line.text) for line in found.lines] == [
        ("r.txt", 2, "--extra-index-url https://wheels.example.com/simple  --pre"),
        ("r.txt", 3, "peft==0.15.2     --hash=sha256:00     --hash=sha256:01"),
        ("base/more.txt", 1, "trl [quantization]>=0.9 ; sys_platform == 'linux'"),
        ("r.txt", 8, "./pkg[extra]"),
        ("r.txt", 9, 'a.whl ; python_version > "3"'),
        ("r.txt", 10, "git+https://github.com/org/name@v1#egg=name"),
        ("r.txt", 11, "other @ https://example.com/other.whl"),
        ("r.txt", 12, "-f wheels"),
    ]
    assert [line.requirement for line in found.lines if line.requirement] == [
        "peft==0.15.2",
        "trl [quantization]>=0.9 ; sys_platform == 'linux'",
        "other @ https://example.com/other.whl",
    ]
    assert [line.text for line in found.constraints] == ["numpy<2"]
    assert found.files == ("r.txt", "base/more.txt", "pins.txt")
    assert [path for _, path in found.paths] == ["pkg", "a.whl", "wheels"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_windows_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "r.txt").write_text("peft\r\n", encoding=encoding)
    assert [line.requirement for line in read_requirements(tmp_path, "r.txt").lines] == ["peft"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-r gone.txt", "the code has no file 'gone.txt', which r.txt includes"),
        ("-r r.txt", "circular include: r.txt -> r.txt"),
        ("-r ../base.txt", "r.txt, line 1: '../base.txt' is outside the code's folder"),
        ("-c /etc/pins.txt", "is outside the code's folder"),
        ("./gone.whl", "r.txt, line 1: the code has no 'gone.whl'"),
        ("pkg @ file:///tmp/pkg", "is outside the code's folder"),
        ("-f file:///tmp", "is outside the code's folder"),
        ("--requirem base.txt", "unrecognized arguments"),
        ("-r base.txt --pre", "-r or -c must be on a separate line"),
    ],
)
def test_invalid_requirements_are_rejected(tmp_path: Path, line: str, message: str) -> None:
    write_files(tmp_path, {"r.txt": line, "base.txt": ""})
    with pytest.raises(UsageError) as refused:
        read_requirements(tmp_path, "r.txt")
    assert message in refused.value.args[0]
