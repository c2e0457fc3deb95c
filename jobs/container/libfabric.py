"""Load libfabric, through which the cards of several nodes communicate, and list its providers.

HCCL and NCCL each load libfabric through a plugin. If libfabric or the plugin cannot be loaded, HCCL cannot reach other
nodes, and NCCL silently uses TCP.
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
"""The library that connects an accelerator's collectives to libfabric: Habana's wrapper, and aws-ofi-nccl under the
name that NCCL looks for (src/Makefile.am of aws-ofi-nccl). Other accelerators need none."""

NCCL_NET = {"NCCL_NET": "Libfabric"}
"""Makes NCCL use aws-ofi-nccl, which it calls Libfabric (src/nccl_ofi_interface_nvidia of 1.14 to 1.21), or fail. By
default, NCCL falls back to TCP if anything is wrong."""

EFA = "efa"

EFA_DEVICES = Path("/dev/infiniband"), "uverbs[0-9]*"
"""Folder and names of the EFA devices, which Batch passes to multi-node jobs."""

_API_VERSION = 1 << 16 | 9
"""FI_VERSION(1, 9), of 2019. The fields read below are the same in all later versions."""


class _FabricAttributes(ctypes.Structure):
    """fi_fabric_attr, up to the fields that are read here (fi_fabric(3))."""

    _fields_ = (("fabric", ctypes.c_void_p), ("name", ctypes.c_char_p), ("provider_name", ctypes.c_char_p))


class _Info(ctypes.Structure):
    """fi_info, up to the fields that are read here (fi_getinfo(3))."""


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
    """Load the libraries through which collectives reach other nodes. Returns libfabric, or None if not needed.

    NCCL needs libfabric only for EFA, HCCL for any connection to another node. Raises ConfigurationError if a library
    cannot be loaded.
    """
    if name not in WRAPPERS or (name == "cuda" and not has_efa()):
        return None
    return load_for(name)


def load_for(name: Name) -> ctypes.CDLL:
    """Load the libraries of an accelerator in `WRAPPERS`, with or without EFA devices on this node."""
    libfabric = _load(LIBFABRIC)
    _load(WRAPPERS[name])
    return libfabric


def has_efa() -> bool:
    """Return whether this node has EFA devices. Batch passes them to multi-node jobs only."""
    folder, names = EFA_DEVICES
    return any(folder.glob(names))


def environment(name: Name, *, nnodes: int) -> dict[str, str]:
    """Return the variables that make the ranks of a job use the EFA devices of their nodes, or fail.

    Raises ConfigurationError if the image does not support EFA, because over TCP the job would pay for idle cards. Does
    not override an image that sets NCCL_NET, for instance to `Socket`, which is NCCL's name for TCP.
    """
    if name != "cuda" or nnodes == 1 or not has_efa():
        return {}
    (variable,) = NCCL_NET
    if os.environ.get(variable, NCCL_NET[variable]) != NCCL_NET[variable]:
        log.warning("warning: this node has EFA, but with %s=%s NCCL does not use it", variable, os.environ[variable])
        return {}
    try:
        load(name)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"this node has EFA, but NCCL would use TCP, which is many times slower: {error.args[0]}",
            next_step=f"run the job in the standard image of its instance type, or set {variable}=Socket in your image "
            "to train over TCP anyway",
        ) from None
    return NCCL_NET


def providers(libfabric: ctypes.CDLL) -> list[str]:
    """Return the providers that libfabric finds on this node, in libfabric's order.

    Raises ConfigurationError if it finds none.
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
            f"libfabric finds no provider on this node (error {code})",
            next_step="set FI_LOG_LEVEL=info to log the reason",
        )
    found: dict[str, None] = {}
    info = first
    while info:
        # A layered provider has both names: `tcp;ofi_rxm`.
        found.setdefault(info.contents.fabric.contents.provider_name.decode().partition(";")[0])
        info = info.contents.next
    libfabric.fi_freeinfo(first)
    return list(found)


def preferred_provider(found: Sequence[str]) -> str:
    """Return the provider that HCCL uses: EFA, else verbs, else TCP (docs.habana.ai, Scale-out via Host NIC).

    Raises ConfigurationError if libfabric has none of these, or if the node has EFA devices but libfabric has no EFA.
    """
    if EFA not in found and has_efa():
        raise ConfigurationError(
            f"this node has EFA devices, but libfabric has no provider '{EFA}', only {', '.join(found)}",
            next_step="set FI_LOG_LEVEL=info to log the reason; check the AMI's EFA driver and the security group",
        )
    for provider in (EFA, "verbs", "tcp"):
        if provider in found:
            return provider
    raise ConfigurationError(
        f"libfabric has no provider that reaches another node, only {', '.join(found)}",
        next_step="set FI_LOG_LEVEL=info to log the reason",
    )


def _load(library: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise ConfigurationError(
            f"{library} cannot be loaded ({error}), so the cards of this node cannot reach other nodes",
            next_step="run the job in the standard image of its instance type; `trainyard images test` checks this",
        ) from None
