"""The process group of Ray's workers, as Ray Train makes it, but with a store that listens on loopback.

Ray's own listens on all addresses of the machine, and does what anybody asks of it.
"""

import os
from typing import TYPE_CHECKING, Any

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend

from jobs.train.store import LOOPBACK, serve_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

_served: "list[TCPStore]" = []
"""The store that this worker serves: there until its process ends."""


class LoopbackConfig(TorchConfig):  # type: ignore[misc]  # Ray has no types
    """Says how the workers connect: by a process group whose store is the first worker's."""

    @property
    def backend_cls(self) -> type[Any]:
        return _LoopbackBackend


class _LoopbackBackend(_TorchBackend):  # type: ignore[misc]  # Ray has no types
    def on_start(self, worker_group: Any, backend_config: LoopbackConfig) -> None:
        """Connect the workers."""
        worker_group.execute(_meet_at, port=worker_group.execute_single(0, _serve))
        worker_group.execute(_set_torch_distributed_env_vars)
        ray.get(
            [
                worker_group.execute_single_async(
                    index,
                    _setup_torch_process_group,
                    backend=backend_config.backend,
                    world_rank=index,
                    world_size=len(worker_group),
                    init_method="env://",
                    timeout_s=backend_config.timeout_s,
                )
                for index in range(len(worker_group))
            ]
        )


def _serve() -> int:
    """Serve a store, of which the process group becomes a tenant. Returns its port."""
    _served.append(serve_store(LOOPBACK))
    return _served[0].port


def _meet_at(port: int) -> None:
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
