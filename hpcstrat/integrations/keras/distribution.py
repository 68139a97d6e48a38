"""The call that makes a model of Keras train on all replicas."""

from __future__ import annotations

from typing import Any

from hpcstrat.integrations.frameworks import require_sums_each_step
from hpcstrat.integrations.keras.distributed_model import DistributedMethods
from hpcstrat.integrations.keras.logical_training import LogicalDistributed
from hpcstrat.integrations.keras.replicas import (
    optimizer_of,
    separate_seeds,
    strategies,
)
from hpcstrat.integrations.keras.requirements import (
    require_distributable,
    require_strategy,
)
from hpcstrat.strategies import Strategy

__all__ = ["distribute", "put_on"]


def distribute(model: Any, strategy: Strategy) -> Any:
    """Make a model train, evaluate and predict on all replicas.

    Collective over the strategy's replicas, as are then the model's ``fit``,
    ``evaluate``, ``predict``, ``train_on_batch``, ``test_on_batch`` and
    ``predict_on_batch``, and ``apply`` of its optimizers.

    The model stays what it is, and is saved as it would be. Weights, states of layers
    and the optimizer's begin with those of replica 0, here and in each ``fit``. Arrays
    that are passed are global batches, or many of them, the same on every replica;
    other data are this replica's share. What comes out is the same on every replica:
    weights and logs, which are those of one process up to rounding, and predictions,
    which are those of all rows.

    Parameters
    ----------
    model : keras.Model
        Compiled, with its weights, the same on every replica. After another ``compile``
        call this again.
    strategy : Strategy
        Whose replicas.

    Returns
    -------
    keras.Model
        The model itself.

    Raises
    ------
    ValueError
        For a model that is not compiled, or has no weights yet; for a strategy of
        another library; where TensorFlow is to compile with XLA.
    NotImplementedError
        For layers with ``synchronized=True``; for a backend that trains no models; for
        a strategy whose replicas are not in sync.
    RuntimeError
        Where Keras would combine gradients by itself: with a distribution of its own,
        or, from 3.16 on, over a process group of torch.distributed.
    CollectiveError
        If the replicas' models differ. On every replica. Later, the methods raise it
        where replicas do different things.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.keras as hsk
    >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> model = hsk.distribute(model, hs.get_strategy())
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=2, verbose=0)
    >>> sorted(history.history)
    ['loss']
    """
    require_strategy(strategy)
    require_sums_each_step(strategy, "a model of Keras")
    return strategy.collectives.call("distribute", put_on, model, strategy)


def put_on(model: Any, strategy: Strategy, *, by_scope: bool = False) -> Any:
    """Do what `distribute` says, in a call of all replicas.

    ``by_scope``: all data are global batches, and the model need not be compiled.
    """
    require_distributable(model, is_compiled=not by_scope)
    optimizer = optimizer_of(model)
    # Now, so that `begin` finds its state: Keras builds it in the first step.
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    kind = LogicalDistributed if strategy.logical else DistributedMethods
    distributed = kind(model, strategy, by_scope=by_scope)
    separate_seeds(model, distributed.mask)
    distributed.install()
    distributed.state.begin("distribute")
    strategies[model] = strategy
    return model
