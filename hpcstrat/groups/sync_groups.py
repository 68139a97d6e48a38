"""`SyncGroups`: groups of replicas that average parameters rarely (as in DiLoCo)."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.kinds import array_module, is_device, is_half
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.pending_calls import PendingCall
from hpcstrat.engine.context import current, pop, push
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array
from hpcstrat.optimizers import SGD, Optimizer
from hpcstrat.optimizers.routine import learning_rate
from hpcstrat.optimizers.slots import file_names
from hpcstrat.strategies import MultiWorkerMirroredStrategy, Strategy
from hpcstrat.strategies.connection import subset
from hpcstrat.strategies.split import Split
from hpcstrat.variables import HostValue, MirroredVariable, Variable

if TYPE_CHECKING:
    from mpi4py import MPI

_CREATION = "creation of SyncGroups"
# Indices into `SyncGroups._counts`: number of steps since the last sum over groups
# began, and number of steps since the pending sum began (-1: no sum is pending).
_SINCE, _UNDER_WAY = 0, 1


class SyncGroups:
    """Trains groups of replicas; groups are averaged with each other every few steps.

    Creation and all methods are collective over ``comm``, except a method whose
    description says that it is not.

    Each group trains by itself with ``strategy``, which sums gradients only inside of
    the group. A round ends every ``every`` steps. Another copy of the parameters, the
    outer parameters, changes only when a round ends, and is equal in all groups. At the
    end of a round, the outer gradient is the outer parameters minus the mean, over all
    replicas, of the parameters that the replicas' groups have trained. The outer
    optimizer updates the outer parameters with this gradient, and each group continues
    from the outer parameters. With ``outer=SGD(1.0)`` each group continues from the
    average of the groups' parameters: this is local SGD (Stich, Local SGD Converges
    Fast and Communicates Little, ICLR 2019, doi:10.48550/arXiv.1805.09767). The default
    outer optimizer is DiLoCo's (Douillard et al., DiLoCo: Distributed Low-Communication
    Training of Language Models, 2023, doi:10.48550/arXiv.2311.08105).

    The averaged variables are the trainable variables of floating types that are made
    in the scope of ``strategy``; all groups begin with replica 0's values. Making such
    a variable is therefore collective over all replicas, and this object keeps a
    reference to it. Other state, such as inner optimizers', belongs to one group. A
    checkpoint needs the same variables in all groups: call `Optimizer.build` of inner
    optimizers before the first step, which may fail in a group.

    Parameters
    ----------
    by : {"worker"}, optional
        Each worker is a group; this is the default if ``size`` is not given.
    every : int
        Number of steps of a round.
    size : int, optional
        Number of replicas in each group, a divisor of the number of all replicas.
    outer : Optimizer, optional
        The optimizer that updates the outer parameters; default: ``SGD(0.7,
        momentum=0.9, nesterov=True)``. Its ``aggregation`` is not used.
    delay : int
        Number of steps between the end of a round and the wait for the round's sum over
        groups, from 0 to ``every``. Messages travel during these steps, as for
        `start_all_reduce`. When the sum is complete, the change of the outer parameters
        is added to the group's parameters, which keep the updates made in these steps.
        A delay above 0 needs memory for another copy of the parameters.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks to divide into groups; default: all ranks of the job.
    replicas_per_worker : int, optional
        As for `MultiWorkerMirroredStrategy`.
    communication_options : CommunicationOptions, optional
        Options for sums between groups, such as the type of values in messages.
    on_error : str
        ``"abort"`` or ``"raise"``, for both strategies; see `Strategy`. An error in
        ``strategy.run`` is raised only in the group in which it occurred.
    progress_thread : bool
        Whether a thread continues sums between groups while the program computes; see
        `MultiWorkerMirroredStrategy`.
    settings : Settings, optional
        Settings of both strategies, such as their timeouts.

    Attributes
    ----------
    strategy : Strategy
        The strategy of this replica's group; use its ``scope`` and ``run``.
    everyone : MultiWorkerMirroredStrategy
        The strategy of all replicas, for datasets and random numbers of all replicas.
    outer : Optimizer
        The outer optimizer; its ``iterations`` count the rounds.

    Raises
    ------
    ValueError
        For arguments out of range.
    CollectiveError
        If ranks pass different arguments; raised on every rank.
    ReplicaError
        If an argument is wrong on another rank.
    """

    def __init__(
        self,
        by: str | None = None,
        *,
        every: int,
        size: int | None = None,
        outer: Optimizer | None = None,
        delay: int = 0,
        comm: MPI.Intracomm | None = None,
        replicas_per_worker: int | None = None,
        communication_options: CommunicationOptions | None = None,
        on_error: str = "abort",
        progress_thread: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self.everyone = MultiWorkerMirroredStrategy(
            comm=comm,
            replicas_per_worker=replicas_per_worker,
            communication_options=communication_options,
            on_error=on_error,
            progress_thread=progress_thread,
            settings=settings,
        )
        self._pairs: list[tuple[MirroredVariable, Variable]] = []
        # Copies of the group's parameters, made when the pending sum began.
        self._starts: list[Variable] = []
        self._sum: PendingCall | None = None
        # Learning rate of the outer optimizer for the last sum that began.
        self._rate = 0.0
        try:
            self._agree(by, size, every, delay, outer)
            self.strategy: Strategy = _make_groups(
                self.everyone,
                size,
                self._take,
                replicas_per_worker=replicas_per_worker,
                on_error=on_error,
            )
        except Exception:
            # All ranks raise this error, so all ranks close the strategy.
            self.everyone.close()
            raise
        self._counts = _plain("counts", np.array([0, -1], np.int64))

    def _agree(
        self,
        by: str | None,
        size: int | None,
        every: int,
        delay: int,
        outer: Optimizer | None,
    ) -> None:
        """Check that the arguments are valid, and equal on all ranks."""
        collectives = self.everyone.collectives
        try:
            _check(by, size, every, delay, self.everyone.num_replicas_in_sync)
            if outer is None:
                outer = SGD(0.7, momentum=0.9, nesterov=True)
            if not isinstance(outer, Optimizer):
                raise TypeError(
                    f"expected an optimizer as outer, found {outer!r}; pass one of "
                    "hpcstrat.optimizers"
                )
            outer.require_alone("as outer", "choose every instead")
            self.every, self.delay, self.outer = int(every), int(delay), outer
            groups = "by='worker'" if size is None else f"size={size}"
            words = f"{groups}, every={every}, outer={_describe(outer)}, delay={delay}"
        except Exception as error:
            collectives.fail(_CREATION, error)
            raise
        collectives.barrier(f"creation of SyncGroups({words})")

    @property
    def collectives(self) -> Collectives:
        """The collective calls between all replicas, for the library's own modules."""
        found: Collectives = self.everyone.collectives
        return found

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        assert self.everyone.split is not None
        return self.everyone.split.num_groups

    @property
    def group_id(self) -> int:
        """Number of this replica's group, from 0."""
        assert self.everyone.split is not None
        return self.everyone.split.own

    def _take(self, variable: MirroredVariable) -> None:
        """Set a new variable to replica 0's value; `step` and `end_round` average it.

        Collective over all replicas."""
        value, name = variable.component, variable.name
        token = push(self.everyone.cross_context)
        try:
            given = value if is_device(value) else HostValue(value)
            outer = Variable(given, trainable=False, name=name)
        finally:
            pop(token)
        value[...] = outer.component
        if self.delay:
            token = push(self.strategy.cross_context)
            try:
                given = value if is_device(value) else HostValue(value)
                self._starts.append(Variable(given, trainable=False, name=name))
            finally:
                pop(token)
        self._pairs.append((variable, outer))

    @collective
    def step(self) -> bool:
        """Count a step of this group, and end the round after the round's last step.

        Collective over all replicas at the end of a round and, with a ``delay``, again
        ``delay`` steps later. Other calls return without waiting for other groups. Call
        this method after each ``strategy.run`` that changes variables, even if that
        ``run`` failed in this group, because all groups must call `step` equally often.

        Returns
        -------
        bool
            True if this call averaged the groups. This group then continues from the
            outer parameters or, with a ``delay``, from the outer parameters plus the
            updates that it made during the delay.

        Raises
        ------
        ValueError
            If there are no variables to average.
        RuntimeError
            If called in a replica function.
        CollectiveError
            If ranks have different variables. This error and the errors of the sum are
            raised on every rank.
        """
        self._require_outside("step")
        counts = self._counts.component
        counts[_SINCE] += 1
        met = False
        if counts[_UNDER_WAY] >= 0:
            counts[_UNDER_WAY] += 1
            if counts[_UNDER_WAY] >= self.delay:
                self._merge()
                met = True
            elif self._sum is not None:
                self._sum.test()
        if counts[_SINCE] >= self.every:
            self._begin(self.delay)
            met = met or not self.delay
        return met

    @collective
    def end_round(self) -> None:
        """End the round now: all groups continue from the outer parameters.

        Collective over all replicas. Call this method at the end of a training or of a
        part of it; the next call of `step` begins a new round. Nothing is sent if a
        round has just ended.

        Raises
        ------
        ValueError
            If there are no variables to average.
        RuntimeError
            If called in a replica function.
        """
        self._require_outside("end_round")
        counts = self._counts.component
        if counts[_UNDER_WAY] >= 0:
            self._merge()
        if counts[_SINCE]:
            self._begin(delay=0)
        else:
            self._take_outer()

    def _require_outside(self, what: str) -> None:
        entry = current()
        if entry is not None and entry.replica_context is not None:
            raise RuntimeError(
                f"expected {what} outside of replica functions, found it in one; call "
                "it after strategy.run"
            )
        if not self._pairs:
            raise ValueError(
                f"expected trainable variables of floating types before {what}, found "
                "none; make them in the scope of SyncGroups.strategy"
            )
        if self._counts.component[_UNDER_WAY] >= 0 and not self.delay:
            # A program with a delay has saved this state while a sum was pending. Only
            # the parameters at the start of the sum tell what the groups must add.
            raise ValueError(
                f"expected a delay above 0 for {what}, because the restored checkpoint "
                "was saved while a sum over the groups was pending, found delay=0; "
                "restore it with the delay of the save, call end_round and save again"
            )

    @without_fp_warnings
    def _changes(self) -> list[Array]:
        """Return the outer gradients: outer parameters minus the group's parameters."""
        changes = [outer.component - own.component for own, outer in self._pairs]
        # The difference of two NumPy arrays of shape () is a scalar, not an array.
        return [array_module(change).asarray(change) for change in changes]

    def _begin(self, delay: int) -> None:
        """Begin the sum over the groups; without a delay, wait until it is complete."""
        collectives, changes = self.collectives, self._changes()
        names = ", ".join(variable.name for variable, _ in self._pairs)
        what = f"mean over groups of {names}"
        # If the schedule fails on one rank, `learning_rate` notifies the others.
        self._rate = learning_rate(self.outer, self.everyone)
        if not delay:
            self._use(collectives.batch_reduce(ReduceOp.MEAN, changes, what))
            self._take_outer()
        else:
            # A header may contain a notice that the job will end, but no rank waits for
            # the headers of a pending sum. Therefore one more element of the sum is a
            # flag: it is not 0 if a rank has a notice; see `_finish`.
            told = array_module(changes[0]).zeros(1, np.float32)
            told += bool(getattr(collectives.channel, "notice", ""))
            given = [*changes, told]
            self._sum = collectives.start_reduce(ReduceOp.MEAN, given, what, out=given)
            for (variable, _), start in zip(self._pairs, self._starts, strict=True):
                start.component[...] = variable.component
            self._counts.component[_UNDER_WAY] = 0
        self._counts.component[_SINCE] = 0

    def _take_outer(self) -> None:
        """Set this group's parameters to the outer parameters."""
        for variable, outer in self._pairs:
            variable.component[...] = outer.component

    def _use(self, gradients: list[Array]) -> None:
        """Update the outer parameters with their mean gradients over the groups."""
        # Variables that were made after the sum began have no gradient in the sum.
        outers = [outer for _, outer in self._pairs[: len(gradients)]]
        pairs = list(zip(gradients, outers, strict=True))
        # Run this update outside of any scope of the program. `run` also checks that
        # the replicas' copies are equal.
        token = push(None)
        try:
            self._build()
            self.everyone.run(lambda: self.outer.apply_combined(pairs, self._rate))
        finally:
            pop(token)

    def _build(self) -> None:
        """Make the outer optimizer's state, if it does not exist yet."""
        if self._pairs:
            self.outer.build([outer for _, outer in self._pairs])

    def _finish(self) -> None:
        """Wait for a pending sum, if there is one, and update the outer parameters."""
        if self._sum is not None:
            started, self._sum = self._sum, None
            try:
                *gradients, told = started.wait()
                if float(told[0]):
                    # The flag is equal on all replicas, so all replicas enter this
                    # barrier, whose headers contain the notice.
                    self.collectives.barrier("notice to all groups")
                self._use(gradients)
            except BaseException:
                # This sum is lost; the next round's sum includes this round's updates.
                self._counts.component[_UNDER_WAY] = -1
                raise

    def _merge(self) -> None:
        """Wait for the pending sum; add the outer change to this group's parameters."""
        self._finish()
        self._add_changes()
        self._counts.component[_UNDER_WAY] = -1

    @without_fp_warnings
    def _add_changes(self) -> None:
        for (variable, outer), start in zip(self._pairs, self._starts, strict=True):
            # The change overwrites `start`, whose values are not needed any more.
            change = np.subtract(outer.component, start.component, out=start.component)
            value = variable.component
            value += change

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the variables to save, after waiting for a pending sum.

        Collective over all replicas. The returned variables do not include the groups'
        parameters, which the program saves itself.

        Returns
        -------
        dict of str to Variable
            ``counts``, the outer parameters as ``value/<variable>``, the state of the
            outer optimizer under ``outer/``, and with a ``delay`` the parameters of
            each group when the last sum began, as ``start/<variable>``.

        Raises
        ------
        ValueError
            If two variables have the same name.
        """
        self._finish()
        self._build()
        named = [(f"value/{v.name}", outer) for v, outer in self._pairs]
        named += [(f"start/{start.name}", start) for start in self._starts]
        paths = file_names([name for name, _ in named])
        found = {"counts": self._counts}
        found |= dict(zip(paths, [variable for _, variable in named], strict=True))
        own = self.outer.checkpoint_variables()
        return found | {f"outer/{path}": variable for path, variable in own.items()}

    @collective
    def close(self) -> None:
        """Close the strategy of the group and the strategy of all replicas.

        Collective over all replicas. A second call does nothing."""
        self.strategy.close()
        self.everyone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        # After an error on this rank, the other ranks may never call `close`.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return (
            f"SyncGroups(group {self.group_id} of {self.num_groups}, "
            f"{self.strategy.num_replicas_in_sync} of "
            f"{self.everyone.num_replicas_in_sync} replicas, every {self.every} steps)"
        )


def _plain(name: str, array: Array) -> Variable:
    """Make a variable that belongs to no strategy, even inside a strategy's scope."""
    token = push(None)
    try:
        return Variable(HostValue(array), trainable=False, name=name)
    finally:
        pop(token)


