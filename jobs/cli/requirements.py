"""A script's requirements, held against the packages of its image before anything is paid for."""

import re

from jobs.core.errors import UsageError
from jobs.core.git import ROOT
from jobs.core.images import child_name, release
from jobs.core.stage import DeployedStage
from jobs.runs.secrets import ENVIRONMENT_NEXT, secret_text
from jobs.spec.code import Pack
from jobs.spec.requirements import Requirements, read_requirements
from jobs.spec.spec import JobSpec

_PIN = re.compile(r"^([^#=\s]+)==([^\s;]+)", re.MULTILINE)


def check_requirements(stage: DeployedStage, spec: JobSpec, pack: Pack | None) -> None:
    """Raise UsageError if a requirement asks for another version of what the stage's image has.

    Also if the file includes or installs what is not packed. Only the lines themselves are looked at; what a package
    needs in turn is found when it is installed.
    """
    name = getattr(spec.entrypoint_arguments(), "requirements", None)
    if pack is None or name is None:
        return
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    requirements = read_requirements(pack.folder, name)
    _check_packed(requirements, pack)
    image, pinned = _image_packages(stage, spec)
    for line in (*requirements.lines, *requirements.constraints):
        if (what := secret_text(line.text)) is not None:
            raise UsageError(
                f"arguments.requirements: {line}: it seems to hold {what}, and code is readable for the whole team",
                next_step=f"write ${{NAME}} in its place, which pip takes from the environment, and {ENVIRONMENT_NEXT}",
            )
        if not line.asked:
            continue
        try:
            asked = Requirement(line.asked)
        except InvalidRequirement as error:
            raise UsageError(
                f"arguments.requirements: {line}: no requirement: {str(error).splitlines()[0]}",
                next_step="write it as pip does: peft==0.15.2",
            ) from None
        found = pinned.get(canonicalize_name(asked.name))
        if found is not None and not asked.specifier.contains(found, prereleases=True):
            raise UsageError(
                f"arguments.requirements: {line}: '{line.asked}' would replace {asked.name} {found} of the "
                f"image {image}, which is what the release was made with",
                next_step=f"leave it out, or ask for what {found} satisfies",
            )


def _check_packed(requirements: Requirements, pack: Pack) -> None:
    names = {file.name for file in pack.files}
    for place, path in [("it", file) for file in requirements.files] + [
        (str(line), path) for line, path in requirements.paths
    ]:
        if path not in names and path != "." and not any(name.startswith(f"{path}/") for name in names):
            raise UsageError(
                f"arguments.requirements: {place} needs '{path}', which is not packed: an ignore file names it",
                next_step="see with --dry-run what goes along, and correct .gitignore or .trainyardignore",
            )


def _image_packages(stage: DeployedStage, spec: JobSpec) -> tuple[str, dict[str, str]]:
    """Return the image that the job will run in, and the versions of its packages; none where no lock file has them."""
    root = "cpu" if stage.emulated else stage.instance_type.image
    row = release(stage.release)
    image = child_name(root, spec.kind.image)
    path = ROOT / "images" / "locks" / row.name / f"{image}.txt"
    pinned = dict(_PIN.findall(path.read_text())) if path.is_file() else {}
    if root == "gaudi":
        pinned["torch"] = row.pytorch
    return f"{image} of release {row.name}", pinned
