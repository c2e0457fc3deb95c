"""Checks a script's requirements before submission, against the packages of the image that it runs in."""

import re

from jobs.core.errors import UsageError
from jobs.core.git import ROOT
from jobs.core.images import child_name, release
from jobs.core.stage import DeployedStage
from jobs.runs.script_environment import check_environment
from jobs.runs.secrets import ENVIRONMENT_NEXT, secret_text
from jobs.spec.code import Pack
from jobs.spec.kinds.script import Script
from jobs.spec.requirements import Requirements, read_requirements
from jobs.spec.spec import JobSpec

_PIN = re.compile(r"^([^#=\s]+)==([^\s;]+)", re.MULTILINE)


def check_requirements(stage: DeployedStage, spec: JobSpec, pack: Pack | None) -> None:
    """Raise UsageError if a script's requirements are invalid, or if it cannot have its own environment.

    Requirements must not replace a package of the image, hold a secret, or name a file that is not packed. Only the
    listed requirements are checked: uv finds conflicts among their dependencies when it installs them.
    """
    arguments = spec.entrypoint_arguments()
    if not isinstance(arguments, Script):
        return
    if arguments.environment is not None:
        check_environment(arguments, stage, pack)
    name = arguments.requirements
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
                f"arguments.requirements: {line}: it seems to hold {what}, and the whole team can read the code",
                next_step=f"write ${{NAME}}, which uv replaces from the environment, and {ENVIRONMENT_NEXT}",
            )
        if not line.requirement:
            continue
        try:
            requested = Requirement(line.requirement)
        except InvalidRequirement as error:
            raise UsageError(
                f"arguments.requirements: {line}: not a requirement: {str(error).splitlines()[0]}",
                next_step="write it as for pip: peft==0.15.2",
            ) from None
        if arguments.environment is not None:  # it may replace every package
            continue
        found = pinned.get(canonicalize_name(requested.name))
        if found is not None and not requested.specifier.contains(found, prereleases=True):
            raise UsageError(
                f"arguments.requirements: {line}: '{line.requirement}' would replace {requested.name} {found} of the "
                f"image {image}; the release was built and tested with {found}",
                next_step=f"remove the requirement, or require a version that {found} satisfies",
            )


def _check_packed(requirements: Requirements, pack: Pack) -> None:
    names = {file.name for file in pack.files}
    for place, path in [("it", file) for file in requirements.files] + [
        (str(line), path) for line, path in requirements.paths
    ]:
        if path not in names and path != "." and not any(name.startswith(f"{path}/") for name in names):
            raise UsageError(
                f"arguments.requirements: {place} needs '{path}', which is not packed because an ignore file names it",
                next_step="list the packed files with --dry-run, and correct .gitignore or .trainyardignore",
            )


def _image_packages(stage: DeployedStage, spec: JobSpec) -> tuple[str, dict[str, str]]:
    """Return the name of the job's image and its pinned packages; no packages if the release has no lock file."""
    root = "cpu" if stage.emulated else stage.instance_type.image
    row = release(stage.releases.get(root), of=root)
    image = child_name(root, spec.kind.image)
    path = ROOT / "images" / "locks" / row.name / f"{image}.txt"
    pinned = dict(_PIN.findall(path.read_text())) if path.is_file() else {}
    if root == "gaudi":
        pinned["torch"] = row.pytorch
    return f"{image} of release {row.name}", pinned
