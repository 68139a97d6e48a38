"""Wrong arguments, missing memory and bad folders of one rank, seen on every rank."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import CheckpointError, ReplicaError
from tests.folders import listed
from tests.mpi.ranks.saved import warnings_of_checkpoints

pytestmark = pytest.mark.files


def _variable(strategy: Any, value: Any = 1.0) -> Any:
    with strategy.scope():
        return hs.Variable(value, name="x")


WRONG: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"max_to_keep": 0}, ValueError, "expected max_to_keep >= 1 or None, found 0"),
    ({"keep_every": "often"}, ValueError, "expected keep_every"),
    ({"keep_best": "loss"}, ValueError, "expected keep_best to be a KeepBest"),
    ({"keep_for": -1.0}, ValueError, "expected keep_for to be a time above 0"),
    ({"max_write_bandwidth": 0}, ValueError, "expected max_write_bandwidth"),
    ({"directory": 5}, TypeError, "not int"),
    ({"net": {"w": np.zeros(3)}}, ValueError, "expected a Variable at variables/net/w"),
    ({"python": {}}, ValueError, "expected a name that is not reserved"),
    ({"other": object()}, ValueError, "as 'other', found object"),
)


@pytest.mark.parametrize(("wrong", "kind", "words"), WRONG)
def test_wrong_argument_on_one_rank_is_told_to_all(
    wrong: dict[str, Any],
    kind: type[Exception],
    words: str,
    strategies: dict[int, Any],
    folder: Path,
    job: Any,
) -> None:
    x = _variable(strategies[job.size])
    guilty = job.rank == job.size - 1
    arguments: dict[str, Any] = {"directory": folder, "x": x}
    with pytest.raises(kind if guilty else ReplicaError, match=words) as caught:  # noqa: PT012
        hs.CheckpointManager(**{**arguments, **(wrong if guilty else {})})
        pytest.fail("the manager was made")
    if not guilty:
        assert isinstance(caught.value, kind)
        assert caught.value.ranks == (job.size - 1,)
    hs.CheckpointManager(**arguments).save(1)


@pytest.mark.parametrize("wrong", [{"path": 5}, {"only": "x"}, {"rename": 5}])
def test_wrong_argument_of_restore_on_one_rank_is_told_to_all(
    wrong: dict[str, Any], strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    manager = hs.CheckpointManager(folder, x=_variable(strategies[job.size]))
    manager.save(1)
    guilty = job.rank == job.size - 1
    error = (TypeError, ValueError) if guilty else ReplicaError
    with pytest.raises(error):
        manager.restore(**(wrong if guilty else {}))
    assert manager.restore() == 1


def test_forgotten_scope_is_named(folder: Path, job: Any) -> None:
    net = {"w": hs.Variable(1.0, name="w")}
    if job.size == 1:
        return
    with pytest.raises(RuntimeError, match="variables/net/w, made outside of a scope"):
        hs.CheckpointManager(folder, net=net)
    with pytest.raises(RuntimeError, match="inside `with strategy"):
        hs.CheckpointManager(folder)


def test_folder_is_made_by_the_first_save(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    x = _variable(strategies[job.size])
    path = folder / "mistyped" / "deep"
    manager = hs.CheckpointManager(path, x=x)
    assert manager.restore_or_initialize() is None
    assert manager.latest() is None
    with pytest.raises(CheckpointError, match="found no such folder; check the"):
        manager.restore()
    job.Barrier()
    assert not path.parent.exists()
    job.Barrier()
    manager.save(1)
    assert manager.restore() == 1


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _through_a_file(path: Path) -> None:
    (path.parent / "file").touch()
    path.symlink_to("file/below")


def _too_long(path: Path) -> None:
    path.symlink_to("x" * 300)


@pytest.mark.parametrize("make", [_circle, _through_a_file, _too_long])
def test_links_that_lead_nowhere_do_not_stop_saves(
    make: Any, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    x = _variable(strategies[job.size])
    manager = hs.CheckpointManager(folder, max_to_keep=1, x=x)
    path = folder / "ckpt-0000000007.h5"
    if job.rank == 0:
        make(path)
    job.Barrier()
    with warnings_of_checkpoints() as said:
        # Links before, at, and after that step.
        for step in (1, 7, 8):
            assert manager.save(step) == str(folder / f"ckpt-{step:010d}.h5")
            assert manager.restore() == step
    counts = job.allgather(len(said))
    # One warning, for the restore of step 1.
    assert sum(counts) == 1, said
    job.Barrier()
    if job.rank == 0:
        assert not path.is_symlink()


@contextmanager
def _descriptors(count: int) -> Iterator[None]:
    """Limit this process to ``count`` further file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[0]), before[1]))
    held: list[int] = []
    try:
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(count):
                os.close(held.pop())
        yield
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("where", ["everywhere", "last"])
def test_without_descriptors_all_ranks_raise_or_none(
    where: str, count: int, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    x = _variable(strategies[job.size], np.ones(job.size << 18))
    manager = hs.CheckpointManager(folder, x=x)
    manager.save(1)
    guilty = where == "everywhere" or job.rank == job.size - 1
    for action in (manager.restore, lambda: manager.save(2, overwrite=True)):
        x.assign(np.zeros(job.size << 18))
        error = None
        with _descriptors(count if guilty else 200):
            try:
                action()
            except CheckpointError as problem:
                error = problem
        errors = job.allgather(str(error))
        assert len(set(errors)) == 1, errors
        if error is not None:
            assert "ulimit -n" in errors[0] or "Too many open files" in errors[0]
            np.testing.assert_array_equal(x.component, 0.0)
        elif action == manager.restore:
            np.testing.assert_array_equal(x.component, 1.0)
    manager.save(3)
    assert manager.restore() == 3
    manager.close()


class _Generator:
    """An object of the program with plain state, an integer."""

    def __init__(self, state: int) -> None:
        self._state = state

    def state_dict(self) -> dict[str, int]:
        return {"state": self._state}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state = state["state"]


def test_plain_state_that_differs_between_replicas_is_refused_on_all(
    strategy: Any, job: Any, folder: Path
) -> None:
    x, same, own = _variable(strategy), _Generator(3), _Generator(job.rank)
    manager = hs.CheckpointManager(folder, x=x, same=same, own=own)
    if strategy.num_replicas_in_sync == 1:
        manager.save(1)
        return
    with pytest.raises(hs.CollectiveError, match="'own' on all replicas") as caught:
        manager.save(1)
    assert caught.value.ranks == tuple(range(1, job.size))
    # The refused save leaves no file, and the program can continue.
    assert not listed(folder)
    hs.CheckpointManager(folder, x=x, same=same).save(1)
