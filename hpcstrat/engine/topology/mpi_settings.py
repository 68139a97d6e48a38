"""Detects MPI and network settings that stop a job before its first line runs.

With such a setting, the MPI library prints an obscure message and ends the process. The
start of MPI and ``hpcstrat doctor`` explain the settings that can be detected before
MPI starts.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["DoubtfulSetting", "doubtful_settings", "has_loaded_gtl"]

_NETWORKS = ("/sys/class/infiniband/*", "/sys/class/net/*")
# Devices that UCX transports and libfabric providers require.
_INFINIBAND = "/sys/class/infiniband/*"
_UCX_OF_INFINIBAND = ("rc", "dc", "ud", "ib")
_UCX_IN_MEMORY = {"sm", "shm", "mm", "posix", "sysv", "xpmem"}
_PROVIDERS = {
    "cxi": ("/sys/class/cxi/*", "Slingshot"),
    "verbs": (_INFINIBAND, "InfiniBand"),
    "efa": (_INFINIBAND, "EFA"),
    "psm2": ("/dev/hfi1*", "Omni-Path"),
    "opx": ("/dev/hfi1*", "Omni-Path"),
}


@dataclass(frozen=True, slots=True)
class DoubtfulSetting:
    """A setting that will probably end the job; ``name`` is the name of the finding."""

    name: str
    text: str


def doubtful_settings(
    environment: Mapping[str, str],
    library: str,
    *,
    has_gtl: bool,
    find: Callable[[str], list[str]] = glob.glob,
) -> list[DoubtfulSetting]:
    """Return the settings that do not match this machine.

    ``library`` is the version text of the MPI library, and ``has_gtl`` says whether
    Cray's GPU library (GTL) is loaded. ``find`` returns the paths that match a pattern.
    """
    texts = {
        "gtl": _gtl(environment, library, has_gtl),
        "ucx-devices": _ucx_devices(environment, find),
        "ucx-transports": _ucx_transports(environment, find),
        "libfabric-provider": _provider(environment, find),
    }
    return [DoubtfulSetting(name, text) for name, text in texts.items() if text]


def has_loaded_gtl() -> bool:
    """Return whether this process has loaded Cray's GPU library (GTL)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            return "libmpi_gtl" in file.read()
    except OSError:
        return True


def _gtl(environment: Mapping[str, str], library: str, has_gtl: bool) -> str:
    asked = environment.get("MPICH_GPU_SUPPORT_ENABLED", "0") not in ("", "0")
    if not asked or has_gtl or "CRAY MPICH" not in library.upper():
        return ""
    folder = environment.get("CRAY_MPICH_ROOTDIR", "/opt/cray/pe/mpich/default")
    return (
        "expected Cray's GTL library in this process, because of "
        "MPICH_GPU_SUPPORT_ENABLED=1, found that Python has not loaded it, so that MPI "
        "will say that the GTL library is not linked; set LD_PRELOAD to "
        f"{folder}/gtl/lib/libmpi_gtl_cuda.so (AMD: libmpi_gtl_hsa.so), or unset "
        "MPICH_GPU_SUPPORT_ENABLED if no GPU is used"
    )


def _words(environment: Mapping[str, str], name: str) -> list[str]:
    """Return the words of a comma-separated variable; none if it starts with ``^``."""
    text = environment.get(name, "").strip()
    return [] if text.startswith("^") else [word for word in text.split(",") if word]


def _ucx_devices(
    environment: Mapping[str, str], find: Callable[[str], list[str]]
) -> str:
    wanted = [
        word
        for word in _words(environment, "UCX_NET_DEVICES")
        if word != "all" and not set(word) & set("*?[")
    ]
    there = {os.path.basename(path) for network in _NETWORKS for path in find(network)}
    missing = [word for word in wanted if word.partition(":")[0] not in there]
    if not missing or not there:
        return ""
    return (
        f"expected the network {', '.join(missing)} of UCX_NET_DEVICES, found "
        f"{', '.join(sorted(there))}; take one of them, or unset UCX_NET_DEVICES, and "
        "look at `ucx_info -d` on a compute node"
    )


def _ucx_transports(
    environment: Mapping[str, str], find: Callable[[str], list[str]]
) -> str:
    words = _words(environment, "UCX_TLS")
    networked = [word for word in words if word.startswith(_UCX_OF_INFINIBAND)]
    if networked and not find(_INFINIBAND):
        return (
            f"expected InfiniBand, because UCX_TLS has {', '.join(networked)}, found "
            "none on this host; unset UCX_TLS, so that UCX chooses among the existing "
            "networks"
        )
    if words and "all" not in words and not set(words) & _UCX_IN_MEMORY:
        return (
            f"expected shared memory among the transports of UCX_TLS, found "
            f"{','.join(words)}, with which ranks of one host may not reach each "
            "other; add sm and self, or unset UCX_TLS"
        )
    return ""


def _provider(environment: Mapping[str, str], find: Callable[[str], list[str]]) -> str:
    # In verbs;ofi_rxm, the part after the semicolon is a layer above the provider.
    wanted = [word.split(";")[0] for word in _words(environment, "FI_PROVIDER")]
    known = [_PROVIDERS[word] for word in wanted if word in _PROVIDERS]
    if len(known) < len(wanted) or any(find(path) for path, _ in known) or not wanted:
        return ""
    networks = ", ".join(dict.fromkeys(network for _, network in known))
    return (
        f"expected {networks} on this host, because of "
        f"FI_PROVIDER={environment['FI_PROVIDER']}, found no such device; unset "
        "FI_PROVIDER, so that libfabric chooses among the existing networks, and look "
        "at `fi_info -l`"
    )
