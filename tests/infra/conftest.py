"""Synthesis: once a session for what `cdk synth` gives, and on demand for settings of a test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.settings import STAGES
from infra.stages import Stage, Team
from tests.support.infra.synthesis import Templates, read_assembly, stacks_of, synthesise
from tests.support.infra.variants import VARIANTS
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
def variants_assembly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cloud assembly of the settings of tests/support/infra/variants.py, all in one app."""
    return made_once(tmp_path_factory, "variants", lambda folder: synthesise(VARIANTS, folder))


@pytest.fixture(scope="session")
def variants(variants_assembly: Path) -> Templates:
    """The templates of the settings of tests/support/infra/variants.py."""
    return read_assembly(variants_assembly)


@pytest.fixture(scope="session")
def synthesised() -> Callable[..., Templates]:
    """Synthesise one stage called `test` with the given settings; keys are the stacks' names."""

    def synthesise_one(**settings: Any) -> Templates:
        return stacks_of(Stage(**{"name": "test", "teams": (Team(name="research"),), **settings}))

    return synthesise_one
