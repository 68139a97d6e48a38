"""Horovod's functions to start and end a program, and to query ranks and features."""

from __future__ import annotations

from typing import Any

from hpcstrat.integrations.horovod.torch.submissions import Submissions
from hpcstrat.strategies import MultiWorkerMirroredStrategy

__all__ = [
    "ProcessSet",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "require_all_ranks",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "submissions",
]

_submissions: Submissions | None = None


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start hpcstrat for Horovod's calls, on all ranks of the job or of ``comm``.

    Collective over ``comm``.

    The first call makes a strategy; a second call does nothing. The program may also
    make other strategies on the same ranks.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part; default: all ranks of the job.
    process_sets : object, optional
        Must be empty; any process set raises NotImplementedError, because every call
        needs all ranks.

    Examples
    --------
    >>> import hpcstrat.integrations.horovod.torch as hvd
    >>> hvd.init()
    >>> hvd.rank(), hvd.is_initialized()
    (0, True)
    >>> hvd.shutdown()
    """
    global _submissions  # noqa: PLW0603 - Horovod's calls take no object
    if process_sets:
        _refuse_process_sets(process_sets)
    if comm is not None and not hasattr(comm, "Get_size"):
        raise NotImplementedError(
            f"expected a communicator of mpi4py, found {comm!r}; pass "
            "MPI.COMM_WORLD.Split(...) of the ranks that take part"
        )
    if _submissions is None:
        _submissions = Submissions(MultiWorkerMirroredStrategy(comm=comm))


def shutdown() -> None:
    """Close the strategy; collective over all ranks. `init` may be called again."""
    global _submissions
    # Reset the variable first, so that `init` works again even if closing fails.
    ended, _submissions = _submissions, None
    if ended is not None:
        ended.close()


def submissions() -> Submissions:
    """Return this rank's `Submissions`; raise ValueError before `init`."""
    if _submissions is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _submissions


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` was not called after it."""
    return _submissions is not None


def _topology() -> Any:
    return submissions().strategy.topology


def rank() -> int:
    """Return this rank's number among all ranks."""
    return _topology().replica_id


def size() -> int:
    """Return the number of ranks."""
    return _topology().num_replicas


def local_rank() -> int:
    """Return this rank's number among the ranks of its node."""
    return _topology().worker_comm.rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return _topology().worker_comm.size


def cross_rank() -> int:
    """Return this node's number among all nodes."""
    return _topology().worker_id


def cross_size() -> int:
    """Return the number of nodes."""
    return _topology().num_workers


def is_homogeneous() -> bool:
    """Return whether all nodes have equally many ranks."""
    return local_size() * cross_size() == size()


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI at the same time."""
    mpi = _topology().mpi
    return mpi.Query_thread() == mpi.THREAD_MULTIPLE


def mpi_enabled() -> bool:
    """Return True, because hpcstrat runs on MPI."""
    return True


mpi_built = mpi_enabled


def gloo_enabled() -> bool:
    """Return False: hpcstrat is not built with Gloo, NCCL or other such libraries."""
    return False


gloo_built = nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = gloo_enabled


class ProcessSet:
    """The ranks that take part in a call; always all ranks of the job."""

    process_set_id = 0

    def __init__(self, ranks: Any = None) -> None:
        if ranks is not None:
            _refuse_process_sets(ranks)

    def included(self) -> bool:
        """Return True, because every rank takes part."""
        return True

    size = staticmethod(size)
    rank = staticmethod(rank)


global_process_set = ProcessSet()


def _refuse_process_sets(ranks: Any) -> None:
    raise NotImplementedError(
        f"expected calls of all ranks, found a process set {ranks!r}; make a strategy "
        "of some ranks: hs.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD.Split(...))"
    )


def add_process_set(process_set: Any) -> None:
    """Raise NotImplementedError, because every call needs all ranks."""
    _refuse_process_sets(process_set)


remove_process_set = add_process_set


def require_all_ranks(process_set: Any) -> None:
    """Raise NotImplementedError for a process set of only some ranks."""
    if process_set is not None and process_set is not global_process_set:
        _refuse_process_sets(process_set)


def join(device: int = -1) -> int:
    """Raise NotImplementedError; ranks without rows can use empty batches instead."""
    raise NotImplementedError(
        "expected ranks that make equally many calls, found hvd.join; let ranks "
        "without rows go on with empty batches: the loader of "
        "hpcstrat.integrations.torch.GlobalBatchSampler gives them"
    )


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise NotImplementedError; set ``HPCSTRAT_TIMELINE`` to record a timeline."""
    raise NotImplementedError(
        f"expected no timeline of Horovod, found {file_path!r}; set "
        "HPCSTRAT_TIMELINE=FOLDER, and merge it by hpcstrat timeline merge FOLDER"
    )


def stop_timeline() -> None:
    """Do nothing, because `start_timeline` cannot start a timeline."""
