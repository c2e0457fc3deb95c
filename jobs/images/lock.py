"""The Python packages of an image, pinned and hashed: images/locks/<release>/<image>.txt.

    python -m jobs.images.lock IMAGE [RELEASE …]      rewrites them, for all releases if RELEASE is left out
    python -m jobs.images.lock all 1.21.0             for every image of a release

A child asks for the group of pyproject.toml that is called like its folder, and has a file for each image that it is
built on, which leaves all that its parent has as it is.

uv resolves and hashes; it needs a package index. A package has the version that the laptop has (requirements.txt),
unless the release's row asks for another version. Only wheels for the image's Python on x86-64 are hashed: Gaudi and
the other rows of jobs/core/instance_types.json are all of that architecture.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tomllib

from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.images import IMAGES_FOLDER, Image, Release, image, images, release, releases
from jobs.core.output import run_program

ROOT = Path(__file__).parents[2]

EVERY_IMAGE = "all"
"""What stands for every image on the command line."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_PLATFORM = "x86_64-manylinux_2_28"
"""What wheels may ask for, as uv calls it: every base has a newer glibc (Ubuntu 22.04, Debian 12)."""

_UNDECLARED = {("pyarrow", "26.0.0"): "numpy>=2", ("pyarrow", "26.0.1"): "numpy>=2"}
"""What packages ask for when they are imported, and their metadata does not say."""

_RESOLUTION_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an image that is built on a base from elsewhere adds to that base."""

    python: str | None
    """The version of its base's Python; None: that of the release's row."""
    torch: str
    """`base`: the base brings it, and it must stay; `cpu`: PyTorch's CPU build; `default`: what the package index has,
    which for Linux is the CUDA build."""
    brings: tuple[str, ...] = ()
    """What else the base brings that must stay: it is counted on, and in no lock."""
    extra: tuple[str, ...] = ()
    """Requirements beyond those of a job; `{name}` stands for a field of the release's row."""


IMAGES = {
    "gaudi": Contents(
        python=None,
        torch="base",
        # Habana's packages are compiled against the base's NumPy, and one of them asks for just that version. 1.23.5 is
        # the oldest known of a row's base: what takes it takes a newer one too. A setuptools without pkg_resources
        # would break the extensions of PyTorch, and so DeepSpeed.
        brings=("numpy==1.23.5", "setuptools"),
        # The last ones: all that the rows' versions of DeepSpeed ask for between them. A later pynvml warns, at each
        # import of torch, that nvidia-ml-py should be there in its place.
        extra=(
            "optimum-habana=={optimum_habana}",
            *("einops", "hjson", "msgpack", "ninja", "nvidia-ml-py", "py-cpuinfo", "pynvml<12"),
        ),
    ),
    "cpu": Contents(python="3.11", torch="cpu"),
    "cuda": Contents(python="3.11", torch="default"),
}


def contents(of: Image) -> Contents:
    """Return what the image at the bottom of `of` adds to its base.

    Raises ConfigurationError if IMAGES has no row of it.
    """
    try:
        return IMAGES[of.root]
    except KeyError:
        raise ConfigurationError(
            f"nothing says what image {of.root} adds to its base",
            next_step=f"add the row '{of.root}' to IMAGES in jobs/images/lock.py: its Python, and whence its torch",
        ) from None


def lock_file(of: Image, row: Release) -> Path:
    """Return the file that the packages of an image for a release are written down in."""
    return IMAGES_FOLDER / "locks" / row.name / f"{of.name}.txt"


