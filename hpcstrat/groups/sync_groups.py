"""Groups of replicas: in sync at each step inside, averaged after many steps."""

from __future__ import annotations

import numbers
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
# Indices of the counts: steps since the last sum began, and since the pending sum began
# (-1: none is pending).
_SINCE, _UNDER_WAY = 0, 1


class SyncGroups:
    """Replicas in groups that are in sync inside, and averaged after every few steps.

    Collective over ``comm``, as are its methods, unless they say otherwise.

    Each group trains by itself with ``strategy``, whose sums stay in the group. A round
    ends every ``every`` steps. Its outer gradient is the outer parameters, which are
    equal in all groups, minus the mean of the groups' parameters over all replicas. The
    outer optimizer changes the outer parameters by it, and each group continues from
    them. ``SGD(1.0)`` takes the average of the groups' parameters: local SGD (Stich,
    Local SGD Converges Fast and Communicates Little, ICLR 2019,
    doi:10.48550/arXiv.1805.09767). The default is that of DiLoCo (Douillard et al.,
    DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
    doi:10.48550/arXiv.2311.08105).

    The trainable variables of floating types made in the scope of ``strategy`` are
    averaged; all groups begin with replica 0's values. So making one is collective over
    all replicas, and this object keeps them. All other state, such as that of inner
    optimizers, belongs to a group.

    Parameters
    ----------
    by : {"worker"}, optional
        Each worker is a group; the default without ``size``.
    every : int
        Number of steps of a round.
    size : int, optional
        Number of replicas of a group, a divisor of the number of all.
    outer : Optimizer, optional
        Changes the outer parameters; default: ``SGD(0.7, momentum=0.9,
        nesterov=True)``. Its ``aggregation`` is not used.
    delay : int
        Number of steps after the end of a round after which its sum is awaited, from 0
        to ``every``. Messages travel meanwhile, as for `start_all_reduce`. The group
        keeps what it has learned by then, and adds the change of the outer parameters.
        Needs another copy of the parameters.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; default: all of the job.
    replicas_per_worker : int, optional
        As for `MultiWorkerMirroredStrategy`.
    communication_options : CommunicationOptions, optional
        For sums between groups, such as their type in messages.
    on_error : str
        ``"abort"`` or ``"raise"``, for both strategies; see `Strategy`. An error in
        ``run`` is raised in its group only.
    progress_thread : bool
        Whether a thread also continues sums between groups; see
        `MultiWorkerMirroredStrategy`.
    settings : Settings, optional
        How the strategies watch over their ranks.

    Attributes
    ----------
    strategy : Strategy
        The strategy of this replica's group, for ``scope`` and ``run``.
    everyone : MultiWorkerMirroredStrategy
        The strategy of all replicas, for data sets and random numbers of all.
    outer : Optimizer
        The outer optimizer; its ``iterations`` count the rounds.

    Raises
    ------
    ValueError
        For arguments out of range.
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
        # The group's parameters when the pending sum began.
        self._starts: list[Variable] = []
        self._sum: PendingCall | None = None
        # Learning rate of the outer optimizer in this round.
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
        """Average a new variable from now on; give it replica 0's value in all groups.

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
        """Count a step of the group; the last one of a round ends it.

        Collective over all replicas at the end of a round; other calls do not wait for
        other groups. Call it after each ``strategy.run`` that changes variables, also
        if it failed in this group: groups meet by the number of these calls.

        Returns
        -------
        bool
            Whether the groups have met at this step: they continue from the outer
            parameters, or with a ``delay`` from these and their own changes.

        Raises
        ------
        ValueError
            Without variables to average.
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
        """End the round now: all groups get the outer parameters.

        Collective over all replicas. For the end of a training, or of a part of it; the
        next round begins. Nothing is sent if a round has just ended.

        Raises
        ------
        ValueError
            Without variables to average.
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
        # Arrays again, as NumPy turns those without dimensions into numbers.
        return [array_module(change).asarray(change) for change in changes]

    def _begin(self, delay: int) -> None:
        """Begin the sum over the groups; without a delay also end it."""
        collectives, changes = self.collectives, self._changes()
        names = ", ".join(variable.name for variable, _ in self._pairs)
        what = f"mean over groups of {names}"
        # A function of the program may fail here on one rank: the header reports it.
        self._rate = self.outer._rate(collectives)
        if not delay:
            self._use(collectives.batch_reduce(ReduceOp.MEAN, changes, what))
            self._take_outer()
        else:
            # No rank awaits this header, so the sum carries a notice of the job's end:
            # see `_finish`.
            told = array_module(changes[0]).zeros(1, np.float32)
            told += bool(getattr(collectives.channel, "notice", ""))
            given = [*changes, told]
            self._sum = collectives.start_reduce(ReduceOp.MEAN, given, what, out=given)
            for (variable, _), start in zip(self._pairs, self._starts, strict=True):
                start.component[...] = variable.component
            self._counts.component[_UNDER_WAY] = 0
        self._counts.component[_SINCE] = 0

    def _take_outer(self) -> None:
        """Continue from the outer parameters."""
        for variable, outer in self._pairs:
            variable.component[...] = outer.component

    def _use(self, gradients: list[Array]) -> None:
        """Change the outer parameters by the mean over the groups."""
        # Variables that were made after the sum began have no part in it.
        outers = [outer for _, outer in self._pairs[: len(gradients)]]
        pairs = list(zip(gradients, outers, strict=True))
        # Outside of the program's scope; `run` compares copies.
        token = push(None)
        try:
            self._build()
            self.everyone.run(lambda: self.outer.apply_combined(pairs, self._rate))
        finally:
            pop(token)

    def _build(self) -> None:
        """Make the outer optimizer's state, if it is not made."""
        if self._pairs:
            self.outer.build([outer for _, outer in self._pairs])

    def _finish(self) -> None:
        """Wait for the pending sum, if there is one."""
        if self._sum is not None:
            started, self._sum = self._sum, None
            try:
                *gradients, told = started.wait()
                if float(told[0]):
                    # All replicas know that one has a notice, and call together for it.
                    self.collectives.barrier("notice to all groups")
                self._use(gradients)
            except BaseException:
                # The next round includes the changes of this one.
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
            # Into the memory of `start`, which is not needed any more.
            change = np.subtract(outer.component, start.component, out=start.component)
            value = variable.component
            value += change

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the state to save, after waiting for a pending sum.

        Collective over all replicas. The program saves the groups' parameters itself.

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
        """Close both strategies, after a pending sum.

        Collective over all replicas. A second call does nothing.
        """
        self.strategy.close()
        self.everyone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        # Closing is collective, and after an error the others may not come.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return (
            f"SyncGroups(group {self.group_id} of {self.num_groups}, "
            f"{self.strategy.num_replicas_in_sync} of "
            f"{self.everyone.num_replicas_in_sync} replicas, every {self.every} steps)"
        )


def _plain(name: str, array: Array) -> Variable:
    """Make a variable that belongs to no strategy, in any scope."""
    token = push(None)
    try:
        return Variable(HostValue(array), trainable=False, name=name)
    finally:
        pop(token)


def _check(
    by: str | None, size: int | None, every: int, delay: int, num_replicas: int
) -> None:
    """Refuse arguments that define no groups."""
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
    """Describe an optimizer in words that are the same on all ranks."""
    kind, options = outer.rule()
    options = {"learning_rate": outer.learning_rate, **options}
    words = [
        f"{name.strip('_')}={value!r}"
        for name, value in options.items()
        if isinstance(value, (bool, int, float, str))
    ]
    return f"{kind.__name__}({', '.join(words)})"
