"""A copy of the images' sources in a separate repository, and the command line to build from it."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.core.git import SOURCES, source_revision
from jobs.core.images import child_name, images, release

ROOT = Path(__file__).parents[3]

ADDED = "2026.11"
"""The last part of the names of releases that `add_image` adds."""

_COMMAND = (sys.executable, "-c", "from jobs.cli import main; main()")


class SourceTree:
    """Sources that start out committed and clean, with a revision that no other sources have."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in SOURCES:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        shutil.copy(ROOT / ".dockerignore", root)
        self.write("images/of-this-tree", uuid.uuid4().hex)  # in no image, so that BuildKit's cached layers still apply
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        return subprocess.run(
            ["git", "-C", str(self.root), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "all")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def append(self, name: str, text: str) -> None:
        path = self.root / name
        path.write_text(path.read_text() + text)

    def add_image(self, name: str, dockerfile: str, *, parent: str | None = None) -> None:
        """Add a folder under images/ and an empty lock file for its image, which is a child of `parent` if given.

        An image without a parent gets a release.
        """
        self.write(f"images/{name}/Dockerfile", dockerfile)
        release = release_of(parent or name)
        self.write(f"images/locks/{release}/{child_name(parent, name) if parent else name}.txt", "")
        if parent is None:
            path = "images/releases.toml"
            rows = (self.root / path).read_text().replace("[default]\n", f'[default]\n{name} = "{release}"\n')
            row = f'image = "{name}"\npython = "3.11"\npytorch = "2.13.0"\ntransformers = "5.24.0"\n'
            self.write(path, f'{rows}\n[releases."{release}"]\n{row}')

    @property
    def revision(self) -> str:
        """Return the revision of the committed sources."""
        return source_revision(self.root).partition("-")[0]

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of `trainyard images ARGUMENTS…` for this tree."""
        return [*_COMMAND, "images", *arguments]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TRAINYARD_"))}
        return {**kept, "PYTHONPATH": str(self.root), "AWS_EC2_METADATA_DISABLED": "true", **(more or {})}

    def images(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout_seconds: float | None = 1500
    ) -> subprocess.CompletedProcess[str]:
        """Run `trainyard images ARGUMENTS…` for this tree until it ends."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            env=self.environment(environment),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )


def release_of(image: str) -> str:
    """Return the default release of an image of the project, or of one that `add_image` has added."""
    root = image.partition("-")[0]
    return release(of=root).name if root in images() else f"{root}-{ADDED}"


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the rows that a successful command printed as JSON."""
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def remove_images(engine: Any, revision: str) -> None:
    """Remove all images of a revision from the engine, under all of their names."""
    for image in engine.images.list():
        for name in image.tags:
            if revision in name:
                engine.images.remove(name, force=True)
