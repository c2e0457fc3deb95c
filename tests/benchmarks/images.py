"""How long an image and its children take to build, cold and after a code edit, and what they add to their base.

    python -m tests.benchmarks.images           of cpu
    python -m tests.benchmarks.images gaudi     of gaudi, on the stand-in for Habana's image
    python -m tests.benchmarks.images cuda      of cuda; fetches gigabytes
    python -m tests.benchmarks.images cpu --base-image localhost:5000/python:3.11 --torch-index http://127.0.0.1:8000

Needs a Docker engine: `.ci/docker-engine python -m …` brings one. A base that cannot be pulled is made first. Cold: on
a base with a layer that BuildKit has never seen, so nothing comes from its cache, and the packages are fetched anew;
the base itself is there already, and neither its fetching nor its making counts. After an edit: one line of jobs/ has
changed, and `trainyard images build IMAGE` makes that image with what it is built on; the time is the whole command's,
the median of several edits. The targets: done within 5 s, and cpu adds at most what `trainyard images test` allows it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import docker

from jobs.contract.image_hierarchy import Image, images, with_descendants
from jobs.images.checks.configuration import TORCH_RATIO
from tests.support.images import habana_stand_in
from tests.support.images.docker_engine import index_of_torch, python_base
from tests.support.images.source_tree import SourceTree

EDIT_TARGET_SECONDS = 5.0


@dataclass(frozen=True)
class Prepared:
    tree: SourceTree
    options: Sequence[str]
    """Options of `trainyard images build`, for a cold one."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.images", description=__doc__)
    roots = [one.name for one in images().values() if not one.parent]
    parser.add_argument("root", metavar="IMAGE", nargs="?", default="cpu", choices=roots, help=", ".join(roots))
    parser.add_argument("--base-image", metavar="IMAGE", help="what it is built on")
    parser.add_argument("--torch-index", metavar="URL", help="where torch's CPU build lies")
    parser.add_argument("--edits", metavar="N", type=int, default=3)
    options = parser.parse_args()
    chosen = [*with_descendants(options.root)]
    client = docker.from_env(timeout=600)
    with (
        tempfile.TemporaryDirectory(prefix="trainyard-benchmark-") as folder,
        _prepared(client, options, Path(folder)) as prepared,
    ):
        rows = _build(prepared.tree, [one.name for one in chosen], prepared.options)
        cold = {row["image"]: row for row in rows}
        seconds = {one.name: _edits(prepared, one, options.edits) for one in chosen}
    client.close()
    torch_bytes = _torch_bytes()
    print(f"PyTorch {distribution('torch').version} unpacks to {torch_bytes / 1e6:.0f} MB; {os.cpu_count()} cores")
    print(f"{'image':16}{'cold':>10}{'after an edit':>26}{'adds':>10}")
    for one in chosen:
        times = seconds[one.name]
        edit, size = statistics.median(times), cold[one.name]["added_bytes"]
        spread = f"{edit:.1f} s ({min(times):.1f} to {max(times):.1f})"
        verdict = _verdict(one, edit, size / torch_bytes)
        print(f"{one.name:16}{cold[one.name]['seconds']:8.1f} s{spread:>26}{size / 1e6:7.0f} MB   {verdict}")


@contextmanager
def _prepared(client: docker.DockerClient, options: argparse.Namespace, folder: Path) -> Iterator[Prepared]:
    """Sources whose images can be built on a base that BuildKit has never seen. What was built goes at the end."""
    chosen = [*with_descendants(options.root)]
    with ExitStack() as stack:
        given = ["--network", "host"]
        tree = None
        base = options.base_image
        if options.root == "cpu":
            index = options.torch_index or stack.enter_context(index_of_torch(_folder(folder, "torch")))
            given += ["--build-arg", f"TORCH_INDEX={index}"]
        if options.root == "gaudi" and base is None:
            habana_base = habana_stand_in.ubuntu(client, _folder(folder, "ubuntu"))
            if habana_base is None:
                index = options.torch_index or stack.enter_context(index_of_torch(_folder(folder, "torch")))
                habana_base = habana_stand_in.debian(python_base(client, folder), index)
            base = stack.enter_context(habana_stand_in.habana_image(client, habana_base, _folder(folder, "habana")))
            tree = habana_stand_in.sources(folder / "tree", habana_base, [one.name for one in chosen])
        base = base or python_base(client, folder)
        tree = tree or SourceTree(folder / "tree")
        unknown = _unknown(client, base)
        try:
            yield Prepared(tree, [*given, "--build-arg", f"BASE_IMAGE={unknown}"])
        finally:
            names = [name for found in client.images.list() for name in found.tags if tree.revision in name]
            for name in [*names, unknown]:
                client.images.remove(name, force=True)


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def _unknown(client: docker.DockerClient, base: str) -> str:
    """The base with a layer that no other image has."""
    command = ["sh", "-c", "head -c 16 /dev/urandom > /benchmark"]
    made = client.containers.create(base, command, network_mode="none")
    try:
        made.start()
        made.wait()
        # A committed container has a name of its own, by which BuildKit finds it.
        made.commit(repository="trainyard-benchmark/base", tag=made.short_id)
    finally:
        made.remove(force=True)
    return f"trainyard-benchmark/base:{made.short_id}"


def _edits(prepared: Prepared, one: Image, times: int) -> list[float]:
    """Seconds of each command that makes this image after an edit."""
    seconds = []
    for number in range(times):
        prepared.tree.append("jobs/train/launch.py", f"# edited: {one.name}, {number}\n")
        began = time.monotonic()
        _build(prepared.tree, [one.name], prepared.options)
        seconds.append(time.monotonic() - began)
    return seconds


def _build(tree: SourceTree, names: Sequence[str], options: Sequence[str]) -> list[dict[str, Any]]:
    """What `trainyard images build` says of each."""
    done = tree.images("build", *names, *options, "-o", "json", timeout_seconds=None)
    if done.returncode:
        sys.exit(done.stderr)
    print(done.stderr, file=sys.stderr)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def _torch_bytes() -> int:
    """What the wheel of PyTorch that is installed here has in it."""
    files = distribution("torch").files or []
    return sum(file.size or 0 for file in files if file.suffix != ".pyc")


def _verdict(one: Image, edit_seconds: float, ratio: float) -> str:
    verdicts = {True: "met", False: "missed"}
    edit = f"edit <= {EDIT_TARGET_SECONDS:.0f} s {verdicts[edit_seconds <= EDIT_TARGET_SECONDS]}"
    size = f", {ratio:.3f} x torch <= {TORCH_RATIO} {verdicts[ratio <= TORCH_RATIO]}"
    return edit + (size if one.name == "cpu" else "")


if __name__ == "__main__":
    main()
