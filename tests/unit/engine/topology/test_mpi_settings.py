"""Settings with which an MPI library would fail to start on a machine."""

from __future__ import annotations

import fnmatch

import pytest

from hpcstrat.engine.topology.bindings import CoreMasks, crowded_ranks
from hpcstrat.engine.topology.mpi_settings import doubtful_settings
from hpcstrat.tools.doctor.examination import RankFacts, compare
from tests.docs.said import assert_said

# Text of MPI_Get_library_version in Cray MPICH.
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)\n"
DEVICES = (
    *("/sys/class/infiniband/mlx5_0", "/sys/class/infiniband/mlx5_1"),
    *("/sys/class/net/ib0", "/sys/class/net/lo"),
)


def told(
    devices: tuple[str, ...] = DEVICES,
    library: str = "",
    *,
    gtl: bool = False,
    **environment: str,
) -> dict[str, str]:
    """Return the warnings on a machine that has these devices."""
    found = doubtful_settings(
        *(environment, library),
        has_gtl=gtl,
        find=lambda pattern: fnmatch.filter(devices, pattern),
    )
    return {doubt.name: doubt.text for doubt in found}


def test_the_missing_gtl_library_is_named_before_cray_ends_the_process() -> None:
    asked = {"MPICH_GPU_SUPPORT_ENABLED": "1"}
    found = told(library=CRAY, CRAY_MPICH_ROOTDIR="/opt/cray/pe/mpich/8.1.28", **asked)
    assert list(found) == ["gtl"]
    assert_said("gtl", found["gtl"])
    assert told(library=CRAY, gtl=True, **asked) == {}
    assert told(library=CRAY, MPICH_GPU_SUPPORT_ENABLED="0") == {}
    assert told(library="MPICH Version:      4.2.0", **asked) == {}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("UCX_NET_DEVICES", "mlx5_0:1,mlx5_9:1", "network mlx5_9:1 of UCX_NET_DEVICES"),
        ("UCX_NET_DEVICES", "mlx5_0:1,ib0", ""),
        ("UCX_NET_DEVICES", "all", ""),
        ("UCX_NET_DEVICES", "^mlx5_9:1", ""),
        ("UCX_NET_DEVICES", "mlx5_*:1", ""),
        ("UCX_TLS", "rc,sm,self", ""),
        ("UCX_TLS", "all", ""),
        ("UCX_TLS", "^cma", ""),
        ("UCX_TLS", "rc,self", "shared memory among the transports"),
        ("FI_PROVIDER", "cxi", "expected Slingshot on this host"),
        ("FI_PROVIDER", "verbs;ofi_rxm", ""),
        ("FI_PROVIDER", "cxi,verbs", ""),
        ("FI_PROVIDER", "tcp", ""),
        ("FI_PROVIDER", "psm2,opx", "expected Omni-Path on this host"),
        ("FI_PROVIDER", "^cxi", ""),
    ],
)
def test_networks_that_are_not_there_are_named(
    name: str, value: str, words: str
) -> None:
    found = list(told(**{name: value}).values())
    assert len(found) == bool(words)
    assert all(words in text for text in found)


def test_transports_of_infiniband_need_it() -> None:
    [text] = told(("/sys/class/net/eth0",), UCX_TLS="rc,sm,self").values()
    assert "expected InfiniBand, because UCX_TLS has rc, found none" in text


def test_ranks_are_crowded_where_the_launcher_has_more_cores() -> None:
    every = frozenset(range(4))
    first = CoreMasks(frozenset({0}), every)
    second = CoreMasks(frozenset({1}), every)
    [crowded] = crowded_ranks([first, second, first])
    assert (crowded.ranks, crowded.num_others) == ((0, 2), 3)
    assert not list(crowded_ranks([first, second]))
    # A machine with a single core has no crowded ranks.
    own = CoreMasks(frozenset({0}), frozenset({0}))
    assert not list(crowded_ranks([own, own]))


def test_hosts_without_huge_pages_are_a_remark() -> None:
    def rank(number: int, host: str, pages: str) -> RankFacts:
        cores = frozenset({0, 1})
        return RankFacts(number, host, cores, cores, "1", 1 << 32, (), (), pages)

    found = compare([rank(0, "node1", "never"), rank(1, "node2", "madvise")])
    assert [(one.name, one.hosts) for one in found.remarks] == [
        ("huge-pages", ("node1",))
    ]
    assert_said("huge-pages", found.remarks[0].text)
    assert not compare([rank(0, "node1", ""), rank(1, "node2", "always")]).remarks
