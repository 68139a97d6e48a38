"""Calls inside a replica on JAX's arrays, with gradients, as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome

both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["outside", "jit"])
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Inside(SimpleNamespace):
    """The ranks of a strategy, as those of one replica."""

    __hash__ = object.__hash__

    def lines(self, along: Any) -> Any:
        return None


def _inside(strategy: Any) -> Any:
    return _Inside(
        position=strategy.replica_id,
        size=strategy.num_replicas_in_sync,
        collectives=strategy.collectives,
    )


@pytest.fixture(scope="module")
def inside(strategy: Any) -> Any:
    return _inside(strategy)


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """Return a replica of this rank alone, for the result of one process."""
    with hs.OneDeviceStrategy() as strategy:
        yield _inside(strategy)


def _part(x: Any, axis: int, inside: Any) -> Any:
    low, high = (
        (inside.position + end) * x.shape[axis] // inside.size for end in (0, 1)
    )
    return jax.lax.slice_in_dim(x, low, high, axis=axis)


def _conv(x: Any, weight: Any) -> Any:
    return jax.lax.conv_general_dilated(x, weight, (1,), "VALID")


def _model(x: Any, weight: Any, length: int, inside: Any) -> Any:
    """Return a part of a loss, whose sum over all ranks depends on the field only."""
    call: Any = {"inside": inside}
    y = hsj.inside.halo(x, 2, (1, 3), periodic=True, **call)
    y = jnp.tanh(_conv(y, weight))
    pair = hsj.inside.halo({"a": y, "b": jnp.sin(y)}, 2, 2, **call)
    y = _conv(pair["a"], weight) + _conv(pair["b"], weight)
    # The sum of all rows before each row needs whole rows.
    z = hsj.inside.transpose(y, 2, 1, length=length, **call)
    z = jnp.cumsum(z, 2) / x.shape[1]
    y = y + hsj.inside.transpose(z, 1, 2, length=x.shape[1], **call)
    mean = hsj.inside.sum(y.mean(1).sum(1), **call)
    rows = hsj.inside.gather(y.sum(2)[None], 0, **call).sum(0)
    first = hsj.inside.broadcast(mean, 0, **call)
    own = (y**2).sum() + (y * first[:, None, None]).sum()
    return own + (mean.prod() + jnp.cos(rows).sum()) / inside.size


@both
@pytest.mark.parametrize("length", [23, 8])
def test_values_and_gradients_are_those_of_one_process(
    inside: Any, alone: Any, length: int, wrap: Wrap
) -> None:
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.standard_normal((3, 3, 5)), jnp.float32) / 4
    x = jnp.asarray(rng.standard_normal((2, 3, length)), jnp.float32)
    results = []
    for ranks in (inside, alone):
        function = jax.value_and_grad(_model, (0, 1))
        step = wrap(lambda x, w, f=function, r=ranks: f(x, w, length, r))
        for _ in range(2):
            loss, (slope, one) = step(_part(x, 2, ranks), weight)
        total = hsj.inside.sum([loss, one], inside=ranks)
        whole = ranks.collectives.all_gather(np.asarray(slope), 2, "gather")
        results.append([*map(np.asarray, total), whole])
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(found, wanted, 2e-4, 2e-5)


@both
def test_halos_of_uneven_rows_move_all_bits(
    inside: Any, alone: Any, wrap: Wrap
) -> None:
    for length in (1, 7, 2):
        whole = jnp.arange(length * 3).reshape(length, 3)
        own = _part(whole, 0, inside)
        for width in (1, (0, 5), (5, 2)):
            padded, right = (
                wrap(lambda x, w=width, r=ranks: hsj.inside.halo(x, 0, w, inside=r))(x)
                for ranks, x in ((inside, own), (alone, whole))
            )
            before = width if isinstance(width, int) else width[0]
            low = inside.position * length // inside.size
            wanted = np.asarray(right)[low : low + len(padded)]
            np.testing.assert_array_equal(padded, wanted)
            # The directional derivative is the halo of the direction.
            slope = jnp.asarray(own, jnp.float32)
            _, moved = jax.jvp(
                wrap(lambda x, w=width: hsj.inside.halo(x, 0, w, inside=inside)),
                (slope,),
                (2 * slope,),
            )
            np.testing.assert_array_equal(moved, 2.0 * wanted)
            assert before + len(own) <= len(padded)


def test_errors_are_raised_on_all_ranks(inside: Any, strategy: Any, job: Any) -> None:
    odd = job.rank == job.size - 1
    x = jnp.ones((4, 3))
    kinds = {TypeError: "found 1.5", ValueError: "found"}
    for call, right, wrong, kind in (
        (hsj.inside.halo, (0, 1), (2, 1), ValueError),
        (hsj.inside.halo, (0, 1), (0, -1), ValueError),
        (hsj.inside.halo, (0, 1), (0, 1.5), TypeError),
        (hsj.inside.transpose, (0, 1), (1, 1), ValueError),
        (hsj.inside.gather, (0,), (2,), ValueError),
        (hsj.inside.broadcast, (0,), (job.size,), ValueError),
    ):
        given = wrong if odd else right
        error = outcome(call, x, *given, inside=inside)
        assert_told(error, kind, odd, kinds[kind])
        assert_usable(strategy, job)
    if job.size > 1:
        with pytest.raises(hs.CollectiveError, match=r"width=\(1, 1\).*width=\(2, 2\)"):
            hsj.inside.halo(x, 0, 1 + odd, inside=inside)
        assert_usable(strategy, job)


def test_vmap_is_refused(inside: Any, strategy: Any, job: Any) -> None:
    def halo(x: Any) -> Any:
        return hsj.inside.halo(x, 0, 1, inside=inside)

    with pytest.raises(NotImplementedError, match="halo outside of vmap"):
        jax.vmap(halo)(jnp.ones((2, 3)))
    if job.size == 1:
        assert_usable(strategy, job)


def test_the_current_strategys_replica_is_the_default(job: Any) -> None:
    with (
        hs.MultiWorkerMirroredStrategy(ranks_per_replica=job.size) as strategy,
        strategy.scope(),
    ):
        assert hsj.inside.sum(jnp.ones(2)).tolist() == [job.size] * 2
