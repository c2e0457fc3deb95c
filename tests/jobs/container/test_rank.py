"""How a process finds its place among the ranks, depending on its starter."""

import importlib.util
from pathlib import Path

import pytest

import trainyard
from jobs.container.channel import LOOPBACK, connect_store, read_result, serve_store
from jobs.container.rank import Rank
from jobs.spec.catalog import CATALOG

ALONE = {
    "TRAINYARD_RANK": "0",
    "TRAINYARD_LOCAL_RANK": "0",
    "TRAINYARD_WORLD_SIZE": "1",
    "TRAINYARD_LOCAL_WORLD_SIZE": "1",
    "TRAINYARD_GROUP_RANK": "0",
}
"""The environment of a script with `processes: 1`, which its child processes inherit."""


@pytest.mark.parametrize(
    "started",
    [
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "PMI_RANK": "0",
        },
    ],
    ids=["Open MPI", "MPICH", "torchrun"],
)
def test_a_rank_started_by_a_script_has_its_own_place(
    started: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"TRAINYARD_RUN_URI": "s3://runs/research/a/", "TRAINYARD_SCRATCH": str(tmp_path)}
    for name, value in {**ALONE, **run}.items():
        monkeypatch.setenv(name, value)
    alone = Rank.from_environment()
    assert (alone.rank, alone.world_size) == (0, 1)
    trainyard.result(f1=0.5)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    rank = Rank.from_environment()
    assert (rank.rank, rank.local_rank, rank.world_size, rank.local_world_size) == (5, 1, 8, 4)
    assert (rank.node, rank.nnodes) == (1, 2)
    trainyard.result(f1=0.1)
    assert read_result(tmp_path) == {"f1": 0.5}, "as rank 0 reported"


def test_a_nested_result_is_refused_in_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"TRAINYARD_RUN_URI": "s3://runs/research/a/", "TRAINYARD_SCRATCH": str(tmp_path)}
    for name, value in {**ALONE, **run}.items():
        monkeypatch.setenv(name, value)
    trainyard.result(f1=0.5, words="x" * 16_000)
    with pytest.raises(
        ValueError, match=r"takes at most 16384 bytes of JSON in all; .* most of them in 'words'\. Next: write"
    ):
        trainyard.result(more="y" * 1000)
    assert read_result(tmp_path).keys() == {"f1", "words"}


def test_each_store_takes_a_free_port() -> None:
    first, second = serve_store(LOOPBACK), serve_store(LOOPBACK)
    assert first.port != second.port
    connect_store(LOOPBACK, first.port).set("a", "b")
    assert first.get("a") == b"b"


def test_every_kind_has_an_entrypoint_module() -> None:
    assert [kind.name for kind in CATALOG.values() if importlib.util.find_spec(kind.entrypoint) is None] == []
