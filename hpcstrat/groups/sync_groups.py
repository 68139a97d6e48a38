"""Groups of replicas: in sync inside at each step, averaged every so many steps."""

from __future__ import annotations

import numbers
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.pending_calls import PendingCall
from hpcstrat.engine.context import current, pop, push
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.reduction.replica_collectives import Collectives
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.typing import Array
from hpcstrat.groups.group_strategy import make_groups
from hpcstrat.optimizers import SGD, Optimizer
from hpcstrat.optimizers.slots import file_names
from hpcstrat.strategies import MultiWorkerMirroredStrategy, Strategy
from hpcstrat.variables import HostValue, MirroredVariable, Variable

if TYPE_CHECKING:
    from mpi4py import MPI

_CREATION = "creation of SyncGroups"
# Indices in the counts: steps since the last sum began, and steps since the pending sum
# began (-1: none is pending).
_SINCE, _UNDER_WAY = 0, 1


class SyncGroups:
    """Replicas in sync inside of groups at each step, and between them now and then.

    Collective over ``comm``, as are its methods, but for those that say otherwise.

    Each group trains by itself, with ``strategy``: sums of gradients, and whatever else
    its steps exchange, stay in the group. Every ``every`` steps a round ends. Its outer
    gradient is the outer parameters, which all groups have, minus the mean over all
    replicas of what each group has made of them; the outer optimizer changes the outer
    parameters by it, and each group goes on from these. With ``SGD(1.0)`` this is the
    average of the groups' parameters: local SGD (Stich, Local SGD Converges Fast and
    Communicates Little, ICLR 2019, doi:10.48550/arXiv.1805.09767). The default is
    DiLoCo's (Douillard et al., DiLoCo: Distributed Low-Communication Training of
    Language Models, 2023, doi:10.48550/arXiv.2311.08105). In the mean a group counts by
    the number of its replicas.

    What is averaged are the trainable variables of floating types made in the scope of
    ``strategy``, which all groups have from replica 0. Making one is therefore
    collective over all replicas, and they are kept as long as this object is. All else,
    such as the state of inner optimizers, stays a group's own.

    Parameters
    ----------
    by : {"worker"}, optional
        Each worker is a group; the default without ``size``.
    every : int
        Number of steps of a round.
    size : int, optional
        Number of replicas of a group: runs of so many, which must fit.
    outer : Optimizer, optional
        Changes the outer parameters; default: ``SGD(0.7, momentum=0.9,
        nesterov=True)``. Its ``aggregation`` does not count.
    delay : int
        How many steps after the end of a round its sum is awaited, from 0, at once, to
        ``every``. Messages travel meanwhile, as those of `start_all_reduce` do, and
        each `step` takes them further. What a group has done by then is kept: the
        change of the outer parameters since the end of the round is added to it. Costs
        a further copy of the parameters.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; default: all of the job.
    replicas_per_worker : int, optional
        As for `MultiWorkerMirroredStrategy`.
    communication_options : CommunicationOptions, optional
        Of the sums between groups, such as their type on the wire.
    on_error : str
        ``"abort"`` or ``"raise"``, of both strategies; see `Strategy`. An error in
        ``run`` is then raised in its group only.
    progress_thread : bool
        Take sums between groups further in a thread, too, see
        `MultiWorkerMirroredStrategy`.
    settings : Settings, optional
        How the strategies watch over their ranks.

    Attributes
    ----------
    strategy : Strategy
        Of this replica's group: for ``scope`` and ``run``.
    everyone : MultiWorkerMirroredStrategy
        Of all replicas: for data sets, whose batches are then divided between all, and
        random numbers, which are then different on all.
    outer : Optimizer
        As given; its ``iterations`` count the rounds.

    Raises
    ------
    ValueError
        For arguments out of range, or a ``size`` that does not divide the number of
        replicas.
    CollectiveError
        If ranks give different arguments. On every rank.
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
        # Parameters of the groups when the sum that is under way began.
        self._starts: list[Variable] = []
        self._sum: PendingCall | None = None
        # Learning rate of the outer optimizer for the sum of this round.
        self._rate = 0.0
        try:
            self._agree(by, size, every, delay, outer)
            self.strategy: Strategy = make_groups(
                self.everyone,
                size,
                self._take,
                replicas_per_worker=replicas_per_worker,
                on_error=on_error,
            )
        except Exception:
            # Raised on all ranks, so that all close.
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
        """Check on all ranks that the arguments are valid and equal."""
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
        """The calls between all replicas; for the library's own modules."""
        found: Collectives = self.everyone.collectives
        return found

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        assert self.everyone.split is not None
        return self.everyone.split.num_groups

    @property
    def group_id(self) -> int:
        """This replica's group, from 0."""
        assert self.everyone.split is not None
        return self.everyone.split.own

    def _take(self, variable: MirroredVariable) -> None:
        """Take a new variable among those that are averaged, with one value for all.

        Collective over all replicas.
        """
        value, name = variable.component, variable.name
        token = push(self.everyone.cross_entry)
        try:
            given = value if is_device(value) else HostValue(value)
            outer = Variable(given, trainable=False, name=name)
        finally:
            pop(token)
        value[...] = outer.component
        if self.delay:
            token = push(self.strategy.cross_entry)
            try:
                given = value if is_device(value) else HostValue(value)
                self._starts.append(Variable(given, trainable=False, name=name))
            finally:
                pop(token)
        self._pairs.append((variable, outer))

    @collective
    def step(self) -> bool:
        """Count a step of the group, and end the round when it is the last one.

        Collective over all replicas where a round ends; between, it does not wait for
        other groups. Call it after each ``strategy.run`` that is to change the
        variables, also where that has failed in this group: groups come together by
        the number of these calls.

        Returns
        -------
        bool
            Whether the groups have come together at this step: they go on from the
            outer parameters, with a ``delay`` from what they have added to them
            meanwhile.

        Raises
        ------
        ValueError
            If there is no variable to be averaged.
        RuntimeError
            In a replica function.
        CollectiveError
            If ranks have other variables. On every rank, as are errors of the sum.
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
        """End the round now, so that all groups have the outer parameters.

        Collective over all replicas. For the end of a training, or of a part of it: the
        next round begins. Where a round has just ended, nothing is sent.

        Raises
        ------
        ValueError
            If there is no variable to be averaged.
        RuntimeError
            In a replica function.
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

    @without_fp_warnings
    def _changes(self) -> list[Array]:
        """Return this group's changes since the last round, with opposite signs."""
        changes = [outer.component - own.component for own, outer in self._pairs]
        # NumPy makes of arrays without dimensions a number, which cannot be written.
        return [array_module(change).asarray(change) for change in changes]

    def _begin(self, delay: int) -> None:
        """Begin the sum over the groups, and end it where it is not delayed."""
        collectives, changes = self.collectives, self._changes()
        names = ", ".join(variable.name for variable, _ in self._pairs)
        what = f"mean over groups of {names}"
        # A program's own function, which may fail on one rank: the header then tells.
        self._rate = self.outer._rate(collectives)
        if not delay:
            self._use(collectives.batch_reduce(ReduceOp.MEAN, changes, what))
            self._take_outer()
        else:
            # A header that is not awaited tells no rank of the job's end, so the sum
            # carries it: see `_finish`.
            told = array_module(changes[0]).zeros(1, np.float32)
            told += bool(getattr(collectives.channel, "notice", ""))
            given = [*changes, told]
            self._sum = collectives.start_reduce(ReduceOp.MEAN, given, what, out=given)
            for (variable, _), start in zip(self._pairs, self._starts, strict=True):
                start.component[...] = variable.component
            self._counts.component[_UNDER_WAY] = 0
        self._counts.component[_SINCE] = 0

    def _take_outer(self) -> None:
        """Let the group go on from the outer parameters."""
        for variable, outer in self._pairs:
            variable.component[...] = outer.component

    def _use(self, gradients: list[Array]) -> None:
        """Change the outer parameters by the mean over the groups."""
        # A variable that was made since the sum began has no part in it.
        outers = [outer for _, outer in self._pairs[: len(gradients)]]
        pairs = list(zip(gradients, outers, strict=True))
        # This leaves the program's scope, and goes through `run`, which compares
        # copies.
        token = push(None)
        try:
            self._build()
            self.everyone.run(lambda: self.outer.apply_combined(pairs, self._rate))
        finally:
            pop(token)

    def _build(self) -> None:
        """Make the outer optimizer's state, where it has not been made."""
        if self._pairs:
            self.outer.build([outer for _, outer in self._pairs])

    def _finish(self) -> None:
        """Await the sum that is under way, if there is one."""
        if self._sum is not None:
            started, self._sum = self._sum, None
            try:
                *gradients, told = started.wait()
                if float(told[0]):
                    # All replicas now know that one has a notice, and take part in the
                    # call that tells it.
                    self.collectives.barrier("notice to all groups")
                self._use(gradients)
            except BaseException:
                # The next round then includes all changes since the last one.
                self._counts.component[_UNDER_WAY] = -1
                raise

    def _merge(self) -> None:
        """Add the changes of the outer parameters to the group's parameters."""
        self._finish()
        self._add_changes()
        self._counts.component[_UNDER_WAY] = -1

    @without_fp_warnings
    def _add_changes(self) -> None:
        for (variable, outer), start in zip(self._pairs, self._starts, strict=True):
            # Its memory is free from here on.
            change = np.subtract(outer.component, start.component, out=start.component)
            value = variable.component
            value += change

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the state to save; a sum that is under way is awaited first.

        Collective over all replicas.

        Returns
        -------
        dict of str to Variable
            ``counts``, the outer parameters as ``value/<variable>``, the state of the
            outer optimizer under ``outer/``, and with a ``delay`` the parameters of
            each group when the last sum began, as ``start/<variable>``. The parameters
            of the groups are for the program to save, like all of its variables.

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
        """Close both strategies, after a sum that is under way.

        Collective over all replicas. A second call does nothing.
        """
        self.strategy.close()
        self.everyone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Closing is collective: after an error the others may be anywhere.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return (
            f"SyncGroups(group {self.group_id} of {self.num_groups}, "
            f"{self.strategy.num_replicas_in_sync} of "
            f"{self.everyone.num_replicas_in_sync} replicas, every {self.every} steps)"
        )


def _plain(name: str, array: Array) -> Variable:
    """Make a variable that belongs to no strategy, whatever scope this is in."""
    token = push(None)
    try:
        return Variable(HostValue(array), trainable=False, name=name)
    finally:
        pop(token)


def _check(
    by: str | None, size: int | None, every: int, delay: int, num_replicas: int
) -> None:
    """Refuse arguments that do not say how groups are formed and averaged."""
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
    """Say which optimizer it is, in words that are the same on all ranks."""
    kind, options = outer.rule()
    options = {"learning_rate": outer.learning_rate, **options}
    words = [
        f"{name.strip('_')}={value!r}"
        for name, value in options.items()
        if isinstance(value, (bool, int, float, str))
    ]
    return f"{kind.__name__}({', '.join(words)})"
