"""Adding an image as images/README.md describes, in a copy of the source. Nothing is built."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from jobs.core.images import release
from tests.support.images.source_tree import ROOT, SourceTree

ROW = release()

COMMAND = ("-c", "from jobs.cli import main; main()")

LOOK = """\
import json, sys
from jobs.core.images import image
from jobs.core.images import release
from jobs.images.check import expected_versions, tests_of

one = image(sys.argv[1])
print(json.dumps([[path.name for path in tests_of(one)], expected_versions(one, release())]))
"""


def test_adding_a_child_image_and_a_root_image(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path / "tree")
    for name in ("pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tree.root)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tree.root,
            env=tree.environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    tree.write("images/probe/Dockerfile", "ARG PARENT_IMAGE\nFROM ${PARENT_IMAGE}\n")
    tree.write("images/probe/test_probe.py", "def test_probe() -> None:\n    import tomli\n")
    tree.write("images/plain/Dockerfile", "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n")
    for image, message in (
        ("gaudi-probe", "pyproject.toml has no group of packages for image gaudi-probe\nnext: add the group"),
        ("plain", "IMAGES does not define what image plain adds to its base\nnext: add the row 'plain' to IMAGES"),
    ):
        refused = run(*COMMAND, "images", "lock", image, ROW.name)
        assert refused.returncode == 3
        assert message in refused.stderr

    project = (tree.root / "pyproject.toml").read_text()
    tree.write("pyproject.toml", project.replace("\nsbom = [\n", '\nprobe = ["tomli==2.0.1"]\nsbom = [\n'))
    done = run(*COMMAND, "images", "lock", "gaudi-probe", ROW.name)
    path = f"images/locks/{ROW.name}/gaudi-probe.txt"
    assert done.stderr == f"{path}\n"
    assert re.fullmatch(r"tomli==2\.0\.1 --hash=sha256:[0-9a-f]{64}", (tree.root / path).read_text().splitlines()[-1])

    tests, versions = json.loads(run("-c", LOOK, "gaudi-probe").stdout)
    assert {"test_files.py", "test_image.py", "test_gaudi.py", "test_probe.py"} <= set(tests)
    assert "test_notebook.py" not in tests
    expected = {"tomli": "2.0.1", "habana-torch-plugin": f"{ROW.name}.*", "transformers": ROW.transformers}
    assert versions | expected == versions
