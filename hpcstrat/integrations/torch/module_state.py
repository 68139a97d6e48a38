"""State of PyTorch's modules and optimizers, saved directly from tensors' memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hpcstrat.checkpoint.agreement import of_all_groups
from hpcstrat.checkpoint.file.plain_state import as_text
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.integrations.frameworks import variable_over
from hpcstrat.integrations.torch.generator_states import GeneratorStates
from hpcstrat.integrations.torch.inner_gradients import require_equal
from hpcstrat.integrations.torch.logical_gradients import streams_of
from hpcstrat.integrations.torch.module_buffers import broadcast
from hpcstrat.integrations.torch.replication import inner, splits_of, strategy_of
from hpcstrat.integrations.torch.tensors import as_tensor, memory_of, torchs_stream
from hpcstrat.strategies import Strategy
from hpcstrat.variables import DividedVariable, Variable
from hpcstrat.variables.divided import Split

__all__ = ["state"]


class _Adoption:
    """Keeps a variable in each tensor's memory; replaces it if the tensor moves.

    ``split_of`` returns how the ranks of a replica divide a tensor, or None.
    """

    def __init__(
        self,
        strategy: Strategy,
        split_of: Callable[[str, torch.Tensor], Split | None],
    ) -> None:
        self.strategy, self._split_of = strategy, split_of
        self._found: dict[str, tuple[Any, Variable]] = {}

    def variables(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Variable]:
        """Return variables in the tensors' memory, without a broadcast to replicas."""
        before, self._found = self._found, {}
        for name, tensor in tensors.items():
            place = tensor.data_ptr(), tensor.dtype, tensor.shape
            found = before.get(name)
            if found is None or found[0] != place:
                found = place, self._adopt(name, tensor)
            self._found[name] = found
        return {name: variable for name, (_, variable) in self._found.items()}

    def _adopt(self, name: str, tensor: torch.Tensor) -> Variable:
        _require_contiguous(name, tensor)
        trainable, memory = isinstance(tensor, torch.nn.Parameter), memory_of(tensor)
        split = self._split_of(name, tensor)
        return variable_over(
            memory, self.strategy, name, trainable=trainable, split=split
        )


def _require_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"expected contiguous tensors to save, found {name!r} of layout "
            f"{tensor.layout} and strides {tensor.stride()}; call "
            ".to(memory_format=torch.contiguous_format) on the module before "
            "replicate"
        )


class _Module:
    """A module's parameters and buffers to save, each under its first name."""

    def __init__(self, module: torch.nn.Module, strategy: Strategy) -> None:
        self.module = module
        self.distribute_strategy = strategy
        self._splits = splits_of(module)
        self._adoption = _Adoption(strategy, lambda name, _: self._splits.get(name))
        tensors = self._tensors()
        # Check before the broadcast: the other replicas would wait there for this one.
        for name, tensor in tensors.items():
            _require_contiguous(name, tensor)
        with torchs_stream():
            arrays = {name: memory_of(tensor) for name, tensor in tensors.items()}
            whole = {k: a for k, a in arrays.items() if k not in self._splits}
            require_equal(strategy, whole, "state of a module")
            with strategy.inside.divided():
                broadcast(strategy, arrays, "state of a module")
        self._adoption.variables(tensors)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the module's tensors to save; non-persistent buffers are left out."""
        found = self.module.state_dict(keep_vars=True)
        tensors = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
        # If a tensor has several names, keep only the first.
        first = {id(tensor): name for name, tensor in reversed(tensors.items())}
        return {k: v for k, v in tensors.items() if first[id(v)] == k}

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return variables in the memory of the module's tensors."""
        return self._adoption.variables(self._tensors())

    def plain(self) -> dict[str, Any]:
        """Return the entries of ``state_dict`` that are not tensors."""
        found = self.module.state_dict(keep_vars=True)
        return {k: v for k, v in found.items() if not isinstance(v, torch.Tensor)}