def _check(
    by: str | None, size: int | None, every: int, delay: int, num_replicas: int
) -> None:
    """Raise ValueError for invalid arguments of `SyncGroups`."""
    if by not in (None, "worker"):
        raise ValueError(
            f"expected by='worker', found {by!r}; leave it out, or give a size"
        )
    if by is not None and size is not None:
        raise ValueError(
            f"expected by or size, found by={by!r} and size={size!r}; leave one out"
        )
    counts: dict[str, tuple[Any, int]]
    counts = {"every": (every, 1), "delay": (delay, 0), "size": (size, 1)}
    for name, (value, least) in counts.items():
        if value is None and name == "size":
            continue
        if not isinstance(value, numbers.Integral) or value < least:
            raise ValueError(
                f"expected an integer >= {least} as {name}, found {value!r}; change it"
            )
    if delay > every:
        raise ValueError(
            f"expected delay <= every, the steps of a round, found {delay} > {every}; "
            "make it smaller"
        )
    if size is not None and num_replicas % size:
        raise ValueError(
            f"expected a size that divides the number of replicas, {num_replicas}, "
            f"found {size}; launch another number of ranks, or choose another size"
        )


def _describe(outer: Optimizer) -> str:
    """Return an optimizer's name and options as text that is equal on all ranks."""
    kind, options = outer.rule()
    options = {"learning_rate": outer.learning_rate, **options}
    words = [
        f"{name.strip('_')}={value!r}"
        for name, value in options.items()
        if isinstance(value, (bool, int, float, str))
    ]
    return f"{kind.__name__}({', '.join(words)})"


