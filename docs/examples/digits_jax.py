"""Train a network of JAX on handwritten digits, one replica per rank.

    python docs/examples/digits_jax.py
    mpirun -n 4 python docs/examples/digits_jax.py --epochs 20 --checkpoints digits

The whole step is one jitted function, with the sum over the replicas inside. On any
number of ranks it learns what one process learns.
"""

import argparse
import json
from pathlib import Path

import h5py
import hpcstrat as hs
import hpcstrat.integrations.jax as hsj
import jax
import jax.numpy as jnp

DIGITS = Path(__file__).parents[2] / "jobs" / "data" / "digits.h5"
BATCH = 64  # of all replicas; the last batch of an epoch has 30 rows
RATE, MOMENTUM = 0.1, 0.9


def network():
    """Return weights and biases, which are the same in every process."""
    keys = jax.random.split(jax.random.key(0))
    return {
        "hidden": {"w": jax.random.normal(keys[0], (64, 64)) / 8, "b": jnp.zeros(64)},
        "output": {"w": jax.random.normal(keys[1], (64, 10)) / 8, "b": jnp.zeros(10)},
    }


def logits(network, images):
    """Return the network's answers."""
    hidden, output = network["hidden"], network["output"]
    pixels = images.astype(jnp.float32) / 16
    return jnp.tanh(pixels @ hidden["w"] + hidden["b"]) @ output["w"] + output["b"]


def loss_sum(network, images, labels):
    """Return the sum of the losses of some rows, which may be none."""
    logs = jax.nn.log_softmax(logits(network, images))
    return -jnp.take_along_axis(logs, labels[:, None].astype(int), axis=1).sum()


def main():
    """Train, test, and print loss and accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", help="folder")
    options = parser.parse_args()
    strategy = hs.MultiWorkerMirroredStrategy()
    with h5py.File(DIGITS, "r", locking=False) as file:
        train, test = ({k: file[part][k][:] for k in file[part]} for part in file)
    batches = strategy.experimental_distribute_dataset(
        hs.Dataset(train, BATCH, shuffle=True)
    )
    start = network(), jax.tree.map(jnp.zeros_like, network())
    training = hsj.state(start, strategy)  # replica 0's values for all
    checkpoints = None
    if options.checkpoints:
        checkpoints = hs.CheckpointManager(
            options.checkpoints, training=training, data=batches
        )
        checkpoints.restore_or_initialize()

    @jax.jit
    def step(state, images, labels):
        network, velocity = state
        found = jax.value_and_grad(loss_sum)(network, images, labels)
        # Sums over the rows of all replicas.
        found = hsj.all_reduce((*found, jnp.float32(len(labels))), "sum", strategy)
        loss, gradient, count = found
        velocity = jax.tree.map(
            lambda v, g: MOMENTUM * v + g / count, velocity, gradient
        )
        network = jax.tree.map(lambda p, v: p - RATE * v, network, velocity)
        return (network, velocity), loss / count

    state, loss = training.tree, jnp.nan
    while batches.epoch < options.epochs:
        for batch in batches:
            rows = strategy.local_value(batch)
            state, loss = step(state, rows["images"], rows["labels"])
        training.tree = state
        if checkpoints is not None:
            checkpoints.save(batches.epoch)
        hs.print_once(f"epoch {batches.epoch}: loss {loss:.4f}")

    found = logits(state[0], test["images"]).argmax(axis=1)
    accuracy = float((found == test["labels"]).mean())
    hs.print_once(json.dumps({"loss": float(loss), "accuracy": accuracy}))


if __name__ == "__main__":
    main()
