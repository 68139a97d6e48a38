"""The primitive of JAX that exchanges arrays between replicas, and its rules.

Outside of jit it reads the arrays where they are; inside XLA calls the library. All
exchanges have one effect with an order: XLA may run what is independent in any order,
and at the same time, but replicas must make their calls in one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir

from hpcstrat.arrays.kinds import is_device
from hpcstrat.call_sites import pass_over
from hpcstrat.integrations.jax.xla_handler import TARGET, key_of, register
from hpcstrat.options import ReduceOp
from hpcstrat.typing import Array

try:
    from jax._src import core, effects
    from jax.extend.core import Primitive
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"expected a JAX whose effects have an order, found jax {jax.__version__}, "
        "which keeps them elsewhere; use a version near 0.10"
    ) from error

__all__ = ["Exchange", "bind", "refuse"]


class _Order(effects.Effect):
    """An effect that keeps the exchanges of all replicas in one order."""

    def __str__(self) -> str:
        return "Exchange"


for _kind in ("ordered", "lowerable", *("control_flow_allowed", "remat_allowed")):
    getattr(effects, f"{_kind}_effects").add_type(_Order)
effects.custom_derivatives_allowed_effects.add_type(_Order)
_order = _Order()


class _Here(threading.local):
    """Whether this thread is XLA's, in an exchange."""

    is_inside = False


_here = _Here()
# The first is of newer versions.
_type_of = getattr(jax, "typeof", None) or jax.core.get_aval

_exchange = Primitive("hpcstrat_exchange")
_exchange.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An operation on the leaves of a tree; all replicas know the same names of leaves.

    ``kind`` is sum, mean, gather or broadcast, and ``place`` its axis or root.
    """

    strategy: Any
    kind: str
    names: tuple[str, ...]
    place: int = 0

    @property
    def what(self) -> str:
        """Name of the call in messages."""
        call = {"gather": "all_gather", "broadcast": "broadcast"}
        return call.get(self.kind, "all_reduce")

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result of a leaf."""
        if self.kind != "gather":
            return shape
        lengths = list(shape)
        lengths[self.place] *= self.strategy.num_replicas_in_sync
        return tuple(lengths)

    def results(self, leaves: list[Array], outs: list[Array] | None) -> list[Array]:
        """Make the call; results are ``outs``, where these are given.

        Collective over the strategy's replicas.
        """
        collectives = self.strategy.collectives
        tree = self._named(leaves)
        if self.kind == "gather":
            # Lengths that differ are an error here, of all: shapes in a program are
            # known beforehand.
            shapes = ", ".join(str(leaf.shape) for leaf in leaves)
            what = f"{self.what} of {shapes}"
            found = collectives.all_gather(tree, self.place, what)
        elif self.kind == "broadcast":
            found = collectives.broadcast(tree, self.place, self.what)
        else:
            op = ReduceOp.parse(self.kind)
            out = None if outs is None else self._named(outs)
            found = collectives.batch_reduce(op, tree, self.what, out=out)
            if outs is not None:
                return outs
        results = [found] if not self._is_named else [found[n] for n in self.names]
        for out, result in zip(outs or (), results, strict=bool(outs)):
            out[...] = result
        return results if outs is None else outs

    @property
    def _is_named(self) -> bool:
        return self.names != ("",)

    def _named(self, leaves: list[Any]) -> Any:
        # Names are compared by the header; a single array needs none.
        if not self._is_named:
            return leaves[0]
        return dict(zip(self.names, leaves, strict=True))

    def inside(self, arrays: Callable[[], tuple[list[Array], list[Array]]]) -> None:
        """Make the call in a thread of XLA's; an error is one of all replicas."""

        def carry_out() -> None:
            self.results(*arrays())

        _here.is_inside = True
        try:
            self.strategy.collectives.call(self.what, carry_out)
        finally:
            _here.is_inside = False


def bind(exchange: Exchange, leaves: list[Any]) -> list[Any]:
    """Exchange leaves, which are arrays of JAX, or stand for such in a trace."""
    _give_rules()
    return _exchange.bind(*leaves, exchange=exchange)


def refuse(strategy: Any, what: str, error: Exception) -> None:
    """Raise an error, after the other replicas have been told."""
    _await_others()
    strategy.collectives.fail(what, error)
    raise error


def _await_others() -> None:
    """Wait for the exchanges under way in XLA's threads: calls have one order."""
    if _here.is_inside:
        return
    try:
        jax.effects_barrier()
    except Exception:
        # Its results raise it; the next exchange is not to wait for it again.
        from jax._src import dispatch

        dispatch.runtime_tokens.clear()


