"""Groups of programs that ``hpcstrat torch`` runs: made early, replaced, refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcstrat.integrations.torch import program_groups, replacements
from hpcstrat.integrations.torch.process_group import BACKEND
from tests.docs.said import assert_said

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch's functions after the test, and destroy its group."""
    names = "init_process_group", "new_group", "_new_process_group_helper"
    for name in names:
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(replacements, "_told", set())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _sum_is_right(job: Any) -> bool:
    own = torch.ones(2)
    dist.all_reduce(own)
    return bool((own == job.size).all())


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"backend": BACKEND},
        {"backend": "nccl", "init_method": "env://"},
        {"backend": "cpu:gloo,cuda:nccl", "init_method": "tcp://127.0.0.1:1"},
    ],
)
def test_a_group_of_the_same_meaning_is_the_one_that_was_made(
    torchs: None, job: Any, capfd: pytest.CaptureFixture[str], given: dict[str, Any]
) -> None:
    program_groups.make_group(["nccl"])
    made = dist.group.WORLD
    dist.init_process_group(**given, world_size=job.size, rank=job.rank)
    assert dist.group.WORLD is made
    assert _sum_is_right(job)
    told = capfd.readouterr().err.count("hpcstrat torch: ")
    # Lines about the group that was made, and about a backend that was replaced.
    assert told == (1 + ("nccl" in str(given)) if job.rank == 0 else 0)
    # Torch itself refuses a third call.
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "gloo"}, "found backend='gloo'; add --replace gloo"),
        ({"backend": "cpu:gloo"}, "found backend='cpu:gloo'; add --replace gloo"),
        ({"world_size": 99, "rank": 0}, "found world_size=99; let the program read"),
        ({"rank": 77}, "found rank=77; let the program read RANK"),
    ],
)
def test_a_group_of_another_meaning_is_refused(
    torchs: None, job: Any, given: dict[str, Any], words: str
) -> None:
    program_groups.make_group(["nccl"])
    with pytest.raises(ValueError, match=words) as caught:
        dist.init_process_group(**given)
    if given.get("backend") == "gloo":
        assert_said("another-group", str(caught.value))


def test_a_group_after_the_made_one_is_the_program_s(torchs: None, job: Any) -> None:
    program_groups.make_group([])
    dist.destroy_process_group()
    dist.init_process_group(BACKEND)
    assert _sum_is_right(job)


@pytest.mark.parametrize("backend", ["mpi", "nccl", "cuda:nccl,cpu:gloo", None])
def test_backends_are_replaced(torchs: None, job: Any, backend: str | None) -> None:
    program_groups.replace_backends(["mpi", "nccl"])
    dist.init_process_group(backend)
    assert dist.get_backend() == BACKEND
    assert _sum_is_right(job)
    assert dist.get_backend(dist.new_group(backend=backend)) == BACKEND


def test_wrong_arguments_are_reported_by_torch(torchs: None) -> None:
    program_groups.watch_creation()
    with pytest.raises(TypeError, match="nonsense"):
        dist.init_process_group(nonsense=1)
