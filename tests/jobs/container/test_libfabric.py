"""The connection between cards of several nodes: which provider is used, and the error if there is none.

The real library is tested in the gaudi image (tests/images/test_gaudi_image.py), which contains one.
"""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from jobs.container import libfabric
from jobs.core.errors import ConfigurationError


class Library:
    """A libfabric that returns a list of providers, in the layout of fi_getinfo(3)."""

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
    """The folder of a node's EFA devices, empty."""
    monkeypatch.setattr(libfabric, "EFA_DEVICES", (tmp_path, libfabric.EFA_DEVICES[1]))
    return tmp_path


def test_each_provider_is_listed_once_by_its_base_name() -> None:
    library = Library("efa", "efa", "tcp;ofi_rxm", "tcp", "shm")
    assert libfabric.providers(library) == ["efa", "tcp", "shm"]  # type: ignore[arg-type]
    assert library.freed == 1


@pytest.mark.parametrize(
    ("found", "provider"), [(["tcp", "efa"], "efa"), (["tcp", "verbs"], "verbs"), (["shm", "tcp"], "tcp")]
)
def test_efa_is_preferred_to_verbs_and_verbs_to_tcp(devices: Path, found: list[str], provider: str) -> None:
    assert libfabric.preferred_provider(found) == provider
    with pytest.raises(ConfigurationError, match="no provider that reaches another node, only shm"):
        libfabric.preferred_provider(["shm"])


def test_tcp_on_a_node_with_efa_is_an_error(devices: Path) -> None:
    (devices / "uverbs0").touch()
    assert libfabric.preferred_provider(["efa", "tcp"]) == "efa"
    with pytest.raises(ConfigurationError, match="this node has EFA devices, but libfabric has no provider 'efa'"):
        libfabric.preferred_provider(["tcp"])


def test_nccl_must_use_efa_on_multi_node_jobs(
    devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libfabric, "_load", lambda _: object())
    assert libfabric.environment("cuda", nnodes=2) == {}, "nodes without EFA devices talk over TCP"
    (devices / "uverbs0").touch()
    assert libfabric.environment("cuda", nnodes=2) == {"NCCL_NET": "Libfabric"}
    assert libfabric.environment("cuda", nnodes=1) == {}
    assert libfabric.environment("hpu", nnodes=2) == {}
    assert not caplog.messages


def test_a_multi_node_job_fails_if_its_image_lacks_efa(
    devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NCCL_NET", raising=False)
    (devices / "uverbs0").touch()
    message = r"NCCL would use TCP, .*\.so(\.1)? cannot be loaded(.|\n)*Next: run the job .* NCCL_NET=Socket"
    with pytest.raises(ConfigurationError, match=message):
        libfabric.environment("cuda", nnodes=2)
    # NCCL's variable can choose TCP explicitly
    monkeypatch.setenv("NCCL_NET", "Socket")
    assert libfabric.environment("cuda", nnodes=2) == {}
    assert caplog.messages == ["warning: this node has EFA, but with NCCL_NET=Socket NCCL does not use it"]


def test_missing_libraries_are_an_error_except_on_a_cpu() -> None:
    assert libfabric.load("cpu") is None
    with pytest.raises(ConfigurationError, match=r"\.so(\.1)? cannot be loaded .*cannot reach other nodes"):
        libfabric.load("hpu")
