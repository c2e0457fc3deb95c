"""The key-value store of a job's launchers and ranks: PyTorch's TCPStore, which asks nobody who they are.

So it listens where those that belong to the job can reach it, and nowhere else: on loopback where there is one node, on
the address that the other nodes know where there are several. PyTorch by itself listens on all addresses.
"""

import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

LOOPBACK = "127.0.0.1"

STORE_TIMEOUT = timedelta(hours=24)
"""The time limit of one request. A peer that prepares data may take hours; one that dies or hangs is found by what it
does not say, not by this."""


def serve_store(address: str, port: int = 0) -> "TCPStore":
    """Serve a store at one address of this machine; port 0: any free one. It is there for as long as what is returned.

    Whoever makes a store for several tenants at that port in this process, as PyTorch does for its own rendezvous,
    becomes another tenant of this server. Raises OSError where nobody can listen there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen()
        return TCPStore(
            address,
            listening.getsockname()[1],
            is_master=True,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening.detach(),  # the store closes it
        )


def connect_store(address: str, port: int) -> "TCPStore":
    """Return a connection of one's own: a thread that waits on one would block the others that share it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

    return TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)


def loopback_sockets() -> dict[str, str]:
    """Return the variables by which the ranks of one node connect to each other over loopback alone."""
    return sockets_of_interface("lo" if sys.platform == "linux" else "lo0")


def sockets_of_interface(name: str) -> dict[str, str]:
    """Return the variables by which ranks listen on one network interface alone.

    Gloo takes the address that the machine's name stands for otherwise, NCCL the interfaces that it finds. NCCL takes
    a name as the start of one, unless `=` is before it (NCCL's documentation, Environment Variables), and meets over
    sockets even where its data goes over EFA. HCCL has such a variable too, HCCL_SOCKET_IFNAME; how it reads names is
    nowhere said where we could read it, and nobody here could try: it is left alone.
    """
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
