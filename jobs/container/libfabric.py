"""libfabric, over which cards of several nodes talk: whether it can be loaded, and the providers that it has.

HCCL and NCCL load it by themselves, each through a library of its own. Where either cannot be loaded HCCL has no way to
another node, and NCCL silently takes TCP.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from jobs.container.accelerator import Name
from jobs.core.errors import ConfigurationError

log = logging.getLogger("trainyard")

LIBFABRIC = "libfabric.so.1"

WRAPPERS: dict[Name, str] = {"hpu": "libhccl_ofi_wrapper.so", "cuda": "libnccl-net.so"}
"""Accelerator to the library by which its collectives reach libfabric: Habana's wrapper, and what NCCL looks for, which
is aws-ofi-nccl (its src/Makefile.am). One that is not named here needs neither."""

NCCL_NET = {"NCCL_NET": "Libfabric"}
"""With it NCCL takes aws-ofi-nccl, by the name that it has in NCCL (src/nccl_ofi_interface_nvidia of 1.14 to 1.21), or
fails; without it NCCL takes TCP where anything is wrong."""

EFA = "efa"

EFA_DEVICES = Path("/dev/infiniband"), "uverbs[0-9]*"
"""Folder and names of the devices by which libfabric reaches EFA; Batch hands them to jobs of several nodes."""

_API_VERSION = 1 << 16 | 9
"""FI_VERSION(1, 9), of 2019: what is read below is the same in all later ones."""


class _FabricAttributes(ctypes.Structure):
    """fi_fabric_attr, up to what is read of it (fi_fabric(3))."""

    _fields_ = (("fabric", ctypes.c_void_p), ("name", ctypes.c_char_p), ("provider_name", ctypes.c_char_p))


class _Info(ctypes.Structure):
    """fi_info, up to what is read of it (fi_getinfo(3))."""


_Info._fields_ = (
    ("next", ctypes.POINTER(_Info)),
    *((name, ctypes.c_uint64) for name in ("capabilities", "mode")),
    ("address_format", ctypes.c_uint32),
    *((name, ctypes.c_size_t) for name in ("source_length", "destination_length")),
    *(
        (name, ctypes.c_void_p)
        for name in ("source", "destination", "handle", "transmit", "receive", "endpoint", "domain")
    ),
    ("fabric", ctypes.POINTER(_FabricAttributes)),
)


def load(name: Name) -> ctypes.CDLL | None:
    """Load what `name`'s collectives talk to other nodes with, and return libfabric; None where they need none.

    NCCL needs it for EFA alone, HCCL for any way to another node. Raises ConfigurationError where a library cannot be
    loaded.
    """
    if name not in WRAPPERS or (name == "cuda" and not has_efa()):
        return None
    return load_for(name)


def load_for(name: Name) -> ctypes.CDLL:
    """Load the same whether or not this node has EFA devices, of an accelerator in `WRAPPERS`."""
    libfabric = _load(LIBFABRIC)
    _load(WRAPPERS[name])
    return libfabric


def has_efa() -> bool:
    """Return whether this node has EFA devices; Batch hands them to jobs whose nodes start together."""
    folder, names = EFA_DEVICES
    return any(folder.glob(names))


def environment(name: Name, *, nnodes: int) -> dict[str, str]:
    """Return the variables with which the ranks of a job use the EFA of their nodes, or fail.

    Raises ConfigurationError where the image cannot: over TCP a job would pay for cards that wait. An image that sets
    NCCL_NET itself has chosen (`Socket` is NCCL's name for TCP), and is left alone.
    """
    if name != "cuda" or nnodes == 1 or not has_efa():
        return {}
    (variable,) = NCCL_NET
    if os.environ.get(variable, NCCL_NET[variable]) != NCCL_NET[variable]:
        log.warning("warning: this node has EFA, and %s=%s has NCCL not use it", variable, os.environ[variable])
        return {}
    try:
        load(name)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"this node has EFA, and NCCL would take TCP, at a fraction of its speed: {error.args[0]}",
            next_step=f"run the job in the image that its instance type's row names, or set {variable}=Socket in yours "
            "to train over TCP all the same",
        ) from None
    return NCCL_NET


def providers(libfabric: ctypes.CDLL) -> list[str]:
    """Return the providers that libfabric has on this node, in its own order.

    Raises ConfigurationError where it has none.
    """
    first = ctypes.POINTER(_Info)()
    libfabric.fi_getinfo.argtypes = (
        ctypes.c_uint32,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.POINTER(_Info)),
    )
    libfabric.fi_freeinfo.argtypes = (ctypes.POINTER(_Info),)
    libfabric.fi_freeinfo.restype = None
    code = libfabric.fi_getinfo(_API_VERSION, None, None, 0, None, ctypes.byref(first))
    if code:
        raise ConfigurationError(
            f"libfabric finds no provider on this node (error {code})", next_step="FI_LOG_LEVEL=info says why"
        )
    found: dict[str, None] = {}
    info = first
    while info:
        # A layer on top of another is named after both: `tcp;ofi_rxm`.
        found.setdefault(info.contents.fabric.contents.provider_name.decode().partition(";")[0])
        info = info.contents.next
    libfabric.fi_freeinfo(first)
    return list(found)


def taken(found: Sequence[str]) -> str:
    """Return the provider that HCCL takes of these: EFA, else verbs, else TCP (docs.habana.ai, Scale-out via Host NIC).

    Raises ConfigurationError where none of them is there, or the node has EFA devices and libfabric has no EFA.
    """
    if EFA not in found and has_efa():
        raise ConfigurationError(
            f"this node has EFA devices, and libfabric has no provider '{EFA}' for them, only {', '.join(found)}",
            next_step="FI_LOG_LEVEL=info says why; see the AMI's driver of EFA and the security group",
        )
    for provider in (EFA, "verbs", "tcp"):
        if provider in found:
            return provider
    raise ConfigurationError(
        f"libfabric has no provider that reaches another node, only {', '.join(found)}",
        next_step="FI_LOG_LEVEL=info says why",
    )


def _load(library: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise ConfigurationError(
            f"{library} cannot be loaded ({error}): cards of this node cannot reach another's",
            next_step="run the job in the image that its instance type's row names; `trainyard images test` loads it",
        ) from None
