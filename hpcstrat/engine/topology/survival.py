"""MPI for the survivors of a lost rank: user-level failure mitigation (ULFM).

A communicator with a dead process raises errors of three classes (MPI Forum, ULFM
chapter; Open MPI 5.0 manual, "User-Level Fault Mitigation"). The first rank that
notices revokes the communicators, and so wakes those who wait for a rank that is alive
but will not come.
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
"""Errors of an exchange of objects on a survivor to which MPI reported success, with
half of the bytes; seen with Open MPI 5.0."""


class TransportError(CollectiveError):
    """An error outside of MPI that may be the first sign of a dead process."""


_FT_ENABLED = "OMPI_MCA_mpi_ft_enable"
_COLL = "OMPI_MCA_coll"
# han returned wrong sums on survivors, and hung, when a rank of another host died; Open
# MPI's own parameters for ULFM leave out the other two.
_UNFIT = ("hcoll", "portals4", "han")
_NAP_SECONDS = 0.002
# Time that the launcher may take after MPI's error to tell which rank has died.
_TOLD_SECONDS = 2.0
# Buffers of abandoned agreements that MPI may still write to.
_abandoned: list[Any] = []
_LAUNCH = "launch with `mpirun --with-ft ulfm` of Open MPI 5"


def choose_collectives(environment: MutableMapping[str, str]) -> None:
    """Keep Open MPI from using collectives that give wrong sums when a rank dies.

    Call it before MPI is initialized. Does nothing where the launcher was not told to
    survive the loss of a rank.
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
    """Return why the loss of a rank cannot be survived here; empty where it can."""
    version = mpi.Get_library_version().split(",")[0].split("\n")[0].strip("\x00 ")
    slurm = "SLURM_STEP_ID" in os.environ and "PRTE_LAUNCHED" not in os.environ
    if slurm and mpi.COMM_WORLD.size > 1:
        return (
            "expected ranks that mpirun started, found those of srun, which cancels "
            f"the whole step when one dies; {_LAUNCH} inside of the batch script"
        )
    # A revoked communicator must raise: an MPI that was not told to survive does not.
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
            f"expected {version} to be told to survive the loss of a rank, found that "
            f"it was not; {_LAUNCH}"
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
    """Refuse to go on where the loss of a rank cannot be survived.

    Collective over ``comm``. Raises TopologyError on every rank; a single rank has no
    other to lose.
    """
    if comm.size == 1:
        return
    problems = comm.allgather(problem_with_survival(mpi, num_nodes))
    found = next((problem for problem in problems if problem), "")
    if found:
        raise TopologyError(found)


def is_loss(mpi: Any, error: BaseException, comm: Any = None) -> bool:
    """Return whether an error says, or hints, that a process has died.

    Errors of communicators that were revoked for a death count. Nonblocking collectives
    of Open MPI 5.0 under which a process dies now and then give MPI_ERR_OTHER, and
    exchanges of objects one of `GARBLED`; NCCL may see the death before MPI does:
    ``comm`` then tells whether a rank has died.
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
        # A communicator of this rank alone drives the progress of all.
        mpi.COMM_SELF.Iprobe()
        time.sleep(_NAP_SECONDS)
    return False


def revoke(comms: Sequence[Any]) -> None:
    """Make all ranks raise an error in every call, now and later.

    Null communicators, and revoked ones, are passed over.
    """
    for comm in comms:
        # A single rank has no other to wake, and MPI may not know these calls.
        if comm and comm.size > 1 and not comm.Is_revoked():
            comm.Revoke()


def lost_ranks(comm: Any) -> list[int]:
    """Return the ranks that are known to be dead; ``comm`` may be revoked."""
    failed, group = comm.Get_failed(), comm.Get_group()
    try:
        lost: list[int] = failed.Translate_ranks(None, group)
        return sorted(lost)
    finally:
        failed.Free()
        group.Free()


def create(mpi: Any, parent: Any, make: Callable[[], Any], survives: bool) -> Any:
    """Make a communicator, on all ranks or on none.

    Collective over ``parent``, which is revoked where a process has died; then
    RankLostError on every rank. With ``survives`` the ranks agree that all have it:
    otherwise one rank could have it, and wait in it for a rank that was told of a
    death.
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
            "been lost; form another of those that are left",
            lost,
        ) from cause
    if comm:
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm


def _agreed(parent: Any, made: bool) -> bool:
    """Return whether all ranks have made it; False where one has left and revoked it.

    MPI_Comm_agree itself would wait for a rank that lives, and does not come.
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
