"""Draws a program from a seed. The program is independent of the number of ranks."""

from __future__ import annotations

from typing import Any

from tests.fuzz.declarations import TYPES, Declarations
from tests.fuzz.program import Op, Program

__all__ = ["KINDS", "generate"]

_CLASSES = ("ValueError", "FloatingPointError", "OSError", "BadBatchError")
_LOOPED = (3,)


class _Maker(Declarations):
    """Draws the operations on the declared objects of a program."""

    def step(self) -> list[Op]:
        """Return an operation, or several operations that belong together."""
        ways = [self.reduce, self.gather, self.run, self.run, self.other]
        if self.variables:
            ways += [self.variable, self.run]
        if self.optimizers:
            ways += [self.train, self.train]
            ways += [self.trained_on] * (2 * self.has_save)
        if self.datasets:
            ways += [self.epoch, self.epoch]
        if self.metrics:
            ways += [self.metric]
        if self.has_save and (self.variables or self.optimizers or self.states):
            ways += [self.save, self.restart]
        made = self.one(*ways)()
        return made if isinstance(made, list) else [made]

    def reduce(self) -> list[Op]:
        ops: list[Op] = []
        args: dict[str, Any] = {"how": self.one("sum", "sum", "mean")}
        way = self.random.random()
        if way < 0.35:
            dtype = self.one("float64", "int64", "int8", "float32", "float16", "uint8")
            style = "huge" if dtype == "float64" and self.chance(0.3) else "exact"
            shape = self.one((4,), (3, 2), (1,))
            args |= {"axis": 0, "values": [self.draw(dtype, shape, style)]}
            if style == "huge" and self.chance(0.5):
                ops.append(Op("errors", {"all": "raise"}))
        elif way < 0.6:
            shape, style = self.one((3,), (40,), (3000,)), "rounding"
            dtype = self.one("float64", "float32")
            args |= {"how": "sum", "values": [self.draw(dtype, shape, style)]}
        else:
            args["values"] = self.draws(self.random.randrange(1, 4))
            if args["how"] == "sum":
                args["out"] = self.one(None, "self", "new")
                if args["out"] and self.chance(0.3):
                    dtype = self.one("float64", "int64")
                    pair = [self.draw(dtype, (3,)), self.draw(dtype, (4,))]
                    args |= {"out": "overlap", "values": pair}
        if self.chance(0.08) and not args.get("out") and args.get("axis") is None:
            args["fault"] = ("text", self.rank())
        args["thread"] = self.chance(0.1) or None
        return [*ops, Op("reduce", args)]

    def gather(self) -> Op:
        shapes = [self.one((3,), (2, 3), (5,)) for _ in range(self.one(1, 1, 2))]
        values = [self.draw(self.one(*TYPES), shape) for shape in shapes]
        return Op("gather", {"values": values, "thread": self.chance(0.1) or None})

    def variable(self) -> Op:
        var = self.one(*self.variables)
        start = var.start
        if var.sync is None and start.shape and self.chance(0.2):
            return self._rows(var, "rows")
        if self.chance(0.5):
            return Op("read", {"var": var.id})
        method = self.one("assign", "assign_add", "assign_sub")
        value = self.draw(start.dtype, start.shape)
        args = {"var": var.id, "method": method, "value": value}
        if self.raises and self.chance(0.1):
            allowed = var.sync is None or method == "assign"
            if allowed and var.aggregation != "none":
                args["fault"] = ("shape", self.rank())
        return Op("assign", args)

    def _rows(self, var: Op, kind: str) -> Op:
        start, method = var.start, self.one("scatter_add", "scatter_sub")
        if var.aggregation in ("none", "only_first_replica") and self.chance(0.4):
            method = self.one("scatter_update", "scatter_max")
        if start.dtype.startswith("complex"):
            method = "scatter_add"
        dtype, count = start.dtype, self.random.randrange(1, 4)
        if dtype.startswith("int") and self.chance(0.3):
            dtype = "float64"
        lines = range(start.shape[0])
        indices = [
            tuple(self.random.sample(lines, min(count, len(lines)))) for _ in range(4)
        ]
        value = self.draw(dtype, (len(indices[0]), *start.shape[1:]))
        args = {"var": var.id, "method": method, "value": value}
        return Op(kind, {**args, "indices": tuple(indices)})

    def metric(self) -> Op:
        return Op(self.one("result", "result", "reset"), {"metric": "measured"})

    def other(self) -> Op:
        mirrored = [
            var
            for var in self.variables
            if var.sync is None and 0 not in var.start.shape
        ]
        if mirrored and self.chance(0.3):
            fault = ("differ", self.rank())
            return Op("differ", {"var": self.one(*mirrored).id, "fault": fault})
        if self.chance(0.3):
            return Op("errors", {"all": self.one("raise", "raise", "ignore")})
        return Op(self.one("barrier", "check"))

    def save(self) -> Op:
        args = {"background": self.chance(0.3) or None}
        if self.strategy.snapshots:
            args["if_due"] = self.chance(0.7) or None
        return Op("save", args)

    def restart(self) -> list[Op]:
        args = {**self.strategy.args, "per_worker": self.one(None, 1, 2)}
        args["ranks"] = self.one(None, 1, 2, 3, 4)
        args["way"] = self.one(None, None, "central")
        ops = [self.save(), Op("restart", args)]
        return ops if self.chance(0.7) else [ops[0], *self.step(), ops[1]]

    def run(self) -> Op:
        body = [self.inner() for _ in range(self.random.randrange(1, 4))]
        return self._with_fault(body)

    def _with_fault(self, body: list[Op]) -> Op:
        args: dict[str, Any] = {"body": body}
        faulty = any(map(self._may_fail, body))
        if self.raises and not faulty and self.chance(0.25):
            at = self.random.randrange(len(body) + 1)
            args["fault"] = (self.one(*_CLASSES), self.rank(), at)
        return Op("run", args)

    def _may_fail(self, op: Op) -> bool:
        """Return whether an operation may fail by itself; it gets no second fault."""
        scatters = op.kind == "scatter"
        alone = any(
            one.id == op.var and one.aggregation == "none" for one in self.variables
        )
        nothing = op.kind == "apply" and not any(op.gradients)
        return bool(op.fault or op.lacks or scatters or alone or nothing)

    def train(self) -> list[Op]:
        """Return some training steps with an optimizer."""
        ops = []
        for _ in range(self.random.randrange(1, 5)):
            body = self.apply(None)
            if self.chance(0.2):
                body.insert(0, self.inner())
            ops.append(self._with_fault(body))
        return [*ops, Op("progress", {"optimizer": "optimizer"})]

    def trained_on(self) -> list[Op]:
        """Return training steps around a restart, perhaps during an accumulation."""
        return [*self.train(), *self.restart(), *self.train()]

    def apply(self, fixed: bool | None) -> list[Op]:
        """Return an optimizer call; without ``name``, return one for each variable."""
        optimizer = self.optimizers[0]
        each = [(name,) for name in optimizer.over]
        groups = each if optimizer.unnamed else [optimizer.over]
        if optimizer.unnamed and optimizer.options.get("accumulate_steps", 1) > 1:
            groups = groups[:1]
        return [self._apply_one(optimizer, names, fixed) for names in groups]

    def _apply_one(self, optimizer: Op, names: tuple[str, ...], plain: Any) -> Op:
        starts = [one.start for one in self.variables if one.id in names]
        gradients: list[Any] = [self.draw(one.dtype, one.shape) for one in starts]
        args = {"optimizer": optimizer.id, "over": names, "gradients": gradients}
        if plain:
            return Op("apply", args)
        if len(names) == 1 and starts[0].shape and self.chance(0.3):
            lines, (start,) = range(starts[0].shape[0]), starts
            rows = tuple(tuple(self.random.choices(lines, k=2)) for _ in range(4))
            args["gradients"] = [self.draw(start.dtype, (2, *start.shape[1:]))]
            return Op("apply", {**args, "rows": rows})
        if starts[0].dtype == "float16" and self.chance(0.5):
            gradients[0] = self.draw("float16", starts[0].shape, "half")
        for index in range(len(names)):
            if len(names) > 1 and self.chance(0.15):
                gradients[index] = None
        if self.strategy.non_finite != "off" and self.chance(0.15):
            gradients[0] = self.draw(starts[0].dtype, starts[0].shape, "nan")
        if self.chance(0.15):
            args["lacks"] = (self.random.randrange(len(names)), self.rank())
        elif self.raises and any(gradients) and self.chance(0.1):
            args["fault"] = ("shape", self.rank())
        return Op("apply", args)

    def inner(self) -> Op:
        """Return a random operation of a replica function."""
        ways = [self._all_reduce, self._all_reduce, self._all_gather, self._merge]
        if self.strategy.ops is None:
            ways.append(self._started)
        if self.variables:
            ways += [self._update, self._update, self._own]
        if self.metrics:
            ways.append(self._measure)
        return Op(*self.one(*ways)())

    def _all_reduce(self) -> tuple[str, dict[str, Any]]:
        args: dict[str, Any] = {"how": self.one("sum", "mean", "max", "min")}
        args["values"] = self.draws(self.random.randrange(1, 4))
        if any(draw.dtype.startswith("complex") for draw in args["values"]):
            args["how"] = self.one("sum", "mean")
        if args["how"] != "mean" and self.chance(0.3):
            args["out"] = "self"
        elif self.chance(0.08):
            args["fault"] = ("text", self.rank())
        return "all_reduce", args

    def _all_gather(self) -> tuple[str, dict[str, Any]]:
        return "all_gather", {"values": self.gather().values}

    def _started(self) -> tuple[str, dict[str, Any]]:
        return "started", {"how": "sum", "values": self.draws(2)}

    def _merge(self) -> tuple[str, dict[str, Any]]:
        return "merge", {"how": self.one("sum", "mean"), "values": self.draws(1)}

    def _update(self) -> tuple[str, dict[str, Any]]:
        var = self.one(*self.variables)
        start = var.start
        if var.sync is None and start.shape and self.chance(0.3):
            op = self._rows(var, "scatter")
            return op.kind, op.args
        method = self.one("assign", "assign_add", "assign_sub")
        value = self.draw(start.dtype, start.shape)
        args = {"var": var.id, "method": method, "value": value}
        if var.sync is None and var.aggregation != "none" and self.chance(0.1):
            args["fault"] = ("shape", self.rank())
        return "update", args

    def _own(self) -> tuple[str, dict[str, Any]]:
        return "own", {"var": self.one(*self.variables).id}

    def _measure(self) -> tuple[str, dict[str, Any]]:
        return "measure", {"metric": "measured", "value": self.draw("float64", (4,))}

    def epoch(self) -> Op:
        dataset = self.datasets[0]
        args: dict[str, Any] = {"dataset": dataset.id, "body": []}
        if dataset.form != "shuffling":
            args["steps"] = self.one(None, None, 1, 2)
            args["gathers"] = True
            if self.optimizers and self.chance(0.6):
                args["body"] = self.apply(True)
        if self.chance(0.5):
            args["body"] = [*args["body"], self.looped()]
        return Op("epoch", args)

    def looped(self, **more: Any) -> Op:
        """Return the same call as in other steps, with different numbers."""
        values = [self.draw("int64", _LOOPED)]
        return Op("all_reduce", {"how": "sum", "values": values, **more})

    def parting(self) -> list[Op]:
        """Return a call that one rank aborts, and calls easily confused with it."""
        ways = ["interrupt", "memory"]
        if not self.raises:
            ways.append("caught")
        if self.datasets and self.datasets[0].form in ("rows", "list"):
            ways += ["step", "step"]
        way, rank = self.one(*ways), self.rank()
        later = [Op("run", {"body": [self.looped()]}) for _ in range(4)]
        body = [self.looped()]
        if way == "step":
            rows, batch = self.datasets[0].rows, self.datasets[0].batch
            number = self.random.randrange(-(-rows // batch))
            fault: tuple[Any, ...] = (way, rank, number)
            args = {"dataset": "data", "body": body, "fault": fault}
            return [Op("epoch", args), *later]
        if way == "caught":
            return [Op("run", {"body": body, "fault": ("ValueError", rank, 0)}), *later]
        call = self.looped(fault=(way, rank))
        if self.chance(0.5):
            # The same call follows, in cross-replica context.
            again = [Op("reduce", dict(self.looped().args)) for _ in range(4)]
            return [Op("reduce", call.args), *again]
        return [Op("run", {"body": [call]}), *later]


class _Grouped(_Maker):
    """Draws programs of groups."""

    types = ("float64", "float64", "float32", "int64")
    forms = ("rows", "list", "function")
    all_named = True

    def _make_strategy(self) -> Op:
        args = super()._make_strategy().args
        every = self.random.randrange(1, 5)
        rates = {"learning_rate": 1.0}, {"learning_rate": 0.5, "momentum": 0.5}
        args |= {
            "way": "groups",
            "ops": None,
            "size": self.one(None, 1, 1, 2),
            "every": every,
            "delay": self.one(0, 0, self.random.randrange(1, every + 1)),
            "outer": self.one(None, *rates),
        }
        return Op("strategy", args)

    def _declare_optimizer(self) -> None:
        super()._declare_optimizer()
        for variable in self.variables:
            # Values rounded to half precision twice would not be exact.
            if variable.start.dtype == "float16":
                variable.args["trainable"] = False

    def step(self) -> list[Op]:
        ops = super().step()
        if self.chance(0.7):
            ops += [Op("round")] * self.one(1, 1, 2)
        elif self.chance(0.15):
            ops.append(Op("end_round"))
        return ops

    def restart(self) -> list[Op]:
        ops = super().restart()
        # If the groups differ from those of the checkpoint, a policy must be given.
        policy = self.one("first", "cycle")
        ops[-1].args |= {"way": "groups", "size": self.one(None, 1, 1, 2)}
        ops[-1].args["per_replica"] = policy
        return ops


class _Served(_Maker):
    """Draws programs of a coordinator, or of workers that share variables."""

    types = ("float64", "float64", "float32", "int64", "int32", "complex128")
    forms = ()
    part_saving = 0.5
    all_named = True
    has_plain_state = False
    has_metrics = False
    has_snapshots = False

    def _make_strategy(self) -> Op:
        args = super()._make_strategy().args
        args |= {"ops": None, "on_error": "abort", "ranks": None, "per_worker": None}
        return Op("strategy", {**args, **self._servers()})

    def _servers(self) -> dict[str, Any]:
        return {
            "way": self.one("served", "served", "shared"),
            "servers": self.one(1, 1, 2),
            "shards": self.one(None, 2, 3),
        }

    def _declare_variable(self, **args: Any) -> Op:
        return super()._declare_variable(**{**args, "sync": None})

    def _declare_optimizer(self) -> None:
        super()._declare_optimizer()
        (optimizer,) = self.optimizers
        optimizer.options.pop("accumulate_steps", None)
        optimizer.options.pop("aggregation", None)
        if optimizer.rule == "LAMB":
            # LAMB is refused for variables with several shards.
            optimizer.args |= {"rule": "SGD", "options": {"learning_rate": 0.25}}

    def _update(self) -> tuple[str, dict[str, Any]]:
        kind, args = super()._update()
        # Remove the fault, because a call has no replicas of which one could fail.
        args.pop("fault", None)
        return kind, args

    def step(self) -> list[Op]:
        ways = [self.schedule, self.schedule, self.schedule]
        ways += [self.variable] * (len(self.variables) > 0)
        if self.has_save and (self.variables or self.optimizers):
            ways += [self.save, self.restart]
        made = self.one(*ways)()
        return made if isinstance(made, list) else [made]

    def restart(self) -> list[Op]:
        ops = super().restart()
        ops[-1].args |= {**self._servers(), "ranks": None}
        return [ops[0], ops[-1], *[self.read(var) for var in self.variables]]

    def read(self, var: Op) -> Op:
        return Op("read", {"var": var.id})

    def schedule(self) -> Op:
        calls = self.one(1, 1, 2, 5, 17)
        if calls == 1:
            body = [self._alone() for _ in range(self.random.randrange(1, 5))]
        elif self.chance(0.1):
            body = [self._compute(), Op("fail", {"call": self.random.randrange(calls)})]
            body += [self._seen(var) for var in self.variables]
        else:
            body = self._beside()
        return Op("schedule", {"calls": calls, "body": body})

    def _compute(self) -> Op:
        dtype, shape = self.one("float64", "int32"), self.one((), (3,), (3000,))
        return Op("compute", {"value": self.draw(dtype, shape)})

    def _seen(self, var: Op) -> Op:
        shape = var.start.shape
        if shape and self.chance(0.5):
            count = self.random.randrange(1, 5)
            ids = tuple(self.random.choices(range(shape[0]), k=count))
            return Op("lookup", {"var": var.id, "ids": ids})
        return Op("own", {"var": var.id})

    def _alone(self) -> Op:
        """Return the operation of a function that is called once."""
        ways = [self._compute]
        if self.variables:
            ways += [lambda: Op(*self._update()), self._seen_one] * 2
        if self.optimizers:
            ways += [lambda: self._stepped(plain=False)] * 2
        return self.one(*ways)()

    def _seen_one(self) -> Op:
        return self._seen(self.one(*self.variables))

    def _stepped(self, *, plain: bool) -> Op:
        """Return an optimizer step, with all gradients if the rule needs them."""
        optimizer = self.optimizers[0]
        op = self._apply_one(optimizer, optimizer.over, True)
        if plain and len(optimizer.over) == 1 and self.chance(0.5):
            return self._apply_one(optimizer, optimizer.over, False)
        if self.chance(0.1) and self.strategy.non_finite in ("raise", "skip"):
            first = op.gradients[0]
            op.gradients[0] = self.draw(first.dtype, first.shape, "nan")
        return op

    def _beside(self) -> list[Op]:
        """Return the operations of calls whose order does not matter."""
        body, written = [self._compute()], set()
        for optimizer in self.optimizers:
            plain = optimizer.rule == "SGD" and "momentum" not in optimizer.options
            if plain and self.chance(0.7):
                body.append(self._stepped(plain=True))
                written |= set(optimizer.over)
        for var in self.variables:
            if var.id in written or self.chance(0.3):
                body += [] if var.id in written else [self._seen(var)]
                continue
            for _ in range(self.one(1, 1, 2)):
                method = self.one("assign_add", "assign_sub")
                value = self.draw(var.start.dtype, var.start.shape)
                args = {"var": var.id, "method": method, "value": value}
                body.append(Op("update", args))
        self.random.shuffle(body)
        return body


class _Inside(_Maker):
    """Draws programs whose replicas have several ranks."""

    def _make_strategy(self) -> Op:
        args = super()._make_strategy().args
        args |= {"on_error": "abort", "way": None, "ranks_per_replica": self.one(2, 3)}
        return Op("strategy", args)

    def restart(self) -> list[Op]:
        ops = super().restart()
        each = self.one(None, 2, 2, 3)
        ops[-1].args |= {"way": None, "ranks_per_replica": each}
        return ops


_MAKERS = {
    "mirrored": _Maker,
    "groups": _Grouped,
    "served": _Served,
    "inside": _Inside,
}
KINDS = tuple(_MAKERS)
"""What kinds of programs there are."""


def generate(seed: int, kind: str = "mirrored") -> Program:
    """Return the program of a seed."""
    maker = _MAKERS[kind](seed)
    ops = [maker.strategy, *maker.declare()]
    for _ in range(maker.random.randrange(3, 9)):
        ops += maker.step()
    usual = kind == "mirrored"
    if usual and maker.chance(0.2):
        ops += maker.parting()
    elif usual and maker.chance(0.08):
        dtype, shape = maker.one("int64", "float64"), maker.one((), (3,), (500,))
        values = [maker.draw(dtype, shape) for _ in range(2)]
        ops.append(Op("threads", {"values": values}))
    else:
        ops += [Op("read", {"var": var.id}) for var in maker.variables]
        steps = [Op("progress", {"optimizer": one.id}) for one in maker.optimizers]
        ops += steps if kind != "served" else []
    return Program(ops, f"seed {seed}, {kind}")
