"""The scans for listening sockets, which hold every launch of the other tests to loopback, are held to the ranks."""

import subprocess

import pytest

from tests.support.train.launching import Launched


@pytest.mark.parametrize(("rank", "seen"), [("", True), ("RANK=0 ", False)])
def test_a_launcher_whose_ranks_run_without_a_store_fails_its_test(*, rank: str, seen: bool) -> None:
    command = ["sh", "-c", f"{rank}sleep 1.5; true"]
    launched = Launched(subprocess.Popen(command, stdout=subprocess.PIPE, text=True), keeps_to_itself=True)
    if seen:
        assert launched.wait() == 0
    else:
        with pytest.raises(AssertionError, match="no listening socket was seen"):
            launched.wait()
