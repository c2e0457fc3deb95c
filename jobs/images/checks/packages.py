"""Checks of an image's Python packages: the versions that were locked, fitting together, and able to be imported."""

from jobs.catalog import CATALOG
from jobs.images.checks import container
from jobs.images.checks.check import Subject
from jobs.images.hierarchy import image
from jobs.images.lock import IMAGES, locked

_OF_EVERY_IMAGE = ("torch", "transformers", "accelerate", "datasets", "boto3", "tensorboard", "jobs.train.launch")
_OF_GAUDI = ("optimum.habana", "habana_frameworks.torch")
_OF_CHILDREN = {
    "ray": ("ray.train.torch",),
    "notebook": ("jupyterlab", "jupyter_server_proxy", "ipykernel", "tensorboard.program"),
}


def versions(subject: Subject) -> str:
    row = subject.release
    expected = _locked(subject) | {"transformers": row.transformers, "accelerate": row.accelerate or ""}
    if _is_gaudi(subject):
        expected |= {"torch": row.pytorch, "optimum-habana": row.optimum_habana}
    return container.last_line(container.run_script(subject, "versions.py", expected))


def fit(subject: Subject) -> str:
    ours = [*_locked(subject), "torch", "deepspeed", "habana-torch-plugin"]
    return container.last_line(container.run_script(subject, "fit.py", ours))


def imports(subject: Subject) -> str:
    modules = [
        *_OF_EVERY_IMAGE,
        *(_OF_GAUDI if _is_gaudi(subject) else ()),
        *(_OF_CHILDREN[subject.image.folder] if subject.image.parent else ()),
        *(kind.entrypoint for kind in CATALOG.values()),
    ]
    return container.last_line(container.run_script(subject, "imports.py", modules))


def _locked(subject: Subject) -> dict[str, str]:
    parent = locked(image(subject.image.parent), subject.release) if subject.image.parent else {}
    return {**parent, **locked(subject.image, subject.release)}


def _is_gaudi(subject: Subject) -> bool:
    return IMAGES[subject.image.root].torch == "base"