def requirements(of: Image, row: Release) -> list[str]:
    """Return what is asked for in an image, as requirements of pip.

    A child asks for its own group of pyproject.toml. The others ask for the groups that a job needs, and for their own
    if they have one, with the versions that the row decides. Raises ConfigurationError if nothing says it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    if of.parent:
        if of.folder not in groups:
            raise ConfigurationError(
                f"pyproject.toml has no group of packages for image {of.name}",
                next_step=f"add the group '{of.folder}' to [project.optional-dependencies], then make pins",
            )
        return list(groups[of.folder])
    own = contents(of)
    wanted = [*project["dependencies"], *groups["train"], *groups.get(of.name, ())]
    decided = {
        "transformers": f"transformers=={row.transformers}",
        "accelerate": f"accelerate=={row.accelerate}",
    }
    if own.torch == "base":
        decided["torch"] = f"torch=={row.pytorch}"
    names = map(_name, wanted)
    # Without their pins: requirements.txt says them again, as a preference, and an old release may need other ones.
    return [decided.get(name, name) for name in names] + [item.format(**vars(row)) for item in own.extra]


def lock(of: Image, row: Release, *, torch_index: str) -> str:
    """Return the text of the lock file. Raises TrainyardError if the requirements cannot be met."""
    own = contents(of)
    python = own.python or row.python
    inherited = locked(image(of.parent), row) if of.parent else {}
    left_out = [*inherited, *map(_name, own.brings), *(["torch"] if own.torch == "base" else [])]
    options = ["--python-version", python, "--python-platform", _PLATFORM, "--only-binary", ":all:", "--no-header"]
    options += ["--index", torch_index] if own.torch == "cpu" else []
    with tempfile.TemporaryDirectory(prefix="trainyard-lock-") as name:
        asked, fixed, pinned, config, files = (
            Path(name, file) for file in ("in.txt", "fixed.txt", "pins.txt", "uv.toml", "pylock.toml")
        )
        asked.write_text("\n".join(requirements(of, row)))
        fixed.write_text("\n".join([*own.brings, *(f"{name}=={pin}" for name, pin in inherited.items())]))
        pinned.write_text((ROOT / "requirements.txt").read_text())  # uv keeps what it finds here, if that fits
        config.write_text(_metadata(own, row))
        without = [option for name in left_out for option in ("--no-emit-package", name)]
        kept: list[str | Path] = [
            "--config-file",
            config,
            "--constraint",
            fixed,
            "--no-annotate",
            "--no-emit-index-url",
        ]
        _compile(asked, *options, *without, *kept, to=pinned)
        # Of a pin's files, this form names just those that fit the platform.
        _compile(pinned, *options, "--no-deps", to=files)
        packages = tomllib.loads(files.read_text()).get("packages", [])
    pins = []
    for package in packages:
        hashes = sorted(f"--hash=sha256:{wheel['hashes']['sha256']}" for wheel in package["wheels"])
        pins.append(" ".join([f"{package['name']}=={package['version']}", *hashes]))
    below = of.parent or "its base"
    return "\n".join(
        [
            f"# What the image {of.name} adds to {below}, for release {row.name} and Python {python}.",
            f"# Made by `python -m jobs.images.lock {of.name} {row.name}`; do not edit.",
            *sorted(pins),
            "",
        ]
    )


def _metadata(own: Contents, row: Release) -> str:
    """Return uv's configuration: requirements of packages that differ from what their metadata says."""
    needs = [(name, version, [more]) for (name, version), more in _UNDECLARED.items()]
    if own.torch == "base":  # what the base's torch depends on is the base's affair
        needs.append(("torch", row.pytorch, []))
    return "".join(
        f'[[dependency-metadata]]\nname = "{name}"\nversion = "{version}"\nrequires-dist = {more}\n'
        for name, version, more in needs
    )


def locked(of: Image, row: Release) -> dict[str, str]:
    """Return the version of each package in the image's lock file. Raises ConfigurationError if there is none."""
    path = lock_file(of, row)
    if not path.is_file():
        raise ConfigurationError(
            f"image {of.name} has no lock file for release {row.name}: {path.relative_to(ROOT)}",
            next_step=f"python -m jobs.images.lock {of.name} {row.name}",
        )
    return dict(re.findall(r"^([^#=\s]+)==(\S+)", path.read_text(), re.MULTILINE))


def _name(requirement: str) -> str:
    return re.split(r"[=<>~\[ ]", requirement, maxsplit=1)[0]


def _compile(*arguments: str | Path, to: Path) -> None:
    """Have uv write requirements that fit together. Raises TrainyardError if it finds none."""
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "uv",
            "pip",
            "compile",
            "--system-certs",
            "--quiet",
            "--output-file",
            to,
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=_RESOLUTION_SECONDS,
        check=False,
    )
    if done.returncode:
        raise TrainyardError(
            f"uv cannot find the packages (exit code {done.returncode}):\n{done.stderr.strip()}",
            next_step="see that the package index answers, or change the versions in images/releases.toml",
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.images.lock", description="Pin and hash an image's packages.")
    parser.add_argument("image", metavar="IMAGE", help=f"{EVERY_IMAGE}, {', '.join(images())}")
    parser.add_argument("releases", metavar="RELEASE", nargs="*", help="rows of images/releases.toml; none: all")
    parser.add_argument("--torch-index", metavar="URL", default=TORCH_CPU_INDEX, help="where torch's CPU build lies")
    given = parser.parse_args()
    chosen = images().values() if given.image == EVERY_IMAGE else [image(given.image)]
    rows = [release(name) for name in given.releases] or releases().values()
    for one, row in itertools.product(chosen, rows):  # parents come first: a child's lock is made on its parent's
        path = lock_file(one, row)
        text = lock(one, row, torch_index=given.torch_index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
