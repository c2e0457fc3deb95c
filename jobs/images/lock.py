"""Pin and hash the Python packages of an image, in images/locks/<release>/<image>.txt.

    trainyard images lock IMAGE [RELEASE …]      rewrites the files, for all releases of the image if none is named
    trainyard images lock all 1.21.0             for every image of a release

A child image installs the group of pyproject.toml that is named after its folder. It has a lock file for each parent,
and leaves the parent's packages unchanged.

uv resolves and hashes the packages, which needs a package index. Each package gets the laptop's version
(requirements.txt), unless the release's row names another version. Only wheels for the image's Python on x86-64 are
hashed, because all rows of jobs/core/instance_types.json have that architecture.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.images import IMAGES_FOLDER, Image, Release, check_image, image, images, release, releases

ROOT = Path(__file__).parents[2]

EVERY_IMAGE = "all"
"""On the command line, all images."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_PLATFORM = "x86_64-manylinux_2_28"
"""The platform of allowed wheels, in uv's notation. Every base has a newer glibc (Ubuntu 22.04, Debian 12)."""

_UNDECLARED = {("pyarrow", "26.0.0"): "numpy>=2", ("pyarrow", "26.0.1"): "numpy>=2"}
"""Requirements that packages need when imported, but do not declare in their metadata."""

_RESOLUTION_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The packages that a root image adds to its base."""

    torch: str
    """Where PyTorch comes from. `base`: the base has it, and it must not change. `cpu`: PyTorch's CPU build. `default`:
    the package index, whose version on Linux is the CUDA build."""
    kept: tuple[str, ...] = ()
    """Other packages of the base that must not change. They are constraints, and not in the lock file."""
    extra: tuple[str, ...] = ()
    """Requirements beyond those of a job. `{name}` is replaced by a field of the release's row."""


IMAGES = {
    "gaudi": Contents(
        torch="base",
        # Habana's packages are compiled against the base's NumPy, and one of them requires exactly that version. 1.23.5
        # is the oldest version in any row's base; packages that accept it accept newer ones too. A setuptools without
        # pkg_resources would break PyTorch's extensions, and so DeepSpeed.
        kept=("numpy==1.23.5", "setuptools"),
        # After optimum-habana: everything that the DeepSpeed versions of all rows require. A later pynvml warns at each
        # import of torch that nvidia-ml-py should be installed instead.
        extra=(
            "optimum-habana=={optimum_habana}",
            *("einops", "hjson", "msgpack", "ninja", "nvidia-ml-py", "py-cpuinfo", "pynvml<12"),
        ),
    ),
    "cpu": Contents(torch="cpu"),
    "cuda": Contents(torch="default"),
}


def contents(img: Image) -> Contents:
    """Return the packages that the root image of `img` adds to its base.

    Raises ConfigurationError if IMAGES has no row for it.
    """
    try:
        return IMAGES[img.root]
    except KeyError:
        raise ConfigurationError(
            f"IMAGES does not define what image {img.root} adds to its base",
            next_step=f"add the row '{img.root}' to IMAGES in jobs/images/lock.py, with the source of its torch",
        ) from None


def lock_file(img: Image, row: Release) -> Path:
    """Return the path of an image's lock file for a release."""
    return IMAGES_FOLDER / "locks" / row.name / f"{img.name}.txt"


