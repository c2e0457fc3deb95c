"""That the moments at which trainings are interrupted are spread over all there is to be hit."""

from collections import Counter

import pytest

from tests.support.benchmarks.moments import KILL_RANK, WAYS, drawn
from tests.support.benchmarks.phases import LAUNCHER, PARTS, PHASES, START_UP


@pytest.mark.parametrize("seed", range(10))
def test_every_phase_way_and_part_of_a_start_up_is_drawn_and_no_pair_of_them_twice(seed: int) -> None:
    trainings = drawn(20, seed, 4)
    assert [len({moment.phase for moment in of_one}) for of_one in trainings] == [5, 5, 5, 5]
    moments = [moment for of_one in trainings for moment in of_one]
    assert len({(moment.phase, moment.way) for moment in moments}) == 20
    ways = Counter(moment.way for moment in moments)
    assert set(ways) == set(WAYS)
    assert set(ways.values()) == {3, 4}
    assert Counter(moment.phase for moment in moments) == dict.fromkeys(PHASES, 4)
    assert {moment.part for moment in moments if moment.phase == START_UP} == set(PARTS)
    assert (KILL_RANK, LAUNCHER) not in {(moment.way, moment.part) for moment in moments}, "it has no rank yet"
    assert drawn(20, seed, 4) == trainings
