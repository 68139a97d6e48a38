"""The JAX primitive that exchanges arrays between replicas, and its rules for jit.

Outside of jit the primitive reads arrays on the host in place; inside of jit, XLA calls
a handler of hpcstrat. XLA may run independent operations in any order, and at the same
time, but all replicas must make their calls in the same order. So all exchanges declare
the same ordered effect, and XLA runs them in program order.

On GPUs a call outside of jit is also compiled, as a small jitted function, so that XLA
provides memory and a stream, see `hpcstrat.integrations.jax.xla_handler`. Passing
CuPy's results to JAX by DLPack would be less safe: some versions of XLA release memory
from DLPack before XLA's stream has read it (`TrackedDeviceBuffer::Delete`), and CuPy
reuses the memory without waiting for that stream.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from hpcstrat.engine.arrays.kinds import array_module
from hpcstrat.engine.context import own_index
from hpcstrat.engine.gpu.streams import borrowed_stream
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.jax.logical_meetings import let_replicas_meet
from hpcstrat.integrations.jax.xla_handler import GPU_TARGET, TARGET, key_of, register

try:
    from jax._src import core, effects
    from jax.extend.core import Primitive
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"expected a JAX whose effects have an order, found jax {jax.__version__}, "
        "which keeps them elsewhere; use a version near 0.10"
    ) from error

__all__ = ["TreeOperation", "bind", "is_on_host", "refuse", "require_replica_context"]


class _Order(effects.Effect):
    """An ordered effect: all operations with this effect run in program order."""

    def __repr__(self) -> str:
        return "collective calls of hpcstrat"


class _PythonCall(effects.Effect):
    """An effect that makes JAX call each compiled function from Python.

    From the second call on, JAX calls a function that was compiled ahead of time from
    C++, without the tokens that order its effects. It does so also if all effects are
    ordered, but not if there is an effect without an order (`create_cpp_call` in
    ``jax/_src/interpreters/pxla.py``).
    """


effects.ordered_effects.add_type(_Order)
for _kind in (
    *("lowerable", "control_flow_allowed", "remat_allowed"),
    "custom_derivatives_allowed",
):
    for _effect in (_Order, _PythonCall):
        getattr(effects, f"{_kind}_effects").add_type(_effect)
_order, _python_call = _Order(), _PythonCall()


class _Here(threading.local):
    """A flag for each thread: True while a thread of XLA makes an exchange."""

    is_inside = False


_here = _Here()
# For a kind of operation, the kind of its gradient, if the two kinds differ.
_TRANSPOSED = {"gather": "part", "broadcast": "at root"}
_TRANSPOSED |= {kind: other for other, kind in _TRANSPOSED.items()}
# Newer versions of JAX have `jax.typeof`; older versions have only `get_aval`.
_type_of = getattr(jax, "typeof", None) or jax.core.get_aval

_exchange = Primitive("hpcstrat_exchange")
_exchange.multiple_results = True


@dataclasses.dataclass(frozen=True)
class TreeOperation:
    """A collective operation on a tree's leaves, with equal names on all replicas.

    ``kind`` is gather, broadcast, or the name of a `ReduceOp` in lower case, such as
    sum; ``place`` is the axis of a gather or the root of a broadcast. Two more kinds
    are gradients: "part", for gather, is this replica's part of the sum along an axis;
    "at root", for broadcast, is the sum on the root, and zero on the other replicas.
    """

    strategy: Any
    kind: str
    names: tuple[str, ...]
    place: int = 0

    @property
    def what(self) -> str:
        """Name of the collective call in error messages."""
        call = {"gather": "all_gather", "broadcast": "broadcast"}
        return call.get(self.kind, "all_reduce")

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for a leaf of this shape."""
        lengths = list(shape)
        if self.kind == "gather":
            lengths[self.place] *= self.strategy.num_replicas_in_sync
        elif self.kind == "part":
            lengths[self.place] //= self.strategy.num_replicas_in_sync
        return tuple(lengths)

    @property
    def keeps_shapes(self) -> bool:
        """Whether each result has the shape of its leaf on all replicas."""
        return self.kind not in ("gather", "part")

    def transposed(self) -> TreeOperation:
        """Return the operation of the gradient."""
        kind = _TRANSPOSED.get(self.kind, self.kind)
        return dataclasses.replace(self, kind=kind)

    def results(self, leaves: list[Array], outs: list[Array] | None) -> list[Array]:
        """Make the call, and return the results, in ``outs`` if given; collective."""
        require_replica_context(self.strategy, self.what)
        collectives = self.strategy.collectives
        tree = self._named(leaves)
        if self.kind == "gather":
            found = collectives.all_gather(tree, self.place, self._call(leaves))
        elif self.kind == "broadcast":
            found = collectives.broadcast(tree, self.place, self.what)
        else:
            out = self._named(outs) if outs is not None and self._is_whole else None
            found = collectives.batch_reduce(self._op, tree, self.what, out=out)
        return self._taken(found, outs, self.strategy.replica_id)

    def later(
        self, leaves: list[Array], outs: list[Array], done: Callable[[Any], None]
    ) -> None:
        """Make the call for the logical replica that is running, without waiting.

        Collective over the strategy's replicas. When the results are in ``outs``, or
        the call has failed, ``done`` is called with None or the error.
        """
        meetings = self.strategy.meetings
        if not meetings.runs:
            done(_outside_of_run(self.what))
            return
        replica, argument = meetings.running_replica, self._named(leaves)
        if self.kind == "gather":
            call = meetings.gathering(self.place, self._call(leaves))
        elif self.kind == "broadcast":
            call = meetings.broadcasting(self.place, self.what)
        else:
            call = meetings.reducing(self._op, self.what, None)

        def then(found: Any, error: BaseException | None) -> None:
            try:
                if error is None:
                    self._taken(found, outs, replica)
            except Exception as problem:
                error = problem
            done(error)

        meetings.meet_later(*call, argument, then)

    def _call(self, leaves: list[Array]) -> str:
        # Ranks compare this text: compiled programs need equal shapes on all ranks.
        return f"{self.what} of {', '.join(str(leaf.shape) for leaf in leaves)}"

    @property
    def _op(self) -> ReduceOp:
        return ReduceOp.parse(self.kind) if self._is_whole else ReduceOp.SUM

    @property
    def _is_whole(self) -> bool:
        """True if the operation returns whole reduced arrays to all replicas."""
        return self.kind.upper() in ReduceOp.__members__

    def _taken(self, found: Any, outs: list[Array] | None, replica: int) -> list[Array]:
        """Return a replica's results, taken from the collective call's result."""
        results = [found] if not self._is_named else [found[n] for n in self.names]
        if self.kind == "part":
            results = [self._own_part(total, replica) for total in results]
        elif self.kind == "at root" and replica != self.place:
            results = [array_module(total).zeros_like(total) for total in results]
        for out, result in zip(outs or (), results, strict=bool(outs)):
            if out is not result:
                out[...] = result
        return results if outs is None else outs

    def _own_part(self, total: Array, replica: int) -> Array:
        """Return a replica's part of an array that is divided along axis ``place``."""
        length = total.shape[self.place] // self.strategy.num_replicas_in_sync
        start = replica * length
        at = (slice(None),) * self.place + (slice(start, start + length),)
        part: Array = array_module(total).ascontiguousarray(total[at])
        return part

    @property
    def _is_named(self) -> bool:
        return self.names != ("",)

    def _named(self, leaves: list[Any]) -> Any:
        # The header compares the names between ranks. A tree of one array has no names.
        if not self._is_named:
            return leaves[0]
        return dict(zip(self.names, leaves, strict=True))

    def inside(
        self,
        arrays: Callable[[], tuple[list[Array], list[Array]]],
        postpone: Callable[[], Callable[[Any], None]],
        stream: int | None,
    ) -> None:
        """Make the call in a thread of XLA; if a replica fails, all raise an error.

        ``postpone`` makes XLA wait for the results, and returns a function that ends
        this wait. On a GPU the call is added to XLA's ``stream``, and the host does not
        wait.
        """
        if self.strategy.meetings is not None:
            self.later(*arrays(), postpone())
            return

        def carry_out() -> None:
            if stream is None:
                self.results(*arrays())
                return
            with borrowed_stream(stream, self.strategy.topology.gpu.index):
                self.results(*arrays())

        _here.is_inside = True
        try:
            self.strategy.collectives.call(self.what, carry_out)
        finally:
            _here.is_inside = False


