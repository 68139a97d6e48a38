"""An error where Keras would train a model of its own on each replica of a scope.

Keras is never imported here; its classes stay as they are until a scope of several
replicas is entered, and its methods do what they did for all other models.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from hpcstrat.engine.context import current

__all__ = ["guard_keras"]

# Models that were compiled in a scope, with its strategy.
_compiled: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def guard_keras() -> None:
    """Let Keras' training ask whether a model was distributed; not collective."""
    model = getattr(sys.modules.get("keras"), "Model", None)
    if model is None or "_hpcstrat_guard" in vars(model):
        return
    model._hpcstrat_guard = True
    for name in ("fit", "train_on_batch"):
        setattr(model, name, _guarded(getattr(model, name)))
    model.compile = _marking(model.compile)


def _distributing() -> Any:
    entry = current()
    if entry is None or not entry.strategy.distributes:
        return None
    return entry.strategy if entry.strategy.num_replicas_in_sync > 1 else None


def _marking(method: Any) -> Any:
    @functools.wraps(method)
    def compile_marked(self: Any, *args: Any, **options: Any) -> Any:
        found = method(self, *args, **options)
        strategy = _distributing()
        if strategy is None:
            _compiled.pop(self, None)
        else:
            _compiled[self] = strategy
        return found

    return compile_marked


def _guarded(method: Any) -> Any:
    @functools.wraps(method)
    def train(self: Any, *args: Any, **options: Any) -> Any:
        strategy = _distributing() or _compiled.get(self)
        # `distribute` puts methods of its own on the model.
        if strategy is not None and method.__name__ not in vars(self):
            error = RuntimeError(
                f"expected a model of Keras that is distributed, found {self.name!r}, "
                f"which each of {strategy.num_replicas_in_sync} replicas would train "
                "by itself; call hpcstrat.integrations.keras.distribute(model, "
                "strategy) after compile, or compile and train it outside of the scope"
            )
            strategy.collectives.fail(f"{method.__name__} of Keras", error)
            raise error
        return method(self, *args, **options)

    return train
