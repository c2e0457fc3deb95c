"""script: run a custom training script, with the folder that contains it."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import Self

from jobs.core.errors import did_you_mean
from jobs.core.locations import HUB, stays_below
from jobs.spec.arguments import Arguments, Folder, Input, JobKind
from jobs.spec.code import is_packed

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
"""A placeholder in a command; the braces of JSON, for instance, do not match."""

_INPUT = re.compile(r"[a-z][a-z0-9_-]{0,62}")

_PYTHON = re.compile(r"3\.[0-9]{1,2}(\.[0-9]{1,2})?", re.ASCII)

_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")

_INTERPRETER = re.compile(r"(?:\S*/)?python(?:3(?:\.\d+)?)?")

_PYTHON_FLAGS = ("-u", "-B", "-s", "-E")
"""Options of Python that make no difference here."""

_PYTHON_VARIABLES = {"-W": "PYTHONWARNINGS", "-O": "PYTHONOPTIMIZE", "-X": "PYTHONFAULTHANDLER"}
"""Variables with the effect of Python's options."""

_VARIABLE = re.compile(r"([A-Za-z_]\w*)=.*", re.DOTALL)

_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
"""The quoted parts of a command, in which operators are text."""

_OPERATOR = re.compile(r"(?:^|\s)(?:(\|\|?|&&?|<|;)(?=\s|$)|(\d?>>?|&>)(?=\s|$|[\w./&]))|(?<=\S)(;)(?=\s|$)")
"""An operator of a shell at the beginning of a word, or `;` at its end."""

_METRIC = re.compile(r"[A-Za-z_][\w.@%+-]{0,62}")

STEP_METRIC = "step"
"""The name in `metrics` whose pattern finds the step, not a metric."""

_PATTERN_CHARACTERS = 500

_REPEATS_A_REPEAT = re.compile(r"(?<!\\)[+*}]\)[+*{]")
"""A pattern such as (a+)+, whose time is exponential in the length of a line."""

MAX_WORD_BYTES = 128_000
"""Maximum size of a word of the command, and of all arguments as JSON, which the ranks get in one variable.

Linux passes 131,071 bytes in one argument or variable (execve(2), MAX_ARG_STRLEN). The locations on S3 add a few bytes.
"""

OWN = "own"
"""Value of `environment` that installs only the requirements."""

LOCK = "uv.lock"

LAST_CHECKPOINT = "last_checkpoint"
"""The placeholder that is left out of the command, with its option, if there is no checkpoint yet."""

PLACEHOLDERS = ("output", "checkpoints", LAST_CHECKPOINT, "node", "nnodes", "main_address", "cards")
"""Placeholders of a command, in addition to its inputs and parameters."""


def _check_file(name: str) -> str:
    if name.startswith("/") or not stays_below(name):
        raise ValueError(f"'{name}' is not a file below the code's folder")
    return name


def _check_code(code: str) -> str:
    """Return `code` unchanged. Raises ValueError if it is a URL."""
    if not is_packed(code) and ("://" in code or "::" in code):
        raise ValueError(f"'{code}' is not a folder; clone the repository and set the path of the clone")
    return code


def _check_environment(name: str) -> str:
    if name != OWN and PurePosixPath(name).name != LOCK:
        raise ValueError(
            f"'{name}' is neither a {LOCK} nor '{OWN}'; for a requirements file, set requirements: {name} and "
            f"environment: {OWN}"
        )
    return _check_file(name)


def _check_quotes(words: str) -> str:
    try:
        shlex.split(words)
    except ValueError as error:
        raise ValueError(f"has unbalanced quotes: {error}") from None
    return words


def _check_kept(name: str) -> str:
    folder = name.rstrip("/").removeprefix("./")
    if not folder or name.startswith("/") or not stays_below(folder) or set(folder) & set("*?["):
        raise ValueError(f"'{name}' is not a file or folder below the working directory, such as out or snapshot.pt")
    return folder


