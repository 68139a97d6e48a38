"""The base of all optimizers: gradients are summed, accumulated, clipped and
applied.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.context import AnnouncesInitErrors, current
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.observe.timeline import traced
from hpcstrat.engine.options import ReduceOp, VariableAggregation
from hpcstrat.engine.reduction.replica_collectives import Collectives
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.optimizers.accumulation import Accumulation
from hpcstrat.optimizers.gradients import (
    Filling,
    Gradient,
    Pairs,
    checked,
    clip_to_norm,
    require_gradients,
    require_names,
    scale,
)
from hpcstrat.optimizers.non_finite import NonFinite
from hpcstrat.optimizers.parameters import LearningRate, Step, require_options
from hpcstrat.optimizers.routine import Routine
from hpcstrat.optimizers.rules import has_two_stages, is_of_elements
from hpcstrat.optimizers.sharding import Parts, shards
from hpcstrat.optimizers.slots import Slots, spellings, unescaped
from hpcstrat.strategies import get_strategy
from hpcstrat.strategies.update_backends import UpdateBackend
from hpcstrat.variables import HostValue, Variable, class_for_state

# Numbers the handles of optimizers: the newest has the largest number.
_handles = itertools.count()

# Attributes of one process, or of its variables, which `Optimizer.rule` leaves out.
_STATEFUL = (
    "_slots",
    "_current",
    "_accumulation",
    "_buffers",
    "_labels",
    "_filling",
    "_routine",
    "_non_finite",
    "iterations",
    "learning_rate",
)


class Optimizer(AnnouncesInitErrors, ABC):
    """Sums gradients over replicas, and updates variables in place.

    A subclass has an update rule, `update`, and names the state that it needs.
    Variables on a GPU, with gradients there, are updated there one by one, without
    waiting for the GPU.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function of the number of steps done.
    aggregation : VariableAggregation or str
        How gradients are combined: ``SUM`` for a loss divided by the global batch size,
        ``MEAN`` for one that each replica divides by its own.
    accumulate_steps : int
        How many calls of `apply_gradients` make one step. All but the last add to this
        replica's sums, without communication once these exist; the last combines them
        and updates. ``SUM`` takes the sum over the calls, ``MEAN`` their mean.
    clip_global_norm : float, optional
        Limit of the norm over all combined gradients together; longer ones are scaled.
    missing_gradients : {"error", "zeros"}
        What to do about gradients that are None on some replicas only: raise a
        CollectiveError that names the variable, or take zeros, and log it once. Zeros
        cost a small message in each step.
    sharded : bool
        Whether each rank has the state of a part of the elements only, updates these,
        and gets the others from their ranks (ZeRO stage 1). State then takes 1/N of the
        memory; results and checkpoints are the same. For rules of elements and LAMB,
        and mirrored variables in host memory.

    Attributes
    ----------
    iterations : Variable
        Number of steps done, int64.
    state : mapping of str to float
        The first value of each kind of state that a variable has, by its name in
        checkpoints; a subclass sets it.
    elementwise : bool
        Whether `update` treats each element by itself, so that several small variables
        may be updated as one array. It holds for the class that sets it, and not for a
        subclass with another `update`.

    Raises
    ------
    ValueError
        For options out of range.
    """

    state: Mapping[str, float] = {}
    elementwise: bool = False

    _two_stages: bool = False
    """Whether `update` is a ``_first_stage`` of single elements, which overwrites the
    gradient, and then a ``_second_stage`` of whole variables."""

    _by_rows: bool = False
    """Whether a gradient of zero leaves an element and its state alone."""

    def __init__(
        self,
        learning_rate: LearningRate,
        *,
        aggregation: VariableAggregation | str = VariableAggregation.SUM,
        accumulate_steps: int = 1,
        clip_global_norm: float | None = None,
        missing_gradients: Literal["error", "zeros"] = "error",
        sharded: bool = False,
    ) -> None:
        kind = type(self)
        if sharded and not (is_of_elements(kind) or has_two_stages(kind)):
            raise ValueError(
                "expected a rule that updates each element by itself to be sharded, "
                f"found {kind.__name__}; leave out sharded=True"
            )
        self._sharded = sharded
        require_options(accumulate_steps, clip_global_norm, missing_gradients)
        self.learning_rate = learning_rate
        self._op = ReduceOp.from_variable_aggregation(aggregation)
        self.clip_global_norm = clip_global_norm
        self._fills = missing_gradients == "zeros"
        self.iterations = class_for_state(on_read=False)(
            HostValue(np.zeros((), np.int64)), trainable=False, name="iterations"
        )
        self._slots = Slots()
        # Variables of the latest step, by id.
        self._current: frozenset[int] = frozenset()
        self._accumulation = Accumulation(
            self._slots, int(accumulate_steps), self._op is ReduceOp.MEAN
        )
        self._buffers: dict[tuple[Any, ...], Array] = {}
        self._labels: dict[tuple[Any, ...], str] = {}
        self._filling = Filling()
        self._routine: Routine | None = None
        self._non_finite = NonFinite()

    @property
    def skipped_steps(self) -> int:
        """Steps left out because of NaN or infinity; not in checkpoints."""
        return self._non_finite.skipped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_routine": None}

    @abstractmethod
    def update(
        self, step: Step, gradient: Array, value: Array, *slots: Any, **named: Any
    ) -> None:
        """Update a value and its state in place: the rule, which a subclass defines.

        Not collective: all replicas get the same arguments. `apply_gradients` calls it
        for each variable; for ``elementwise`` rules several small variables may come as
        one flat array.

        Parameters
        ----------
        step : Step
            Learning rate and number of the step; name of the variable.
        gradient : ndarray
            Combined, scaled and clipped; the rule may overwrite it.
        value : ndarray of the same shape and dtype
            The variable's array.
        *slots : ndarray of the same shape and dtype
            Its state, in the order of ``state``. A rule may name each of them instead.
        **named : object
            Nothing; type checkers then accept rules with other parameters.
        """

    def _is_marked(self, name: str) -> bool:
        """Whether the rule updates this variable differently from the others."""
        return False

    @property
    def key(self) -> int:
        """The number of this optimizer and its copies on other ranks.

        For the library's own modules.
        """
        iterations: Any = self.iterations
        return int(iterations.number)

    def _handle(self) -> tuple[str, int, Any]:
        """Return a handle from which another rank makes a copy; state is not copied."""
        if self._servers is None:
            raise ValueError(
                f"expected an optimizer that was made in the strategy's scope, found "
                f"{type(self).__name__} of elsewhere in a scheduled function; make it "
                "there, or in the function"
            )
        parts = next(_handles), self.rule(), self.learning_rate, self.iterations
        return "optimizer", self.key, parts

    def rule(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return class and options, without state, from which `from_rule` makes a copy.

        For the library's own modules.
        """
        own = vars(self).items()
        return type(self), {k: v for k, v in own if k not in _STATEFUL}

    @staticmethod
    def from_rule(
        rule: tuple[type[Optimizer], dict[str, Any]],
        learning_rate: LearningRate = 0.0,
        iterations: Any = None,
    ) -> Optimizer:
        """Return a copy of an optimizer, without state; for the library's own
        modules.
        """
        kind, options = rule
        copied: Optimizer = object.__new__(kind)
        copied.__dict__.update(options, _buffers={})
        copied.learning_rate, copied.iterations = learning_rate, iterations
        return copied

    def require_alone(
        self,
        where: str = "with parameter servers",
        advice: str = "sum gradients in the function",
    ) -> None:
        """Raise ValueError if gradients are accumulated, which needs state on this
        rank.

        For the library's own modules.
        """
        accumulation = vars(self).get("_accumulation")
        if accumulation is not None and accumulation.steps > 1:
            raise ValueError(
                f"expected accumulate_steps=1 {where}, found {accumulation.steps}; "
                f"{advice}"
            )

    @property
    def collectives(self) -> Collectives:
        """The calls of the current strategy; for the library's own modules."""
        found: Collectives = get_strategy().collectives
        return found

    @traced("apply_gradients", "optimizer")
    @collective
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> bool:
        """Combine the gradients of all replicas and update the variables in place.

        Collective over the strategy's replicas: call it inside ``strategy.run``. With
        ``accumulate_steps`` above 1, only each last call communicates.

        After an error a replica starts its accumulation anew. With ``on_error="raise"``
        all replicas return to the sums that they had before this ``run``, also if
        another part of it fails.

        Parameters
        ----------
        grads_and_vars : iterable of (array_like or IndexedSlices, Variable)
            This replica's gradients, of the variables' shapes, not modified; the same
            variables in the same order on every replica. Variables whose gradient is
            None on all replicas are left out.

        Returns
        -------
        bool
            Whether the variables were updated; False while gradients are accumulated,
            and for a step that the setting ``non_finite="skip"`` leaves out.

        Raises
        ------
        ValueError
            If all gradients are None, a name comes twice, or a gradient does not fit.
        RuntimeError
            In cross-replica context.
        CollectiveError
            If replicas have gradients for different variables. On every replica.
        NonFiniteError
            If a combined gradient is NaN or infinite, with the setting
            ``non_finite="raise"``; nothing has changed. On every replica.
        """
        return get_strategy().apply_gradients(self, grads_and_vars)

    def apply_here(
        self, strategy: Any, grads_and_vars: Iterable[tuple[Any, Variable]]
    ) -> bool:
        """Make a step on the calling ranks, by the strategy's update backend.

        Collective over the strategy's replicas. For the library's own modules.
        """
        entry = current()
        if entry is not None and not entry.replica_context:
            raise RuntimeError(
                "expected apply_gradients in replica context, found cross-replica "
                "context; call it inside the function that strategy.run runs"
            )
        if strategy.logical and self._accumulation.steps > 1:
            raise ValueError(
                "expected accumulate_steps=1 with logical replicas, found "
                f"{self._accumulation.steps}; ask for more logical replicas, which do "
                "the same"
            )
        if strategy.meetings is not None:
            return self._apply_once(strategy, grads_and_vars)
        collectives = strategy.collectives
        try:
            given = list(grads_and_vars)
            # A step like the last one needs no checks.
            routine = self._routine
            if routine is not None and not routine.fits(strategy, given):
                routine = None
            added = [] if routine is not None else checked(given)
        except Exception as error:
            self._accumulation.undo(error, strategy)
            collectives.fail("apply_gradients", error)
            raise
        try:
            if routine is not None:
                return self._combine_and_update(collectives, [given], routine)
            # Checkpoints save the state of these variables, not of deleted ones.
            self._current = frozenset(id(variable) for _, variable in added)
            pairs = self._accumulation.add(added, strategy)
            if pairs is None:
                return False
            updated = self._apply(collectives, pairs)
        except Exception as error:
            self._accumulation.undo(error, strategy)
            raise
        self._accumulation.restart()
        return updated

    def _apply_once(self, strategy: Any, grads_and_vars: Iterable[Any]) -> bool:
        """Make one step for all logical replicas of this process."""
        pairs: Pairs = checked(grads_and_vars)
        if self._fills:
            pairs = self._filling.filled(strategy.collectives, pairs)
        require_gradients(pairs)
        present = [(g, v) for g, v in pairs if g is not None]
        label = self._label(pairs)

        def update(given: list[Pairs]) -> bool:
            routine = self._routine
            if routine is None or not routine.fits(strategy, list(given[0])):
                routine = self._planned(given[0], label)
            updated = self._combine_and_update(strategy.collectives, given, routine)
            dense = not any(isinstance(g, IndexedSlices) for g, _ in given[0])
            self._routine = routine if dense and not self._fills else None
            if self._routine is not None and updated:
                routine.repeat()
            return updated

        def act(given: list[Pairs]) -> list[bool]:
            # As a collective call, so that all ranks learn of an error on one.
            made = strategy.collectives.call("apply_gradients", update, given)
            return [made] * len(given)

        updated: bool = strategy.meetings.meet(label, act, present)
        return updated

    # Not marked as collective: the program has made its calls before.
    def apply_combined(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], rate: float | None = None
    ) -> bool:
        """Update variables in place with gradients that are combined already.

        Logically collective over the strategy's replicas, inside ``strategy.run``. It
        communicates only to make state that `build` has not made, and accumulates
        nothing.

        Parameters
        ----------
        grads_and_vars : iterable of (array_like or IndexedSlices, Variable)
            Gradients of the variables' shapes, equal bit for bit on every replica;
            arrays of the variables' types are overwritten.
        rate : float, optional
            The learning rate of this step; default: the optimizer's.

        Returns
        -------
        bool
            Whether the variables were updated, as `apply_gradients` returns it.

        Raises
        ------
        ValueError
            If there is no gradient, a name comes twice, or a gradient does not fit.
        NonFiniteError
            As in `apply_gradients`.
        NotImplementedError
            If ranks do not have the whole sums, as in central storage.
        """
        strategy = get_strategy()
        if not strategy.update_backend().sums_whole:
            raise NotImplementedError(
                f"expected apply_gradients under {strategy!r}, whose ranks do not have "
                "the whole sums of gradients, found apply_combined; pass each "
                "replica's own gradients to apply_gradients"
            )
        pairs = checked(grads_and_vars)
        require_gradients(pairs)
        present = [(g, v) for g, v in pairs if g is not None]
        label = self._label(pairs)

        def update() -> bool:
            routine = self._planned(present, label)
            now = self._rate(strategy.collectives) if rate is None else rate
            gradients = [gradient for gradient, _ in present]
            return routine.update(self, gradients, [present], now)

        if strategy.meetings is None:
            return update()
        # Once for all logical replicas of this process.
        updated: bool = strategy.meetings.meet(
            f"apply_combined: {label}", lambda given: [update()] * len(given), None
        )
        return updated

    def _apply(self, collectives: Collectives, pairs: Pairs) -> bool:
        sums = self._accumulation
        fills = self._fills or sums.inherits
        try:
            if not fills:
                require_gradients(pairs)
        except Exception as error:
            collectives.fail("apply_gradients", error)
            raise
        if fills:
            shares = (sums.sums(), sums.unclaimed()) if sums.inherits else ()
            pairs = self._filling.filled(collectives, pairs, *shares)
            require_gradients(pairs)
        present = [(g, v) for g, v in pairs if g is not None]
        routine = self._planned(present, self._label(pairs))
        updated = self._combine_and_update(collectives, [present], routine)
        # The next step of this kind needs no checks and no label.
        dense = not any(g is None or isinstance(g, IndexedSlices) for g, _ in pairs)
        plain = dense and not self._fills and sums.steps == 1
        self._routine = routine if plain else None
        if plain and updated:
            routine.repeat()
        return updated

    def _planned(self, pairs: Pairs, label: str) -> Routine:
        """Return the routine for gradients of these kinds."""
        strategy = get_strategy()
        kind = Parts if shards(self, strategy) else strategy.update_backend()
        by_elements = is_of_elements(type(self))
        backend = kind(strategy, pairs, label, self._op, by_elements=by_elements)
        return Routine(strategy, pairs, backend)

    def _combine_and_update(
        self, collectives: Collectives, given: list[Pairs], routine: Routine
    ) -> bool:
        """Make a step by the gradients of each replica of this process."""
        rate = self._rate(collectives)
        parts: list[Any] = [[gradient for gradient, _ in pairs] for pairs in given]
        reduced = routine.backend.reduce(parts, routine.sums)
        return routine.update(self, reduced, given, rate)

    def _rate(self, collectives: Collectives) -> float:
        rate = self.learning_rate
        if callable(rate):
            try:
                # The program's function may fail on this rank only.
                rate = rate(int(self.iterations.component))
            except Exception as error:
                collectives.fail("apply_gradients", error)
                raise
        return rate

    def _first_stage(self, step: Step, gradient: Array, *slots: Array) -> None:
        """Overwrite a gradient by the result of the rule's first stage."""
        raise NotImplementedError

    def _second_stage(self, step: Step, gradient: Array, value: Array) -> None:
        """Update a variable by the result of the first stage."""
        raise NotImplementedError

    def update_here(self, gradients: list[Any], routine: Routine) -> None:
        """Update this rank's arrays by the rule; for the library's own modules."""
        for bundle in routine.bundles:
            bundle.update(self, gradients)
        for index in routine.apart:
            gradient, (step, wholes) = gradients[index], routine.targets[index]
            # The usual kind, without further checks.
            if type(gradient) is np.ndarray:
                self.update(step, gradient, *wholes)
            else:
                self._update_one(step, gradient, wholes)

    def condition(self, gradients: Sequence[Gradient], backend: UpdateBackend) -> None:
        """Scale and clip combined gradients in place; for the library's own modules."""
        # Not `accumulate_steps`, which may have changed since a restore.
        calls = max(1, self._accumulation.calls)
        mean = 1 / calls if self._op is ReduceOp.MEAN else 1.0
        if self.clip_global_norm is None and mean == 1:
            return
        arrays = [g.values if isinstance(g, IndexedSlices) else g for g in gradients]
        scale(arrays, mean)
        if self.clip_global_norm is not None:
            clip_to_norm(arrays, self.clip_global_norm, backend.total)

    def arrays_of(self, variable: Variable, sharded: bool) -> list[Array]:
        """Return the arrays of a variable and its state, which the first call makes.

        For the library's own modules.
        """
        state = [
            self._slots.get(kind, variable, initial, sharded=sharded).component
            for kind, initial in self.state.items()
        ]
        return [variable.component, *state]

    def _update_one(self, step: Step, gradient: Gradient, wholes: list[Array]) -> None:
        if not isinstance(gradient, IndexedSlices):
            self.update(step, gradient, *wholes)
        elif not self._by_rows:
            self.update(step, gradient.to_dense(), *wholes)
        else:
            # Indices are unique, so that rows can be written back.
            parts = [whole[gradient.indices] for whole in wholes]
            self.update(step, gradient.values, *parts)
            for whole, part in zip(wholes, parts, strict=True):
                whole[gradient.indices] = part

    def _label(self, pairs: Pairs) -> str:
        """Name the call for the header, which shows whether all replicas have these
        variables.
        """
        key = tuple((gradient is None, v.name) for gradient, v in pairs)
        label = self._labels.get(key)
        if label is None:
            names = ", ".join(v.name for g, v in pairs if g is not None)
            # Missing gradients come first, as the end of a long text is cut.
            without = ", ".join(v.name for g, v in pairs if g is None)
            without = f" without gradients for {without}," if without else ""
            label = self._labels[key] = f"apply_gradients{without} to {names}"
        return label

    def _scratch(self, like: Array) -> Array:
        """Return an array of the same shape and type that the next calls use again."""
        # Variables are updated one by one: a buffer of the largest size for each type.
        key = is_device(like), like.dtype
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < like.size:
            buffer = array_module(like).empty(like.size, like.dtype)
            self._buffers[key] = buffer
        return buffer[: like.size].reshape(like.shape)

    def build(self, variables: Sequence[Variable]) -> None:
        """Make the state of variables now, not at the first step.

        Collective over the strategy's replicas.

        Parameters
        ----------
        variables : sequence of Variable
            The variables that will be updated.

        Raises
        ------
        ValueError
            If there is none, or a name comes twice.
        """
        require_names(variables)
        if (servers := self._servers) is not None:
            servers.build(self, variables)
            return
        self._current = frozenset(map(id, variables))
        strategy = variables[0].distribute_strategy or get_strategy()
        sharded = shards(self, strategy)
        for variable in variables:
            for kind, initial in self.state.items():
                self._slots.get(kind, variable, initial, sharded=sharded)
        self._accumulation.build(variables)

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the state to save.

        Not collective.

        Returns
        -------
        dict of str to Variable
            ``iterations``, and ``<kind>/<variable>`` for each kind of state of each
            variable, also for restored state whose variable is not made yet; with
            accumulation, the number of calls and the sums.

        Raises
        ------
        ValueError
            If two variables that have state have the same name.
        """
        self._slots.forget_garbage(self._current)
        rest = self._accumulation.own | self._slots.named()
        if (servers := self._servers) is not None:
            rest |= servers.named(self)
        return {"iterations": self.iterations, **dict(sorted(rest.items()))}

    def checkpoint_spellings(self, name: str) -> list[str]:
        """Return all names that saved state may have; for the library's own modules."""
        return spellings(unescaped(name))

    def checkpoint_defer(
        self,
        name: str,
        value: Array,
        strategy: Replicas | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Keep a saved value until its variable needs it at the first step.

        All replicas do it in the same order. For the library's own modules.
        """
        servers = self._servers
        # A value for servers waits in this process only.
        strategy = None if servers is not None else strategy
        if not self._accumulation.defer(name, value, strategy, is_part=is_part):
            self._slots.wait(name, value, strategy)
        if servers is not None:
            servers.wait(self)

    def checkpoint_reset(self, names: Sequence[str]) -> None:
        """Reset state to its values before the first step.

        For restores of a checkpoint that was saved before these ``names`` of
        `checkpoint_variables` were made. For the library's own modules.
        """
        variables = self.checkpoint_variables()
        for name in names:
            # Sums and calls of an accumulation begin with 0.
            initial = self.state.get(name.partition("/")[0], 0.0)
            variable = variables[name]
            if variable.is_remote:
                variable.assign(np.full(variable.shape, initial, variable.dtype))
            else:
                variable.component[...] = initial

    def checkpoint_target(self, name: str) -> Variable | None:
        """Return the variable for saved state that no step has made yet; or None.

        For the library's own modules.
        """
        servers = self._servers
        return None if servers is None else servers.find(self, name)

    def take_restored(self, name: str) -> Array | None:
        """Remove and return restored state that waits for its variable; None without.

        For the library's own modules.
        """
        return self._slots.take(name)

    @property
    def _servers(self) -> Any:
        """The state on parameter servers; None if it is on the ranks that make
        steps.
        """
        iterations: Any = self.iterations
        return iterations.distribute_strategy.slots if iterations.is_remote else None

    def checkpoint_restored(self, num_replicas: int, now: int) -> None:
        """Continue from restored state; for the library's own modules."""
        if (servers := self._servers) is not None:
            servers.restored(self)
        if self._accumulation.restored(num_replicas, now):
            get_logger("optimizers").warning(
                "the checkpoint holds sums of an accumulation that has not ended, and "
                "accumulate_steps is 1: these gradients are not used"
            )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} learning_rate="
            f"{getattr(self.learning_rate, '__qualname__', self.learning_rate)}>"
        )
