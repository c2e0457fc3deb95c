"""A script's requirements, held against the packages of its image before anything is paid for."""

import re

from jobs.contract.code import Pack
from jobs.contract.errors import UsageError
from jobs.contract.image_hierarchy import child_name
from jobs.contract.releases import release
from jobs.contract.revision import ROOT
from jobs.contract.spec import JobSpec
from jobs.contract.stage import DeployedStage

_PIN = re.compile(r"^([^#=\s]+)==([^\s;]+)", re.MULTILINE)


def check_requirements(stage: DeployedStage, spec: JobSpec, pack: Pack | None) -> None:
    """Raise UsageError where a requirement asks for another version of what the stage's image has.

    Only what a line itself says is looked at; what a package needs in turn is found out where it is installed.
    """
    name = getattr(spec.entrypoint_arguments(), "requirements", None)
    if pack is None or name is None:
        return
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    image, pinned = _image_packages(stage, spec)
    for number, line in enumerate((pack.folder / name).read_text(encoding="utf-8").splitlines(), start=1):
        text = re.split(r"(?:^|\s)#", line)[0].strip()
        if not text or text.startswith("-"):  # an option of pip
            continue
        try:
            asked = Requirement(text)
        except InvalidRequirement as error:
            if re.match(r"[\w.+-]+://|\.{0,2}/|\w+\+", text):  # an address or a path, which pip takes and nobody else
                continue
            raise UsageError(
                f"arguments.requirements: {name}, line {number}: no requirement: {str(error).splitlines()[0]}",
                next_step="write it as pip does: peft==0.15.2",
            ) from None
        found = pinned.get(canonicalize_name(asked.name))
        if found is not None and not asked.specifier.contains(found, prereleases=True):
            raise UsageError(
                f"arguments.requirements: {name}, line {number}: '{text}' would replace {asked.name} {found} of the "
                f"image {image}, which is what the release was made with",
                next_step=f"leave it out, or ask for what {found} satisfies",
            )


def _image_packages(stage: DeployedStage, spec: JobSpec) -> tuple[str, dict[str, str]]:
    """Return the image that the job will run in, and the versions of its packages; none where no lock file has them."""
    root = "cpu" if stage.embedded else stage.instance_type.image
    row = release(stage.release)
    image = child_name(root, spec.kind.image)
    path = ROOT / "images" / "locks" / row.name / f"{image}.txt"
    pinned = dict(_PIN.findall(path.read_text())) if path.is_file() else {}
    if root == "gaudi":
        pinned["torch"] = row.pytorch
    return f"{image} of release {row.name}", pinned
