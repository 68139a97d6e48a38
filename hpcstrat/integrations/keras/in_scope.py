"""Models that a strategy's scope makes train on all replicas, without `distribute`."""

from __future__ import annotations

import functools
from typing import Any

from hpcstrat.data import Dataset
from hpcstrat.integrations.frameworks import require_sums_each_step
from hpcstrat.integrations.keras.dealt_batches import DealtBatches, dealt
from hpcstrat.integrations.keras.distribution import put_on
from hpcstrat.integrations.keras.py_dataset import Batches, columns_of
from hpcstrat.integrations.keras.replicas import strategies
from hpcstrat.strategies import Strategy, get_strategy
from hpcstrat.strategies.keras_models import strategy_of

__all__ = ["distribute_with", "owner_of"]

_WHAT = "a model of Keras"


def distribute_with(model: Any, strategy: Strategy, data: dict[str, Any]) -> None:
    """Distribute a model before its first call with some data; builds it by them.

    Collective over the strategy's replicas. Of ``data``, the arguments of the call by
    their names, ``x`` is replaced where its first batch had to be read.
    """
    require_sums_each_step(strategy, _WHAT)
    if not all(layer.built for layer in model._flatten_layers()):
        data["x"] = dealt(data["x"], strategy)
        batch = _first(data, strategy)
        if model.compiled:
            model._symbolic_build(data_batch=batch)
        else:
            model(batch[0] if isinstance(batch, tuple) else batch)
    _distribute(model, strategy)


def owner_of(model: Any) -> Strategy:
    """Return the strategy that a model is of, or the current one.

    Collective over its replicas for a model of a scope that has not been distributed.
    """
    owner, known = strategy_of(model), strategies.get(model)
    if known is not None or owner is None:
        return known or get_strategy()
    require_sums_each_step(owner, _WHAT)
    _distribute(model, owner)
    return owner


def _distribute(model: Any, strategy: Strategy) -> None:
    begin = functools.partial(put_on, model, strategy, by_scope=True)
    strategy.collectives.call("distribute", begin)


def _first(data: dict[str, Any], strategy: Strategy) -> Any:
    """Return a first batch of the data of a call, or a part of it."""
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
    return tuple(rows.values())
