"""Training steps in JAX, one for each way to average gradients."""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any

# Use one thread per rank, as the rivals in other frameworks do.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mlp import MLP_SIZES, MOMENTUM, RATE, ROWS

import hpcstrat.integrations.jax as hsj

__all__ = ["JaxStep", "jax_steps", "start_jax_distributed"]


def start_jax_distributed(comm: Any) -> None:
    """Connect JAX on all ranks by gloo; called before JAX's first computation.

    Collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks, all on one machine.
    """
    port = None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    port = comm.bcast(port)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, comm.rank)


def _loss(parameters: Any, inputs: Any, targets: Any) -> Any:
    for weights, biases in parameters[:-1]:
        inputs = jax.nn.relu(inputs @ weights + biases)
    weights, biases = parameters[-1]
    logits = jax.nn.log_softmax(inputs @ weights + biases)
    return -jnp.take_along_axis(logits, targets[:, None], axis=1).mean()


def _gradient(parameters: Any, batch: Any) -> Any:
    return jax.value_and_grad(_loss)(parameters, *batch)


def _update(state: Any, gradients: Any) -> Any:
    parameters, velocities = state
    velocities = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocities, gradients)
    return jax.tree.map(lambda p, v: p - RATE * v, parameters, velocities), velocities


class JaxStep:
    """A training step with its own parameters."""

    def __init__(self, state: Any, function: Callable[[Any], Any]) -> None:
        self._state, self._function = state, function

    def __call__(self) -> None:
        """Do a step to its end; collective, unless the step does not communicate."""
        self._state = jax.block_until_ready(self._function(self._state))

    def parameters(self) -> list[Any]:
        """Return the weights as arrays."""
        # Arrays of jax.distributed are replicated, so that this rank's copy is
        # complete.
        leaves = jax.tree.leaves(self._state[0])
        return [np.array(leaf.addressable_data(0)) for leaf in leaves]


def _one_jit(batch: Any, average: Callable[[Any], Any]) -> Any:
    def step(state: Any, batch: Any) -> Any:
        _, gradients = _gradient(state[0], batch)
        return _update(state, average(gradients))

    jitted = jax.jit(step, donate_argnums=0)
    return lambda state: jitted(state, batch)


def _two_jits(batch: Any, average: Callable[[Any], Any]) -> Any:
    gradient, update = jax.jit(_gradient), jax.jit(_update, donate_argnums=0)

    def step(state: Any) -> Any:
        _, gradients = gradient(state[0], batch)
        return update(state, average(gradients))

    return step


def _by_hand(comm: Any, shapes: list[tuple[int, ...]]) -> Callable[[Any], Any]:
    buffers = [np.empty(shape, np.float32) for shape in shapes]

    def average(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        for leaf, buffer in zip(leaves, buffers, strict=True):
            comm.Allreduce(np.asarray(leaf), buffer)
            np.multiply(buffer, np.float32(1 / comm.size), out=buffer)
        return structure.unflatten([jnp.array(buffer) for buffer in buffers])

    return average


def _mpi4jax(comm: Any, mpi: Any) -> Callable[[Any], Any]:
    import mpi4jax

    def average(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: mpi4jax.allreduce(leaf, op=mpi.SUM, comm=comm) / comm.size,
            tree,
        )

    return average


def _of_all_ranks(host_state: Any, batch: Any, size: int) -> JaxStep:
    """Return the step of jax.distributed, which JAX distributes over the ranks."""
    mesh = jax.make_mesh((size,), ("x",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*p)) for p in ((), ("x",)))

    def on_all(array: Any) -> Any:
        return jax.make_array_from_callback(array.shape, whole, lambda i: array[i])

    state = jax.tree.map(on_all, host_state)
    rows = tuple(jax.make_array_from_process_local_data(split, b) for b in batch)
    return JaxStep(state, _one_jit(rows, lambda gradients: gradients))


def jax_steps(strategy: Any, *, with_gloo: bool) -> dict[str, JaxStep]:
    """Return the rivals, which all start with equal parameters.

    Collective over the strategy's replicas.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    with_gloo : bool
        Whether `start_jax_distributed` was called.

    Returns
    -------
    dict of str to JaxStep
        The steps by name; the first step does not communicate.
    """
    topology = strategy.topology
    comm, mpi = topology.replica_comm.Dup(), topology.mpi
    generator = np.random.default_rng(0)
    parameters = [
        (
            (generator.normal(size=(i, o)) / np.sqrt(i)).astype(np.float32),
            np.zeros(o, np.float32),
        )
        for i, o in itertools.pairwise(MLP_SIZES)
    ]
    state = parameters, jax.tree.map(np.zeros_like, parameters)
    shapes = [leaf.shape for leaf in jax.tree.leaves(parameters)]
    generator = np.random.default_rng([1, comm.rank])
    batch = (
        generator.normal(size=(ROWS, MLP_SIZES[0])).astype(np.float32),
        generator.integers(0, MLP_SIZES[-1], ROWS),
    )
    here = jax.local_devices()[0]
    local = jax.device_put(batch, here)

    def step(way: Any, average: Any) -> JaxStep:
        # Copy the parameters, because the steps donate their memory to JAX.
        mine = jax.tree.map(jnp.copy, jax.device_put(state, here))
        return JaxStep(mine, way(local, average))

    def averaged(tree: Any) -> Any:
        return hsj.all_reduce(tree, "mean", strategy)

    steps = {
        "none": step(_one_jit, lambda tree: tree),
        "none, two jits": step(_two_jits, lambda tree: tree),
        "mpi4py, between jits": step(_two_jits, _by_hand(comm, shapes)),
        "hpcstrat, inside jit": step(_one_jit, averaged),
        "hpcstrat, between jits": step(_two_jits, averaged),
    }
    if importlib.util.find_spec("mpi4jax"):
        steps["mpi4jax, inside jit"] = step(_one_jit, _mpi4jax(comm, mpi))
    if with_gloo:
        steps["jax.distributed, gloo"] = _of_all_ranks(state, batch, comm.size)
    return steps