def require_replica_context(strategy: Any, what: str) -> None:
    """Raise RuntimeError if a strategy has logical replicas, and none is running."""
    if strategy.logical and own_index() is None:
        raise _outside_of_run(what)


def _outside_of_run(what: str) -> RuntimeError:
    return RuntimeError(
        f"expected {what} in the function that strategy.run runs, with logical "
        "replicas, found it outside, where no replica has a value of its own; call "
        "the jitted function inside run"
    )


def bind(exchange: TreeOperation, leaves: list[Any]) -> list[Any]:
    """Exchange leaves, which are arrays or tracers of JAX, between replicas."""
    _give_rules()
    return _exchange.bind(*leaves, exchange=exchange)


def refuse(strategy: Any, what: str, error: Exception) -> None:
    """Raise an error on this replica, and make the other replicas raise one, too."""
    _await_others()
    strategy.collectives.fail(what, error)
    raise error


def _await_others() -> None:
    """Wait for exchanges in XLA's threads, so that calls stay in program order."""
    if _here.is_inside:
        return
    try:
        jax.effects_barrier()
    except Exception:
        # JAX raises this error again when the program reads the exchange's results.
        # Remove the exchange's token, so that the next exchange does not fail with it.
        from jax._src import dispatch

        dispatch.runtime_tokens.clear()


