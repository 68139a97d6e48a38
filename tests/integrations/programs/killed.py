"""Train with a framework: ``killed.py FOLDER OPTIONS``, the options in JSON.

``kind`` is ``torch``, ``jax`` or ``keras``. Without ``run``, the program saves
checkpoints in FOLDER. When it is started again after a kill, on any number of ranks, it
resumes from the newest checkpoint; replica 0 prints a hash of all trained state. With
``run``, which contains keywords of `hpcstrat.elastic.run`, the remaining ranks continue
after a rank was killed; each rank writes the hash into FOLDER. The hash is always the
same.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "NPROC": "1"}

import numpy as np

import hpcstrat as hs

EPOCHS, ROWS, BATCH = 4, 44, 12
# A pause in each step, so that kills can hit each part of a step.
PAUSE_SECONDS = 0.01

draw = np.random.default_rng(0)
X = draw.normal(size=(ROWS, 6)).astype(np.float32)
Y = (X @ draw.normal(size=6) > 0).astype(np.float32)[:, np.newaxis]


class Files:
    """A `hpcstrat.elastic.Memory` that keeps training state in checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def track(self, **objects: Any) -> None:
        self.manager = hs.CheckpointManager(self._folder, max_to_keep=2, **objects)

    def restore(self) -> int:
        return self.manager.restore_or_initialize()

    def commit(self, number: int) -> None:
        """Save a checkpoint, every second time in the background."""
        self.manager.save(number, asynchronous=number % 2 == 0)


def train_torch(strategy: Any, keeper: Any) -> list[Any]:
    """Train a PyTorch module with dropout; return its final state."""
    import torch

    import hpcstrat.integrations.torch as hst

    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, 1))
    hst.replicate(net, strategy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = batches(strategy)
    state = hst.state(net, optimizer)
    keeper.track(data=data, **state)
    number = keeper.restore() or 0

    def step(batch: Any) -> None:
        rows, labels = map(torch.from_numpy, batch)
        (net(rows) - labels).square().sum().backward()

    while data.epoch < EPOCHS:
        for batch in data:
            optimizer.zero_grad()
            strategy.run(step, args=(batch,))
            optimizer.step()
            number += 1
            keeper.commit(number)
            time.sleep(PAUSE_SECONDS)
    return [p.detach() for p in net.parameters()]


def train_jax(strategy: Any, keeper: Any) -> list[Any]:
    """Train with gradients from JAX; return the final weights."""
    import jax

    jnp = jax.numpy

    def loss(params: Any, rows: Any, labels: Any) -> Any:
        return jnp.sum((jnp.tanh(rows @ params[0]) @ params[1] - labels) ** 2)

    gradients = jax.jit(jax.grad(loss))
    rng = np.random.default_rng(2)
    with strategy.scope():
        weights = [
            hs.Variable(rng.normal(size=shape).astype(np.float32), name=f"w{shape}")
            for shape in ((6, 7), (7, 1))
        ]
        optimizer = hs.optimizers.Adam(0.01)
    data = batches(strategy)
    objects = {"data": data, "weights": weights, "optimizer": optimizer}
    keeper.track(**objects)
    number = keeper.restore() or 0

    def step(batch: Any) -> None:
        found = gradients([w.value() for w in weights], *batch)
        optimizer.apply_gradients(zip(found, weights, strict=True))

    while data.epoch < EPOCHS:
        for batch in data:
            strategy.run(step, args=(batch,))
            number += 1
            keeper.commit(number)
            time.sleep(PAUSE_SECONDS)
    return weights


def train_keras(strategy: Any, keeper: Any) -> list[Any]:
    """Train with Keras' fit, which commits after each epoch; return the weights."""
    import keras

    import hpcstrat.integrations.keras as hsk

    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.Dropout(0.3, seed=3),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy")
    hsk.distribute(model, strategy)
    keeper.track(**hsk.state(model))
    data = hsk.Batches(X, Y, batch_size=BATCH, strategy=strategy, shuffle=True, seed=5)
    pause = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(PAUSE_SECONDS)
    )
    keep: Any = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: keeper.commit(epoch + 1)
    )
    first = 0
    if isinstance(keeper, Files):
        keep = hsk.Checkpoint(keeper.manager)
    else:
        first = keeper.restore() or 0
    # Keras has one commit per epoch; the other kinds have one per step.
    how = {"epochs": 4 * EPOCHS, "initial_epoch": first, "verbose": 0}
    model.fit(data, callbacks=[keep, pause], **how)
    return [keras.ops.convert_to_numpy(v) for v in model.variables]


def batches(strategy: Any) -> Any:
    """Return shuffled batches; the last batch leaves some replicas without rows."""
    dataset = hs.Dataset((X, Y), BATCH, shuffle=True, seed=1)
    return strategy.experimental_distribute_dataset(dataset)


def digest(arrays: list[Any]) -> str:
    """Return a hash of all arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train with the given framework, and print or write the hash."""
    kinds = {"torch": train_torch, "jax": train_jax, "keras": train_keras}
    train = kinds[options["kind"]]
    if "run" not in options:
        strategy = hs.MultiWorkerMirroredStrategy(logical_replicas=4)
        files = Files(folder / "checkpoints")
        found = digest(train(strategy, files))
        files.manager.close()
        hs.print_once(found)
        return
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    (folder / f"{rank}.process").write_text(str(os.getpid()))

    def begin(strategy: Any, memory: Any) -> str:
        (folder / "started").touch()
        return digest(train(strategy, memory))

    marker = folder / "done"
    result = hs.elastic.run(begin, completion_marker=marker, **options["run"])
    if result is not None:
        (folder / f"{rank}.result").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
