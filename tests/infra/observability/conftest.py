"""A stage with all that observability can have, and one of which nothing was asked."""

import pytest

from tests.support.infra.observed_stage import EVERYTHING, Observed, observed


@pytest.fixture(scope="module")
def everything() -> Observed:
    return observed(**EVERYTHING)


@pytest.fixture(scope="module")
def plain() -> Observed:
    """A stage of which nothing was asked."""
    return observed()
