"""Warnings about misconfigured networks and launchers, with real MPI libraries."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hpcstrat.testing import Finished, launch, launch_command
from tests.docs.said import assert_said

PROGRAM = """
import hpcstrat as hs
strategy = hs.MultiWorkerMirroredStrategy()
hs.print_once("replicas", strategy.num_replicas_in_sync)
"""
OPEN_MPI = "--oversubscribe" in launch_command(1)
mpich = pytest.mark.skipif(OPEN_MPI, reason="MPICH has UCX and libfabric, not Open MPI")
no_infiniband = pytest.mark.skipif(
    Path("/sys/class/infiniband").exists(), reason="there is InfiniBand"
)


def run(monkeypatch: pytest.MonkeyPatch, *words: str, **settings: str) -> Finished:
    """Run the program on two ranks with settings of MPI in the environment."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return launch(2, [*words, sys.executable, "-c", PROGRAM], timeout=60)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_ranks_that_are_bound_to_one_core_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = min(os.sched_getaffinity(0))
    done = run(monkeypatch, "taskset", "-c", str(core))
    assert "replicas 2" in done.stdout, done
    assert_said("bound", done.stderr)
    assert done.stderr.count("are bound to core") == 1
    assert "are bound to core" not in run(monkeypatch).stderr


@mpich
@no_infiniband
def test_ucx_without_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, UCX_TLS="rc,self,sm")
    assert_said("ucx-rc", done.stderr + done.stdout)
    monkeypatch.delenv("UCX_TLS")
    done = run(monkeypatch, UCX_NET_DEVICES="mlx5_0:1")
    assert "replicas 2" in done.stdout
    assert_said("ucx-devices", done.stderr + done.stdout)


@mpich
def test_ucx_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, UCX_TLS="self")
    assert done.returncode
    assert_said("ucx-self", done.stderr + done.stdout)


@mpich
@pytest.mark.skipif(Path("/sys/class/cxi").exists(), reason="there is Slingshot")
def test_libfabric_without_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, FI_PROVIDER="cxi", MPIR_CVAR_CH4_NETMOD="ofi")
    assert done.returncode
    assert_said("libfabric", done.stderr + done.stdout)


@pytest.mark.skipif(not OPEN_MPI, reason="a message of Open MPI")
def test_open_mpi_without_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, OMPI_MCA_pml="ucx")
    assert done.returncode
    assert_said("no-pml", done.stderr + done.stdout)


@no_infiniband
def test_the_doctor_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    monkeypatch.setenv("FI_PROVIDER", "verbs")
    words = ["-c", "from hpcstrat.cli import main; main()", "doctor", "--json"]
    done = launch(1, [sys.executable, *words], timeout=120)
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["ucx-devices"]["severity"] == "problem"
    assert "expected InfiniBand" in found["libfabric-provider"]["text"]
