"""Detection of Keras models that are made, compiled or trained in a strategy's scope.

A scope calls `watch` when the program has imported Keras. From then on, models outside
of a scope behave as before, and models of a scope are distributed when they first
train, evaluate or predict.
"""

from __future__ import annotations

import functools
import gc
import inspect
from typing import Any

import keras

from hpcstrat.engine.context import current
from hpcstrat.integrations.keras.distribution import distribute_with
from hpcstrat.integrations.keras.replicas import optimizers_of, scope_strategies

__all__ = ["own_all_models", "watch"]

METHODS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)


def watch() -> None:
    """Wrap the methods of the Keras model class, and own the models of a scope."""
    model: Any = keras.Model
    model.__new__ = _made(model.__new__)
    # ``compile`` is wrapped in the class that defines it, because Keras checks whether
    # a subclass overrides it.
    trainer = next(base for base in model.__mro__ if "compile" in vars(base))
    trainer.compile = _compiled(trainer.compile)
    for name in METHODS:
        setattr(model, name, _distributed(getattr(model, name)))
    optimizer: Any = keras.optimizers.Optimizer
    optimizer.apply = _refused_in_run(optimizer.apply)
    # If a scope is active, the program imported Keras in this scope.
    if current() is not None:
        own_all_models()


def own_all_models() -> None:
    """Record the current strategy as the owner of all models of the program.

    RuntimeError if the program has trained a model: no replica has distributed it.
    """
    for found in gc.get_objects():
        if issubclass(type(found), keras.Model):
            _take(found)
            _refuse_trained(found)


def _take(model: Any) -> None:
    """Record the current strategy, if any, as the owner of a model."""
    entry = current()
    if entry is not None and not entry.strategy.is_default:
        scope_strategies[model] = entry.strategy


def _refuse_trained(model: Any) -> None:
    """Raise RuntimeError if replicas have trained a model of this scope separately."""
    entry = current()
    size = 1 if entry is None else entry.strategy.num_replicas_in_sync
    steps = [int(one.iterations) for one in optimizers_of(model).values()]
    if size > 1 and any(steps):
        raise RuntimeError(
            f"expected keras to be imported before the scope in which {model.name!r} "
            f"trains, found an import in the scope, and {max(steps)} steps that each "
            f"of {size} replicas made by itself; import keras before strategy.scope()"
        )


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
        if self in scope_strategies:
            # Remove the methods of an earlier ``compile``, which use the earlier
            # optimizer.
            for name in METHODS:
                vars(self).pop(name, None)
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
        strategy = scope_strategies.get(self)
        if strategy is None:
            return method(self, *args, **options)
        with strategy.collectives.section(f"{name} of Keras"):
            given = inspect.signature(method).bind(self, *args, **options).arguments
            data = {key: value for key, value in given.items() if key != "self"}
            data |= data.pop("kwargs", {})
            shuffle = name == "fit" and data.get("shuffle", True)
            distribute_with(self, strategy, data, shuffle=shuffle)
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
