"""The choice of each rank's GPU from the GPUs that ranks see; and CuPy's errors."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.binding import View, choose, problem, worker_gpus
from hpcstrat.engine.gpu.library import Gpu
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.settings import Settings
from hpcstrat.errors import TopologyError
from hpcstrat.strategies.devices import gpu_numbers, parse_device


def gpus(*places: int, part: str = "") -> tuple[Gpu, ...]:
    """Return the GPUs that a rank sees: some GPUs of the host, in this order."""
    return tuple(
        Gpu(index, f"0000:{place:02X}:00.0", part, "H100")
        for index, place in enumerate(places)
    )


def places(found: Sequence[Gpu | None]) -> list[int | None]:
    """Return the host's numbers of the chosen GPUs."""
    return [None if gpu is None else int(gpu.pci_bus_id[5:7], 16) for gpu in found]


@st.composite
def hosts(draw: st.DrawFn) -> list[View]:
    """Draw the GPUs that each rank of a host sees, and their earlier choices."""
    total = draw(st.integers(0, 6))
    views = []
    for rank in range(draw(st.integers(1, 6))):
        lists = st.lists(st.integers(1, max(1, total)), unique=True, max_size=total)
        seen = draw(lists)
        which = st.none() | st.integers(0, max(0, len(seen) - 1))
        chosen = draw(which) if seen else None
        views.append(View(rank, gpus(*seen), chosen, None, "why", draw(which)))
    return views


@given(hosts())
def test_every_rank_gets_a_gpu_that_it_sees_or_all_are_told(views: list[View]) -> None:
    found = choose(views)
    for view, gpu in zip(views, found, strict=True):
        assert (gpu is None) == (not view.gpus)
        assert gpu is None or gpu in view.gpus
        if view.chosen is not None:
            assert gpu == view.gpus[view.chosen]
    have = [gpu.identity for gpu in found if gpu is not None]
    text = problem(views, found, "node1")
    wrong = bool(have) and (len(have) < len(views) or len(set(have)) < len(have))
    assert bool(text) == wrong
    shared = problem(views, found, "node1", share=True)
    assert bool(shared) == (bool(have) and len(have) < len(views))
    if text:
        assert "node1" in text
        assert "; " in text


@given(st.lists(st.integers(1, 99), unique=True, min_size=1), st.data())
def test_ranks_that_see_the_same_list_get_one_each(
    seen: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(seen)))
    found = choose([View(rank, gpus(*seen)) for rank in range(size)])
    assert places(found) == seen[:size]
    # Some ranks have chosen GPUs, and the others get the remaining GPUs.
    order = data.draw(st.permutations(range(len(seen))))
    choosing = data.draw(st.sets(st.integers(0, size - 1)))
    views = [
        View(rank, gpus(*seen), order[rank] if rank in choosing else None)
        for rank in range(size)
    ]
    found = choose(views)
    assert problem(views, found, "node1") == ""
    assert [places(found)[rank] for rank in choosing] == [
        seen[order[rank]] for rank in choosing
    ]


def test_what_a_rank_had_earlier_gives_way_to_a_choice() -> None:
    views = [View(0, gpus(1, 2, 3), earlier=2), View(1, gpus(1, 2, 3), earlier=0)]
    assert places(choose(views)) == [3, 1]
    # CUDA does not distinguish a choice of the first GPU from none; the rank keeps it.
    views = [View(0, gpus(1, 2), earlier=1), View(1, gpus(1, 2), 1, earlier=0)]
    assert places(choose(views)) == [1, 2]


@given(st.permutations(range(1, 6)))
def test_a_rank_that_sees_one_has_that_one(order: list[int]) -> None:
    views = [View(rank, gpus(place)) for rank, place in enumerate(order)]
    assert places(choose(views)) == order
    # All ranks number their GPU 0.
    assert {gpu.index for gpu in choose(views) if gpu} == {0}
    assert problem(views, choose(views), "node1") == ""


def test_the_number_of_a_gpu_is_not_its_identity() -> None:
    # With CUDA_VISIBLE_DEVICES=1,0 on one rank, its first GPU is the other's second.
    views = [View(0, gpus(1, 2)), View(1, gpus(2, 1))]
    assert places(choose(views)) == [1, 2]
    twice = [View(0, gpus(1, 2), 0), View(1, gpus(2, 1), 1)]
    assert "ranks 0 and 1" in problem(twice, choose(twice), "node1")


def test_lists_that_overlap_are_shared_out_by_list() -> None:
    # As with srun --gpu-bind=closest on a host with two sockets.
    views = [View(rank, gpus(*[1, 2] if rank < 2 else [3, 4])) for rank in range(4)]
    assert places(choose(views)) == [1, 2, 3, 4]


