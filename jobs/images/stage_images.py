"""What a stage has of images: repositories, and what was pushed to them last, as its parameters in SSM tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.aws.connection import Aws
from jobs.core.errors import ConfigurationError, did_you_mean
from jobs.core.images import Image, child_name, image, images
from jobs.core.stage import (
    IMAGES,
    RELEASE,
    deploy_command,
    image_parameter,
    image_repository_parameter,
    parameter_path,
)

_PARAMETERS_OF_A_CALL = 10
"""GetParameters' own limit."""

_CPU_ROOT = "cpu"
"""The root that every machine can run."""


@dataclass(frozen=True, kw_only=True)
class StageImages:
    """The images of a stage for one release, as its image stack and earlier pushes left them in SSM."""

    stage: str
    release: str
    repositories: Mapping[str, str]
    """Image to URI of its repository."""
    recorded: Mapping[str, str]
    """Image to what its parameter holds."""
    default: tuple[str, ...]
    """Names of the images that new jobs run in."""

    @staticmethod
    def release_of(aws: Aws, stage: str) -> str:
        """Return the stage's own release. Raises ConfigurationError if its image stack is not deployed."""
        return _about(aws, stage)[RELEASE]

    @classmethod
    def read(cls, aws: Aws, stage: str, release: str | None) -> "StageImages":
        """Read the stage's parameters in SSM. `release` is None for the stage's own.

        Raises ConfigurationError if its image stack is not deployed.
        """
        about = _about(aws, stage)
        release = release or about[RELEASE]
        repositories = {name: image_repository_parameter(name) for name in images()}
        parameters = {name: image_parameter(name, release) for name in images()}
        found = _parameters(aws, stage, [*repositories.values(), *parameters.values()])
        return cls(
            stage=stage,
            release=release,
            repositories={name: found[key] for name, key in repositories.items() if key in found},
            recorded={name: found[key] for name, key in parameters.items() if key in found},
            default=tuple(about.get(IMAGES, "").split()),
        )

    def chosen(self, names: Sequence[str], *, emulated: bool) -> list[Image]:
        """Return the images called `names`; without any, those of new jobs (on the emulator, their CPU twins).

        Raises UsageError for an image that there is not, ConfigurationError for one that the stage has no place for.
        """
        if not names:
            roots = dict.fromkeys(_twin(image(name), _CPU_ROOT) if emulated else name for name in self.default)
            names = list(roots)
        chosen = [image(name) for name in dict.fromkeys(names)]
        deploy = deploy_command(self.stage, "image", emulated=emulated)
        for one in chosen:
            if one.name not in self.repositories:
                raise ConfigurationError(
                    f"stage '{self.stage}' has no repository for image '{one.name}'"
                    f"{did_you_mean(one.name, self.repositories)}",
                    next_step=f"{deploy}, where a row of its settings names an instance type that runs it",
                )
            if one.name not in self.recorded:
                raise ConfigurationError(
                    f"no pool of stage '{self.stage}' runs image '{one.name}' of release {self.release}",
                    next_step=f"name the stage's own release, or give it this one in infra/settings.py and {deploy}",
                )
        return chosen

    def stand_ins(self, one: Image) -> list[str]:
        """Return the names of the images that `one` stands in for on a machine without accelerators."""
        if one.root != _CPU_ROOT:
            return []
        twins = {_twin(one, other.name) for other in images().values() if other.parent is None}
        return sorted(name for name in twins if name in self.recorded and name != one.name)


def _about(aws: Aws, stage: str) -> dict[str, str]:
    about = _parameters(aws, stage, [RELEASE, IMAGES])
    if RELEASE not in about:
        raise ConfigurationError(
            f"stage '{stage}' has no repositories for images: SSM has no {parameter_path(stage)}{RELEASE}",
            next_step=deploy_command(stage, "image", emulated=aws.emulated),
        )
    return about


def _parameters(aws: Aws, stage: str, names: Sequence[str]) -> dict[str, str]:
    """Read parameters of the stage: value by name (without the stage's path), of those that are there."""
    path = parameter_path(stage)
    found: dict[str, str] = {}
    for start in range(0, len(names), _PARAMETERS_OF_A_CALL):
        asked = [path + name for name in names[start : start + _PARAMETERS_OF_A_CALL]]
        answer = aws.ssm.get_parameters(Names=asked)["Parameters"]
        found.update({item["Name"].removeprefix(path): item["Value"] for item in answer})
    return found


def _twin(one: Image, root: str) -> str:
    """Return the name of the image that has the same on another root."""
    return child_name(root, one.folder if one.parent else None)
