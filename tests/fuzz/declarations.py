"""The beginning of a program: a strategy, and all objects made in its scope."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.program import Draw, Op

__all__ = ["SHAPES", "TYPES", "Declarations"]

TYPES = ("float64", "float64", "float32", "int64", "int32", "float16", "complex128")
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (3,), (2, 3), (0,), (5, 1), (700,))
_OPS = ("MpiAllReduce", "HierarchicalCopyAllReduce", "ReductionToOneDevice")


class Declarations:
    """Draws the declarations of a program, and random numbers for its operations."""

    types: tuple[str, ...] = TYPES
    forms: tuple[str, ...] = ("rows", "rows", "list", "shuffling", "function")
    part_saving = 0.35
    all_named = False
    has_plain_state = True
    has_metrics = True
    has_snapshots = True

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._key = seed * 1000
        self.variables: list[Op] = []
        self.optimizers: list[Op] = []
        self.metrics: list[Op] = []
        self.datasets: list[Op] = []
        self.states: list[Op] = []
        self.has_save = self.chance(self.part_saving)
        self.strategy = self._make_strategy()

    # Random choices.

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def rank(self) -> int:
        return self.random.randrange(4)

    def draw(self, dtype: str, shape: tuple[int, ...], style: str = "exact") -> Draw:
        self._key += 1
        return Draw(self._key, dtype, shape, style)

    def draws(self, count: int, *types: str) -> list[Draw]:
        chosen = [
            (self.one(*(types or TYPES)), self.one(*SHAPES)) for _ in range(count)
        ]
        return [self.draw(*one) for one in chosen]

    # Declarations at the beginning of a program.

    def _make_strategy(self) -> Op:
        args = {
            "per_worker": self.one(None, None, 1, 2),
            "on_error": self.one("abort", "raise"),
            "ops": self.one(None, None, None, *_OPS),
            "non_finite": self.one("off", "off", "warn", "raise", "skip"),
            "divergence": self.one("rolling", "rolling", "full", "off"),
        }
        if self.chance(0.1):
            args["ranks"] = self.random.randrange(1, 5)
        if self.chance(0.15):
            args["way"] = "central"
        if self.has_save and self.has_snapshots and self.chance(0.4):
            args["snapshots"] = True
        return Op("strategy", args)

    @property
    def raises(self) -> bool:
        return bool(self.strategy.on_error == "raise")

    def declare(self) -> list[Op]:
        """Return the program's declarations."""
        for _ in range(self.random.randrange(4)):
            self._declare_variable()
        if self.chance(0.6):
            self._declare_optimizer()
        if self.has_metrics and self.chance(0.25):
            rule = self.one("Mean", "Sum")
            self.metrics.append(Op("metric", {"id": "measured", "rule": rule}))
        for _ in range(self.random.randrange(2)):
            if self.forms:
                self._declare_dataset()
        if self.has_save and self.has_plain_state and self.chance(0.4):
            value = self.one(
                {"step": 3, "text": "a", "list": [1.5, None, True]},
                {"seen": (1, 2)},
                {1: "one", "1": "text"},
                {"nested": [{"pair": (1, (2,))}]},
            )
            self.states.append(Op("state", {"id": "state", "value": value}))
        return [
            *self.variables,
            *self.optimizers,
            *self.metrics,
            *self.datasets,
            *self.states,
        ]

    def _declare_variable(self, **args: Any) -> Op:
        dtype = args.pop("dtype", None) or self.one(*self.types)
        shape = args.pop("shape", None) or self.one(*SHAPES[:4], (4, 2))
        ways = ["none", "sum", "only_first_replica"]
        ways += ["mean"] if dtype.startswith("float") else []
        name = f"v{len(self.variables)}"
        made = {
            "id": name,
            "name": name,
            "start": self.draw(dtype, shape),
            "sync": self.one(None, None, "on_read"),
            "aggregation": self.one(*ways),
            **args,
        }
        if (
            made["sync"] == "on_read"
            and self.has_save
            and made["aggregation"] == "none"
        ):
            made["aggregation"] = "sum"
        self.variables.append(Op("variable", made))
        return self.variables[-1]

    def _declare_optimizer(self) -> None:
        rule = self.one("SGD", "SGD", "SGD", "Adam", "AdamW", "Adagrad", "LAMB")
        options: dict[str, Any] = {"learning_rate": self.one(0.5, 0.25, 0.125)}
        if rule == "SGD" and self.chance(0.5):
            options["momentum"] = self.one(0.5, 0.75)
            options["nesterov"] = self.chance(0.3)
        if self.chance(0.5):
            options["accumulate_steps"] = self.random.randrange(2, 5)
        if self.chance(0.2):
            options["clip_global_norm"] = self.one(0.5, 1.0, 4.0)
        if self.chance(0.2):
            options["aggregation"] = "mean"
        if self.chance(0.3):
            options["missing_gradients"] = "zeros"
        unnamed = not (self.has_save or self.all_named) and self.chance(0.25)
        halves = rule == "SGD" and "momentum" not in options and self.chance(0.2)
        if halves and self.chance(0.5):
            options.update(clip_global_norm=2.0**-10, learning_rate=512.0)
        # The global norm would carry float32's rounding errors into float64 values.
        dtypes = ("float64", "float64", "float32")
        one = self.one(*dtypes) if "clip_global_norm" in options else None
        over = []
        for _ in range(self.random.randrange(1, 4) + unnamed):
            dtype = "float16" if halves else one or self.one(*dtypes)
            more = {"name": None} if unnamed else {}
            more["shape"] = (3,) if unnamed else self.one((), (3,), (4, 2))
            over.append(self._declare_variable(dtype=dtype, sync=None, **more).id)
        args = {
            "id": "optimizer",
            "rule": rule,
            "options": options,
            "over": tuple(over),
        }
        args |= {"build": None if unnamed else self.chance(0.3) or None}
        self.optimizers.append(Op("optimizer", {**args, "unnamed": unnamed or None}))

    def _declare_dataset(self) -> None:
        form = self.one(*self.forms)
        rows, batch = self.random.randrange(1, 20), self.random.randrange(1, 7)
        args = {"id": "data", "form": form, "rows": rows, "batch": batch}
        if form == "rows" and self.chance(0.5):
            args |= {"shuffle": True, "seed": self.random.randrange(9)}
        self.datasets.append(Op("dataset", args))
