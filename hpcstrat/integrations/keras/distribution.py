"""Makes a Keras model train on all replicas, by `distribute` or in a scope."""

from __future__ import annotations

import functools
from typing import Any

from hpcstrat.data import Dataset
from hpcstrat.integrations.frameworks import require_one_rank, require_sums_each_step
from hpcstrat.integrations.keras.dealt_batches import DealtBatches, dealt
from hpcstrat.integrations.keras.distributed_model import DistributedMethods
from hpcstrat.integrations.keras.logical_training import LogicalDistributed
from hpcstrat.integrations.keras.py_dataset import Batches, columns_of, for_backend
from hpcstrat.integrations.keras.replicas import (
    optimizer_of,
    scope_strategies,
    separate_seeds,
    strategies,
)
from hpcstrat.integrations.keras.requirements import (
    require_distributable,
    require_strategy,
)
from hpcstrat.strategies import Strategy, get_strategy

__all__ = ["distribute", "distribute_with", "owner_of"]

_WHAT = "a model of Keras"


def distribute(model: Any, strategy: Strategy) -> Any:
    """Make a model train, evaluate and predict on all replicas.

    Collective over the strategy's replicas. From then on the model's ``fit``,
    ``evaluate``, ``predict``, ``train_on_batch``, ``test_on_batch`` and
    ``predict_on_batch``, and ``apply`` of its optimizers, are collective, too.

    The model is saved as if it were not distributed. Weights and the state of layers
    and optimizer become equal to replica 0's, here and in each ``fit``. Arrays,
    `Batches` and data sets of hpcstrat contain global batches, the same on every
    replica; other iterables contain this replica's share of each batch. Weights, logs
    and predictions are the same on every replica, and as in one process up to rounding.

    Parameters
    ----------
    model : keras.Model
        A compiled model with weights, the same on every replica. After another
        ``compile``, call `distribute` again.
    strategy : Strategy
        The strategy whose replicas train the model.

    Returns
    -------
    keras.Model
        The model itself.

    Raises
    ------
    ValueError
        For a model that is not compiled, or has no weights yet; for a strategy of
        another library; if TensorFlow is set to compile with XLA.
    NotImplementedError
        For layers with ``synchronized=True``; for a backend that trains no models; for
        a strategy whose replicas are not in sync.
    RuntimeError
        If Keras would combine gradients by itself: with a distribution of its own, or,
        from 3.16 on, over a process group of torch.distributed.
    CollectiveError
        If the replicas' models differ; raised on every replica. Later, the model's
        methods raise it if replicas make different calls.

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
    return _distribute(model, strategy)


def distribute_with(
    model: Any, strategy: Strategy, data: dict[str, Any], *, shuffle: Any
) -> None:
    """Distribute a model of a strategy's scope, and first build it if needed.

    Collective over the strategy's replicas. ``data`` are the arguments, by name, of the
    model's method that the program calls, and ``shuffle`` is that argument of ``fit``.
    If building the model reads a batch of ``data["x"]``, this function replaces
    ``data["x"]``, so that no batch is lost.
    """
    require_one_rank(strategy, _WHAT)
    require_sums_each_step(strategy, _WHAT)
    if not all(layer.built for layer in model._flatten_layers()):
        data["x"] = dealt(data["x"], strategy)
        if isinstance(data["x"], DealtBatches):
            data["x"].shuffle = bool(shuffle)
            data["x"].on_epoch_begin()
        batch = _first(data, strategy)
        if model.compiled:
            model._symbolic_build(data_batch=batch)
        else:
            model(batch[0] if isinstance(batch, tuple) else batch)
    _distribute(model, strategy, by_scope=True)


def owner_of(model: Any) -> Strategy:
    """Return the strategy to which a model belongs, or the current strategy.

    If the model was made or compiled in a scope and is not distributed yet, this call
    distributes it, and is collective over the strategy's replicas.
    """
    owner, known = scope_strategies.get(model), strategies.get(model)
    if known is not None or owner is None:
        return known or get_strategy()
    _distribute(model, owner, by_scope=True)
    return owner


def _distribute(model: Any, strategy: Strategy, *, by_scope: bool = False) -> Any:
    require_one_rank(strategy, _WHAT)
    require_sums_each_step(strategy, _WHAT)
    begin = functools.partial(_put_on, model, strategy, by_scope=by_scope)
    return strategy.collectives.call("distribute", begin)


def _put_on(model: Any, strategy: Strategy, *, by_scope: bool) -> Any:
    """Distribute a model, inside of a collective call.

    With ``by_scope`` all data are global batches, and the model need not be compiled.
    """
    require_distributable(model, is_compiled=not by_scope)
    optimizer = optimizer_of(model)
    # `begin` broadcasts the optimizer's state, so build the optimizer now; Keras would
    # build it only in the first step.
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    kind = LogicalDistributed if strategy.logical else DistributedMethods
    distributed = kind(model, strategy, by_scope=by_scope)
    separate_seeds(model, distributed.mask)
    distributed.install()
    distributed.state.begin("distribute")
    strategies[model] = strategy
    return model


def _first(data: dict[str, Any], strategy: Strategy) -> Any:
    """Return some rows of a method's data, with which the model can be built."""
    x = data["x"]
    if isinstance(x, DealtBatches):
        return x.first
    if isinstance(x, Dataset):
        x = Batches.of(x, strategy)
    if isinstance(x, Batches):
        return x.first_rows()
    names = ("x", "y", "sample_weight")
    arrays = {name: data[name] for name in names if data.get(name) is not None}
    columns: Any = columns_of(arrays)
    rows = columns.read(slice(0, min(columns.num_rows, data.get("batch_size") or 32)))
    return for_backend(tuple(rows.values()))
