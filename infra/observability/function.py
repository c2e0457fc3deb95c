"""A Lambda function of functions/, which an event of the stage calls."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.constructs.function import Function
from infra.observability import functions

_FOLDER = Path(__file__).parent / "functions"


class EventFunction(Function):
    """A function made of a module of functions/ that has a `handler`."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        file: str,
        description: str,
        environment: Mapping[str, str],
        dead_letters: sqs.IQueue,
        log_retention_days: int,
    ) -> None:
        with TemporaryDirectory() as package:
            _pack(file, Path(package))
            super().__init__(
                scope,
                name,
                handler=f"{file}.handler",
                code=lambda_.Code.from_asset(package),
                description=description,
                environment=environment,
                dead_letters=dead_letters,
                log_retention_days=log_retention_days,
            )


def _pack(file: str, package: Path) -> None:
    """Put the function's file where Lambda looks for its handler, and all of functions/ where its imports look."""
    shutil.copy(_FOLDER / f"{file}.py", package)
    shutil.copytree(
        _FOLDER, package.joinpath(*functions.__name__.split(".")), ignore=shutil.ignore_patterns("__pycache__")
    )
