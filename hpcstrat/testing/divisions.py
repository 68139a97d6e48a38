"""Comparison of a program's results for several divisions of ranks into replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hpcstrat.testing.runner import run

__all__ = ["compare_divisions"]


def compare_divisions(
    fn: Callable[[int], Mapping[str, Any]],
    divisions: Iterable[tuple[int, int]] = ((2, 1), (2, 2), (4, 2)),
    *,
    rtol: float = 1e-12,
    atol: float = 0.0,
    timeout: float = 60,
) -> None:
    """Require the results of one rank from several ranks, and from replicas of several.

    Not collective: each division is a job of its own on this machine.

    Parameters
    ----------
    fn : callable
        Takes the number of ranks of a replica, makes a strategy with it, and returns
        arrays by name: whole values, such as losses and ``variable.numpy()``, equal on
        all ranks. Its global batch must not depend on the number of replicas. As in
        `run`, it may be a local function.
    divisions : iterable of (int, int)
        The number of ranks of the job, and of ranks of a replica, of each comparison.
    rtol, atol : float
        Largest relative and absolute difference from one rank, as in
        ``numpy.allclose``. Both 0: the bits must be equal.
    timeout : float
        Seconds after which a job is ended.

    Raises
    ------
    AssertionError
        If a result differs from that of one rank; the message names the division, the
        rank, the result and the largest difference.
    RankFailure
        If a rank raised an error.
    RankTimeout
        If a job did not end in time.

    Examples
    --------
    >>> def train(ranks_per_replica):
    ...     strategy = hs.MultiWorkerMirroredStrategy(
    ...         ranks_per_replica=ranks_per_replica)
    ...     return {"total": strategy.inside.sum(np.float64(strategy.inside.size))}
    >>> hs.testing.compare_divisions(train, [(2, 2)])  # doctest: +SKIP
    AssertionError: expected 'total' of one rank ...
    """
    [expected] = run(1, fn, 1, timeout=timeout)
    for ranks, each in divisions:
        found = run(ranks, fn, each, timeout=timeout)
        for rank, results in enumerate(found):
            where = f"rank {rank} of {ranks} with {each} in a replica"
            if results.keys() != expected.keys():
                raise AssertionError(
                    f"expected results named {sorted(expected)}, as of one rank, found "
                    f"{sorted(results)} on {where}; return the same names everywhere"
                )
            for name, value in results.items():
                one, other = np.asarray(expected[name]), np.asarray(value)
                problem = _difference(one, other, rtol, atol)
                if problem:
                    raise AssertionError(
                        f"expected {name!r} of one rank, {problem} on {where}; look "
                        "for a sum inside of the replica that is missing or made "
                        "twice, for a part that is not gathered, or for a batch that "
                        "depends on the number of ranks"
                    )


def _difference(one: Any, other: Any, rtol: float, atol: float) -> str:
    """Return a text that says how two results differ; "" if they do not."""
    if other.shape != one.shape or other.dtype != one.dtype:
        return (
            f"{one.dtype} of shape {one.shape}, found {other.dtype} of shape "
            f"{other.shape}"
        )
    if one.tobytes() == other.tobytes():
        return ""
    if (rtol or atol) and np.allclose(other, one, rtol, atol, equal_nan=True):
        return ""
    if one.dtype.kind not in "ifc":
        return "found another value"
    largest = np.max(abs(other - one), initial=0)
    return f"with rtol={rtol:g} and atol={atol:g}, found a difference of {largest}"
