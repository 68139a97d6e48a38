"""The strategy: the cross-replica side of a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hpcstrat.context import Entry, current, pop, push
from hpcstrat.observe.timeline import active
from hpcstrat.options import RunOptions, VariableSynchronization, check_on_error
from hpcstrat.reduction.replica_collectives import Collectives
from hpcstrat.settings import Settings
from hpcstrat.strategies.cross_replica import CrossReplicaMethods
from hpcstrat.strategies.extended import StrategyExtended
from hpcstrat.strategies.records import RecordMethods
from hpcstrat.strategies.replica_context import ReplicaContext
from hpcstrat.tree import tree_map
from hpcstrat.typing import Tree
from hpcstrat.values import DistributedValues, PerReplica, localize
from hpcstrat.variables import MirroredVariable, SyncOnReadVariable, Variable

if TYPE_CHECKING:
    from hpcstrat.topology.topology import Topology

__all__ = ["Strategy"]


class Strategy(CrossReplicaMethods, RecordMethods):
    """Base class: everything that strategies share.

    Parameters
    ----------
    collectives : Collectives
        The calls between replicas.
    replica_id : int
        This process's replica.
    device : str
        This replica's device.
    on_error : str
        ``"abort"``: an exception in a replica function stays on its replica, and ends
        the job when nothing catches it. ``"raise"``: it is raised on all replicas, out
        of the same ``run``, so that all can skip a step together; ``run``, merge calls,
        updates, assignments in cross-replica context and ``next()`` of a data set then
        end with an agreement of all replicas.

    Attributes
    ----------
    collectives : Collectives
        For the library's own modules.
    extended : StrategyExtended
        Further methods.
    puts_on_gpu : bool
        Whether variables and batches are put on this replica's GPU, wherever their
        first values come from.
    raises_together : bool
        Whether replicas leave ``run`` together, with ``on_error="raise"``.
    run_ends : list of callable
        Called once with whether the ``run`` under way failed, on any replica.
    """

    is_default = False
    distributes = True
    puts_on_gpu = False

    def __init__(
        self,
        collectives: Collectives | None = None,
        replica_id: int = 0,
        device: str = "CPU:0",
        *,
        on_error: str = "abort",
    ) -> None:
        check_on_error(on_error)
        self.collectives = collectives or Collectives(None)
        self.replica_id = replica_id
        self.device = device
        self.extended = StrategyExtended(self)
        self.cross_entry = Entry(self)
        self.update_entry = Entry(self, updating=True)
        self.replica_entry = Entry(self, ReplicaContext(self, replica_id))
        self.raises_together = on_error == "raise"
        self.run_ends: list[Callable[[bool], None]] = []
        self._settings: Settings | None = None

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose updates are aggregated together."""
        return self.collectives.size

    @property
    def topology(self) -> Topology:
        """The communicators of the replicas."""
        raise RuntimeError(
            f"expected a strategy on MPI, found {self!r}, which has no communicators; "
            "use MirroredStrategy or MultiWorkerMirroredStrategy"
        )

    @property
    def cluster_resolver(self) -> Any:
        """The resolver in use; None where MPI itself says which ranks there are."""
        return None

    @property
    def settings(self) -> Settings:
        """How this strategy watches over its ranks; the same on every replica."""
        if self._settings is None:
            self._settings = Settings().resolved()
        return self._settings

    def register(self, variable: MirroredVariable) -> None:
        """Take a variable among those whose copies are compared; for variables alone.

        Logically collective over the strategy's replicas.

        Parameters
        ----------
        variable : MirroredVariable
            New.
        """

    def variable_class(self, synchronization: VariableSynchronization) -> Any:
        """Return the class of variables made in this strategy's scope.

        Not collective.

        Parameters
        ----------
        synchronization : VariableSynchronization
            What was asked for.

        Returns
        -------
        type
            A subclass of `Variable`.
        """
        if not self.distributes:
            return Variable
        on_read = synchronization is VariableSynchronization.ON_READ
        return SyncOnReadVariable if on_read else MirroredVariable

    @contextmanager
    def scope(self) -> Iterator[Self]:
        """Make this the current strategy, in cross-replica context.

        Not collective.

        Yields
        ------
        Strategy
            This strategy.

        Raises
        ------
        RuntimeError
            Inside the scope of another strategy, or inside a replica function.
        """
        entry = current()
        if entry is not None:
            self._require_cross("scope")
            if entry.strategy is not self or self.is_default:
                raise RuntimeError(
                    f"expected no other strategy around the scope of {self!r}, found "
                    f"that of {entry.strategy!r}; do not nest strategies"
                )
        token = push(self.cross_entry)
        try:
            yield self
        finally:
            pop(token)

    def _require_cross(self, what: str) -> None:
        """Refuse replica context, and another strategy's scope."""
        entry = current()
        if entry is None or (entry.strategy is self and not entry.replica_context):
            return
        if entry.strategy.is_default or self.is_default:
            return
        if entry.strategy is not self:
            raise RuntimeError(
                f"expected {what} of {self!r} in its own scope, found that of "
                f"{entry.strategy!r}; do not mix strategies"
            )
        raise RuntimeError(
            f"expected {what} in cross-replica context, found it inside a replica "
            "function; call it outside strategy.run, or inside merge_call"
        )

    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call a function once on every replica.

        Logically collective over the strategy's replicas: all must call it, but it does
        not communicate by itself. With ``on_error="raise"`` its end is collective.

        Parameters
        ----------
        fn : callable
            Runs in replica context.
        args : list or tuple
            Positional arguments; each distributed value in them is replaced by this
            replica's component, variables go in as they are.
        kwargs : dict, optional
            Keyword arguments, likewise.
        options : RunOptions, optional
            Accepted for tf.distribute's sake.

        Returns
        -------
        object
            The function's result. With several replicas each leaf becomes PerReplica,
            except None, variables and Mirrored values.

        Raises
        ------
        ValueError
            If ``args`` is no list or tuple.
        RuntimeError
            In replica context.
        ReplicaError
            With ``on_error="raise"``, if the function failed on another replica.
        """
        del options
        entry = current()
        if entry is not None:
            self._require_cross("run")
        channel = self.collectives.channel
        if channel is not None:
            channel.position.enter_run()
        if active.recorder is not None:
            number = None if channel is None else {"run": channel.position.run_index}
            fn = active.recorder.around(fn, "run", "step", number)
        try:
            with self.together("run"):
                if not isinstance(args, (list, tuple)):
                    raise ValueError(
                        "expected a list or tuple of arguments, found "
                        f"{type(args).__name__}; write args=(value,)"
                    )
                if args:
                    args = [localize(argument) for argument in args]
                named = {k: localize(v) for k, v in kwargs.items()} if kwargs else {}
                token = push(self.replica_entry)
                try:
                    result = fn(*args, **named)
                finally:
                    pop(token)
                result = None if result is None else self.distributed(result)
        except BaseException:
            self._end_run(failed=True)
            raise
        if self.run_ends:
            self._end_run(failed=False)
        return result

    def _end_run(self, failed: bool) -> None:
        ends, self.run_ends = self.run_ends, []
        for function in ends:
            function(failed)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Return what surrounds a part of the program that runs on every replica.

        Collective over the strategy's replicas, at its end, with ``on_error="raise"``:
        an error of one replica is raised on all; else not collective.

        Parameters
        ----------
        what : str
            The part, for messages.

        Returns
        -------
        context manager
            See `hpcstrat.channel.sections`.
        """
        return self.collectives.section(what) if self.raises_together else _ALONE

    def expect_slow(self, seconds: float) -> AbstractContextManager[None]:
        """Let the others wait longer for this replica; here there are none.

        Not collective.

        Parameters
        ----------
        seconds : float
            How long the block may take.

        Returns
        -------
        context manager
            For compilations, long evaluations, and the like.

        Raises
        ------
        ValueError
            If ``seconds`` is not positive and finite.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"expected seconds > 0 and finite, found {seconds}; say how long the "
                "block may take"
            )
        return nullcontext()

    @contextmanager
    def all_or_none(self, variable: Variable, what: str) -> Iterator[None]:
        """Surround a change of this replica's component of a variable.

        Collective over the strategy's replicas, at its end, with ``on_error="raise"``:
        if it fails on any of them, the component is as before on all.

        Parameters
        ----------
        variable : Variable
            Of this strategy.
        what : str
            How it is changed, for messages.

        Yields
        ------
        None
            Nothing.
        """
        if not self.raises_together:
            yield
            return
        before = variable.component.copy()
        try:
            with self.together(f"{what} of variable {variable.name!r}"):
                yield
        except BaseException:
            np.copyto(variable.component, before)
            raise

    def distributed(self, tree: Tree) -> Tree:
        """Wrap what a replica function returned.

        Not collective.

        Parameters
        ----------
        tree : tree
            This replica's result.

        Returns
        -------
        tree
            With PerReplica leaves, where there are several replicas.
        """
        return tree if self.num_replicas_in_sync == 1 else tree_map(_wrap, tree)

    def close(self) -> None:
        """Free the communicators.

        Collective over the strategy's replicas. A second call does nothing.
        """

    def __enter__(self) -> Self:
        """Return the strategy, to be closed at the end of the block."""
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        """Close the strategy, unless an error is on its way."""
        if kind is None:
            self.close()

    def __copy__(self) -> Self:
        """Refuse to be copied."""
        raise RuntimeError(
            f"expected one object for {self!r}, found an attempt to copy it; share it"
        )

    def __deepcopy__(self, memo: Any) -> Self:
        """Refuse to be copied."""
        return self.__copy__()

    def __repr__(self) -> str:
        """Show kind and place."""
        return (
            f"{type(self).__name__}(replica {self.replica_id} of "
            f"{self.num_replicas_in_sync})"
        )


_ALONE = nullcontext()


def _wrap(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (Variable, DistributedValues)):
        return leaf
    return PerReplica(leaf)
