"""MPI after the loss of a rank: user-level failure mitigation (ULFM).

A communicator with a dead process raises errors of three classes (MPI Forum, ULFM
chapter; Open MPI 5.0 manual, "User-Level Fault Mitigation"). The first rank that gets
such an error revokes the communicators. The revocation wakes ranks that wait for a rank
that is alive but has left the call.
"""

from __future__ import annotations

import os
import pickle
import platform
import time
from array import array
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from hpcstrat.errors import CollectiveError, RankLostError, TopologyError

__all__ = [
    "GARBLED",
    "TransportError",
    "choose_collectives",
    "create",
    "is_loss",
    "lost_ranks",
    "problem_with_survival",
    "require_survival",
    "revoke",
]

GARBLED: tuple[type[Exception], ...] = (
    EOFError,
    MemoryError,
    OverflowError,
    pickle.UnpicklingError,
)
"""Errors of an exchange of objects on a surviving rank, after MPI reported success but
had received only half of the bytes; seen with Open MPI 5.0."""


class TransportError(CollectiveError):
    """An error outside of MPI that may be the first sign of a dead process."""


_FT_ENABLED = "OMPI_MCA_mpi_ft_enable"
_COLL = "OMPI_MCA_coll"
# When a rank of another host died, Open MPI's component han returned wrong sums on
# survivors, and hung. Open MPI's parameters for ULFM exclude the other two.
_UNFIT = ("hcoll", "portals4", "han")
_NAP_SECONDS = 0.002
# Seconds to wait, after an error of MPI, for the launcher to report the dead rank.
_TOLD_SECONDS = 2.0
# Buffers of abandoned agreements that MPI may still write to.
_abandoned: list[Any] = []
_LAUNCH = "launch with `mpirun --with-ft ulfm` of Open MPI 5"


def choose_collectives(environment: MutableMapping[str, str]) -> None:
    """Exclude Open MPI's components whose collectives give wrong sums when a rank dies.

    Call this function before MPI is initialized. Does nothing if the job was not
    launched with fault tolerance.
    """
    if environment.get(_FT_ENABLED, "").lower() not in ("1", "true", "yes"):
        return
    text = environment.get(_COLL, "")
    names = [name for name in text.lstrip("^").split(",") if name]
    if text and not text.startswith("^"):
        environment[_COLL] = ",".join(n for n in names if n not in _UNFIT)
        return
    missing = [name for name in _UNFIT if name not in names]
    environment[_COLL] = "^" + ",".join([*names, *missing])


def _may_use_han(environment: MutableMapping[str, str]) -> bool:
    text = environment.get(_COLL, "")
    named = "han" in text.lstrip("^").split(",")
    return not named if not text or text.startswith("^") else named


def problem_with_survival(mpi: Any, num_nodes: int = 1) -> str:
    """Return why this job cannot survive the loss of a rank, or an empty string."""
    version = mpi.Get_library_version().split(",")[0].split("\n")[0].strip("\x00 ")
    slurm = "SLURM_STEP_ID" in os.environ and "PRTE_LAUNCHED" not in os.environ
    if slurm and mpi.COMM_WORLD.size > 1:
        return (
            "expected ranks that mpirun started, found those of srun, which cancels "
            f"the whole step when one dies; {_LAUNCH} inside of the batch script"
        )
    # A call on a revoked communicator must raise an error; if the job was launched
    # without fault tolerance, the call succeeds.
    own = mpi.COMM_SELF.Dup()
    own.Set_errhandler(mpi.ERRORS_RETURN)
    try:
        own.Revoke()
        own.Iprobe()
    except NotImplementedError:
        return (
            f"expected an MPI library that survives the loss of a rank, found "
            f"{version}; {_LAUNCH}"
        )
    except mpi.Exception as error:
        if not is_loss(mpi, error):
            raise
    else:
        return (
            f"expected {version} to be started so that it survives the loss of a rank, "
            f"found that it was not; {_LAUNCH}"
        )
    finally:
        own.Free()
    if num_nodes > 1 and _may_use_han(os.environ):
        return (
            "expected MPI without the collectives `han`, which give wrong sums when a "
            f"rank of another node dies, found it initialized with them; {_LAUNCH} and "
            "`--mca coll ^han`, or let the first strategy initialize MPI"
        )
    return ""


