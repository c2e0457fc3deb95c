"""Synthesis: once per session for the shipped settings and the variants, and on demand for a test's settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.settings import STAGES
from infra.stages import Stage, Team
from tests.support.infra.deployed_roles import DeployedStage
from tests.support.infra.synthesis import Templates, read_assembly, stacks_of, synthesise
from tests.support.infra.variants import ALL, VARIANTS
from tests.support.made_once import made_once


@pytest.fixture(scope="session")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cloud assembly of all stages of infra/settings.py."""
    return made_once(tmp_path_factory, "assembly", lambda folder: synthesise(STAGES.values(), folder))


@pytest.fixture(scope="session")
def templates(assembly: Path) -> Templates:
    """The templates of all stages of infra/settings.py."""
    return read_assembly(assembly)


@pytest.fixture(scope="session")
def variant_assemblies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The cloud assemblies of ALL, and of the other settings of tests/support/infra/variants.py."""
    others = [row for row in VARIANTS if row is not ALL]
    return (
        made_once(tmp_path_factory, "all", lambda folder: synthesise([ALL], folder)),
        made_once(tmp_path_factory, "variants", lambda folder: synthesise(others, folder)),
    )


@pytest.fixture(scope="session")
def variants(variant_assemblies: tuple[Path, Path]) -> Templates:
    """The templates of the settings of tests/support/infra/variants.py."""
    return {path: template for made in variant_assemblies for path, template in read_assembly(made).items()}


@pytest.fixture(scope="session")
def reviewed(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    """The templates of ALL, the stage with every feature, by stack name."""
    made = read_assembly(made_once(tmp_path_factory, "all", lambda folder: synthesise([ALL], folder)))
    return {path.removeprefix(f"{ALL.name}/"): template for path, template in made.items()}


@pytest.fixture(scope="session")
def everything(reviewed: Templates) -> DeployedStage:
    """The same stage as CloudFormation would create it."""
    return DeployedStage(ALL.name, reviewed)


@pytest.fixture(scope="session")
def synthesised() -> Callable[..., Templates]:
    """Synthesise a stage named `test` with the given settings; returns templates by stack name."""

    def synthesise_one(**settings: Any) -> Templates:
        return stacks_of(Stage(**{"name": "test", "teams": (Team(name="research"),), **settings}))

    return synthesise_one