class GroupStrategy(MultiWorkerMirroredStrategy):
    """The strategy of one group: synchronous training on the replicas of the group.

    Collective over ``comm``. Making a trainable variable of floating type in the scope
    is collective over all replicas of all groups, because the function ``take``
    broadcasts replica 0's value to all groups.
    """

    def __init__(
        self, take: Callable[[MirroredVariable], None], **options: Any
    ) -> None:
        self._take = take
        super().__init__(**options)

    def variable_made(self, variable: MirroredVariable) -> None:
        """Register a new variable; collective over all groups if they average it."""
        super().variable_made(variable)
        kind = variable.dtype
        if variable.trainable and (kind.kind in "fc" or is_half(kind)):
            self._take(variable)


def _make_groups(
    whole: MultiWorkerMirroredStrategy,
    size: int | None,
    take: Callable[[MirroredVariable], None],
    **options: Any,
) -> GroupStrategy:
    """Return the strategy of this replica's group, and record the groups in ``split``.

    Collective over the replicas of ``whole``. By default each worker is a group; with
    ``size``, each ``size`` consecutive replicas form a group. ``whole`` and the group's
    strategy get the same attribute ``split``, which records the group of each replica.
    """
    topology = whole.topology
    group = topology.worker_id if size is None else topology.replica_id // size
    world = Topology.world()
    found = whole.collectives.all_gather_object((group, world.rank), "forming groups")
    comm = subset([rank for other, rank in found if other == group])
    try:
        part = GroupStrategy(take, comm=comm, settings=whole.settings, **options)
    finally:
        comm.Free()
    whole.split = part.split = Split(whole, part, [group for group, _ in found])
    return part
