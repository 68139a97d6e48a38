"""Strategies bind each rank to its own GPU, or raise the same error on all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import cupy
import pytest

import hpcstrat as hs
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.capabilities import gather


@pytest.fixture
def alone(job: Any) -> Any:
    """Yield a new communicator of all ranks, whose strategies share nothing."""
    comm = job.Dup()
    before = cupy.cuda.Device().id
    yield comm
    cupy.cuda.Device(before).use()
    comm.Free()


def _enough(job: Any) -> bool:
    return cupy.cuda.runtime.getDeviceCount() >= job.size


def test_each_rank_has_a_gpu_of_its_own(strategy: Any, job: Any) -> None:
    gpu = strategy.topology.gpu
    assert cupy.cuda.Device().id == gpu.index
    assert strategy.device.startswith("GPU:")
    place = strategy.topology.worker_comm.rank
    assert strategy.devices[place] == strategy.device
    own = strategy.topology.replica_comm.allgather(gpu.identity)
    shares = strategy.topology.replica_comm.allgather(strategy.topology.shares_gpu)
    if _enough(job):
        # Ranks of one host may be several workers; their GPUs differ, too.
        assert len(set(own)) == len(own)
        assert not any(shares)


def test_abilities_are_the_same_on_all_ranks(strategy: Any) -> None:
    able = gather(strategy.topology)
    assert (
        strategy.topology.replica_comm.allgather(able)
        == [able] * strategy.num_replicas_in_sync
    )
    assert able.num_gpus == strategy.num_replicas_in_sync
    assert len(able.explain().splitlines()) == 5


def test_gpus_are_named_in_any_order(alone: Any) -> None:
    if not _enough(alone):
        return
    names = [f"/gpu:{number}" for number in reversed(range(alone.size))]
    with hs.MirroredStrategy(names, comm=alone) as strategy:
        number = alone.size - 1 - alone.rank
        assert strategy.device == f"GPU:{number}"
        assert strategy.topology.gpu.index == cupy.cuda.Device().id == number
        assert strategy.puts_on_gpu
        assert strategy.extended.worker_devices == strategy.devices


def test_gpu_that_is_not_there_is_an_error_on_every_rank(alone: Any) -> None:
    names = [f"GPU:{number}" for number in range(alone.size - 1)]
    with pytest.raises(hs.TopologyError, match=r"GPU:99 .* for rank"):
        hs.MirroredStrategy([*names, "GPU:99"], comm=alone)
    hs.MirroredStrategy(comm=alone).close()


def test_choice_of_the_program_is_respected(alone: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() <= alone.size:
        return
    cupy.cuda.Device(alone.rank + 1).use()
    with hs.MultiWorkerMirroredStrategy(comm=alone) as strategy:
        assert strategy.topology.gpu.index == alone.rank + 1


def test_same_choice_twice_is_an_error_on_every_rank(alone: Any) -> None:
    if alone.size == 1 or cupy.cuda.runtime.getDeviceCount() < 2:
        return
    cupy.cuda.Device(1).use()
    everyone = f"ranks 0.* and {alone.size - 1} on host"
    with pytest.raises(hs.TopologyError, match=everyone):
        hs.MultiWorkerMirroredStrategy(comm=alone)
    settings = hs.Settings(share_gpus=True)
    with hs.MultiWorkerMirroredStrategy(comm=alone, settings=settings) as strategy:
        assert strategy.topology.gpu.index == 1
        assert strategy.topology.shares_gpu
        assert not gather(strategy.topology).one_gpu_per_rank


def test_parts_of_a_gpu_are_one_to_nccl(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone.size == 1:
        return
    whole = library.visible_gpus()[0]
    part = dataclasses.replace(whole, uuid=f"{whole.uuid}MIG-{alone.rank}")
    monkeypatch.setattr(library, "visible_gpus", lambda: [part])
    with hs.MultiWorkerMirroredStrategy(comm=alone) as strategy:
        assert strategy.topology.gpu == part
        able = gather(strategy.topology)
    assert not able.nccl
    assert "share a GPU" in able.nccl.reason


def test_cpu_leaves_gpus_alone(alone: Any) -> None:
    settings = hs.Settings(device="cpu")
    with hs.MultiWorkerMirroredStrategy(comm=alone, settings=settings) as strategy:
        assert strategy.topology.gpu is None
        assert strategy.device == f"CPU:{alone.rank}"
    names = [f"CPU:{rank}" for rank in range(alone.size)]
    with hs.MirroredStrategy(names, comm=alone) as strategy:
        assert strategy.topology.gpu is None
        assert strategy.device == f"CPU:{alone.rank}"


def test_other_gpus_than_those_in_use_are_an_error(job: Any) -> None:
    if job.size == 1 or not _enough(job):
        return
    names = [f"GPU:{number}" for number in range(job.size)]
    with hs.MirroredStrategy(names) as strategy:
        again = hs.MirroredStrategy(names)
        assert again.topology is strategy.topology
        again.close()
        with pytest.raises(ValueError, match="strategies that are open"):
            hs.MirroredStrategy(names[::-1])


def test_one_device_is_one_that_this_process_sees() -> None:
    before = cupy.cuda.Device().id
    strategy = hs.OneDeviceStrategy("GPU:0")
    assert (strategy.device, strategy.puts_on_gpu) == ("GPU:0", True)
    assert cupy.cuda.Device().id == 0
    cupy.cuda.Device(before).use()
    with pytest.raises(ValueError, match=r"GPU:99; name one of these"):
        hs.OneDeviceStrategy("GPU:99")