def _check_pattern(pattern: str) -> str:
    """Return the pattern of a metric unchanged. Raises ValueError if it cannot find one number in each line."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(
            f"'{pattern}' has {groups} groups; put the number, and only that, in parentheses: loss[:=] ([0-9.]+); for "
            "other parentheses use (?:...)"
        )
    if len(pattern) > _PATTERN_CHARACTERS:
        raise ValueError(f"has {len(pattern)} characters, more than {_PATTERN_CHARACTERS}")
    if _REPEATS_A_REPEAT.search(pattern):
        raise ValueError(f"'{pattern}' repeats a group that ends in a repeat, which can take forever; repeat only one")
    return pattern


def _check_command(command: str) -> str:
    try:
        words = _without_python(shlex.split(command))
    except ValueError as error:
        raise ValueError(f"has unbalanced quotes: {error}") from None
    if not words or words == ["-m"]:
        raise ValueError("names no script; it should look like train.py --epochs 3, or -m package.module")
    if variable := _VARIABLE.fullmatch(words[0]):
        raise ValueError(f"begins with a variable; set it in the spec: env: {{{variable[1]}: ...}}")
    if words[0].startswith("-") and words[0] != "-m":
        raise ValueError(f"has the option {words[0]} of Python, which is not supported here{_python_option(words[0])}")
    if words[0] == "cd":
        raise ValueError("begins with cd; set arguments.workdir to the folder, and command to the script in it")
    if found := _OPERATOR.search(_QUOTED.sub("", command)):
        operator = found[0].strip()
        raise ValueError(f"has '{operator}', but no shell reads the command{_shell_hint(operator)}")
    return command


def _without_python(words: list[str]) -> list[str]:
    """Return the words of a command without a leading `python -u`: the platform chooses the Python."""
    if not words or not _INTERPRETER.fullmatch(words[0]):
        return words
    start = next((number for number, word in enumerate(words) if number and word not in _PYTHON_FLAGS), len(words))
    return words[start:]


def _python_option(option: str) -> str:
    variable = _PYTHON_VARIABLES.get(option[:2])
    return f"; set it in the spec instead, as env: {{{variable}: ...}}" if variable else "; name a script or -m module"


def _shell_hint(operator: str) -> str:
    if ">" in operator:
        return ": remove it, because the log is kept (trainyard logs RUN). Quote it if it is part of an argument"
    return ": put the commands into a script of the code, and set command: bash run.sh with processes: 1"


class Script(Arguments):
    """Run your training script, unchanged, in the stage's image."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset(
        {"conversations", "silence_timeout_seconds", "wheelhouse", "resume_arguments", "keep", "metrics"}
    )

    code: Annotated[str, Field(min_length=1), AfterValidator(_check_code)]
    """Folder of the script, relative to the working directory; it is packed and uploaded when the spec is submitted.
    The package contains the files that git tracks or would track, except those that .trainyardignore names."""
    command: Annotated[str, AfterValidator(_check_command)]
    """The script in that folder and its arguments: train.py --data {inputs.reviews}, or -m package.module.
    Placeholders: inputs.NAME, parameters.NAME, output, checkpoints, last_checkpoint, node, nnodes, main_address, cards.
    The command is not run by a shell. A leading python is ignored."""
    resume_arguments: Annotated[str, AfterValidator(_check_quotes)] | None = None
    """Words to append to the command if an earlier attempt has saved a checkpoint: --resume, or --init_from=resume.
    They may contain placeholders. Default: none."""
    workdir: Annotated[str, AfterValidator(_check_file)] | None = None
    """Folder below `code` in which the script runs, and to which the command's paths are relative. Default: `code`."""
    keep: list[Annotated[str, AfterValidator(_check_kept)]] = Field(default_factory=list)
    """Files and folders that the script writes beside itself, relative to the working directory: [out, snapshot.pt].
    They are saved with the output and restored for the next attempt; checkpoints in them are found. Default: none."""
    parameters: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Values by name: {parameters.NAME} in the command, TRAINYARD_PARAMETER_NAME in the environment. A sweep can vary
    them as arguments.parameters.NAME."""
    inputs: dict[str, Input] = Field(default_factory=dict)
    """Files and folders by name: data://…, s3://…, run://…, hf://org/name or a local path. Each node downloads them
    before its ranks start."""
    streamed_inputs: list[str] = Field(default_factory=list)
    """Names of inputs that are not downloaded; the script gets their s3:// locations."""
    conversations: list[str] = Field(default_factory=list)
    """Names of inputs whose lines are examples for a language model, to check before submission: JSON with `messages`,
    with `prompt` and `completion`, or with `text`."""
    requirements: Annotated[str, AfterValidator(_check_file)] | None = None
    """Requirements file in that folder, installed on top of the image's packages, which it must not replace. Default:
    no further packages."""
    environment: Annotated[str, AfterValidator(_check_environment)] | None = None
    """Packages that replace the image's, torch included: the path of a uv.lock next to its pyproject.toml, or own for
    the requirements alone; not on HPUs. Default: the image's packages."""
    python: str | None = None
    """Python version of that environment, in quotes: "3.13"; uv downloads a version that the image lacks. Default: the
    image's, if the lock allows it."""
    wheelhouse: Folder | None = None
    """Folder of wheels to install the requirements from. Default: a package index."""
    processes: Literal[1] | None = None
    """1 starts one process per node without torchrun's variables, for launchers and single-process scripts. Default:
    one rank per card, started the way torchrun does."""
    metrics: dict[str, Annotated[str, AfterValidator(_check_pattern)]] = Field(default_factory=dict, max_length=50)
    """Regular expressions, each with one group, that find numbers in the log lines of rank 0: {loss: 'loss[:=]
    ([0-9.]+)'}. The name step finds the step instead; without it, the word step or iter before a number does. Default:
    only the script's files and what a Trainer prints."""
    silence_timeout_seconds: float = Field(default=1800.0, ge=0)
    """End the attempt after this many seconds without a log line, a new file or a heartbeat; 0 disables the limit."""

    def evaluation_metrics(self) -> None:
        return None  # depends on the script

    def has_conversations(self, argument: str) -> bool:
        return argument.removeprefix("inputs.") in self.conversations

    @property
    def resumes_on_other_ranks(self) -> bool:
        return False  # its checkpoints may depend on anything

    @property
    def lock(self) -> str | None:
        """Return the uv.lock of the script's own environment, relative to the folder."""
        return None if self.environment in (None, OWN) else self.environment

    @property
    def words(self) -> list[str]:
        return _without_python(shlex.split(self.command))

    @property
    def is_python(self) -> bool:
        """Return whether the command is a Python script or module, not another program."""
        return self.words[0] == "-m" or self.words[0].endswith(".py")

    @property
    def script(self) -> str | None:
        """Return the script file relative to the code's folder; None for a module or another program."""
        return f"{self.folder}{self.words[0]}" if self.words[0].endswith(".py") else None

    @property
    def folder(self) -> str:
        """Return the working directory relative to the code's folder, with a slash at its end, or an empty text."""
        return "" if self.workdir is None else f"{self.workdir.strip('/')}/"

    def filled(self, places: Mapping[str, str]) -> list[str]:
        """Return the words of the command with placeholders replaced by the values of `places`.

        A word with {last_checkpoint} is left out if `places` has no checkpoint, and so is the option before it. With a
        checkpoint, the words of `resume_arguments` follow.
        """
        filled: list[str] = []
        more = shlex.split(self.resume_arguments or "") if LAST_CHECKPOINT in places else []
        for word in [*self.words, *more]:
            if LAST_CHECKPOINT in _PLACEHOLDER.findall(word) and LAST_CHECKPOINT not in places:
                if filled and filled[-1].startswith("-") and "=" not in filled[-1] and not word.startswith("-"):
                    filled.pop()
                continue
            filled.append(_PLACEHOLDER.sub(lambda match: places.get(match[1], match[0]), word))
        return filled

    @property
    def parameter_texts(self) -> dict[str, str]:
        """Return the parameters as text for the command line and the environment."""
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in self.parameters.items()}

    @field_validator("python", mode="before")
    @classmethod
    def _check_python(cls, python: object) -> object:
        if python is not None and (not isinstance(python, str) or not _PYTHON.fullmatch(python)):
            raise ValueError(f'{python!r} is not a Python version; write it in quotes: "3.13"')
        return python

    @field_validator("parameters")
    @classmethod
    def _check_parameter_names(
        cls, parameters: dict[str, str | int | float | bool]
    ) -> dict[str, str | int | float | bool]:
        for name in parameters:
            if not _PARAMETER.fullmatch(name):
                raise ValueError(f"'{name}' is not a valid parameter name: use letters, digits and '_', a letter first")
        return parameters

    @field_validator("metrics")
    @classmethod
    def _check_metric_names(cls, metrics: dict[str, str]) -> dict[str, str]:
        for name in metrics:
            if not _METRIC.fullmatch(name) or name in ("time", "epoch"):
                raise ValueError(f"'{name}' is not a valid metric name: use letters, digits and '_', as in eval_loss")
        if metrics and not metrics.keys() - {STEP_METRIC}:
            raise ValueError("only 'step' is given, which is not a metric; add one: {loss: 'loss[:=] ([0-9.]+)'}")
        return metrics

    @field_validator("inputs")
    @classmethod
    def _check_input_names(cls, inputs: dict[str, str]) -> dict[str, str]:
        for name in inputs:
            if not _INPUT.fullmatch(name):
                raise ValueError(
                    f"'{name}' is not a valid input name: use lower-case letters, digits, '-' and '_', a letter first"
                )
        return inputs

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        known = [*(f"inputs.{name}" for name in self.inputs), *(f"parameters.{name}" for name in self.parameters)]
        known += PLACEHOLDERS
        for key, text in (("command", self.command), ("resume_arguments", self.resume_arguments or "")):
            for name in _PLACEHOLDER.findall(text):
                if name not in known:
                    raise ValueError(f"'{key}': unknown placeholder {{{name}}}{did_you_mean(name, known)}")
        for key in ("streamed_inputs", "conversations"):
            for name in getattr(self, key):
                if name not in self.inputs:
                    raise ValueError(f"'{key}': unknown input '{name}'{did_you_mean(name, self.inputs)}")
        for name in self.streamed_inputs:
            if self.inputs[name].startswith(HUB):
                raise ValueError(f"'streamed_inputs': '{name}' is on the hub, which has no s3:// locations")
        if self.words[0] == "torchrun" and self.processes is None:
            raise ValueError(
                "'command' starts with 'torchrun'; leave it and its options out, because the platform starts one rank "
                "per card in the same way (resources.nproc_per_node changes the number)"
            )
        parameters = {f"parameters.{name}": text for name, text in self.parameter_texts.items()}
        words = [json.dumps(self.fixed_arguments()), *self.filled(parameters)]
        if (size := max(len(word.encode()) for word in words)) > MAX_WORD_BYTES:
            sizes = {name: len(text.encode()) for name, text in {**parameters, "command": self.command}.items()}
            longest = max(sizes, key=lambda name: sizes[name])
            raise ValueError(
                f"'{longest}' has {sizes[longest]:,} bytes, which makes a word of the script's command or environment "
                f"{size:,} bytes long; the limit is {MAX_WORD_BYTES:,}: write it to a file, and name that in 'inputs'"
            )
        if not self.is_python and self.processes is None:
            raise ValueError(
                f"'command' starts with '{self.words[0]}', which is not a Python script; use train.py … or -m "
                "package.module …, or set processes: 1 for a program that starts its own ranks"
            )
        if self.script is not None:
            _check_file(self.script)
        if self.environment == OWN and self.requirements is None:
            raise ValueError(
                "'environment: own' needs 'requirements' to install; for a lock, set 'environment' to the uv.lock"
            )
        if self.lock is not None and self.requirements is not None:
            raise ValueError(f"'requirements' cannot be added to {self.lock}: use uv add, or set environment: own")
        if self.python is not None and self.environment is None:
            raise ValueError("'python' needs 'environment': without it, the script runs in the image's Python")
        if self.wheelhouse is not None and self.requirements is None:
            raise ValueError("'wheelhouse' needs 'requirements', which are installed from it")
        return self


KIND = JobKind(
    name="script",
    summary="run your own training script",
    entrypoint="jobs.container.kinds.script",
    arguments=Script,
    accelerated=True,
    timeout_hours=24,
)
