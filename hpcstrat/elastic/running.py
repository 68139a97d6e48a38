"""The loop around the training: train, lose a rank, meet, train again."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcstrat.checkpoint.save.pending_save import give_up_all
from hpcstrat.elastic.finishing import (
    end_without_finalize_after_loss,
    remove_marker,
    write_marker,
)
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
    """Call a training function, and call it again on those who are left after a loss.

    Collective over all ranks of the job.

    When a rank dies, `RankLostError` leaves the function on all ranks that are left;
    it must not be caught there. A spare rank takes the place of the lost one, if there
    is any; else there is one replica less. Then the function is called again, with a
    new strategy: it makes its variables and data sets anew, and ``memory.restore()``
    gives them the state of the last commit.

    Parameters
    ----------
    train : callable
        Takes a `MultiWorkerMirroredStrategy` and a `Memory`; called on the active
        ranks.
    spare_ranks : int
        How many ranks, the last ones, wait until one is lost.
    min_replicas : int
        With how few replicas the training may go on.
    max_losses : int, optional
        After how many lost ranks, spare ones included, it does not go on.
    completion_marker : str or path, optional
        A file that the first active rank writes when the function has returned on all;
        one that is there at the start is removed.
    partner_copies : bool
        Whether each commit also sends the state that one replica alone has (SyncOnRead
        variables and random streams) to a replica of another worker, which keeps it.
    **strategy_options : object
        Of `MultiWorkerMirroredStrategy`, without ``comm``, ``on_lost_rank`` and
        ``progress_thread``.

    Returns
    -------
    object
        The result of the function; None on ranks that were spare to the end.

    Raises
    ------
    TopologyError
        If the job was not started by ``mpirun --with-ft ulfm`` of Open MPI 5; a single
        rank needs none. On every rank.
    RankLostError
        If too few ranks are left. On every rank.
    ValueError
        If the numbers do not fit the number of ranks, or an option is not allowed; the
        ranks without that option raise ReplicaError.
    """
    # The meeting tells all ranks, so that all raise, whichever has the option.
    problem = _problem_of(strategy_options)
    given = strategy_options.get("settings") or Settings()
    with Creation("start of elastic.run", given) as creation:
        prepare_mpi(given)
        mpi = start_mpi()
        exits.install()
        numbers = f"spare_ranks={spare_ranks}, min_replicas={min_replicas}"
        call = describe_call(f"elastic.run({numbers}, max_losses={max_losses})")
        with contextlib.suppress(RankLostError):
            # The meeting below finds out who has died.
            creation.meet(mpi, Topology.world(), call, problem, survives=True)
    pool = Pool(mpi, Topology.world(), spare_ranks)
    _check_least(min_replicas, mpi.COMM_WORLD.size - spare_ranks)
    # This comes before the first meeting, in which a rank may be lost already.
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
            # Active ranks have left by an error, and end the job or handle the error.
            return None
        meeting = pool.meet(outcome.returned)
        # All ranks have left the strategy. This rank may have finished, and others not.
        if outcome.strategy is not None:
            outcome.strategy.abandon()
        if not meeting.finished:
            # A save that still runs might overwrite the files of the next training.
            give_up_all(RankLostError("a rank was lost", meeting.lost))
    if completion_marker is not None:
        _mark(completion_marker, pool, meeting, mpi.COMM_WORLD.rank)
    if outcome.exits is not None:
        # The function's own sys.exit(), after all have come to the end.
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
    """The end of the training on this rank."""

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
    """Call the training function once; come back from it also after a loss."""
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
        # A loss counts even if the function has caught its error.
        outcome.returned = strategy.lost_ranks is None
        strategy.collectives.barrier("end of elastic.run")
    except Exception as error:
        outcome.noticed_at = time.monotonic()
        if not _is_of_loss(error, strategy):
            pool.release_spares()
            raise
        # A rank whose function has returned keeps its result: the loss came in the
        # barrier after it. If all have returned, the training is finished.
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
        # Frames of the error may keep all of the old variables alive.
        gc.collect()
    return outcome


def _is_of_loss(error: Exception, strategy: MultiWorkerMirroredStrategy | None) -> bool:
    """Return whether a lost rank caused an error; if so, tell the other ranks."""
    if strategy is None:
        return isinstance(error, RankLostError)
    if strategy.lost_ranks is not None:
        return True
    channel: Any = strategy.collectives.channel
    topology = strategy.topology
    if channel is not None and is_loss(topology.mpi, error, topology.replica_comm):
        # A communicator of the program's own, or of the topology's, may be at fault.
        return (
            channel.failures.rank_loss.found(error, "the training function") is not None
        )
    return False


def _mark(
    path: str | os.PathLike[str], pool: Pool, meeting: Meeting, rank: int
) -> None:
    """Write the marker, on the first active rank that is alive."""
    told = {"num_replicas": len(meeting.active), "num_lost": meeting.num_lost}
    writers = list(meeting.active)
    # The next one writes it, if the first has died meanwhile.
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
    """Remove the marker of an earlier run, or raise on all ranks."""
    if path is None:
        return
    error = _tried(remove_marker, path) if mpi.COMM_WORLD.rank == 0 else ""
    try:
        error = mpi.COMM_WORLD.bcast(error)
    except mpi.Exception as problem:
        if not is_loss(mpi, problem):
            raise
        # The meeting finds out who has died.
        return
    if error:
        raise OSError(
            f"expected to remove the completion marker of an earlier run, found {error}"
        )


def _tried(function: Callable[..., None], *args: Any) -> str:
    """Call a function; return the error of the system, or an empty string."""
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
    """Refuse to go on with too few ranks; on all of them."""
    advice = "start the job again, and restore from the checkpoint"
    if len(meeting.active) < min_replicas:
        raise RankLostError(
            f"expected at least {min_replicas} replicas to go on with, found "
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
    """Log once which ranks were lost, and how the training goes on."""
    if meeting.comm is None or meeting.comm.rank or not meeting.lost:
        return
    get_logger("elastic").warning(
        "lost rank %s of the job; training goes on with %d replicas after %.3f s",
        ", ".join(map(str, meeting.lost)),
        len(meeting.active),
        time.monotonic() - noticed_at if noticed_at else 0.0,
    )
