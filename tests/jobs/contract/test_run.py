from datetime import datetime, timedelta, timezone

import pytest

from jobs.contract.run import is_run_id, new_run_id, run_prefix, submitted_at

NOON = datetime(2026, 11, 21, 12, 0, 5, tzinfo=timezone.utc)


def test_a_run_id_tells_name_and_utc_time() -> None:
    assert new_run_id("reviews", now=NOON) == "reviews-20261121-120005-0000"
    two_hours_east = NOON.astimezone(timezone(timedelta(hours=2)))
    assert new_run_id("reviews", now=two_hours_east) == "reviews-20261121-120005-0000"


def test_a_run_id_is_read_back_as_the_moment_that_it_names() -> None:
    assert submitted_at(new_run_id("bert-base-2", now=NOON)) == NOON
    with pytest.raises(ValueError, match="is not a run's id"):
        submitted_at("reviews")


def test_ids_of_one_second_sort_by_time() -> None:
    moments = [NOON.replace(microsecond=microsecond) for microsecond in (0, 16, 400, 500_000, 999_999)]
    ids = [new_run_id("a", now=moment) for moment in moments]
    assert ids == sorted(set(ids))
    assert ids[-1] == "a-20261121-120005-ffff"


@pytest.mark.parametrize("name", ["reviews", "a", "bert-base-2", "2-b"])
def test_what_is_made_is_recognised(name: str) -> None:
    assert is_run_id(new_run_id(name, now=NOON))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reviews",
        "reviews-20261121-120005",
        "reviews-20261121-120005-00AB",
        "Reviews-20261121-120005-00ab",
        "-20261121-120005-00ab",
        "reviews-20261121-120005-00ab/",
        "reviews-20261121-120005-00ab\n",
        "0e5e9c1e-1f6a-4f0e-9a54-6a4f9a2b7c11",
    ],
)
def test_other_texts_are_no_run_ids(text: str) -> None:
    assert not is_run_id(text)


def test_a_runs_files_lie_under_its_team() -> None:
    assert run_prefix("research", "reviews-20261121-120005-00ab") == "research/reviews-20261121-120005-00ab/"
