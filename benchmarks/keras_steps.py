"""Training steps in Keras, on the backend that ``KERAS_BACKEND`` names."""

from __future__ import annotations

import os
from typing import Any

# Use one thread per rank, as the rivals in other frameworks do, and silence TensorFlow.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from mlp import MLP_SIZES, MOMENTUM, RATE, ROWS

import hpcstrat.integrations.keras as hsk

__all__ = ["KerasStep", "keras_steps"]


def _use_one_thread() -> None:
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)


class KerasStep:
    """A training step by ``train_on_batch``, with its own model."""

    def __init__(self, batch: Any, strategy: Any = None) -> None:
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        layers = [dense(size, activation="relu") for size in MLP_SIZES[1:-1]]
        first, last = keras.layers.Input(MLP_SIZES[:1]), dense(MLP_SIZES[-1])
        self.model = keras.Sequential([first, *layers, last])
        self.model.compile(
            keras.optimizers.SGD(RATE, momentum=MOMENTUM),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile="auto" if keras.backend.backend() == "jax" else False,
        )
        if strategy is not None:
            hsk.distribute(self.model, strategy)
        self._batch = batch

    def __call__(self) -> None:
        """Do a step; collective if the model is distributed."""
        self.model.train_on_batch(*self._batch)

    def parameters(self) -> list[Any]:
        """Return the weights as arrays."""
        variables = self.model.trainable_variables
        return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def keras_steps(strategy: Any, check: str) -> dict[str, KerasStep]:
    """Return the rivals, whose models all start with equal weights.

    Collective over the strategy's replicas.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    check : str
        Name of the reference for the weights: a step in one process, with the rows of
        all replicas.

    Returns
    -------
    dict of str to KerasStep
        The steps by name; the first step does not communicate.
    """
    _use_one_thread()
    count, replica = strategy.num_replicas_in_sync, strategy.replica_id
    generator = np.random.default_rng(0)
    # Use the same arrays on all ranks, because each rank takes its rows of them.
    inputs = generator.normal(size=(count * ROWS, MLP_SIZES[0])).astype(np.float32)
    targets = generator.integers(0, MLP_SIZES[-1], count * ROWS)
    own = slice(replica * ROWS, (replica + 1) * ROWS)
    return {
        "none": KerasStep((inputs[own], targets[own])),
        "hpcstrat, distribute": KerasStep((inputs, targets), strategy),
        check: KerasStep((inputs, targets)),
    }