class _OptimizerSlots:
    """Slots of an optimizer, such as momentum, by slot name and parameter name."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: _Module, strategy: Any
    ) -> None:
        self.optimizer = optimizer
        self.distribute_strategy = strategy
        self._adoption = _Adoption(strategy, self._split_of)
        # The divided parameters, each with its variable.
        self._divided = {
            name: variable
            for name, variable in module.checkpoint_variables().items()
            if isinstance(variable, DividedVariable)
        }
        known = {id(p): name for name, p in module.module.named_parameters()}
        self._names = {
            known.get(id(parameter), f"{number}.{index}"): parameter
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }

    def _split_of(self, name: str, slot: torch.Tensor) -> Split | None:
        # Numbers, such as counts of steps, are not divided.
        variable = self._divided.get(name.partition("/")[2])
        same = variable is not None and slot.shape == variable.shape
        return variable.split if variable is not None and same else None

    def _slots(self) -> Iterator[tuple[str, str, Any]]:
        for name, parameter in self._names.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    yield kind, name, value

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return variables in the memory of the slots that are dense tensors."""
        tensors = {
            f"{kind}/{name}": value
            for kind, name, value in self._slots()
            if _has_memory(value)
        }
        return self._adoption.variables(dict(sorted(tensors.items())))

    def checkpoint_spellings(self, name: str) -> list[str]:
        """Return the names that a variable may have in a file: only its own name."""
        return [name]

    def checkpoint_defer(
        self,
        name: str,
        value: Array,
        strategy: Replicas | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Add a slot with a saved value, as the optimizer would at its first step."""
        del strategy, is_part
        kind, _, owner = name.partition("/")
        parameter = self._names.get(owner)
        if parameter is None:
            raise ValueError(
                f"expected a parameter {owner!r} for the saved {kind}, found "
                f"{', '.join(self._names)}; restore into the model that was saved"
            )
        groups = self.optimizer.param_groups
        group = next(g for g in groups if any(p is parameter for p in g["params"]))
        divided = self._divided.get(owner)
        if divided is not None and value.shape == divided.whole_shape:
            inside = divided.distribute_strategy.inside
            value = value[inside.region(divided.whole_shape, divided.split)]
        # A copy of a part in the order of its elements.
        tensor = as_tensor(value.copy("C"))
        # As in torch, step counts are on the host, unless the optimizer needs them on
        # the GPU.
        if kind != "step" or group.get("capturable") or group.get("fused"):
            tensor = tensor.to(parameter.device)
        self.optimizer.state[parameter][kind] = tensor

    def checkpoint_reset(self, names: Sequence[str]) -> None:
        """Remove slots; the optimizer makes them again at its next step."""
        for name in names:
            kind, _, owner = name.partition("/")
            del self.optimizer.state[self._names[owner]][kind]

    def checkpoint_restored(self, num_replicas: int, now: int) -> None:
        """Do nothing, because a restore writes into the tensors themselves."""

    def plain(self) -> dict[str, Any]:
        """Return the options, and all slots that are not dense tensors, as plain state.

        Lists of tensors, such as the history of LBFGS, and sparse tensors, such as
        SGD's momentum of sparse gradients, change their size at each step, so that a
        variable of fixed shape could not store them.
        """
        slots = [
            [kind, name, _packed(value)]
            for kind, name, value in self._slots()
            if not _has_memory(value)
        ]
        for kind, name, _ in slots:
            if name in self._divided:
                raise ValueError(
                    f"expected dense tensors as state of {name!r}, which the ranks of "
                    f"a replica divide, found another kind as {kind!r}; take another "
                    "optimizer for it, such as Adam"
                )
        groups = [
            {
                k: v.item() if isinstance(v, torch.Tensor) else _packed(v)
                for k, v in group.items()
                if k != "params"
            }
            for group in self.optimizer.param_groups
        ]
        return {"groups": groups, "slots": slots}

    def load_plain(self, saved: dict[str, Any]) -> None:
        """Set the optimizer's state to a state that `plain` has returned."""
        groups = zip(self.optimizer.param_groups, saved["groups"], strict=True)
        for group, options in groups:
            for key, packed in options.items():
                value = _unpacked(packed)
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        # Remove all plain slots; the optimizer makes slots that were not saved again.
        for kind, name, value in [*self._slots()]:
            if not _has_memory(value):
                del self.optimizer.state[self._names[name]][kind]
        for kind, name, value in saved["slots"]:
            parameter = self._names[name]
            found = _unpacked(value, parameter.device)
            self.optimizer.state[parameter][kind] = found


# In plain state, a dict with one of these strings as its only key represents a tensor.
_TENSOR = "$torch.Tensor"
_SPARSE = "$torch.sparse_coo_tensor"


def _has_memory(value: Any) -> bool:
    """Return whether a value is a dense tensor, which has memory of a fixed size."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _packed(value: Any) -> Any:
    """Return a structure with each tensor replaced by its type, shape and bytes."""
    if isinstance(value, torch.Tensor) and value.is_sparse:
        own = value.detach().coalesce()
        parts = _packed(own.indices()), _packed(own.values()), list(own.shape)
        return {_SPARSE: list(parts)}
    if isinstance(value, torch.Tensor):
        own = value.detach().to("cpu").contiguous()
        kind = str(own.dtype).removeprefix("torch.")
        data = own.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TENSOR: [kind, list(own.shape), data]}
    return _mapped(_packed, value)


def _unpacked(value: Any, device: Any = "cpu") -> Any:
    """Rebuild the structure that was passed to `_packed`."""
    if type(value) is dict and value.keys() == {_TENSOR}:
        kind, shape, data = value[_TENSOR]
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None
        empty = torch.empty(shape, dtype=getattr(torch, kind))
        own = empty if raw is None else raw.view(empty.dtype).reshape(shape)
        return own.to(device)
    if type(value) is dict and value.keys() == {_SPARSE}:
        indices, values, shape = value[_SPARSE]
        parts = _unpacked(indices, device), _unpacked(values, device)
        made = torch.sparse_coo_tensor(*parts, shape, check_invariants=True)
        return made.coalesce()
    return _mapped(functools.partial(_unpacked, device=device), value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the items of a list, tuple or dict; keep other values."""
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    if isinstance(value, dict):
        pairs = {key: function(item) for key, item in value.items()}
        return pairs if type(value) is dict else type(value)(pairs)
    return value


class _PlainState:
    """State of a training that is not in tensors; a checkpoint saves replica 0's."""

    def __init__(
        self,
        module: _Module,
        optimizer: _OptimizerSlots | None,
        others: Mapping[str, Any],
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._others = others

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the module, the optimizer and the other objects."""
        found = {name: other.state_dict() for name, other in self._others.items()}
        if self._optimizer is not None:
            found["optimizer"] = self._optimizer.plain()
        return {"module": self._module.plain(), **found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of the module, the optimizer and the other objects."""
        if state["module"]:
            self._module.module.load_state_dict(state["module"], strict=False)
        if self._optimizer is not None and "optimizer" in state:
            self._optimizer.load_plain(state["optimizer"])
        for name, other in self._others.items():
            if name in state:
                other.load_state_dict(state[name])


def state(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
) -> dict[str, Any]:
    """Return the state of a training with PyTorch, for a CheckpointManager to save.

    Collective over the replicas of the module's strategy. Parameters and buffers of all
    replicas become equal to replica 0's.

    Nothing is copied: parameters, buffers and the optimizer's tensors are saved from
    their memory, and restored into it, on any number of replicas.
    `Strategy.check_divergence` compares these tensors, too. If the optimizer has not
    made its slots yet, because it makes them at its first step, a restore makes them.
    If parameters are moved, for instance by ``.to``, the next save uses their new
    memory.

    If the ranks of a replica divide parameters, see `replicate`, a file has the whole
    parameters and slots, and is restored on any number of ranks per replica.

    With ``generators``, a resumed program draws the numbers that it would have drawn
    without the interruption. On another number of replicas, a replica without a saved
    state keeps the state that the program has given it. Older checkpoints without
    these states can be restored.

    Parameters
    ----------
    module : torch.nn.Module
        A module that was passed to `replicate`. For any other module the current
        strategy is used.
    optimizer : torch.optim.Optimizer, optional
        The optimizer of the module's parameters.
    scheduler : optional
        A scheduler of learning rates, or any object whose ``state_dict`` has no
        tensors.
    scaler : torch.amp.GradScaler, optional
        A scaler of losses; its ``state_dict`` is saved, too.

    Returns
    -------
    dict of str to object
        Keyword arguments for `CheckpointManager` and `hpcstrat.elastic.Memory.track`:
        ``model``, ``optimizer`` if one is given, ``torch`` for state that is not in
        tensors, and ``generators`` for each replica's states of the generators of
        torch (on the host, and on the replica's GPU), ``numpy.random`` and ``random``.
        With logical replicas also ``torch_random``, the state of the random numbers
        that dropout uses.

    Raises
    ------
    ValueError
        For tensors that are not contiguous, such as ``channels_last`` tensors; the
        other replicas raise ReplicaError.
    CollectiveError
        If the replicas' modules differ; raised on every replica.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.torch as hst
    >>> model = hst.replicate(torch.nn.Linear(2, 1), hs.get_strategy())
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> sorted(hst.state(model, optimizer))
    ['generators', 'model', 'optimizer', 'torch']
    """
    strategy = strategy_of(module)
    others = {"scheduler": scheduler, "scaler": scaler}
    others = {name: other for name, other in others.items() if other is not None}
    what, calls = "state of a module", strategy.inside.collectives
    begin = functools.partial(_state, inner(module), optimizer, others, strategy)
    found: dict[str, Any] = strategy.collectives.call(what, calls.call, what, begin)
    return found


def _state(
    module: torch.nn.Module, optimizer: Any, others: dict[str, Any], strategy: Strategy
) -> dict[str, Any]:
    for name, other in others.items():
        as_text(name, other.state_dict())
    own, streams = _Module(module, strategy), streams_of(strategy)
    generators = GeneratorStates(of_all_groups(strategy))
    found: dict[str, Any] = {"model": own, "generators": generators}
    if streams is not None:
        found["torch_random"] = streams
    slots = None
    if optimizer is not None:
        found["optimizer"] = slots = _OptimizerSlots(optimizer, own, strategy)
    return {**found, "torch": _PlainState(own, slots, others)}
