"""The elastic training loop: train, and after the loss of a rank, train again."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcstrat.checkpoint.save.pending_save import give_up_all
from hpcstrat.elastic.completion_marker import remove_marker, write_marker
from hpcstrat.elastic.finishing import end_without_finalize_after_loss
from hpcstrat.elastic.memory import Memory
from hpcstrat.elastic.pool import Meeting, Pool
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.survival import is_loss
from hpcstrat.engine.topology.topology import Topology, start_mpi
from hpcstrat.errors import RankLostError
from hpcstrat.safety import exits
from hpcstrat.safety.start.creation import Creation
from hpcstrat.strategies import MultiWorkerMirroredStrategy
from hpcstrat.strategies.devices import prepare_mpi

__all__ = ["run"]

_RESERVED = ("comm", "on_lost_rank", "progress_thread")


def run(
    train: Callable[[Any, Memory], Any],
    *,
    spare_ranks: int = 0,
    min_replicas: int = 1,
    max_losses: int | None = None,
    completion_marker: str | os.PathLike[str] | None = None,
    partner_copies: bool = False,
    **strategy_options: Any,
) -> Any:
    """Call a training function, and repeat the call after each loss of a rank.

    Collective over all ranks of the job.

    When a rank dies, collective calls in the function raise `RankLostError` on all
    remaining ranks; the function must not catch this error. A spare rank, if there is
    one, replaces the lost rank; without a spare rank, there is one replica less. Then
    ``run`` calls the function again, with a new strategy. The function must make new
    variables and datasets, and call ``memory.restore()`` to restore the last commit.

    Parameters
    ----------
    train : callable
        Function with two parameters, a `MultiWorkerMirroredStrategy` and a `Memory`. It
        is called on the active ranks.
    spare_ranks : int
        Number of ranks (the last ones of the job) that wait to replace a lost rank.
    min_replicas : int
        Least number of replicas for the training to continue.
    max_losses : int, optional
        Largest number of lost ranks, spare ranks included, for the training to
        continue; default: no limit.
    completion_marker : str or path, optional
        File that the first active rank writes when the function has returned on all
        ranks; an older file is removed at the start.
    partner_copies : bool
        Whether a second replica (of another worker, if there is one) keeps a copy of
        each replica's own state: its parts of SyncOnRead variables and random streams.
    **strategy_options : object
        Options of `MultiWorkerMirroredStrategy`, except ``comm``, ``on_lost_rank`` and
        ``progress_thread``.

    Returns
    -------
    object
        The result of the function; None on ranks that never became active.

    Raises
    ------
    TopologyError
        On every rank, if the job was not started by ``mpirun --with-ft ulfm`` of Open
        MPI 5. A job of one rank does not need ``ulfm``.
    RankLostError
        On every rank, if too few ranks are left.
    ValueError
        If the numbers do not fit the number of ranks, or an option is not allowed. If
        only some ranks pass that option, the other ranks raise ReplicaError.
    OSError
        On every rank, if ``completion_marker`` cannot be removed or written.
    """
    # Do not raise yet: `creation.meet` raises this problem on all ranks.
    problem = _problem_of(strategy_options)
    given = strategy_options.get("settings") or Settings()
    with Creation("start of elastic.run", given) as creation:
        prepare_mpi(given)
        mpi = start_mpi()
        exits.install()
        numbers = f"spare_ranks={spare_ranks}, min_replicas={min_replicas}"
        call = describe_call(f"elastic.run({numbers}, max_losses={max_losses})")
        with contextlib.suppress(RankLostError):
            # If a rank has died already, `pool.meet` below finds it.
            creation.meet(mpi, Topology.world(), call, problem, survives=True)
    pool = Pool(mpi, Topology.world(), spare_ranks)
    _check_least(min_replicas, mpi.COMM_WORLD.size - spare_ranks)
    # Register the exit handler now, because a rank may die in the first meeting.
    end_without_finalize_after_loss(pool)
    _clear(completion_marker, mpi)
    memory = Memory(partner_copies)
    outcome = _TrainingEnd()
    meeting = pool.meet()
    while not meeting.finished:
        _check_enough(meeting, min_replicas, max_losses)
        _report(meeting, outcome.noticed_at)
        if meeting.comm is not None:
            outcome = _train(train, pool, memory, meeting, strategy_options)
        elif not pool.wait():
            # An active rank has failed with an error, which ends the training.
            return None
        meeting = pool.meet(outcome.returned)
        # Even if the function has returned here, other ranks have left this strategy.
        if outcome.strategy is not None:
            outcome.strategy.abandon()
        if not meeting.finished:
            # A save that still runs might overwrite files of the next call's saves.
            give_up_all(RankLostError("a rank was lost", meeting.lost))
    if completion_marker is not None:
        _mark(completion_marker, pool, meeting, mpi.COMM_WORLD.rank)
    if outcome.exits is not None:
        # Raise the SystemExit of the function now, after all ranks have finished.
        raise outcome.exits
    return outcome.result


def _problem_of(options: dict[str, Any]) -> ValueError | None:
    for name in _RESERVED:
        if name in options:
            return ValueError(
                f"expected options without {name}, which elastic.run chooses, found "
                f"{options[name]!r}; leave it out"
            )
    return None


@dataclass(slots=True)
class _TrainingEnd:
    """The outcome of one call of the training function, on this rank."""

    returned: bool = False
    result: Any = None
    exits: SystemExit | None = None
    strategy: MultiWorkerMirroredStrategy | None = None
    noticed_at: float = 0.0


def _train(
    train: Callable[[Any, Memory], Any],
    pool: Pool,
    memory: Memory,
    meeting: Meeting,
    options: dict[str, Any],
) -> _TrainingEnd:
    """Call the training function once; return the outcome, even if a rank was lost."""
    outcome, strategy = _TrainingEnd(), None
    try:
        strategy = MultiWorkerMirroredStrategy(
            comm=meeting.comm, on_lost_rank="raise", **options
        )
        outcome.strategy = strategy
        memory.begin(strategy, meeting.generation)
        try:
            outcome.result = train(strategy, memory)
        except SystemExit as error:
            outcome.exits = error
        # After a loss, call the function again, even if it has caught RankLostError.
        outcome.returned = strategy.lost_ranks is None
        strategy.collectives.barrier("end of elastic.run")
    except Exception as error:
        outcome.noticed_at = time.monotonic()
        if not _is_of_loss(error, strategy):
            pool.release_spares()
            raise
        # If the function has returned here, the loss was found in the barrier: keep the
        # result. The training is finished if it has returned on all ranks.
        if not outcome.returned:
            outcome.exits = outcome.result = None
        if not isinstance(error, RankLostError):
            get_logger("elastic").warning(
                "the training function was left by %s: %s; it is called again, because "
                "a rank was lost",
                type(error).__name__,
                error,
            )
    except BaseException:
        pool.release_spares()
        raise
    if strategy is not None and not outcome.returned:
        strategy.abandon()
        outcome.strategy = None
        # Collect garbage, because the error's frames may hold all old variables.
        gc.collect()
    return outcome


def _is_of_loss(error: Exception, strategy: MultiWorkerMirroredStrategy | None) -> bool:
    """Return whether the loss of a rank caused ``error``; if so, notify other ranks."""
    if strategy is None:
        return isinstance(error, RankLostError)
    if strategy.lost_ranks is not None:
        return True
    channel: Any = strategy.collectives.channel
    topology = strategy.topology
    if channel is not None and is_loss(topology.mpi, error, topology.replica_comm):
        # ``error`` may be of a communicator of the program or of the topology.
        return channel.failures.loss(error, "the training function") is not None
    return False


def _mark(
    path: str | os.PathLike[str], pool: Pool, meeting: Meeting, rank: int
) -> None:
    """Write the marker file on the first active rank that is alive; collective."""
    told = {"num_replicas": len(meeting.active), "num_lost": meeting.num_lost}
    writers = list(meeting.active)
    # If the writing rank dies, the next active rank writes the file.
    while writers:
        error = _tried(write_marker, path, told) if rank == writers[0] else ""
        living = pool.living(error)
        if writers[0] in living:
            if living[writers[0]]:
                raise OSError(
                    f"expected to write the completion marker {path}, found "
                    f"{living[writers[0]]}; the training has ended nevertheless"
                )
            return
        writers = [writer for writer in writers if writer in living]


def _clear(path: str | os.PathLike[str] | None, mpi: Any) -> None:
    """Remove the marker file of an earlier run, or raise OSError on all ranks."""
    if path is None:
        return
    error = _tried(remove_marker, path) if mpi.COMM_WORLD.rank == 0 else ""
    try:
        error = mpi.COMM_WORLD.bcast(error)
    except mpi.Exception as problem:
        if not is_loss(mpi, problem):
            raise
        # `pool.meet` finds the ranks that have died.
        return
    if error:
        raise OSError(
            f"expected to remove the completion marker of an earlier run, found {error}"
        )


def _tried(function: Callable[..., None], *args: Any) -> str:
    """Call a function; return its OSError as text, or an empty string."""
    try:
        function(*args)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _check_least(min_replicas: int, num_places: int) -> None:
    if not 1 <= min_replicas <= num_places:
        raise ValueError(
            f"expected 1 <= min_replicas <= {num_places}, the number of active ranks, "
            f"found {min_replicas}; start more ranks, or ask for fewer"
        )


def _check_enough(meeting: Meeting, min_replicas: int, max_losses: int | None) -> None:
    """Raise RankLostError if too few ranks are left; the same on all ranks."""
    advice = "start the job again, and restore from the checkpoint"
    if len(meeting.active) < min_replicas:
        raise RankLostError(
            f"expected at least {min_replicas} replicas to continue, found "
            f"{len(meeting.active)} after {meeting.num_lost} ranks were lost; {advice}",
            meeting.lost,
        )
    if max_losses is not None and meeting.num_lost > max_losses:
        raise RankLostError(
            f"expected at most {max_losses} lost ranks, found {meeting.num_lost}; "
            f"{advice}",
            meeting.lost,
        )


def _report(meeting: Meeting, noticed_at: float) -> None:
    """Log the lost ranks, and the number of replicas, on the first active rank."""
    if meeting.comm is None or meeting.comm.rank or not meeting.lost:
        return
    get_logger("elastic").warning(
        "lost rank %s of the job; training goes on with %d replicas after %.3f s",
        ", ".join(map(str, meeting.lost)),
        len(meeting.active),
        time.monotonic() - noticed_at if noticed_at else 0.0,
    )
