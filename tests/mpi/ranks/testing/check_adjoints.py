"""The dot-product test finds adjoints that are wrong, on every rank."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.testing import check_adjoint
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome


@pytest.fixture
def inside(strategy: Any, job: Any) -> Any:
    """Return the ranks of a strategy as those of one replica."""
    return SimpleNamespace(position=job.rank, collectives=strategy.collectives)


@pytest.mark.parametrize("dtype", ["f8", "c16", "f4"])
def test_adjoints_of_calls_inside_pass(inside: Any, job: Any, dtype: str) -> None:
    fields = inside.collectives.fields
    reduce = inside.collectives.batch_reduce
    lengths = [2 + rank for rank in range(job.size)]
    root = job.size - 1

    def added(x: Any) -> Any:
        return reduce(hs.ReduceOp.SUM, x, "sum")

    options: Any = {"inside": inside, "dtype": dtype}
    options["tolerance"] = 1e-12 if dtype != "f4" else 1e-5
    own = lengths[job.rank]
    for width in (0, 1, (0, 2), (5, 3)):
        for periodic in (False, max(np.max(width), 1) <= sum(lengths)):
            given: Any = {"axis": 1, "width": width, "periodic": periodic}
            there = functools.partial(fields.halo, **given)
            back = functools.partial(fields.halo_adjoint, **given)
            check_adjoint(there, back, (3, own), **options)
    part = len(range(job.rank * 7 // job.size, (job.rank + 1) * 7 // job.size))
    check_adjoint(
        lambda x: fields.transpose(x, 0, 2),
        lambda g: fields.transpose(g, 2, 0),
        (part, 2, 5),
        **options,
    )
    check_adjoint(added, added, (4,), **options)
    first, gather = sum(lengths[: job.rank]), inside.collectives.all_gather
    check_adjoint(
        lambda x: gather(x, 0, "gather"),
        lambda g: added(g)[first : first + own],
        (own, 2),
        **options,
    )
    check_adjoint(
        lambda x: inside.collectives.broadcast(x, root, "broadcast"),
        lambda g: added(g) * (job.rank == root),
        (3,),
        **options,
    )
    # Several arguments and results.
    check_adjoint(
        lambda x, y: (x + 2 * y, y, added(x)),
        lambda a, b, c: (a + added(c), 2 * a + b),
        (2, 3),
        (2, 3),
        **options,
    )


def test_an_adjoint_that_is_wrong_on_one_rank_is_an_error_on_all(
    inside: Any, strategy: Any, job: Any
) -> None:
    fields = inside.collectives.fields

    def wrong(g: Any) -> Any:
        # One rank forgets the last row.
        found = fields.halo_adjoint(g, 0, 1)
        return found * (np.arange(5) < 5 - (job.rank == 0))

    text = r"<A x, y> == <x, adjoint\(y\)>, found \S+ and \S+, which differ by"
    with pytest.raises(AssertionError, match=text):
        check_adjoint(lambda x: fields.halo(x, 0, 1), wrong, (5,), inside=inside)
    with pytest.raises(AssertionError, match=text):
        check_adjoint(lambda x: x, lambda g: g * np.nan, (5,), inside=inside)
    assert_usable(strategy, job)


def test_shapes_that_are_wrong_on_one_rank_are_an_error_on_all(
    inside: Any, strategy: Any, job: Any
) -> None:
    odd = job.rank == 0

    def wrong(g: Any) -> Any:
        return g[1:] if odd else g

    error = outcome(check_adjoint, lambda x: x, wrong, (5,), inside=inside)
    assert_told(error, ValueError, odd, "found [(4,)]")
    assert_usable(strategy, job)
