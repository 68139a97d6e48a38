"""The threads of numerical libraries, which change the bits of their results."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["fix_threads"]

_XLA = "NPROC"
# What that was when XLA began to compute, or may have been.
_of_xla = [os.environ.get(_XLA, "")]


def fix_threads(count: int) -> Any:
    """Let BLAS, OpenMP, PyTorch and XLA compute with so many threads in this process.

    Sums inside of a matrix product are made by parts, one for each thread, so that
    their bits depend on the number. Returns what keeps the limit; RuntimeError where
    JAX has begun to compute with another number, which it keeps to its end.
    """
    from threadpoolctl import threadpool_limits

    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if not getattr(bridge, "backends_are_initialized", bool)():
        # XLA looks at this when it first computes, and then never again.
        os.environ[_XLA] = str(count)
        _of_xla[:] = [str(count)]
    elif _of_xla[0] != str(count) and len(os.sched_getaffinity(0)) > count:
        raise RuntimeError(
            f"expected JAX to have {count} threads with logical replicas, found that "
            f"it has computed already, with another number; make the strategy first, "
            f"or start the job with {_XLA}={count}"
        )
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(count)
    # What is loaded later looks at these.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)
    return threadpool_limits(limits=count)
