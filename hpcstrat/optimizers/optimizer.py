"""The base class of optimizers: it sums, accumulates, clips and applies gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.context import AnnouncesInitErrors, current
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.observe.timeline import traced
from hpcstrat.engine.options import ReduceOp, VariableAggregation
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.optimizers.accumulation import Accumulation
from hpcstrat.optimizers.gradients import (
    Filling,
    Pairs,
    checked,
    require_gradients,
    require_names,
)
from hpcstrat.optimizers.non_finite import NonFinite
from hpcstrat.optimizers.routine import Routine, is_sharded, learning_rate
from hpcstrat.optimizers.rules import (
    LearningRate,
    UpdateRule,
    has_two_stages,
    is_of_elements,
    require_options,
)
from hpcstrat.optimizers.slots import Slots, spellings, unescaped
from hpcstrat.strategies import get_strategy
from hpcstrat.variables import HostValue, Variable, class_for_state

# Numbers for the handles of optimizers: a newer handle has a larger number.
_handles = itertools.count()

# Attributes of an optimizer with its state, or for one process: the copies that
# `Optimizer.rule` returns do not have them.
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


class Optimizer(UpdateRule, AnnouncesInitErrors):
    """Base class of optimizers that sum gradients over replicas and update variables.

    A subclass defines an update rule, `update`, and names the state that the rule
    needs. Variables on a GPU are updated one by one on that GPU, without waiting for
    it; their gradients must be on the same GPU.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function of the number of completed steps.
    aggregation : VariableAggregation or str
        How gradients are combined: ``SUM`` if each replica's loss is divided by the
        global batch size, ``MEAN`` if it is divided by the replica's own batch size.
    accumulate_steps : int
        How many calls of `apply_gradients` make one step. All calls but the last add
        gradients to this replica's sums, without communication except for the first
        call, which makes the sums. The last call combines the sums and updates the
        variables. ``SUM`` uses the sum over the calls, ``MEAN`` their mean.
    clip_global_norm : float, optional
        Limit of the norm over all combined gradients together; if the norm is larger,
        all gradients are scaled down.
    missing_gradients : {"error", "zeros"}
        Treatment of gradients that are None on some replicas only: raise a
        CollectiveError that names the variable, or use zeros and log a warning once per
        variable. ``"zeros"`` costs a small message in each step.
    sharded : bool
        Whether each rank stores state for only a part of the elements, updates that
        part, and receives the other parts from the other ranks (ZeRO stage 1). State
        then uses 1/N of the memory; results and checkpoints are the same. Only for
        ``elementwise`` rules and LAMB, with mirrored variables in host memory.

    Attributes
    ----------
    iterations : Variable
        Number of completed steps, int64.
    state : mapping of str to float
        The initial value of each kind of state, by the kind's name in checkpoints, such
        as ``{"momentum": 0.0}``; set by a subclass.
    elementwise : bool
        Whether `update` treats each element by itself, so that small variables may be
        updated as one array. Subclasses with another `update` do not inherit this.

    Raises
    ------
    ValueError
        For options out of range.
    """

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
        # Ids of the variables of the latest step.
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
        """Number of steps skipped because of NaN or infinity; not in checkpoints."""
        return self._non_finite.skipped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_routine": None}

    @property
    def key(self) -> int:
        """The number that identifies this optimizer and its copies on other ranks.

        For the library's own modules."""
        iterations: Any = self.iterations
        return int(iterations.number)

    def _handle(self) -> tuple[str, int, Any]:
        """Return the data from which another rank makes a copy without state."""
        if self._servers is None:
            raise ValueError(
                "expected an optimizer that was made in the strategy's scope, found "
                f"{type(self).__name__} that was made elsewhere, in a scheduled "
                "function; make it in the scope, or in the function"
            )
        parts = next(_handles), self.rule(), self.learning_rate, self.iterations
        return "optimizer", self.key, parts

    def rule(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class and options, without state, for a copy by `from_rule`.

        For the library's own modules."""
        own = vars(self).items()
        return type(self), {k: v for k, v in own if k not in _STATEFUL}

    @staticmethod
    def from_rule(
        rule: tuple[type[Optimizer], dict[str, Any]],
        learning_rate: LearningRate = 0.0,
        iterations: Any = None,
    ) -> Optimizer:
        """Return an optimizer without state, from the result of `rule`.

        For the library's own modules."""
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
        """Raise ValueError if ``accumulate_steps`` is above 1.

        For the library's own modules."""
        accumulation = vars(self).get("_accumulation")
        if accumulation is not None and accumulation.steps > 1:
            raise ValueError(
                f"expected accumulate_steps=1 {where}, found {accumulation.steps}; "
                f"{advice}"
            )

    @property
    def collectives(self) -> Collectives:
        """The current strategy's collective calls; for the library's own modules."""
        found: Collectives = get_strategy().collectives
        return found

    @traced("apply_gradients", "optimizer")
    @collective
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> bool:
        """Combine the gradients of all replicas and update the variables in place.

        Collective over the strategy's replicas: call it inside ``strategy.run``. With
        ``accumulate_steps`` above 1, only the last call of each step communicates, and
        any call that makes the sums of new variables.

        After an error, a replica restarts its accumulation with empty sums. With
        ``on_error="raise"``, all replicas restore the sums from before this ``run``,
        even if another part of the ``run`` fails.

        Parameters
        ----------
        grads_and_vars : iterable of (array_like or IndexedSlices, Variable)
            This replica's gradients, with the variables' shapes; not modified. Every
            replica passes the same variables in the same order. Variables whose
            gradient is None on all replicas are not updated.

        Returns
        -------
        bool
            Whether the variables were updated. False while gradients are accumulated,
            and for a step skipped by the setting ``non_finite="skip"``.

        Raises
        ------
        ValueError
            If all gradients are None, two variables have the same name, or a gradient
            has a wrong shape, dtype or device.
        RuntimeError
            If called in cross-replica context.
        CollectiveError
            If replicas have gradients for different variables. On every replica.
        NonFiniteError
            If a combined gradient is NaN or infinite, with the setting
            ``non_finite="raise"``. Variables and state are unchanged. On every replica.
        """
        return get_strategy().apply_gradients(self, grads_and_vars)

    def apply_here(
        self, strategy: Any, grads_and_vars: Iterable[tuple[Any, Variable]]
    ) -> bool:
        """Make a step on the calling ranks, with the strategy's update backend.

        Collective over the strategy's replicas. For the library's own modules."""
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
        try:
            given = list(grads_and_vars)
            # Gradients with the last step's variables, shapes and dtypes need no check.
            routine = self._routine
            if routine is not None and not routine.fits(strategy, given):
                routine = None
            added = [] if routine is not None else checked(given)
        except Exception as error:
            self._accumulation.undo(error, strategy)
            strategy.collectives.fail("apply_gradients", error)
            raise
        try:
            if routine is not None:
                return routine.step(self, [given])
            # Checkpoints omit the state of other variables if the program deleted them.
            self._current = frozenset(id(variable) for _, variable in added)
            pairs = self._accumulation.add(added, strategy)
            if pairs is None:
                return False
            updated = self._apply(strategy, pairs)
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
                routine = Routine(strategy, given[0], label, self)
            updated = routine.step(self, given)
            dense = not any(isinstance(g, IndexedSlices) for g, _ in given[0])
            self._routine = routine if dense and not self._fills else None
            if self._routine is not None and updated:
                routine.repeat()
            return updated

        def act(given: list[Pairs]) -> list[bool]:
            # In a collective call, an error on one rank is raised on all ranks.
            made = strategy.collectives.call("apply_gradients", update, given)
            return [made] * len(given)

        updated: bool = strategy.meetings.meet(label, act, present)
        return updated

    # Not decorated as collective: the program has already combined the gradients.
    def apply_combined(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], rate: float | None = None
    ) -> bool:
        """Update variables in place with gradients that are already combined.

        Logically collective over the strategy's replicas, inside ``strategy.run``. The
        call communicates only if it must make state that `build` has not made.
        Gradients are not accumulated.

        Parameters
        ----------
        grads_and_vars : iterable of (array_like or IndexedSlices, Variable)
            Gradients with the variables' shapes, equal bit for bit on every replica.
            Arrays with a variable's dtype are overwritten.
        rate : float, optional
            The learning rate of this step; default: the optimizer's learning rate.

        Returns
        -------
        bool
            Whether the variables were updated, as `apply_gradients` returns it.

        Raises
        ------
        ValueError
            If there is no gradient, two variables have the same name, or a gradient has
            a wrong shape, dtype or device.
        NonFiniteError
            As in `apply_gradients`.
        NotImplementedError
            If ranks do not have the sums of all elements, as in central storage.
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
            routine = Routine(strategy, present, label, self)
            own = learning_rate(self, strategy) if rate is None else rate
            gradients = [gradient for gradient, _ in present]
            return routine.update(self, gradients, [present], own)

        if strategy.meetings is None:
            return update()
        # One update serves all logical replicas of this process.
        updated: bool = strategy.meetings.meet(
            f"apply_combined: {label}", lambda given: [update()] * len(given), None
        )
        return updated

    def _apply(self, strategy: Any, pairs: Pairs) -> bool:
        sums = self._accumulation
        is_restored = sums.restored is not None
        if self._fills or is_restored:
            pairs = self._filling.filled(
                strategy.collectives,
                pairs,
                *((sums.shares(), sums.unclaimed()) if is_restored else ()),
                only_restored=not self._fills,
            )
        try:
            require_gradients(pairs)
        except Exception as error:
            strategy.collectives.fail("apply_gradients", error)
            raise
        present = [(g, v) for g, v in pairs if g is not None]
        routine = Routine(strategy, present, self._label(pairs), self)
        updated = routine.step(self, [present])
        # Keep the routine, so that a next step with the same variables, shapes and
        # dtypes needs no checks and no label.
        dense = not any(g is None or isinstance(g, IndexedSlices) for g, _ in pairs)
        plain = dense and not self._fills and sums.steps == 1
        self._routine = routine if plain else None
        if plain and updated:
            routine.repeat()
        return updated

    def _label(self, pairs: Pairs) -> str:
        """Return a label for the header, which must be equal on all replicas."""
        key = tuple((gradient is None, v.name) for gradient, v in pairs)
        label = self._labels.get(key)
        if label is None:
            names = ", ".join(v.name for g, v in pairs if g is not None)
            # Missing gradients are named first: long labels are truncated at the end.
            without = ", ".join(v.name for g, v in pairs if g is None)
            without = f" without gradients for {without}," if without else ""
            label = self._labels[key] = f"apply_gradients{without} to {names}"
        return label

    def build(self, variables: Sequence[Variable]) -> None:
        """Make the state of variables now, before the first step.

        Collective over the strategy's replicas.

        Parameters
        ----------
        variables : sequence of Variable
            The variables that will be updated.

        Raises
        ------
        ValueError
            If there are no variables, or two variables have the same name.
        """
        require_names(variables)
        if (servers := self._servers) is not None:
            servers.build(self, variables)
            return
        self._current = frozenset(map(id, variables))
        strategy = variables[0].distribute_strategy or get_strategy()
        sharded = is_sharded(self, strategy)
        for variable in variables:
            for kind, initial in self.state.items():
                self._slots.get(kind, variable, initial, sharded=sharded)
        self._accumulation.build(variables)

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the optimizer state that a checkpoint saves.

        Not collective.

        Returns
        -------
        dict of str to Variable
            ``iterations``, and ``<kind>/<variable>`` for each kind of state of each
            variable, including restored state that no step has used yet. With
            accumulation, also the number of calls and the sums.

        Raises
        ------
        ValueError
            If two variables with state have the same name.
        """
        self._slots.forget_garbage(self._current)
        rest = self._accumulation.own | self._slots.named()
        if (servers := self._servers) is not None:
            rest |= servers.named(self)
        return {"iterations": self.iterations, **dict(sorted(rest.items()))}

    def checkpoint_spellings(self, name: str) -> list[str]:
        """Return the names under which a checkpoint may contain the state ``name``.

        For the library's own modules."""
        return spellings(unescaped(name))

    def checkpoint_defer(
        self,
        name: str,
        value: Array,
        strategy: Replicas | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Store a restored value until its variable's first step needs it.

        All replicas make these calls in the same order. For the library's own modules.
        """
        servers = self._servers
        # A value for parameter servers waits in this process only.
        strategy = None if servers is not None else strategy
        if not self._accumulation.defer(name, value, strategy, is_part=is_part):
            self._slots.wait(name, value, strategy)
        if servers is not None:
            servers.wait(self)

    def checkpoint_reset(self, names: Sequence[str]) -> None:
        """Reset the state variables with these names to their initial values.

        A restore calls this method for state that was made after the checkpoint had
        been saved. For the library's own modules.
        """
        variables = self.checkpoint_variables()
        for name in names:
            # The sums and the number of calls of an accumulation start at 0.
            initial = self.state.get(name.partition("/")[0], 0.0)
            variable = variables[name]
            if variable.is_remote:
                variable.assign(np.full(variable.shape, initial, variable.dtype))
            else:
                variable.component[...] = initial

    def checkpoint_target(self, name: str) -> Variable | None:
        """Return the variable on parameter servers for the state of a name, or None.

        For the library's own modules."""
        servers = self._servers
        return None if servers is None else servers.find(self, name)

    def take_restored(self, name: str) -> Array | None:
        """Remove and return restored state that waits for its variable, or None.

        For the library's own modules."""
        return self._slots.take(name)

    @property
    def _servers(self) -> Any:
        """The state on parameter servers; None if state is stored on this rank."""
        iterations: Any = self.iterations
        return iterations.distribute_strategy.slots if iterations.is_remote else None

    def checkpoint_restored(self, num_replicas: int, now: int) -> None:
        """Prepare the next step after a restore; for the library's own modules."""
        if (servers := self._servers) is not None:
            servers.restored(self)
        if self._accumulation.continues(num_replicas, now):
            get_logger("optimizers").warning(
                "the checkpoint has sums of an accumulation that has not ended, but "
                "accumulate_steps is 1: these gradients are not used"
            )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} learning_rate="
            f"{getattr(self.learning_rate, '__qualname__', self.learning_rate)}>"
        )