@_exchange.def_impl
def _outside(*leaves: Any, exchange: Exchange) -> list[Any]:
    _await_others()
    devices = {device for leaf in leaves for device in leaf.devices()}
    on_gpu = any(device.platform != "cpu" for device in devices)

    def carry_out() -> list[Array]:
        # Read in place; the library itself asks for memory on GPUs.
        read = [leaf if on_gpu else np.asarray(leaf) for leaf in leaves]
        return exchange.results(read, None)

    results = exchange.strategy.collectives.call(exchange.what, carry_out)
    if any(map(is_device, results)):
        return [jax.dlpack.from_dlpack(result) for result in results]
    # Results are of their own, aligned memory, which JAX takes over without a copy.
    return jax.device_put(results, [leaf.sharding for leaf in leaves])


@_exchange.def_effectful_abstract_eval
def _shapes(*leaves: Any, exchange: Exchange) -> tuple[list[Any], set[Any]]:
    shapes = [leaf.update(shape=exchange.shape(leaf.shape)) for leaf in leaves]
    return shapes, {_order}


def _inside(context: Any, *operands: Any, exchange: Exchange) -> Any:
    """Let XLA call the handler, after the exchange before it in the program."""
    if problem := register():
        error = NotImplementedError(f"{problem}; call {exchange.what} outside of jit")
        refuse(exchange.strategy, exchange.what, error)
    if (channel := exchange.strategy.collectives.channel) is not None:
        channel.elsewhere = _await_others
    # Sums need no memory of their own; without this XLA copies all arguments.
    count = len(operands) if exchange.kind in ("sum", "mean", "broadcast") else 0
    rule = jax.ffi.ffi_lowering(
        TARGET,
        has_side_effect=True,
        operand_output_aliases={1 + index: 1 + index for index in range(count)},
    )
    tokens = {
        "avals_in": [core.abstract_token, *context.avals_in],
        "avals_out": [core.abstract_token, *context.avals_out],
    }
    key = np.int64(key_of(exchange, exchange.inside))
    before = context.tokens_in.get(_order)
    after, *results = rule(context.replace(**tokens), before, *operands, key=key)
    context.set_tokens_out(mlir.TokenSet({_order: after}))
    return results


def _elsewhere(context: Any, *operands: Any, exchange: Exchange) -> Any:
    del context, operands
    error = NotImplementedError(
        f"expected {exchange.what} inside of jit on CPUs, found a function that is "
        f"compiled for another device; call {exchange.what} between jitted functions"
    )
    refuse(exchange.strategy, exchange.what, error)


def _forward(primals: Any, tangents: Any, *, exchange: Exchange) -> Any:
    # All of them, whatever each replica knows to be zero: their calls are the same.
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    # Integers have none.
    chosen = [i for i, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]
    names = tuple(exchange.names[i] for i in chosen)
    results = bind(exchange, list(primals))
    moved = [ad.Zero(_type_of(r).to_tangent_aval()) for r in results]
    linear = dataclasses.replace(exchange, names=names)
    some = bind(linear, [tangents[i] for i in chosen]) if chosen else []
    for index, tangent in zip(chosen, some, strict=True):
        moved[index] = tangent
    return results, moved


def _backward(cotangents: Any, *leaves: Any, exchange: Exchange) -> list[Any]:
    """Return the gradient of the sum of what all replicas compute."""
    del leaves
    strategy, place = exchange.strategy, exchange.place
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    kind = "mean" if exchange.kind == "mean" else "sum"
    sums = bind(dataclasses.replace(exchange, kind=kind, place=0), cotangents)
    if exchange.kind == "broadcast" and strategy.replica_id != place:
        return [jax.numpy.zeros_like(total) for total in sums]
    if exchange.kind == "gather":
        own = []
        for total in sums:
            length = total.shape[place] // strategy.num_replicas_in_sync
            start = strategy.replica_id * length
            own.append(jax.lax.slice_in_dim(total, start, start + length, axis=place))
        return own
    return list(sums)


def _refuse_vmap(leaves: Any, dims: Any, *, exchange: Exchange) -> Any:
    del leaves, dims
    what = exchange.what
    error = NotImplementedError(
        f"expected {what} outside of vmap, found it inside, where each element would "
        f"need a call of its own; call it on what vmap returns, {what}(jax.vmap(f)(x), "
        "...), which is one call for all"
    )
    refuse(exchange.strategy, what, error)


@functools.cache
def _give_rules() -> None:
    """Tell JAX the primitive's rules, at its first use: the reference has no JAX."""
    ad.primitive_jvps[_exchange] = _forward
    ad.primitive_transposes[_exchange] = _backward
    batching.primitive_batchers[_exchange] = _refuse_vmap
    mlir.register_lowering(_exchange, _inside, platform="cpu")
    mlir.register_lowering(_exchange, _elsewhere)
    # Messages name the lines of programs that call jitted functions.
    pass_over(os.path.dirname(jax.__file__))
