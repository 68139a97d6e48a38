"""Errors of torch that an option of ``hpcstrat torch`` prevents, and their notes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcstrat.integrations.torch.error_notes import notes
from hpcstrat.integrations.torch.process_group import BACKEND
from tests.docs.said import assert_said

pytestmark = pytest.mark.filterwarnings("ignore")
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def group() -> Iterator[None]:
    """Make the default process group."""
    dist.init_process_group(BACKEND)
    yield
    dist.destroy_process_group()


def _note_of(function: Callable[[], Any]) -> str:
    with pytest.raises((KeyError, RuntimeError, ValueError)) as caught:
        function()
    (note,) = notes(caught.value)
    return note


def test_a_missing_group_is_explained(job: Any) -> None:
    assert_said("no-group", _note_of(lambda: dist.all_reduce(torch.ones(1))))


@on_cpus
def test_devices_of_modules_on_cpus_are_explained(job: Any, group: None) -> None:
    ddp, norm = torch.nn.parallel.DistributedDataParallel, torch.nn.SyncBatchNorm(2)
    layer = torch.nn.Linear(1, 1)
    for function in (
        lambda: ddp(layer, device_ids=[0]),
        lambda: ddp(norm),
        lambda: norm(torch.ones(3, 2)),
    ):
        assert _note_of(function).endswith("; add --on-cpus")


@on_cpus
def test_backends_that_torch_does_not_have_are_explained(job: Any) -> None:
    own = {"world_size": 1, "rank": 0, "store": dist.HashStore()}
    note = _note_of(lambda: dist.init_process_group("nccl", **own))
    assert note.endswith("; add --replace nccl")
    gpu = torch.device("cuda", 0)
    note = _note_of(lambda: dist.init_process_group("gloo", device_id=gpu, **own))
    assert note.endswith("; add --on-cpus")


def test_a_second_group_is_explained(job: Any, group: None) -> None:
    assert "--make-group" in _note_of(lambda: dist.init_process_group("gloo"))


@pytest.mark.parametrize(
    ("variable", "option"),
    [
        ("SLURM_NODE_OF_NOWHERE", "--set slurm"),
        ("OMPI_NOWHERE", "--set openmpi"),
        ("TORCHELASTIC_NOWHERE", "--set torchrun"),
    ],
)
def test_a_missing_variable_is_explained(job: Any, variable: str, option: str) -> None:
    assert _note_of(lambda: os.environ[variable]).endswith(option)


@pytest.mark.parametrize(
    ("variable", "option"),
    [("OMPI_COMM_WORLD_SIZE", "mpi"), ("PMI_RANK", "mpi"), ("SLURM_NTASKS", "slurm")],
)
@pytest.mark.parametrize("is_set", [True, False])
def test_code_that_raises_because_of_a_launcher_is_explained(
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    option: str,
    *,
    is_set: bool,
) -> None:
    # As deepxde/config.py, whose code is that of a module.
    program = f"import os\nif {variable!r} in os.environ:\n  raise NotImplementedError"
    monkeypatch.delenv(variable, raising=False)
    if not is_set:
        program = f"name = {variable!r}\nraise NotImplementedError"
    else:
        monkeypatch.setenv(variable, "2")
    with pytest.raises(NotImplementedError) as caught:
        exec(program, {})
    found = list(notes(caught.value))
    assert len(found) == is_set
    for note in found:
        assert f"that looks for {variable}; add --hide {option}" in note


def test_other_errors_have_no_note(job: Any) -> None:
    for error in (KeyError("HOME"), ValueError("no"), RuntimeError("SLURM")):
        assert not list(notes(error))
