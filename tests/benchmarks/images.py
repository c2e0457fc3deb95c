"""How long images take to build, cold and after a code edit, and what they add to their base.

    python -m tests.benchmarks.images [IMAGE …]       cpu and all that is built on it, where none is named
    python -m tests.benchmarks.images cpu --base-image localhost:5000/python:3.11 --torch-index http://127.0.0.1:8000 \
        --network host

Needs a Docker engine. Cold: on a base with a layer that BuildKit has never seen, so nothing comes from its cache, and
the packages are fetched anew; the base itself is there already. After an edit: one line of jobs/ has changed, and the
image is ready together with all that it is built on. The targets are those of images/cpu: ready within 5 s, at most
1.3 times what the wheel of PyTorch unpacks to.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import docker

from jobs.images.hierarchy import Image, image, with_descendants
from tests.jobs.images.source_tree import SourceTree

EDIT_TARGET_SECONDS = 5.0
SIZE_TARGET = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.images", description=__doc__)
    parser.add_argument("images", metavar="IMAGE", nargs="*", help="as for trainyard images build")
    parser.add_argument(
        "--base-image",
        metavar="IMAGE",
        default="public.ecr.aws/docker/library/python:3.11-slim-bookworm",
        help="what roots extend",
    )
    parser.add_argument("--torch-index", metavar="URL", help="where torch's CPU build lies")
    parser.add_argument("--network", metavar="MODE", help="Docker's network mode")
    options = parser.parse_args()
    chosen = [image(name) for name in options.images] or [*with_descendants("cpu")]
    engine = docker.from_env(timeout=600)
    with tempfile.TemporaryDirectory(prefix="trainyard-benchmark-") as folder:
        tree = SourceTree(Path(folder))
        base = _unknown_base(engine, options.base_image)
        given = ["--build-arg", f"BASE_IMAGE={base}"]
        given += ["--build-arg", f"TORCH_INDEX={options.torch_index}"] if options.torch_index else []
        given += ["--network", options.network] if options.network else []
        try:
            cold = _build(tree, chosen, given)
            tree.append("jobs/train/launch.py", "# edited\n")
            edited = _build(tree, chosen, given)
        finally:
            _remove(engine, tree.revision, base)
    torch_bytes = _torch_bytes()
    print(f"PyTorch {distribution('torch').version} unpacks to {torch_bytes / 1e6:.0f} MB")
    print(f"{'image':16}{'cold':>10}{'after edit':>14}{'over base':>12}{'x torch':>9}")
    for one in chosen:
        size = cold[one.name]["added_bytes"]
        edit = edited[one.name]["seconds"] + (edited[one.parent]["seconds"] if one.parent else 0)
        ratio = size / torch_bytes
        print(
            f"{one.name:16}{cold[one.name]['seconds']:8.1f} s{edit:12.1f} s{size / 1e6:9.0f} MB"
            f"{'' if one.parent else f'{ratio:9.3f}'}{_verdict(one, edit, ratio)}"
        )


def _unknown_base(engine: docker.DockerClient, base: str) -> str:
    """The base with a layer that no other image has."""
    command = ["sh", "-c", "head -c 16 /dev/urandom > /benchmark"]
    made = engine.containers.create(base, command, network_mode="none")
    try:
        made.start()
        made.wait()
        # A committed container has a name of its own, by which BuildKit finds it.
        made.commit(repository="trainyard-benchmark/base", tag=made.short_id)
    finally:
        made.remove(force=True)
    return f"trainyard-benchmark/base:{made.short_id}"


def _build(tree: SourceTree, chosen: Sequence[Image], options: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By name, what `trainyard images build` says of each."""
    done = tree.images("build", *(one.name for one in chosen), *options, "-o", "json", timeout_seconds=None)
    if done.returncode:
        sys.exit(done.stderr)
    print(done.stderr, file=sys.stderr)
    return {row["image"]: row for row in json.loads(done.stdout)}


def _remove(engine: docker.DockerClient, revision: str, base: str) -> None:
    names = [name for found in engine.images.list() for name in found.tags if revision in name]
    for name in [*names, base]:
        engine.images.remove(name, force=True)


def _torch_bytes() -> int:
    """What the wheel of PyTorch that is installed here has in it."""
    files = distribution("torch").files or []
    return sum(file.size or 0 for file in files if file.suffix != ".pyc")


def _verdict(one: Image, edit_seconds: float, ratio: float) -> str:
    if one.name != "cpu":
        return ""
    verdicts = {True: "met", False: "missed"}
    return (
        f"   edit <= {EDIT_TARGET_SECONDS:.0f} s {verdicts[edit_seconds <= EDIT_TARGET_SECONDS]}, "
        f"size <= {SIZE_TARGET} x {verdicts[ratio <= SIZE_TARGET]}"
    )


if __name__ == "__main__":
    main()
