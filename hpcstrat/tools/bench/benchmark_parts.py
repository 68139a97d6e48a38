"""The parts of a scaling benchmark, with their parameters and measuring functions."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.checkpoint import CheckpointManager
from hpcstrat.data import Dataset
from hpcstrat.strategies.base import Strategy
from hpcstrat.strategies.current import get_replica_context
from hpcstrat.tools.bench.measuring import Repeats, fill_calls, fill_steps
from hpcstrat.tools.bench.run_file import BenchError, Part
from hpcstrat.tools.bench.shapes import MODELS, gradient_bytes
from hpcstrat.tools.bench.training import (
    StepSize,
    TiledRows,
    TrainingStep,
    load_function,
)
from hpcstrat.variables import Variable

__all__ = ["PARTS", "Options", "Planned", "planned"]

PARTS = ("all_reduce", "gradients", "step", "checkpoint", "input")
"""The parts that a user can choose; the first two time calls, the others time steps."""


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options; the benchmark reads and writes its files in ``folder``."""

    parts: tuple[str, ...] = PARTS
    sizes: tuple[int, ...] = ()
    models: tuple[str, ...] = tuple(MODELS)
    model: str = "resnet50"
    compute_seconds: float = 0.1
    step: str = ""
    batch_size: int = 64
    row_bytes: int = 4096
    repeats: Repeats = field(default_factory=Repeats)
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """Parts of a benchmark that are measured together.

    The times in ``parts`` are empty until ``measure`` adds them. ``measure`` is
    collective over the strategy's replicas.
    """

    parts: tuple[Part, ...]
    measure: Callable[[Strategy], None]

    @property
    def title(self) -> str:
        """A description of these parts in one line."""
        part = self.parts[0]
        words = [part.name.replace("_", "-")]
        words += [
            str(part.parameters[k]) for k in ("model", "step") if k in part.parameters
        ]
        if part.name == "all_reduce":
            words.append(f"of {part.parameters['nbytes']:,} bytes")
        if part.scaling != "same":
            words.append(part.scaling)
        return " ".join(words)


def planned(options: Options) -> list[Planned]:
    """Return all requested parts, in the order in which they are measured."""
    makers: dict[str, Callable[[Options], Iterator[Planned]]] = {
        "all_reduce": _all_reduces,
        "gradients": _gradients,
        "step": _steps,
        "checkpoint": _checkpoints,
        "input": _inputs,
    }
    found = [makers[name](options) for name in PARTS if name in options.parts]
    return list(itertools.chain.from_iterable(found))


def _all_reduces(options: Options) -> Iterator[Planned]:
    for nbytes in options.sizes:
        part = Part("all_reduce", "same", {"nbytes": nbytes}, [])
        shapes = [(nbytes // 4,)]
        measure = functools.partial(_measure_sums, part, shapes, options.repeats)
        yield Planned((part,), measure)


def _gradients(options: Options) -> Iterator[Planned]:
    for model in options.models:
        shapes = MODELS[model]()
        about = {
            "model": model,
            "nbytes": gradient_bytes(model),
            "num_arrays": len(shapes),
        }
        part = Part("gradients", "same", about, [])
        measure = functools.partial(_measure_sums, part, shapes, options.repeats)
        yield Planned((part,), measure)


def _measure_sums(
    part: Part,
    shapes: Sequence[tuple[int, ...]],
    repeats: Repeats,
    strategy: Strategy,
) -> None:
    # Sum zeros, which do not grow when sums are repeated in place.
    arrays = [np.zeros(shape, np.float32) for shape in shapes]
    part.reduced_bytes = 4 * sum(map(math.prod, shapes))
    part.num_calls = 1

    def call() -> None:
        context: Any = get_replica_context()
        # Sum in place: page faults of a new result would take longer than the sum.
        context.all_reduce("sum", arrays, out=arrays)

    fill_calls(part, strategy, call, repeats)


def _weak_and_strong(
    name: str, parameters: dict[str, Any], measure: Callable[[Part, Strategy], None]
) -> Iterator[Planned]:
    for scaling in ("weak", "strong"):
        part = Part(name, scaling, dict(parameters), [])
        yield Planned((part,), functools.partial(measure, part))


def _set_batch(part: Part, batch_size: int, strategy: Strategy) -> None:
    """Set the global batch size; raise BenchError on all ranks if it is too small."""
    count = strategy.num_replicas_in_sync
    part.batch_size = batch_size * (count if part.scaling == "weak" else 1)
    # Each replica needs an example: a replica without examples would only wait.
    if part.batch_size < count:
        raise BenchError(
            f"expected an example for each of {count} replicas in strong scaling, "
            f"found a batch of {part.batch_size}; give a larger --batch-size"
        )


def _steps(options: Options) -> Iterator[Planned]:
    # These parameters must not depend on the number of replicas, because parts of
    # different runs are compared only if they have equal parameters.
    parameters: dict[str, Any] = {"batch_size": options.batch_size}
    if options.step:
        parameters["step"] = options.step
    else:
        parameters |= {
            "model": options.model,
            "nbytes": gradient_bytes(options.model),
            "compute_seconds": options.compute_seconds,
            "row_bytes": options.row_bytes,
        }

    def measure(part: Part, strategy: Strategy) -> None:
        _set_batch(part, options.batch_size, strategy)
        step: Callable[[], Any]
        if options.step:
            step = load_function(options.step)(strategy, part.batch_size)
        else:
            size = StepSize(
                options.model,
                options.compute_seconds,
                options.batch_size,
                part.batch_size,
            )
            num_steps = options.repeats.in_all
            step = TrainingStep(strategy, size, options.folder, num_steps)
        fill_steps(part, strategy, step, options.repeats)

    return _weak_and_strong("step", parameters, measure)


def _inputs(options: Options) -> Iterator[Planned]:
    parameters = {"batch_size": options.batch_size, "row_bytes": options.row_bytes}

    def measure(part: Part, strategy: Strategy) -> None:
        _set_batch(part, options.batch_size, strategy)
        # Make rows for all steps: the end of an epoch would end the measurement.
        rows = TiledRows(options.folder, part.batch_size * options.repeats.in_all)
        dataset = Dataset(rows, part.batch_size)
        batches = iter(strategy.experimental_distribute_dataset(dataset))
        fill_steps(part, strategy, lambda: next(batches), options.repeats)

    return _weak_and_strong("input", parameters, measure)


def _checkpoints(options: Options) -> Iterator[Planned]:
    about = {"model": options.model, "nbytes": gradient_bytes(options.model)}
    # Strong scaling: any number of replicas together write and read the same data.
    save, restore = (
        Part(name, "strong", dict(about), []) for name in ("save", "restore")
    )

    def measure(strategy: Strategy) -> None:
        # Save random data, because a file system cannot compress them.
        generator = np.random.default_rng(0)
        with strategy.scope():
            variables = [
                Variable(generator.random(shape, np.float32), name=f"weights_{number}")
                for number, shape in enumerate(MODELS[options.model]())
            ]
        folder = os.path.join(options.folder, "checkpoints")
        with CheckpointManager(folder, max_to_keep=1, weights=variables) as manager:
            # Save each checkpoint under a new step number, as in training.
            numbers = itertools.count()
            fill_steps(
                save, strategy, lambda: manager.save(next(numbers)), options.repeats
            )
            fill_steps(restore, strategy, manager.restore, options.repeats)

    yield Planned((save, restore), measure)