def require_survival(mpi: Any, comm: Any, num_nodes: int) -> None:
    """Raise TopologyError if the job cannot survive the loss of a rank.

    Collective over ``comm``. Raises on every rank. Does nothing for a single rank.
    """
    if comm.size == 1:
        return
    problems = comm.allgather(problem_with_survival(mpi, num_nodes))
    found = next((problem for problem in problems if problem), "")
    if found:
        raise TopologyError(found)


def is_loss(mpi: Any, error: BaseException, comm: Any = None) -> bool:
    """Return whether an error means, or may mean, that a process has died.

    Returns True for errors of communicators that were revoked after a death. If a
    process dies during a nonblocking collective, Open MPI 5.0 sometimes returns
    MPI_ERR_OTHER; an exchange of objects may raise one of `GARBLED`; and NCCL may
    notice the death before MPI. For these errors, the function asks ``comm`` whether a
    rank has died.
    """
    if isinstance(error, mpi.Exception):
        kinds = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        if error.Get_error_class() in kinds:
            return True
    elif not isinstance(error, (*GARBLED, TransportError)):
        return False
    deadline = time.monotonic() + _TOLD_SECONDS
    while comm is not None and time.monotonic() < deadline:
        if comm.Is_revoked() or lost_ranks(comm):
            return True
        # Iprobe on COMM_SELF drives the progress of all communicators.
        mpi.COMM_SELF.Iprobe()
        time.sleep(_NAP_SECONDS)
    return False


def revoke(comms: Sequence[Any]) -> None:
    """Revoke communicators, so that all calls on them raise an error on all ranks.

    Null communicators and revoked communicators are skipped.
    """
    for comm in comms:
        # A single rank has no other rank to wake, and MPI may not support these calls.
        if comm and comm.size > 1 and not comm.Is_revoked():
            comm.Revoke()


def lost_ranks(comm: Any) -> list[int]:
    """Return the ranks that MPI knows to be dead; ``comm`` may be revoked."""
    failed, group = comm.Get_failed(), comm.Get_group()
    try:
        lost: list[int] = failed.Translate_ranks(None, group)
        return sorted(lost)
    finally:
        failed.Free()
        group.Free()


def create(mpi: Any, parent: Any, make: Callable[[], Any], survives: bool) -> Any:
    """Create a communicator, on all ranks or on none.

    Collective over ``parent``. If a process has died, ``parent`` is revoked and
    RankLostError is raised on every rank. If ``survives`` is true, the ranks agree that
    all have the new communicator. Without this agreement, a rank that has the
    communicator could wait in it for a rank whose creation failed.
    """
    if not survives or parent.size == 1:
        return make()
    comm, cause = None, None
    parent.Set_errhandler(mpi.ERRORS_RETURN)
    try:
        comm = make()
    except mpi.Exception as error:
        if not is_loss(mpi, error, parent):
            raise
        cause = error
        revoke([parent])
    try:
        everywhere = _agreed(parent, comm is not None)
    except mpi.Exception as error:
        if not is_loss(mpi, error):
            raise
        everywhere, cause = False, error
    if not everywhere:
        revoke([parent, comm])
        lost = lost_ranks(parent)
        raise RankLostError(
            f"expected all ranks to form a communicator, found that {_some(lost)} had "
            "been lost; form another one of the remaining ranks",
            lost,
        ) from cause
    if comm:
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm


def _agreed(parent: Any, made: bool) -> bool:
    """Return whether all ranks have created the communicator.

    Returns False if a rank has revoked ``parent``. The blocking MPI_Comm_agree would
    wait forever for a rank that is alive but has left the call.
    """
    flag = array("i", [made])
    request = parent.Iagree(flag)
    while not request.Test():
        if parent.Is_revoked():
            _abandoned.append((request, flag))
            return False
        os.sched_yield()
    return bool(flag[0])


def _some(lost: Sequence[int]) -> str:
    return f"ranks {list(lost)}" if lost else f"a rank ({platform.node()} sees no more)"
