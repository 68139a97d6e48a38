"""Reports of train_digits.py: hosts, examples per second, and a picture of curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CURVES", "draw", "rate", "replicas_and_hosts"]

CURVES = ("loss", "train accuracy", "test accuracy")


def replicas_and_hosts(strategy: Any) -> str:
    """Return a line with the numbers of replicas and hosts of the training.

    Collective over all replicas.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the training.

    Returns
    -------
    str
        Such as ``4 replicas on 2 hosts: node1, node2``.
    """
    replicas = strategy.arrivals().replicas
    hosts = list(dict.fromkeys(replica.host for replica in replicas))
    words = [
        f"{number} {noun}" + ("s" if number > 1 else "")
        for number, noun in ((len(replicas), "replica"), (len(hosts), "host"))
    ]
    return f"{' on '.join(words)}: {', '.join(hosts)}"


def rate(epochs: int, examples: int, seconds: float) -> str:
    """Return a line with the duration and the rate of a training.

    Not collective.

    Parameters
    ----------
    epochs : int
        Number of completed epochs.
    examples : int
        Number of examples on all replicas in all these epochs.
    seconds : float
        Seconds of these epochs, including tests and checkpoints.

    Returns
    -------
    str
        Such as ``30 epochs in 2.9 s: 14900 examples per second``.
    """
    count = f"{epochs} epoch" + ("" if epochs == 1 else "s")
    return f"{count} in {seconds:.1f} s: {examples / seconds:.0f} examples per second"


def draw(curves: Any, least_loss: float, path: Path) -> None:
    """Draw loss and accuracies over the epochs.

    Not collective.

    Parameters
    ----------
    curves : array, shape (epochs, 3)
        A column for each name of ``CURVES``.
    least_loss : float
        The loss of perfect answers, drawn as a dotted line.
    path : Path
        The picture; its suffix names the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = np.arange(1, len(curves) + 1)
    marker = "o" if len(curves) == 1 else None
    loss.plot(epochs, curves[:, 0], color="black", marker=marker, label="train")
    loss.axhline(least_loss, color="black", linestyle=":", label="least possible")
    loss.set(xlabel="epoch", ylabel="mean loss", ylim=(0, None))
    loss.legend(loc="upper right")
    for column, style in ((1, "--"), (2, "-")):
        label = "train, during the epoch" if column == 1 else "test, after it"
        accuracy.plot(epochs, curves[:, column], style, label=label, marker=marker)
    accuracy.set(xlabel="epoch", ylabel="accuracy")
    accuracy.set_title(f"test accuracy {curves[-1, 2]:.4f}", fontsize="medium")
    accuracy.legend(loc="lower right")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
