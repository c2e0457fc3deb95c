"""Fixtures: a rank without a launcher, its attempts, and an S3 that denies requests on demand."""

from tests.support.container.rank_fixtures import attempts, faulty, first_rank

__all__ = ["attempts", "faulty", "first_rank"]
