"""The training that bench_step.py measures, by hpcstrat and by hand on mpi4py."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from buffers import in_pieces

import hpcstrat as hs

__all__ = ["NUM_FEATURES", "ByHand", "Ours", "Trainer", "require_equal"]

NUM_FEATURES = 256
RATE, MOMENTUM = 0.01, 0.9
PIECE = 1 << 20
# Tolerance for float32 sums in another order, after a few thousand steps.
TOLERANCE = 1e-3

Array = np.ndarray[Any, Any]


def initial_parameters(width: int) -> list[Array]:
    """Draw the network's weights and biases; the same on all replicas.

    Not collective.

    Parameters
    ----------
    width : int
        Number of hidden units.

    Returns
    -------
    list of ndarray
        Weights and biases of both layers.
    """
    generator = np.random.default_rng(0)
    parameters = []
    for num_in, num_out in ((NUM_FEATURES, width), (width, NUM_FEATURES)):
        weights = generator.standard_normal((num_in, num_out), np.float32)
        parameters += [weights / np.float32(math.sqrt(num_in))]
        parameters += [np.zeros(num_out, np.float32)]
    return parameters


class Network:
    """A network that learns to reproduce its input, with preallocated arrays.

    Parameters
    ----------
    width : int
        Number of hidden units.
    rows : int
        Number of rows of this replica.
    num_global : int
        Number of rows of all replicas.
    """

    def __init__(self, width: int, rows: int, num_global: int):
        self.scale = np.float32(2 / (NUM_FEATURES * num_global))
        self.hidden, self.to_hidden, self.slope = (
            np.empty((rows, width), np.float32) for _ in range(3)
        )
        self.error = np.empty((rows, NUM_FEATURES), np.float32)
        self.losses = np.empty(rows, np.float32)

    def losses_and_gradients(
        self, parameters: list[Array], inputs: Array, gradients: list[Array]
    ) -> Array:
        """Compute a loss for each row, and this replica's part of the gradients.

        Not collective.

        Parameters
        ----------
        parameters : list of ndarray
            Weights and biases.
        inputs : ndarray of shape (rows, NUM_FEATURES)
            The rows, which are also the targets.
        gradients : list of ndarray
            Arrays with the parameters' shapes; overwritten. Their sums over all
            replicas are the gradients of the mean loss of all rows.

        Returns
        -------
        ndarray of shape (rows,)
            Mean square error of each row; overwritten by the next call.
        """
        hidden_weights, hidden_biases, output_weights, output_biases = parameters
        np.matmul(inputs, hidden_weights, out=self.hidden)
        self.hidden += hidden_biases
        np.tanh(self.hidden, out=self.hidden)
        np.matmul(self.hidden, output_weights, out=self.error)
        self.error += output_biases
        self.error -= inputs
        np.einsum("ij,ij->i", self.error, self.error, out=self.losses)
        self.losses /= NUM_FEATURES

        self.error *= self.scale
        np.matmul(self.error, output_weights.T, out=self.to_hidden)
        np.multiply(self.hidden, self.hidden, out=self.slope)
        np.subtract(1, self.slope, out=self.slope)
        self.to_hidden *= self.slope
        np.matmul(inputs.T, self.to_hidden, out=gradients[0])
        np.sum(self.to_hidden, axis=0, out=gradients[1])
        np.matmul(self.hidden.T, self.error, out=gradients[2])
        np.sum(self.error, axis=0, out=gradients[3])
        return self.losses


class Trainer(ABC):
    """The state of one training, and its step.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    width : int
        Number of hidden units.
    batches : list of ndarray of shape (rows, NUM_FEATURES)
        This replica's rows of each batch.
    """

    def __init__(
        self,
        strategy: hs.MultiWorkerMirroredStrategy,
        width: int,
        batches: list[Array],
    ):
        self.strategy = strategy
        self.comm = strategy.topology.replica_comm
        self.mpi = strategy.topology.mpi
        self.batches = batches
        self.num_global = len(batches[0]) * self.comm.size
        self.network = Network(width, len(batches[0]), self.num_global)
        self.num_steps = 0
        self.loss = math.nan

    def __call__(self) -> None:
        """Do a training step with the next batch.

        Collective over all replicas.
        """
        self.loss = self.step(self.batches[self.num_steps % len(self.batches)])
        self.num_steps += 1

    @abstractmethod
    def step(self, inputs: Array) -> float:
        """Train on some rows; return the mean loss over all replicas' rows.

        Collective over all replicas.

        Parameters
        ----------
        inputs : ndarray of shape (rows, NUM_FEATURES)
            This replica's rows.
        """

    @abstractmethod
    def parameters(self) -> list[Array]:
        """Return the weights and biases.

        Not collective.
        """


class Ours(Trainer):
    """The step by hpcstrat; see `Trainer` for the parameters."""

    def __init__(
        self,
        strategy: hs.MultiWorkerMirroredStrategy,
        width: int,
        batches: list[Array],
    ):
        super().__init__(strategy, width, batches)
        with strategy.scope():
            self.variables = [
                hs.Variable(value, name=f"parameter{index}")
                for index, value in enumerate(initial_parameters(width))
            ]
            self.optimizer = hs.optimizers.SGD(RATE, MOMENTUM)
        self.gradients = [np.zeros_like(array) for array in self.parameters()]

    def parameters(self) -> list[Array]:
        """Return the weights and biases.

        Not collective.
        """
        return [variable.value() for variable in self.variables]

    def replica_step(self, inputs: Array) -> Array:
        """Train on this replica's rows, in replica context.

        Collective over all replicas.
        """
        losses = self.network.losses_and_gradients(
            self.parameters(), inputs, self.gradients
        )
        pairs = zip(self.gradients, self.variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return hs.compute_average_loss(losses, global_batch_size=self.num_global)

    def step(self, inputs: Array) -> float:
        """Train on some rows; return the mean loss over all replicas' rows.

        Collective over all replicas.
        """
        losses = self.strategy.run(self.replica_step, args=(inputs,))
        return float(self.strategy.reduce("sum", losses, axis=None))


class ByHand(Trainer):
    """The step by mpi4py; see `Trainer` for the other parameters.

    Parameters
    ----------
    fastest : bool
        Whether gradients are computed in the send buffer, and summed in pieces.
    """

    def __init__(
        self,
        strategy: hs.MultiWorkerMirroredStrategy,
        width: int,
        batches: list[Array],
        *,
        fastest: bool,
    ):
        super().__init__(strategy, width, batches)
        self.values = initial_parameters(width)
        self.velocities = [np.zeros_like(array) for array in self.values]
        self.packed = np.zeros(sum(array.size for array in self.values), np.float32)
        ends = np.cumsum([array.size for array in self.values])[:-1]
        self.views = [
            part.reshape(array.shape)
            for part, array in zip(
                np.split(self.packed, ends), self.values, strict=True
            )
        ]
        self.gradients = self.views
        if not fastest:
            self.gradients = [np.zeros_like(array) for array in self.values]
        in_place = self.mpi.IN_PLACE
        piece = PIECE if fastest else self.packed.nbytes
        self.all_reduce = in_pieces(self.comm, in_place, self.packed, piece)
        self.total_loss = np.zeros((), np.float32)

    def parameters(self) -> list[Array]:
        """Return the weights and biases.

        Not collective.
        """
        return self.values

    def step(self, inputs: Array) -> float:
        """Train on some rows; return the mean loss over all replicas' rows.

        Collective over all replicas.
        """
        losses = self.network.losses_and_gradients(self.values, inputs, self.gradients)
        if self.gradients is not self.views:
            for view, gradient in zip(self.views, self.gradients, strict=True):
                np.copyto(view, gradient)
        self.all_reduce()
        for gradient, velocity, value in zip(
            self.views, self.velocities, self.values, strict=True
        ):
            np.multiply(gradient, np.float32(-RATE), out=gradient)
            np.multiply(velocity, np.float32(MOMENTUM), out=velocity)
            np.add(velocity, gradient, out=velocity)
            np.add(value, velocity, out=value)
        self.total_loss[...] = losses.sum() / np.float32(self.num_global)
        self.comm.Allreduce(self.mpi.IN_PLACE, self.total_loss)
        return float(self.total_loss)


def require_equal(trainers: dict[str, Trainer], reference: str) -> None:
    """Raise unless all trainings have reached the same weights and loss.

    Not collective.

    Parameters
    ----------
    trainers : dict of str to Trainer
        The trainers, after equal numbers of steps.
    reference : str
        Name of the trainer with which the others are compared.

    Raises
    ------
    ArithmeticError
        If weights or losses differ.
    """
    first = trainers[reference]
    for name, trainer in trainers.items():
        if trainer.num_steps != first.num_steps:
            raise ArithmeticError(
                f"expected {first.num_steps} steps of {name}, found "
                f"{trainer.num_steps}; do not use the times"
            )
        pairs = [
            *zip(first.parameters(), trainer.parameters(), strict=True),
            (np.float32(first.loss), np.float32(trainer.loss)),
        ]
        for expected, found in pairs:
            distance = float(np.linalg.norm(expected - found))
            norm = float(np.linalg.norm(expected))
            if not distance <= TOLERANCE * norm:
                raise ArithmeticError(
                    f"expected weights and loss of {reference} after {first.num_steps} "
                    f"steps of {name}, found a distance of {distance:.3g}, with a norm "
                    f"of {norm:.3g}; do not use the times"
                )