def requirements(img: Image, row: Release) -> list[str]:
    """Return the requirements of an image, in pip's syntax.

    A child has its own group in pyproject.toml. A root has the groups that a job needs and its own group if there is
    one, with the versions of the row. Raises ConfigurationError if a child's group is missing.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    if img.parent:
        if img.folder not in groups:
            raise ConfigurationError(
                f"pyproject.toml has no group of packages for image {img.name}",
                next_step=f"add the group '{img.folder}' to [project.optional-dependencies], then make pins",
            )
        return list(groups[img.folder])
    own = contents(img)
    wanted = [*project["dependencies"], *groups["train"], *groups.get(img.name, ())]
    versions = {
        "transformers": f"transformers=={row.transformers}",
        "accelerate": f"accelerate=={row.accelerate}",
        "torch": f"torch=={row.pytorch}",
    }
    names = map(_name, wanted)
    # Without their pins: requirements.txt adds them as preferences, and an old release may need other versions.
    return [versions.get(name, name) for name in names] + [item.format(**vars(row)) for item in own.extra]


def lock(img: Image, row: Release, *, torch_index: str) -> str:
    """Return the text of the lock file. Raises TrainyardError if the requirements conflict."""
    own = contents(img)
    python = row.python
    inherited = locked(image(img.parent), row) if img.parent else {}
    left_out = [*inherited, *map(_name, own.kept), *(["torch"] if own.torch == "base" else [])]
    options = ["--python-version", python, "--python-platform", _PLATFORM, "--only-binary", ":all:", "--no-header"]
    options += ["--index", torch_index] if own.torch == "cpu" else []
    with tempfile.TemporaryDirectory(prefix="trainyard-lock-") as name:
        wanted, fixed, pinned, config, files = (
            Path(name, file) for file in ("in.txt", "fixed.txt", "pins.txt", "uv.toml", "pylock.toml")
        )
        wanted.write_text("\n".join(requirements(img, row)))
        fixed.write_text("\n".join([*own.kept, *(f"{name}=={pin}" for name, pin in inherited.items())]))
        pinned.write_text((ROOT / "requirements.txt").read_text())  # uv prefers the versions it finds here
        config.write_text(_metadata(own, row))
        without = [option for name in left_out for option in ("--no-emit-package", name)]
        further = ("--config-file", config, "--constraint", fixed, "--no-annotate", "--no-emit-index-url")
        _compile(wanted, *options, *without, *further, to=pinned)
        # In this format uv lists only those files of a pin that fit the platform.
        _compile(pinned, *options, "--no-deps", to=files)
        packages = tomllib.loads(files.read_text()).get("packages", [])
    pins = []
    for package in packages:
        hashes = sorted(f"--hash=sha256:{wheel['hashes']['sha256']}" for wheel in package["wheels"])
        pins.append(" ".join([f"{package['name']}=={package['version']}", *hashes]))
    below = img.parent or "its base"
    return "\n".join(
        [
            f"# Packages that the image {img.name} adds to {below}, for release {row.name} and Python {python}.",
            f"# Made by `trainyard images lock {img.name} {row.name}`; do not edit.",
            *sorted(pins),
            "",
        ]
    )


def lock_all(name: str, only: Sequence[str], *, torch_index: str = TORCH_CPU_INDEX) -> Iterator[Path]:
    """Write the lock files of an image, or of all images, for the releases in `only`, or for all. Yields their paths.

    Raises UsageError for an unknown name, ConfigurationError if the releases are for other images, and TrainyardError
    if requirements conflict.
    """
    chosen = list(images().values()) if name == EVERY_IMAGE else [image(name)]
    rows = [release(each) for each in only] or list(releases().values())
    for img in chosen:
        contents(img)  # raises an error for a new root image without a row
    fitting = [(img, row) for img, row in itertools.product(chosen, rows) if img.root == row.image]
    if not fitting:
        check_image(chosen[0].root, rows[0])
    for img, row in fitting:  # parents first, because a child's lock depends on its parent's
        path = lock_file(img, row)
        text = lock(img, row, torch_index=torch_index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        yield path


def resolve(wanted: Sequence[str], python: str, *, index: str | None) -> dict[str, str]:
    """Return the newest versions that fit these requirements, by package. `index`: an additional package index.

    Raises TrainyardError if the requirements conflict or the index does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="trainyard-lock-") as name:
        given, found = Path(name, "in.txt"), Path(name, "out.txt")
        given.write_text("\n".join(wanted))
        options = ["--python-version", python, "--python-platform", _PLATFORM, "--only-binary", ":all:", "--no-header"]
        _compile(given, *options, *(["--index", index] if index else []), "--no-annotate", to=found)
        return _versions(found.read_text())


def _metadata(own: Contents, row: Release) -> str:
    """Return uv's configuration, with corrected requirements of packages whose metadata is wrong."""
    needs = [(name, version, [more]) for (name, version), more in _UNDECLARED.items()]
    if own.torch == "base":  # the base already has torch's dependencies
        needs.append(("torch", row.pytorch, []))
    return "".join(
        f'[[dependency-metadata]]\nname = "{name}"\nversion = "{version}"\nrequires-dist = {more}\n'
        for name, version, more in needs
    )


def locked(img: Image, row: Release) -> dict[str, str]:
    """Return the version of each package in the image's lock file. Raises ConfigurationError if there is none."""
    path = lock_file(img, row)
    if not path.is_file():
        raise ConfigurationError(
            f"image {img.name} has no lock file for release {row.name}: {path.relative_to(ROOT)}",
            next_step=f"trainyard images lock {img.name} {row.name}",
        )
    return _versions(path.read_text())


def _versions(pins: str) -> dict[str, str]:
    return dict(re.findall(r"^([^#=\s]+)==(\S+)", pins, re.MULTILINE))


def _name(requirement: str) -> str:
    return re.split(r"[=<>~\[ ]", requirement, maxsplit=1)[0]


def _compile(*arguments: str | Path, to: Path) -> None:
    """Run uv to resolve requirements. Raises TrainyardError if they conflict."""
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "uv", "pip", "compile", "--system-certs", "--quiet", "--output-file", to),
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
            next_step="check that the package index answers, or change the versions in images/releases.toml",
        )
