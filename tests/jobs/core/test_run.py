from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.core.run import is_run_id, new_run_id, spec_name, submitted_at

NOON = datetime(2026, 11, 21, 12, 0, 5, tzinfo=timezone.utc)
MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(timezone.utc))  # noqa: DTZ001


@given(name=st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True), moments=st.lists(MOMENTS, min_size=1))
def test_run_ids_are_recognized_parsed_and_sort_by_time(name: str, moments: list[datetime]) -> None:
    ids = [new_run_id(name, now=moment) for moment in sorted(moments)]
    assert ids == sorted(ids)
    assert all(map(is_run_id, ids))
    assert submitted_at(ids[0]) == min(moments).replace(microsecond=0)
    assert spec_name(ids[0]) == name


def test_run_id_contains_name_and_utc_time() -> None:
    assert new_run_id("reviews", now=NOON) == "reviews-20261121-120005-0000"
    two_hours_east = NOON.astimezone(timezone(timedelta(hours=2)))
    assert new_run_id("reviews", now=two_hours_east) == "reviews-20261121-120005-0000"
    assert new_run_id("a", now=NOON.replace(microsecond=999_999)) == "a-20261121-120005-ffff"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reviews",
        "reviews-20261121-120005",
        "reviews-20261121-120005-00AB",
        "Reviews-20261121-120005-00ab",
        "-20261121-120005-00ab",
        "reviews-20261121-120005-00ab\n",
    ],
)
def test_other_texts_are_not_run_ids(text: str) -> None:
    assert not is_run_id(text)
    with pytest.raises(ValueError, match="is not a run id"):
        submitted_at(text)