def is_on_host(leaf: Any) -> bool:
    """Return whether all parts of a JAX array are in host memory."""
    return all(device.platform == "cpu" for device in leaf.devices())


@_exchange.def_impl
def _outside(*leaves: Any, exchange: TreeOperation) -> list[Any]:
    on_host = all(map(is_on_host, leaves))
    if not on_host and not exchange.strategy.logical:
        # XLA runs this jitted function after the exchanges in earlier functions.
        return _program(exchange)(*leaves)
    _await_others()

    def carry_out() -> list[Array]:
        # `np.asarray` reads arrays on the host in place, without a copy.
        return exchange.results([np.asarray(leaf) for leaf in leaves], None)

    results = exchange.strategy.collectives.call(exchange.what, carry_out)
    # The results have aligned memory of their own, so JAX uses it without a copy.
    return jax.device_put(results, [leaf.sharding for leaf in leaves])


@functools.cache
def _program(exchange: TreeOperation) -> Any:
    """Return a jitted function that only exchanges leaves."""
    return jax.jit(lambda *leaves: bind(exchange, list(leaves)))


@_exchange.def_effectful_abstract_eval
def _shapes(*leaves: Any, exchange: TreeOperation) -> tuple[list[Any], set[Any]]:
    shapes = [leaf.update(shape=exchange.shape(leaf.shape)) for leaf in leaves]
    return shapes, {_order, _python_call}


