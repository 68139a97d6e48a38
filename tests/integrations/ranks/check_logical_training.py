"""Training with PyTorch and JAX on logical replicas has the bits of one process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.rule


if find_spec("jax"):
    # Call before JAX computes: see `hpcstrat.engine.logical.threads.let_xla_wait`.
    import hpcstrat.integrations.jax as hsj


def made(comm: Any = None, **options: Any) -> Any:
    return hs.MultiWorkerMirroredStrategy(logical_replicas=4, comm=comm, **options)


def alone() -> Any:
    """Return a strategy in which this process has all replicas."""
    from mpi4py import MPI

    return made(MPI.COMM_SELF)


def batches(strategy: Any, *shape: int) -> Any:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((96, *shape), dtype=np.float32), rng.integers(0, 5, 96)
    dataset = hs.Dataset((x, y), 32, shuffle=True, seed=1)
    return strategy.experimental_distribute_dataset(dataset)


def bits(*arrays: Any) -> list[bytes]:
    return [np.asarray(array).tobytes() for array in arrays]


@pytest.mark.parametrize("buffers", ["first", "mean", None])
@pytest.mark.parametrize("inside", [False, True])
def test_pytorch(job: Any, buffers: Any, inside: bool) -> None:
    torch = pytest.importorskip("torch")
    import hpcstrat.integrations.torch as hst

    def training(strategy: Any) -> Any:
        torch.manual_seed(0)
        nn = torch.nn
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
            nn.Flatten(), nn.Linear(4 * 36, 5), nn.Linear(5, 5),
        )  # fmt: skip
        net[6].requires_grad_(False)
        hst.replicate(net, strategy, buffers=buffers)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def step(batch: Any) -> Any:
            rows, labels = map(torch.from_numpy, batch)
            if inside:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(rows), labels)
            loss.backward()
            if inside:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
            return loss.detach().numpy()

        for batch in batches(strategy, 1, 8, 8):
            if not inside:
                optimizer.zero_grad()
            losses = strategy.run(step, args=(batch,))
            if not inside:
                optimizer.step()
        mean = strategy.reduce("mean", losses, axis=None)
        state = [t.detach() for t in net.state_dict().values()]
        if buffers is None:
            # Buffers differ between replicas; the module keeps those of one replica.
            state = [p.detach() for p in net.parameters()]
        return bits(mean, *state)

    with alone() as one:
        wanted = training(one)
    with made() as strategy:
        assert training(strategy) == wanted


def test_pytorch_adds_up_backwards_and_knows_unreached_parameters(job: Any) -> None:
    torch = pytest.importorskip("torch")
    import hpcstrat.integrations.torch as hst

    with made() as strategy:
        net = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in "ab"])
        with torch.no_grad():
            for layer in net:
                layer.weight.fill_(1.0)
        hst.replicate(net, strategy, op="sum")

        def step() -> None:
            replica = hs.get_replica_context().replica_id_in_sync_group
            rows = torch.full((1, 1), float(replica + 1))
            # Only one replica uses the second layer.
            out = net[0](rows) + (net[1](rows) if replica == 2 else 0)
            out.sum().backward()

        for times in (1, 2):
            strategy.run(step)
            assert net[0].weight.grad.item() == 10 * times
            assert net[1].weight.grad.item() == 3 * times
        with pytest.raises(RuntimeError, match="inside"):
            net[0](torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_pytorch_adds_gradients_of_all_types_in_the_order_of_the_tree(op: str) -> None:
    """Some replicas use only some parameters; the missing gradients count as zeros."""
    torch = pytest.importorskip("torch")
    import hpcstrat.integrations.torch as hst
    from hpcstrat.engine.logical.tree_order import TreeOrder

    rng, count = np.random.default_rng(8), 7
    kinds = ("float16", "bfloat16", "float32", "float64", "complex64")
    shapes = [(3,), (40, 300), ()]
    with hs.MultiWorkerMirroredStrategy(logical_replicas=count) as strategy:
        module = torch.nn.ParameterList(
            torch.zeros(shape, dtype=getattr(torch, kind))
            for kind in kinds
            for shape in shapes
        )
        hst.replicate(module, strategy, op=op)
        for _ in range(4):
            values, reached = [], rng.random((count, len(module))) < 0.6
            for parameter in module:
                scales = 10.0 ** rng.integers(-3, 3, (count, *parameter.shape))
                drawn = rng.standard_normal((count, *parameter.shape)) * scales
                drawn[rng.random(drawn.shape) < 0.2] = -0.0
                values.append(torch.from_numpy(drawn).to(parameter.dtype))

            def step(values: Any = values, reached: Any = reached) -> None:
                own = hs.get_replica_context().replica_id_in_sync_group
                loss = torch.zeros(())
                for index in np.flatnonzero(reached[own]):
                    product = module[index] * values[index][own].conj()
                    loss = loss + product.sum().real.double()
                if reached[own].any():
                    loss.backward()

            for parameter in module:
                parameter.grad = None
            reached[:, 0] = True
            strategy.run(step)
            for index, parameter in enumerate(module):
                if not reached[:, index].any():
                    assert parameter.grad is None
                    continue
                half = parameter.dtype in (torch.float16, torch.bfloat16)
                parts = values[index].float() if half else values[index]
                leaves = [
                    part if is_there else torch.zeros_like(part)
                    for part, is_there in zip(parts, reached[:, index], strict=True)
                ]
                own = [leaf.numpy().copy() for leaf in leaves]
                [total] = TreeOrder(count, 1).sum_roots(0, own)
                if op == "mean":
                    total = total / count
                wanted = torch.from_numpy(np.asarray(total)).to(parameter.dtype)
                assert torch.equal(_bits(parameter.grad), _bits(wanted)), index


def _bits(tensor: Any) -> Any:
    import torch

    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.contiguous().view(sizes[real.element_size()])


def test_pytorch_checkpoints_hold_what_dropout_draws_from(
    job: Any, folder: Any
) -> None:
    torch = pytest.importorskip("torch")
    import hpcstrat.integrations.torch as hst

    def training(strategy: Any, steps: int, resumed: bool) -> Any:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 5))
        hst.replicate(net, strategy)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        state = hst.state(net, optimizer)
        assert "torch_random" in state
        data = batches(strategy, 6)
        manager = hs.CheckpointManager(folder / "torch", data=data, **state)
        begin = manager.restore() if resumed else 0

        def step(batch: Any) -> None:
            rows, labels = map(torch.from_numpy, batch)
            torch.nn.functional.cross_entropy(net(rows), labels).backward()

        for number, batch in enumerate(data, begin):
            if number == steps:
                break
            optimizer.zero_grad()
            strategy.run(step, args=(batch,))
            optimizer.step()
            if number == 0 and not resumed and steps == 1:
                manager.save(1)
        return bits(*(p.detach() for p in net.parameters()))

    with alone() as one:
        wanted = training(one, 3, resumed=False)
    with made() as strategy:
        training(strategy, 1, resumed=False)
    with alone() as one:
        assert training(one, 3, resumed=True) == wanted


def test_what_needs_a_rank_for_each_replica_is_refused(job: Any) -> None:
    pytest.importorskip("torch")
    import hpcstrat.integrations.torch as hst

    with made() as strategy:
        error = outcome(hst.GlobalBatchSampler, range(9), 3, strategy)
        assert isinstance(error, NotImplementedError), repr(error)
        assert "logical replicas" in str(error)


def test_jax(job: Any) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def loss(params: Any, rows: Any, labels: Any) -> Any:
        hidden = jnp.tanh(rows @ params[0]) @ params[1]
        return -jnp.mean(jax.nn.log_softmax(hidden)[jnp.arange(len(labels)), labels])

    gradients = jax.jit(jax.value_and_grad(loss))

    def training(strategy: Any) -> Any:
        rng = np.random.default_rng(2)
        with strategy.scope():
            weights = [
                hs.Variable(rng.standard_normal(s).astype(np.float32), name=f"w{s}")
                for s in ((6, 7), (7, 5))
            ]
            optimizer = hs.optimizers.Adam(0.01)

        def step(batch: Any) -> Any:
            value, found = gradients([w.value() for w in weights], *batch)
            optimizer.apply_gradients(zip(found, weights, strict=True))
            return np.asarray(value)

        for batch in batches(strategy, 6):
            losses = strategy.run(step, args=(batch,))
        mean = strategy.reduce("mean", losses, axis=None)
        return bits(mean, *(w.numpy() for w in weights))

    with alone() as one:
        wanted = training(one)
    with made() as strategy:
        assert training(strategy) == wanted


@pytest.mark.parametrize("ready", [False, True])
def test_jax_exchanges_inside_of_jit(job: Any, ready: bool) -> None:
    """Test gradients of gathers and broadcasts, twice, with arguments of any kind."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def training(strategy: Any) -> Any:
        def loss(weights: Any, rows: Any) -> Any:
            hidden = jnp.tanh(rows @ weights["in"])
            joined = hsj.all_gather(hidden[:2], 0, strategy)
            out = hsj.broadcast(weights["out"], 1, strategy)
            return jnp.mean((joined @ out) ** 2) + jnp.mean(hidden @ weights["out"])

        def steep(weights: Any, rows: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(weights, rows)
            return value + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

        @jax.jit
        def step(weights: Any, rows: Any) -> Any:
            found = jax.value_and_grad(steep)(weights, rows)
            value, gradient = hsj.all_reduce(found, "mean", strategy)
            return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)

        rng = np.random.default_rng(3)
        weights = {
            "in": rng.standard_normal((300, 200)).astype(np.float32) / 20,
            "out": rng.standard_normal((200,)).astype(np.float32) / 20,
        }
        data = rng.standard_normal((4, 8, 300)).astype(np.float32)

        def one(weights: Any) -> Any:
            replica = hs.get_replica_context().replica_id_in_sync_group
            rows = jnp.asarray(data[replica]) if ready else data[replica]
            value, weights = step(weights, rows)
            total = hs.get_replica_context().all_reduce("sum", np.ones(3))
            assert total.tolist() == [4.0, 4.0, 4.0]
            return value, weights

        for _ in range(3):
            value, weights = strategy.run(one, args=(weights,))
            weights = {
                name: np.asarray(strategy.experimental_local_results(leaf)[0])
                for name, leaf in weights.items()
            }
        first = strategy.experimental_local_results(value)[0]
        return bits(first, *weights.values())

    with alone() as one:
        wanted = training(one)
    with made() as strategy:
        assert training(strategy) == wanted


def test_jax_errors_inside_of_jit_reach_all_replicas(job: Any) -> None:
    jax = pytest.importorskip("jax")

    with made(on_error="raise") as strategy:
        mean = jax.jit(lambda rows: hsj.all_reduce(rows, "mean", strategy))

        def differ() -> Any:
            replica = hs.get_replica_context().replica_id_in_sync_group
            return np.asarray(mean(np.ones(3 if replica == 3 else 2)))

        def fail() -> Any:
            replica = hs.get_replica_context().replica_id_in_sync_group
            if replica == 2:
                raise ZeroDivisionError("of replica 2")
            return np.asarray(mean(np.ones(2)))

        for function, word in [(differ, "float32"), (fail, "replica 2")]:
            error = outcome(strategy.run, function)
            assert error is not None
            assert word in str(error), repr(error)
        # After the error, all replicas continue together.
        results = strategy.run(lambda: np.asarray(mean(np.full(2, 3.0))))
        for result in strategy.experimental_local_results(results):
            assert result.tolist() == [3.0, 3.0]
        error = outcome(mean, np.ones(2))
        assert "function that strategy.run runs" in str(error), repr(error)
