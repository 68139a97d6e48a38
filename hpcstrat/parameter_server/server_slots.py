"""The classes by which checkpoints read and write optimizer state on servers.

Servers identify an optimizer by its key. They make a shard's state at the shard's first
step. A checkpoint has the same names as with other strategies: the state of a variable
is one dataset, even if the variable has several shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.slots import file_names, unescaped
from hpcstrat.parameter_server.client import Client
from hpcstrat.parameter_server.pieces import ServerBytes
from hpcstrat.parameter_server.server_variables import ServerVariable
from hpcstrat.variables import Variable


class _ServerSlot(Variable):
    """One kind of a variable's optimizer state, read and assigned as one array."""

    is_remote = True

    def __init__(
        self, optimizer: Optimizer, kind: str, variable: ServerVariable
    ) -> None:
        self.name, self.trainable = f"{kind}/{variable.name}", False
        self.aggregation = variable.aggregation
        self.synchronization = variable.synchronization
        self._strategy, self._component = variable._strategy, variable._component
        self._variable, self._initial = variable, optimizer.state[kind]
        self._place = optimizer.key, kind

    def pieces(self) -> ServerBytes:
        """Return an object that reads and writes the state's bytes in pieces."""
        return self._variable.pieces((*self._place, self._initial))

    def value(self) -> Array:
        """Return a copy of the state of the whole variable."""
        size = self._component.nbytes
        data = self.pieces()[0:size] if size else np.empty(0, np.uint8)
        return data.view(self.dtype).reshape(self.shape)

    def assign(self, value: Any, read_value: bool = True) -> Any:
        """Replace the state of the whole variable, on all servers."""
        if value.shape != self.shape:
            raise ValueError(
                f"expected a saved value of shape {self.shape} for {self.name!r}, "
                f"found {value.shape}; restore a checkpoint of the same model"
            )
        data = value.astype(self.dtype, "C", copy=False).reshape(-1)
        self.pieces().write_bytes(0, data.view(np.uint8))


class ServerSlots:
    """The state of all optimizers on the servers, as the coordinator uses it.

    ``variables`` is the coordinator's mapping of existing variables by number. If a
    checkpoint is restored before a variable is made, the variable's state stays in the
    optimizer until then.
    """

    def __init__(self, client: Client, variables: Mapping[int, ServerVariable]) -> None:
        self._client, self._variables = client, variables
        self._waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def named(self, optimizer: Optimizer) -> dict[str, Variable]:
        """Return all existing state of an optimizer, by its names in checkpoints."""
        there = {
            number
            for server in self._client.alive()
            for number in self._client.ask(server, "stateful", optimizer.key)
        }
        slots = [
            _ServerSlot(optimizer, kind, variable)
            for variable in list(self._variables.values())
            if any(shard.number in there for shard in variable._shards)
            for kind in optimizer.state
        ]
        return dict(zip(file_names([s.name for s in slots]), slots, strict=True))

    def build(self, optimizer: Optimizer, variables: Sequence[ServerVariable]) -> None:
        """Make the state of variables on the servers, if no step has made it yet."""
        state = dict(optimizer.state)
        for variable in variables:
            for shard in variable._shards:
                number = shard.number
                self._client.post(shard.server, "build", number, optimizer.key, state)
        self._client.done()

    def forget(self) -> None:
        """Delete the state of all optimizers on the remaining servers."""
        for server in self._client.alive():
            self._client.post(server, "forget_state")
        self._client.done()

    def wait(self, optimizer: Optimizer) -> None:
        """Assign an optimizer's restored state: now, or when a new variable is made."""
        self._waiting.add(optimizer)
        for variable in list(self._variables.values()):
            self.give(variable)

    def give(self, variable: ServerVariable) -> None:
        """Send restored optimizer state, which waited for this variable, to servers."""
        for optimizer in list(self._waiting):
            for kind in optimizer.state:
                value = optimizer.take_restored(f"{kind}/{variable.name}")
                if value is not None:
                    _ServerSlot(optimizer, kind, variable).assign(value)

    def find(self, optimizer: Optimizer, name: str) -> Variable | None:
        """Return the state that has this name in checkpoints, or None.

        The state need not exist on servers yet. The result is None if the variable does
        not exist, or if the optimizer has no state of this kind.
        """
        kind, _, rest = name.partition("/")
        names = rest, unescaped(name).partition("/")[2]
        found = [v for v in list(self._variables.values()) if v.name in names]
        known = kind in optimizer.state and found
        return _ServerSlot(optimizer, kind, found[0]) if known else None

    def restored(self, optimizer: Optimizer) -> None:
        """Let servers continue to count from the restored number of steps."""
        steps = int(optimizer.iterations.numpy())
        for server in self._client.alive():
            self._client.post(server, "restored", optimizer.key, steps)
        self._client.done()
