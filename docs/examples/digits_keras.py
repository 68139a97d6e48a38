"""Train a network of Keras on handwritten digits, one replica per rank.

    KERAS_BACKEND=torch python docs/examples/digits_keras.py
    KERAS_BACKEND=jax mpirun -n 4 python docs/examples/digits_keras.py --epochs 20

compile and fit are as without ranks. On any number of them, and with any backend, it
learns what one process learns.
"""

import argparse
import json
from pathlib import Path

import h5py
import hpcstrat as hs
import hpcstrat.integrations.keras as hsk
import keras

DIGITS = Path(__file__).parents[2] / "jobs" / "data" / "digits.h5"
BATCH = 64  # of all replicas; the last batch of an epoch has 30 rows


def digits(part):
    """Return the images and labels of one part of the file."""
    with h5py.File(DIGITS, "r", locking=False) as file:
        images, labels = (file[part][name][:] for name in ("images", "labels"))
    return images.astype("float32") / 16, labels.astype("int32")


def network():
    """Return the compiled model, which is the same in every process."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((64,)),
        keras.layers.Dense(64, activation="tanh"),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    """Train, test, and print loss and accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", help="folder")
    options = parser.parse_args()
    strategy = hs.MultiWorkerMirroredStrategy()
    model = hsk.distribute(network(), strategy)
    batches = hsk.Batches(
        *digits("train"), batch_size=BATCH, strategy=strategy, shuffle=True
    )
    callbacks = []
    if options.checkpoints:
        manager = hs.CheckpointManager(options.checkpoints, **hsk.state(model))
        callbacks.append(hsk.Checkpoint(manager))  # goes on with what is there
    model.fit(batches, epochs=options.epochs, callbacks=callbacks, verbose=2)
    loss, accuracy = model.evaluate(*digits("test"), batch_size=BATCH, verbose=0)
    hs.print_once(json.dumps({"loss": loss, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