def _inside(
    context: Any, *operands: Any, exchange: TreeOperation, target: str = TARGET
) -> Any:
    """Compile an exchange into a handler call, ordered after the previous exchange."""
    problem = register(target)
    if target == GPU_TARGET:
        # Do not advise calls outside of jit: on GPUs those are compiled here, too.
        problem = problem and f"{problem}; use another version of JAX"
        problem = problem or _gpu_problem(exchange)
    else:
        if exchange.strategy.logical:
            problem = problem or let_replicas_meet(exchange.strategy, _await_others)
        problem = problem and f"{problem}; call {exchange.what} outside of jit"
    if problem:
        refuse(exchange.strategy, exchange.what, NotImplementedError(problem))
    if (channel := exchange.strategy.collectives.channel) is not None:
        channel.elsewhere = _await_others
    # Let results use the memory of arguments, so that XLA need not copy the arguments.
    count = len(operands) if exchange.keeps_shapes else 0
    rule = jax.ffi.ffi_lowering(
        target,
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


def _gpu_problem(exchange: TreeOperation) -> str:
    """Return the reason why an exchange cannot run on a GPU, or an empty text."""
    if exchange.strategy.logical:
        # XLA would block the thread that must run the other replicas: a deadlock.
        return (
            f"expected a rank for each replica, for {exchange.what} inside of jit on a "
            f"GPU, found logical replicas; call {exchange.what} between jitted "
            "functions"
        )
    if exchange.strategy.topology.gpu is None:
        return (
            f"expected a strategy with a GPU, for {exchange.what} of arrays on one, "
            "found one without; import cupy before the strategy is made, or set "
            "HPCSTRAT_DEVICE=gpu"
        )
    return ""


def _elsewhere(context: Any, *operands: Any, exchange: TreeOperation) -> Any:
    del context, operands
    error = NotImplementedError(
        f"expected {exchange.what} of arrays on CPUs or on GPUs with CUDA, found a "
        "function that is compiled for another device; put them there by jax.device_put"
    )
    refuse(exchange.strategy, exchange.what, error)


def _forward(primals: Any, tangents: Any, *, exchange: TreeOperation) -> Any:
    # Exchange zero tangents, too: replicas with other tangents wait for this call.
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    # Integers have no tangents.
    chosen = [i for i, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]
    names = tuple(exchange.names[i] for i in chosen)
    results = bind(exchange, list(primals))
    moved = [ad.Zero(_type_of(r).to_tangent_aval()) for r in results]
    linear = dataclasses.replace(exchange, names=names)
    given = [tangents[i] for i in chosen]
    if chosen and exchange.kind in ("max", "min"):
        # Each result moves with the elements that are equal to it, by equal parts.
        linear = dataclasses.replace(linear, kind="sum")
        equal = [_equal(primals[i], results[i]) for i in chosen]
        counts = bind(linear, equal)
        rows = zip(given, equal, counts, strict=True)
        given = [tangent * own / count for tangent, own, count in rows]
    some = bind(linear, given) if chosen else []
    for index, tangent in zip(chosen, some, strict=True):
        moved[index] = tangent
    return results, moved


def _equal(one: Any, other: Any) -> Any:
    """Return 1 where elements are equal, or both NaN, and 0 elsewhere."""
    same = (one == other) | (jnp.isnan(one) & jnp.isnan(other))
    return same.astype(one.dtype)


def _backward(cotangents: Any, *leaves: Any, exchange: TreeOperation) -> list[Any]:
    """Return the gradient of the sum of all replicas' results."""
    del leaves
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    return bind(exchange.transposed(), cotangents)


def _refuse_vmap(leaves: Any, dims: Any, *, exchange: TreeOperation) -> Any:
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
    """Register the primitive's rules, at first use: docs are built without JAX."""
    ad.primitive_jvps[_exchange] = _forward
    ad.primitive_transposes[_exchange] = _backward
    batching.primitive_batchers[_exchange] = _refuse_vmap
    mlir.register_lowering(_exchange, _inside, platform="cpu")
    on_gpu = functools.partial(_inside, target=GPU_TARGET)
    mlir.register_lowering(_exchange, on_gpu, platform="cuda")
    mlir.register_lowering(_exchange, _elsewhere)
