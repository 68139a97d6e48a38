"""The network of train_digits.py in NumPy: 64 pixels, hidden units, 10 digits.

The activation is max(x, 0) squared, because its slope is continuous. With max(x, 0)
itself, a rounding error that moves a sum past zero changes the gradient of a whole
unit. Runs on different numbers of replicas, which add in different orders, would then
diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["forward", "initial_parameters", "least_loss", "losses_and_gradients"]

Array = np.ndarray[Any, Any]

NUM_PIXELS = 64
NUM_HIDDEN = 256
NUM_CLASSES = 10
# The share of each target that is spread over all classes (label smoothing, Szegedy et
# al. 2016, doi:10.1109/CVPR.2016.308): it keeps the network from overfitting.
SMOOTHING = 0.1


def initial_parameters(seed: int, dtype: str) -> dict[str, Array]:
    """Draw the network's weights, which depend only on the seed.

    Not collective.

    Parameters
    ----------
    seed : int
        Seed of the generator.
    dtype : str
        Type of the arrays. The weights are drawn as float64 and rounded to this type.

    Returns
    -------
    dict of str to array
        Weights and biases of both layers, in the order in which they act.
    """
    generator = np.random.default_rng(seed)
    parameters = {}
    for layer, num_inputs, num_outputs in (
        ("hidden", NUM_PIXELS, NUM_HIDDEN),
        ("output", NUM_HIDDEN, NUM_CLASSES),
    ):
        weights = generator.standard_normal((num_inputs, num_outputs))
        parameters[f"{layer}_weights"] = (weights / np.sqrt(num_inputs)).astype(dtype)
        parameters[f"{layer}_biases"] = np.zeros(num_outputs, dtype)
    return parameters


def forward(parameters: Sequence[Array], images: Array) -> tuple[Array, Array]:
    """Compute the outputs of both layers for some images.

    Not collective.

    Parameters
    ----------
    parameters : sequence of array
        The values of ``initial_parameters``.
    images : array, shape (n, 64)
        Pixels from 0 to 1; n may be 0.

    Returns
    -------
    rectified : array, shape (n, 256)
        Sums of the hidden layer, the negative ones set to 0, before they are squared.
    logits : array, shape (n, 10)
        Logarithms of the digits' probabilities, up to a constant for each image.
    """
    hidden_weights, hidden_biases, output_weights, output_biases = parameters
    rectified = np.maximum(images @ hidden_weights + hidden_biases, 0)
    return rectified, rectified**2 @ output_weights + output_biases


def least_loss() -> float:
    """Return the loss of perfect answers: the entropy of the smoothed targets.

    Not collective.

    Returns
    -------
    float
        In the unit of the losses, nats.
    """
    targets = np.full(NUM_CLASSES, SMOOTHING / NUM_CLASSES)
    targets[0] += 1 - SMOOTHING
    return float(-(targets * np.log(targets)).sum())


def losses_and_gradients(
    parameters: Sequence[Array], images: Array, labels: Array, num_global: int
) -> tuple[Array, list[Array], int]:
    """Compute one loss per image, and this replica's part of the mean's gradient.

    Not collective.

    Parameters
    ----------
    parameters : sequence of array
        The values of ``initial_parameters``.
    images : array, shape (n, 64)
        This replica's part of the batch; n may be 0.
    labels : array of int, shape (n,)
        The digits.
    num_global : int
        Number of images of this batch on all replicas together.

    Returns
    -------
    losses : array, shape (n,)
        Cross-entropy of each image.
    gradients : list of array
        One gradient for each parameter. The sums over all replicas are the gradient of
        the mean loss of the global batch.
    num_correct : int
        Number of images whose greatest logit is at their label.
    """
    output_weights = parameters[2]
    rectified, logits = forward(parameters, images)
    logits -= logits.max(axis=1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    targets = np.full_like(logits, SMOOTHING / NUM_CLASSES)
    targets[np.arange(len(labels)), labels] += 1 - SMOOTHING
    losses = -(targets * log_probabilities).sum(axis=1)

    to_logits = (np.exp(log_probabilities) - targets) / num_global
    to_hidden = to_logits @ output_weights.T * (2 * rectified)
    gradients = [
        images.T @ to_hidden,
        to_hidden.sum(axis=0),
        (rectified**2).T @ to_logits,
        to_logits.sum(axis=0),
    ]
    return losses, gradients, int((logits.argmax(axis=1) == labels).sum())