def test_two_ranks_with_one_gpu_are_named_with_host_and_bus_id() -> None:
    views = [View(rank, gpus(59)) for rank in (4, 5, 6)]
    text = problem(views, choose(views), "node7")
    assert "ranks 4, 5 and 6 on host node7 share 0000:3B:00.0 (H100)" in text
    assert "share_gpus=True" in text
    assert "--ntasks-per-node=1" in text
    assert problem(views, choose(views), "node7", share=True) == ""


def test_a_wrong_choice_among_enough_gpus_gets_other_advice() -> None:
    views = [View(0, gpus(1, 2), 1), View(1, gpus(1, 2), 1)]
    text = problem(views, choose(views), "node7")
    assert "0000:02:00.0" in text
    assert "leave the choice to the strategy" in text


def test_a_rank_without_a_gpu_beside_others_is_named_with_its_reason() -> None:
    views = [View(8, gpus(1)), View(9, (), reason="no CUDA device")]
    text = problem(views, choose(views), "node7")
    assert "rank 9 on host node7: no CUDA device" in text
    nowhere = [View(8), View(9)]
    assert problem(nowhere, choose(nowhere), "node7") == ""


def test_parts_of_one_gpu_are_told_apart() -> None:
    views = [View(0, gpus(1, part="MIG-a")), View(1, gpus(1, part="MIG-b"))]
    assert problem(views, choose(views), "node7") == ""
    assert len(worker_gpus(views)) == 2


def test_named_gpus_are_counted_over_the_host() -> None:
    views = [View(0, gpus(1, 2), wanted=1), View(1, gpus(1, 2), wanted=0)]
    assert places(choose(views)) == [2, 1]
    # Each rank sees only its own GPU; GPUs are numbered in the order of ranks.
    views = [View(0, gpus(7), wanted=0), View(1, gpus(3), wanted=1)]
    assert places(choose(views)) == [7, 3]
    other = [View(0, gpus(7), wanted=1), View(1, gpus(3), wanted=0)]
    text = problem(other, choose(other), "node7")
    assert "expected rank 0 on host node7 to see GPU:1" in text
    beyond = [View(0, gpus(1, 2), wanted=0), View(1, gpus(1, 2), wanted=2)]
    assert "name GPU:0 to GPU:1" in problem(beyond, choose(beyond), "node7")


def test_names_of_devices() -> None:
    assert parse_device("/job:worker/task:1/device:gpu:3") == "GPU:3"
    assert gpu_numbers(["GPU:1", "GPU:0"]) == [1, 0]
    assert gpu_numbers(["CPU:0"]) is None
    with pytest.raises(ValueError, match="devices of one kind"):
        gpu_numbers(["GPU:0", "CPU:0"])
    with pytest.raises(ValueError, match="expected a device"):
        parse_device("TPU:0")


def test_settings_about_gpus() -> None:
    environment = {"HPCSTRAT_DEVICE": "GPU", "HPCSTRAT_SHARE_GPUS": "1"}
    settings = Settings(mpi_reads_gpu="no").resolved(environment)
    assert (settings.device, settings.share_gpus) == ("gpu", True)
    assert settings.mpi_reads_gpu == "no"
    with pytest.raises(ValueError, match="'auto', 'cpu', 'gpu'"):
        Settings(device="tpu")


# Tests with a CuPy that is missing, broken, or prints warnings.


def test_missing_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TopologyError, match=r"not installed; .*extra cuda12 or cuda13"):
        library.load()
    assert "not installed" in library.why_no_gpu()
    assert library.visible_gpus() == []


def _fake(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import cupy` import a module with this source text."""
    (folder / "cupy.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    for name in [n for n in sys.modules if n.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    # Let monkeypatch remove the imported module after the test.
    monkeypatch.setitem(sys.modules, "cupy", sys)
    monkeypatch.delitem(sys.modules, "cupy")


def test_cupy_that_cannot_be_imported_is_no_missing_cupy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "raise ImportError('libnvrtc.so.12: cannot open shared object file')"
    _fake(tmp_path, text, monkeypatch)
    with pytest.raises(TopologyError, match=r"cannot be imported: libnvrtc.so.12"):
        library.load()


_WITHOUT_DRIVER = """
import types, warnings

class CUDARuntimeError(RuntimeError):
    pass

def getDeviceCount():
    raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

warnings.warn("libfoo could not be loaded")
runtime = types.SimpleNamespace(getDeviceCount=getDeviceCount)
cuda = types.SimpleNamespace(runtime=runtime)
"""


def test_no_device_is_an_error_that_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _fake(tmp_path, _WITHOUT_DRIVER, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level(logging.INFO, "hpcstrat")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TopologyError) as caught:
            library.load()
    assert "cudaErrorNoDevice" in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES=''" in str(caught.value)
    assert "--gpus-per-node" in str(caught.value)
    assert library.visible_gpus() == []
    # The import's warning is logged once; pytest may have two handlers for it.
    told = [r for r in caplog.records if "libfoo" in r.getMessage()]
    assert {r.getMessage() for r in told} == {"CuPy warns: libfoo could not be loaded"}
    assert len({id(r) for r in told}) == 1
