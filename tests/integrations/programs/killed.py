"""Train with a framework, saving as it goes: killed.py torch|jax|keras FOLDER.

Run again after it was killed, on any number of ranks, it goes on with the newest
checkpoint. Replica 0 prints a hash of all that was trained, the same for every run.
"""

from __future__ import annotations

import hashlib
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
# So that a kill meets each part of a step.
PAUSE_SECONDS = 0.01

draw = np.random.default_rng(0)
X = draw.normal(size=(ROWS, 6)).astype(np.float32)
Y = (X @ draw.normal(size=6) > 0).astype(np.float32)[:, np.newaxis]


def train_torch(strategy: Any, folder: Path) -> list[Any]:
    """Train a module with dropout; every other save is in the background."""
    import torch

    import hpcstrat.integrations.torch as hst

    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, 1))
    hst.replicate(net, strategy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = batches(strategy)
    state = hst.state(net, optimizer)
    manager = hs.CheckpointManager(folder, max_to_keep=2, data=data, **state)
    number = manager.restore_or_initialize() or 0

    def step(batch: Any) -> None:
        rows, labels = map(torch.from_numpy, batch)
        (net(rows) - labels).square().sum().backward()

    while data.epoch < EPOCHS:
        for batch in data:
            optimizer.zero_grad()
            strategy.run(step, args=(batch,))
            optimizer.step()
            number += 1
            manager.save(number, asynchronous=number % 2 == 0)
            time.sleep(PAUSE_SECONDS)
    manager.close()
    return [p.detach() for p in net.parameters()]


def train_jax(strategy: Any, folder: Path) -> list[Any]:
    """Train by gradients of JAX."""
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
    manager = hs.CheckpointManager(folder, max_to_keep=2, **objects)
    number = manager.restore_or_initialize() or 0

    def step(batch: Any) -> None:
        found = gradients([w.value() for w in weights], *batch)
        optimizer.apply_gradients(zip(found, weights, strict=True))

    while data.epoch < EPOCHS:
        for batch in data:
            strategy.run(step, args=(batch,))
            number += 1
            manager.save(number, asynchronous=number % 2 == 0)
            time.sleep(PAUSE_SECONDS)
    manager.close()
    return weights


def train_keras(strategy: Any, folder: Path) -> list[Any]:
    """Train by Keras' fit, which saves after each epoch."""
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
    manager = hs.CheckpointManager(folder, max_to_keep=2, **hsk.state(model))
    data = hsk.Batches(X, Y, batch_size=BATCH, strategy=strategy, shuffle=True, seed=5)
    pause = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(PAUSE_SECONDS)
    )
    # One save in each epoch, where the others save in each step.
    callbacks = [hsk.Checkpoint(manager), pause]
    model.fit(data, epochs=4 * EPOCHS, verbose=0, callbacks=callbacks)
    return [keras.ops.convert_to_numpy(v) for v in model.variables]


def batches(strategy: Any) -> Any:
    """Return shuffled batches, the last of which leaves replicas without rows."""
    dataset = hs.Dataset((X, Y), BATCH, shuffle=True, seed=1)
    return strategy.experimental_distribute_dataset(dataset)


def main(kind: str, folder: Path) -> None:
    """Train, and print the hash."""
    strategy = hs.MultiWorkerMirroredStrategy(logical_replicas=4)
    train = {"torch": train_torch, "jax": train_jax, "keras": train_keras}[kind]
    trained = hashlib.sha256()
    for array in train(strategy, folder):
        trained.update(np.asarray(array).tobytes())
    hs.print_once(trained.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
