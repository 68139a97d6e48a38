"""Detection of Keras models that are made, compiled or trained in a strategy's scope.

This module never imports Keras. When a strategy's scope is entered, methods of the
Keras model class are wrapped; models outside of a scope behave as before. When a model
from a scope first trains, evaluates or predicts, `hpcstrat.integrations.keras` is
loaded, and distributes the model.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import weakref
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hpcstrat.engine.context import current

METHODS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)

_owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def watch_keras() -> None:
    """Wrap the methods of the Keras model class, now or when Keras is imported."""
    keras = sys.modules.get("keras")
    model = getattr(keras, "Model", None)
    if model is None:
        if not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WhenImported())
    elif "_hpcstrat_watched" not in vars(model):
        model._hpcstrat_watched = True
        model.__new__ = _made(model.__new__)
        # ``compile`` is wrapped in the class that defines it, because Keras checks
        # whether a subclass overrides it.
        trainer = next(base for base in model.__mro__ if "compile" in vars(base))
        trainer.compile = _compiled(trainer.compile)
        for name in METHODS:
            setattr(model, name, _distributed(getattr(model, name)))
        optimizer: Any = keras.optimizers.Optimizer  # type: ignore[union-attr]
        optimizer.apply = _refused_in_run(optimizer.apply)


def strategy_of(model: Any) -> Any:
    """Return the strategy in whose scope a Keras model was used, or None."""
    return _owners.get(model)


def _take(model: Any) -> None:
    """Record the current strategy, if any, as the owner of a model."""
    entry = current()
    if entry is not None and not entry.strategy.is_default:
        _owners[model] = entry.strategy


def _made(new: Any) -> Any:
    @functools.wraps(new)
    def make(cls: Any, *args: Any, **options: Any) -> Any:
        model = new(cls, *args, **options)
        _take(model)
        return model

    return staticmethod(make)


def _compiled(method: Any) -> Any:
    @functools.wraps(method)
    def compile_model(self: Any, *args: Any, **options: Any) -> Any:
        _take(self)
        if self in _owners:
            # Remove the methods of an earlier ``compile``, which use the earlier
            # optimizer.
            for name in METHODS:
                vars(self).pop(name, None)
            keras: Any = sys.modules["keras"]
            if keras.config.backend() == "tensorflow":
                # On GPUs Keras would use XLA, whose code cannot call MPI.
                options.setdefault("jit_compile", False)
        return method(self, *args, **options)

    return compile_model


def _distributed(method: Any) -> Any:
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        # If `distribute_with` has stored a distributed method in the model object, that
        # method makes this call, to run the original method.
        if name in vars(self):
            return method(self, *args, **options)
        _take(self)
        strategy = _owners.get(self)
        if strategy is None:
            return method(self, *args, **options)
        with strategy.collectives.section(f"{name} of Keras"):
            # Imported by name, because integrations are in a layer above this module.
            found = importlib.import_module("hpcstrat.integrations.keras.distribution")
            given = inspect.signature(method).bind(self, *args, **options).arguments
            data = {key: value for key, value in given.items() if key != "self"}
            data |= data.pop("kwargs", {})
            found.distribute_with(self, strategy, data)
        return getattr(self, name)(**data)

    return call


def _refused_in_run(method: Any) -> Any:
    """Wrap ``apply`` of optimizers: refuse a step whose gradients are not combined."""
    # Optimizers whose ``apply`` is running. Some optimizers call an inner optimizer;
    # only the outermost optimizer is checked, because the program calls only that one.
    inside: list[Any] = []

    @functools.wraps(method)
    def apply(self: Any, *args: Any, **options: Any) -> Any:
        entry = current()
        in_run = entry is not None and entry.replica_context is not None
        # `distribute` gives the optimizer object its own ``apply``, which combines
        # gradients; an optimizer with this attribute is not refused.
        if in_run and not inside and "apply" not in vars(self):
            size = entry.strategy.num_replicas_in_sync  # type: ignore[union-attr]
            if size > 1:
                raise RuntimeError(
                    f"expected an optimizer of Keras whose gradients are combined, "
                    f"found {self.name!r}, with which each of {size} replicas would "
                    "train by itself; compile the model with it, and call "
                    "hpcstrat.integrations.keras.distribute(model, strategy), or fit"
                )
        inside.append(self)
        try:
            return method(self, *args, **options)
        finally:
            inside.pop()

    return apply


class _WhenImported:
    """An import hook that calls `watch_keras` after Keras is imported."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a spec for Keras, whose loader also calls `watch_keras`.

        For other modules, return None."""
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenWatch(spec, spec.loader)
        return spec


class _ThenWatch(Loader):
    """A module loader that calls another loader, and then `watch_keras`."""

    def __init__(self, spec: ModuleSpec, loader: Any) -> None:
        self._spec = spec
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        # The original loader is put back first, because other code gets files of the
        # package from the module's loader.
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        watch_keras()
