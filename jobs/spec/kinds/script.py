"""script: a training script of one's own, with the folder that it lies in."""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import Self

from jobs.core.errors import did_you_mean
from jobs.core.locations import HUB, stays_below
from jobs.spec.arguments import Arguments, Folder, Input, JobKind
from jobs.spec.code import is_packed

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
"""What is written so in a command, JSON's braces for instance not."""

_INPUT = re.compile(r"[a-z][a-z0-9_-]{0,62}")

_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")

PLACES = ("output", "checkpoints", "node", "nnodes", "main_address", "cards")
"""What a command may name in braces, beside its inputs and its parameters."""


def _file_below(name: str) -> str:
    if name.startswith("/") or not stays_below(name):
        raise ValueError(f"'{name}' is no file below the folder of the code")
    return name


def _is_folder(code: str) -> str:
    """Return the code as it is, unless it is an address."""
    if not is_packed(code) and ("://" in code or "::" in code):
        raise ValueError(f"'{code}' is no folder; clone the repository, and name that folder")
    return code


def _has_a_word(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"its quotes do not fit together: {error}") from None
    if not words or words == ["-m"]:
        raise ValueError("it names no script; it should look like train.py --epochs 3, or -m package.module")
    return command


class Script(Arguments):
    """Run a training script of your own, unchanged, in the stage's image."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset({"silence_timeout_seconds", "wheelhouse"})

    code: Annotated[str, Field(min_length=1), AfterValidator(_is_folder)]
    """The folder of the script: what git tracks there or would, without what .trainyardignore names. It is
    packed and uploaded when the spec is submitted; a path counts from the working directory."""
    command: Annotated[str, AfterValidator(_has_a_word)]
    """The script in that folder and its arguments: train.py --data {inputs.reviews}, or -m package.module. Braces name
    inputs.NAME, parameters.NAME, output, checkpoints, node, nnodes, main_address and cards. No shell reads it."""
    parameters: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Values by a name: {parameters.NAME} in the command, TRAINYARD_PARAMETER_NAME in the environment. A sweep may set
    them: arguments.parameters.NAME."""
    inputs: dict[str, Input] = Field(default_factory=dict)
    """Files and folders by a name: data://…, s3://…, run://…, hf://org/name or a local path. Each node has them before
    its ranks start."""
    streamed_inputs: list[str] = Field(default_factory=list)
    """Names of inputs that are not downloaded. The script gets their s3:// address."""
    requirements: Annotated[str, AfterValidator(_file_below)] | None = None
    """A file of that folder, installed on top of the image's packages, none of which it may replace."""
    wheelhouse: Folder | None = None
    """A folder of wheels that the requirements come from, in place of a package index."""
    processes: Literal[1] | None = None
    """1: one process on each node, which starts its own ranks, without torchrun's variables. Default: a rank on each
    card, as torchrun starts them."""
    silence_timeout_seconds: float = Field(default=1800.0, ge=0)
    """Seconds without a line, a file or a heartbeat after which the script has hung. 0 disables it."""

    def metrics(self) -> None:
        return None  # only the script knows

    @property
    def resumes_on_other_ranks(self) -> bool:
        return False  # what its checkpoints need, only the script knows

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)

    @property
    def is_python(self) -> bool:
        """Return whether the command is a Python script or module, and no program."""
        return self.words[0] == "-m" or self.words[0].endswith(".py")

    @property
    def script(self) -> str | None:
        """Return the file that the command runs, relative to the folder; None for a module or a program."""
        return self.words[0] if self.words[0].endswith(".py") else None

    def filled(self, places: Mapping[str, str]) -> list[str]:
        """Return the command's words with what `places` has for the names in braces."""
        return [_PLACEHOLDER.sub(lambda match: places.get(match[1], match[0]), word) for word in self.words]

    @property
    def parameter_texts(self) -> dict[str, str]:
        """Return the parameters as a command line and an environment have them."""
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in self.parameters.items()}

    @field_validator("parameters")
    @classmethod
    def _parameter_names(cls, parameters: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        for name in parameters:
            if not _PARAMETER.fullmatch(name):
                raise ValueError(f"'{name}' cannot name a parameter: letters, digits and '_', a letter first")
        return parameters

    @field_validator("inputs")
    @classmethod
    def _names(cls, inputs: dict[str, str]) -> dict[str, str]:
        for name in inputs:
            if not _INPUT.fullmatch(name):
                raise ValueError(f"'{name}' cannot name an input: small letters, digits, '-' and '_', a letter first")
        return inputs

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        known = [*(f"inputs.{name}" for name in self.inputs), *(f"parameters.{name}" for name in self.parameters)]
        known += PLACES
        for name in _PLACEHOLDER.findall(" ".join(self.words)):
            if name not in known:
                raise ValueError(f"'command' names {{{name}}}, which is no place{did_you_mean(name, known)}")
        for name in self.streamed_inputs:
            if name not in self.inputs:
                raise ValueError(f"'streamed_inputs': '{name}' is no input{did_you_mean(name, self.inputs)}")
            if self.inputs[name].startswith(HUB):
                raise ValueError(f"'streamed_inputs': '{name}' lies on the hub, which has no s3:// address")
        if not self.is_python and self.processes is None:
            raise ValueError(
                f"'command' begins with '{self.words[0]}', which is no Python script; it should look like train.py …, "
                "or -m package.module …; for a program that starts its own ranks set processes: 1"
            )
        if self.script is not None:
            _file_below(self.script)
        if self.wheelhouse is not None and self.requirements is None:
            raise ValueError("'wheelhouse' is what 'requirements' come from; name those too")
        return self


KIND = JobKind(
    name="script",
    summary="run a training script of your own",
    entrypoint="jobs.container.kinds.script",
    arguments=Script,
    accelerated=True,
    timeout_hours=24,
)
