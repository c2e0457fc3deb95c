"""Checks of an image's Python packages: the versions that were locked, fitting together, and able to be imported."""

from jobs.contract.catalog import CATALOG
from jobs.contract.image_hierarchy import Image, image
from jobs.contract.releases import Release
from jobs.images.checks import container
from jobs.images.checks.check import Subject
from jobs.images.lock import contents, locked

_OF_EVERY_IMAGE = ("torch", "transformers", "accelerate", "datasets", "boto3", "tensorboard", "jobs.train.launch")
_OF_GAUDI = ("optimum.habana", "habana_frameworks.torch")
_OF_CHILDREN = {
    "notebook": ("jupyterlab", "jupyter_server_proxy", "ipykernel", "tensorboard.program"),
}
"""Folder to what its packages are imported by."""


def versions(subject: Subject) -> str:
    return container.last_line(
        container.run_script(subject, "versions.py", expected_versions(subject.image, subject.release))
    )


def fit(subject: Subject) -> str:
    ours = [*_locked(subject.image, subject.release), "torch", "deepspeed", "habana-torch-plugin"]
    return container.last_line(container.run_script(subject, "fit.py", ours))


def imports(subject: Subject) -> str:
    return container.last_line(container.run_script(subject, "imports.py", modules(subject.image)))


def expected_versions(of: Image, row: Release) -> dict[str, str]:
    """Return the version of each package that the lock and the row ask for.

    Raises ConfigurationError where there is no lock.
    """
    expected = _locked(of, row) | {"transformers": row.transformers, "accelerate": row.accelerate or ""}
    if _is_gaudi(of):
        expected |= {
            "torch": row.pytorch,
            "optimum-habana": row.optimum_habana,
            "habana-torch-plugin": f"{row.name}.*",
        }
    return expected


def modules(of: Image) -> list[str]:
    """Return the modules that one can import in an image."""
    return [
        *_OF_EVERY_IMAGE,
        *(_OF_GAUDI if _is_gaudi(of) else ()),
        *(_OF_CHILDREN.get(of.folder, ()) if of.parent else ()),
        *(kind.entrypoint for kind in CATALOG.values()),
    ]


def _locked(of: Image, row: Release) -> dict[str, str]:
    parent = locked(image(of.parent), row) if of.parent else {}
    return {**parent, **locked(of, row)}


def _is_gaudi(of: Image) -> bool:
    return contents(of).torch == "base"
