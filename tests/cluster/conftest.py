"""Pretend hosts for the tests, which are skipped if the machine cannot have hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from hpcstrat.errors import HpcstratError
from hpcstrat.testing.launcher import find_launcher
from tests.cluster.hosts import Hosts, HostsUnavailable
from tests.cluster.pbs import PBS
from tests.cluster.sge import SGE
from tests.cluster.slurm import Slurm


@pytest.fixture(scope="session")
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """Yield a function that makes `Hosts`; all hosts are removed after the tests."""
    with ExitStack() as stack:

        def make(num_hosts: int = 2, rate: str = "") -> Hosts:
            try:
                find_launcher()
                return stack.enter_context(Hosts(num_hosts, rate))
            except (HostsUnavailable, HpcstratError) as exc:
                pytest.skip(str(exc))

        yield make


@pytest.fixture(scope="session")
def hosts(make_hosts: Callable[..., Hosts]) -> Hosts:
    """Return two hosts without a rate limit; tests must leave no process there."""
    return make_hosts(2)


@pytest.fixture(scope="session")
def make_slurm() -> Iterator[Callable[[int], Slurm]]:
    """Yield a function that makes a `Slurm`; all are removed after the tests."""
    with ExitStack() as stack:

        def make(num_nodes: int) -> Slurm:
            try:
                find_launcher()
                return stack.enter_context(Slurm(num_nodes))
            except (HostsUnavailable, HpcstratError) as exc:
                pytest.skip(str(exc))

        yield make


@pytest.fixture(scope="session")
def slurm(make_slurm: Callable[[int], Slurm]) -> Slurm:
    """Return a Slurm of three nodes; jobs end with their test."""
    return make_slurm(3)


def _two_hosts(kind: type[SGE]) -> Iterator[SGE]:
    try:
        find_launcher()
        cluster = kind(2)
    except (HostsUnavailable, HpcstratError) as exc:
        pytest.skip(str(exc))
    with cluster:
        yield cluster


@pytest.fixture(scope="session")
def sge() -> Iterator[SGE]:
    """Yield a Grid Engine of two hosts; jobs end with their test."""
    yield from _two_hosts(SGE)


@pytest.fixture(scope="session")
def pbs() -> Iterator[SGE]:
    """Yield an OpenPBS of two hosts; jobs end with their test."""
    yield from _two_hosts(PBS)
