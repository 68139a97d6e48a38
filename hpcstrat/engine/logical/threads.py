"""Thread counts of numerical libraries, which affect the bits of their results."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["fix_threads", "let_xla_wait", "xla_problem"]

_XLA = "NPROC"
_TENSORFLOW = "TF_NUM_INTRAOP_THREADS"
_DEVICES = "jax_num_cpu_devices"
# The value of NPROC that XLA reads when it begins to compute.
_of_xla = [os.environ.get(_XLA, "")]
# The largest number of replicas of a strategy made before XLA began to compute.
_most_replicas = [0]


def fix_threads(count: int, num_replicas: int) -> Any:
    """Let BLAS, OpenMP, PyTorch, XLA and TensorFlow compute with ``count`` threads.

    The sums of a matrix product are split over the threads, so that the bits of the
    results depend on the number of threads. Returns threadpoolctl's limiter, which can
    restore the earlier limits. Raises RuntimeError if JAX or TensorFlow has already
    begun to compute with another number of threads, which it cannot change any more.
    """
    from threadpoolctl import threadpool_limits

    if not _xla_has_begun():
        # XLA reads this variable once, when it first computes.
        os.environ[_XLA] = str(count)
        _of_xla[:] = [str(count)]
        _most_replicas[0] = max(_most_replicas[0], num_replicas)
        if "hpcstrat.integrations.jax" in sys.modules:
            let_xla_wait()
    elif _of_xla[0] != str(count) and len(os.sched_getaffinity(0)) > count:
        raise RuntimeError(
            f"expected JAX to have {count} threads with logical replicas, found that "
            f"it has computed already, with another number; make the strategy first, "
            f"or start the job with {_XLA}={count}"
        )
    _fix_tensorflow(count)
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(count)
    # Libraries that are loaded after this call read these variables.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)
    return threadpool_limits(limits=count)


def _fix_tensorflow(count: int) -> None:
    tensorflow: Any = sys.modules.get("tensorflow")
    try:
        # TensorFlow reads the variable when it first computes.
        if tensorflow is not None and os.environ.get(_TENSORFLOW) != str(count):
            tensorflow.config.threading.set_intra_op_parallelism_threads(count)
    except RuntimeError as error:
        raise RuntimeError(
            f"expected TensorFlow to have {count} threads with logical replicas, found "
            "that it has computed already, with another number; make the strategy "
            f"first, or start the job with {_TENSORFLOW}={count}"
        ) from error
    os.environ[_TENSORFLOW] = str(count)


def _xla_has_begun() -> bool:
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    return bool(getattr(bridge, "backends_are_initialized", bool)())


def let_xla_wait() -> None:
    """Give XLA more launch threads than replicas, so that waiting does not deadlock.

    Does nothing once JAX has computed. An XLA program that waits for other replicas
    blocks a launch thread. XLA has one launch thread per CPU device, and
    ``jax_num_cpu_devices`` sets the number of devices; all devices share the threads
    that compute.
    """
    jax: Any = sys.modules.get("jax")
    if not _most_replicas[0] or jax is None or _xla_has_begun():
        return
    if getattr(jax.config, _DEVICES) <= _most_replicas[0]:
        jax.config.update(_DEVICES, _most_replicas[0] + 1)


def xla_problem(num_replicas: int) -> str:
    """Return why a rank's replicas cannot wait for each other in XLA, or ""."""
    jax: Any = sys.modules["jax"]
    found = len(jax.local_devices(backend="cpu"))
    if num_replicas == 1 or found > num_replicas:
        return ""
    return (
        f"expected JAX to have more than {num_replicas} CPU devices, in which the "
        f"logical replicas of this rank wait for each other, found {found}; make the "
        "strategy, and import hpcstrat.integrations.jax, before JAX computes"
    )
