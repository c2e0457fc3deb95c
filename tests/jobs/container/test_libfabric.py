"""What cards of several nodes talk over: what is said where it is not there, and what is taken where it is.

The real library is read in the gaudi image (tests/images/test_gaudi_image.py), which has one.
"""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from jobs.container import libfabric
from jobs.core.errors import ConfigurationError


class Library:
    """A libfabric that answers with a list of providers, laid out as fi_getinfo(3) says."""

    def __init__(self, *names: str) -> None:
        self._fabrics = [libfabric._FabricAttributes(provider_name=name.encode()) for name in names]
        self._infos = [libfabric._Info(fabric=ctypes.pointer(fabric)) for fabric in self._fabrics]
        for info, following in zip(self._infos, self._infos[1:], strict=False):
            info.next = ctypes.pointer(following)
        self.freed = 0

        def fi_getinfo(*arguments: Any) -> int:
            arguments[-1]._obj.contents = self._infos[0]
            return 0

        def fi_freeinfo(_: Any) -> None:
            self.freed += 1

        self.fi_getinfo, self.fi_freeinfo = fi_getinfo, fi_freeinfo


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a node's EFA devices, which has none."""
    monkeypatch.setattr(libfabric, "EFA_DEVICES", (tmp_path, libfabric.EFA_DEVICES[1]))
    return tmp_path


def test_every_provider_is_named_once_by_what_is_below() -> None:
    library = Library("efa", "efa", "tcp;ofi_rxm", "tcp", "shm")
    assert libfabric.providers(library) == ["efa", "tcp", "shm"]  # type: ignore[arg-type]
    assert library.freed == 1


@pytest.mark.parametrize(
    ("found", "provider"), [(["tcp", "efa"], "efa"), (["tcp", "verbs"], "verbs"), (["shm", "tcp"], "tcp")]
)
def test_efa_is_taken_before_verbs_before_tcp_and_nothing_else(devices: Path, found: list[str], provider: str) -> None:
    assert libfabric.taken(found) == provider
    with pytest.raises(ConfigurationError, match="no provider that reaches another node, only shm"):
        libfabric.taken(["shm"])


def test_tcp_in_place_of_the_efa_that_the_node_has_is_an_error(devices: Path) -> None:
    (devices / "uverbs0").touch()
    assert libfabric.taken(["efa", "tcp"]) == "efa"
    with pytest.raises(ConfigurationError, match="this node has EFA devices, and libfabric has no provider 'efa'"):
        libfabric.taken(["tcp"])


def test_nccl_has_to_take_the_efa_of_nodes_that_start_together(
    devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libfabric, "_load", lambda _: object())
    assert libfabric.environment("cuda", nnodes=2) == {}, "nodes without EFA devices talk over TCP"
    (devices / "uverbs0").touch()
    assert libfabric.environment("cuda", nnodes=2) == {"NCCL_NET": "Libfabric"}
    assert libfabric.environment("cuda", nnodes=1) == {}
    assert libfabric.environment("hpu", nnodes=2) == {}
    assert not caplog.messages


def test_a_job_of_several_nodes_ends_where_the_image_cannot_use_their_efa(
    devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NCCL_NET", raising=False)
    (devices / "uverbs0").touch()
    said = r"NCCL would take TCP, .*\.so(\.1)? cannot be loaded(.|\n)*Next: run the job in the image .* NCCL_NET=Socket"
    with pytest.raises(ConfigurationError, match=said):
        libfabric.environment("cuda", nnodes=2)
    # Who asks for TCP by NCCL's own variable gets it
    monkeypatch.setenv("NCCL_NET", "Socket")
    assert libfabric.environment("cuda", nnodes=2) == {}
    assert caplog.messages == ["warning: this node has EFA, and NCCL_NET=Socket has NCCL not use it"]


def test_a_card_without_its_libraries_is_an_error_and_a_cpu_needs_none() -> None:
    assert libfabric.load("cpu") is None
    with pytest.raises(ConfigurationError, match=r"\.so(\.1)? cannot be loaded .*cannot reach another's"):
        libfabric.load("hpu")
