import pytest
from pydantic import ValidationError

from jobs.spec.arguments import parse_flags
from jobs.spec.launcher_options import LauncherOptions

LEAST = {"instance_type": "dl1.24xlarge", "nproc_per_node": 8}


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, []),
        ({"capacity": "spot", "max_usd": 5}, ["--capacity=spot", "--max-usd=5.0"]),
        (
            {"hang_timeout_seconds": 0, "start_timeout_seconds": 60.5},
            ["--hang-timeout-seconds=0", "--start-timeout-seconds=60.5"],
        ),
        (
            {"rendezvous_min_nnodes": 2, "rendezvous_attempts": 3},
            ["--rendezvous-min-nnodes=2", "--rendezvous-attempts=3"],
        ),
        ({"allow_changes": True}, ["--allow-changes"]),
        # Defaults are omitted.
        ({"hang_timeout_seconds": 120, "rendezvous_wait_seconds": 900, "allow_changes": False}, []),
    ],
)
def test_options_become_flags_and_are_parsed_again(given: dict[str, object], flags: list[str]) -> None:
    options = LauncherOptions.model_validate({**LEAST, **given})
    assert options.to_flags() == ["--instance-type=dl1.24xlarge", "--nproc-per-node=8", *flags]
    assert parse_flags(LauncherOptions, options.to_flags(), program="test") == options


@pytest.mark.parametrize("wrong", [{"nproc_per_node": 0}, {"hang_timeout_seconds": -1}, {"max_usd": 0}], ids=str)
def test_invalid_options_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="greater than"):
        LauncherOptions.model_validate({**LEAST, **wrong})
