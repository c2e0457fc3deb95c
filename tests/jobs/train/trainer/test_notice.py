"""What is done at which time from a notice on."""

import pytest

from jobs.train.trainer.notice import SPARE_SECONDS, Action, Measured, action

SAVES_OF_TWO_SECONDS = Measured(save=2, step=0.5)
"""The last save has to begin 2 * 2 + 2 * 0.5 + 2 seconds before the end."""


@pytest.mark.parametrize(
    ("left", "measured", "has_saved", "expected"),
    [
        # At the notice it saves, and then trains on until the last save is due
        (110, SAVES_OF_TWO_SECONDS, False, "save"),
        (110, SAVES_OF_TWO_SECONDS, True, None),
        (7.1, SAVES_OF_TWO_SECONDS, True, None),
        (7.0, SAVES_OF_TWO_SECONDS, True, "stop"),
        # Longer steps and slower saves have it begin earlier, also one that is slower than the last one was
        (12.1, Measured(save=2, step=3), True, None),
        (12.0, Measured(save=2, step=3), True, "stop"),
        (23.0, Measured(save=10, step=0.5), True, "stop"),
        (23.0, Measured(save=10, under_way=9, step=0.5), True, "stop"),
        (27.1, Measured(save=10, under_way=12, step=0.5), True, None),
        # Another one would not be complete in time after one that is so slow
        (27.0, Measured(save=10, under_way=12, step=0.5), True, "leave"),
        (40.0, Measured(under_way=30), True, "leave"),
        # The notice comes late, or saves take long: there is one save only
        (7, SAVES_OF_TWO_SECONDS, False, "stop"),
        (110, Measured(save=60), False, "stop"),
        (50, Measured(save=20, under_way=30), False, "stop"),
        (-40, SAVES_OF_TWO_SECONDS, False, "stop"),
        # Nothing is measured yet
        (110, Measured(), False, "save"),
        (SPARE_SECONDS, Measured(), False, "stop"),
    ],
)
def test_the_last_save_begins_as_late_as_what_is_measured_allows(
    *, left: float, measured: Measured, has_saved: bool, expected: Action | None
) -> None:
    assert action(left, measured, has_saved=has_saved) == expected


def test_an_evaluation_goes_on_until_the_last_save_is_due_where_it_is_known_how_long_that_takes() -> None:
    assert action(110, SAVES_OF_TWO_SECONDS, has_saved=False, evaluates=True) == "save"
    assert action(110, SAVES_OF_TWO_SECONDS, has_saved=True, evaluates=True) is None
    assert action(7, SAVES_OF_TWO_SECONDS, has_saved=True, evaluates=True) == "stop"
    assert action(110, Measured(step=0.5), has_saved=False, evaluates=True) == "stop"
