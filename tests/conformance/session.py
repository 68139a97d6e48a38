"""The state of one program on one rank, and the frames of its functions."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.engine.context import own_index
from tests.conformance.observe import Opaque, encode, encode_tensor, own

__all__ = [
    "Frame",
    "InvalidArgumentError",
    "NotBuiltError",
    "Session",
    "VocabularyError",
    "describe_error",
    "replica_context",
    "variable_kind",
]

# Functions of this package in which a program's own error may occur. An exception from
# any other line of this package is an error of the interpreter.
_PROGRAM_FUNCTIONS = {
    "arithmetic",
    "as_tensor",
    "attribute",
    "check_dtypes",
    "constant",
    "item",
    "raise_error",
    "replica_context",
}
_HERE = str(Path(__file__).parent)


class VocabularyError(Exception):
    """An error: the program uses a word that the interpreter does not know."""


class NotBuiltError(Exception):
    """An error: the program needs a part of hpcstrat that does not exist yet."""


class InvalidArgumentError(Exception):
    """An error in place of the run-time error of TensorFlow's kernels."""


@dataclass
class Frame:
    """The names and arguments of the function that is being executed."""

    mode: str = "cross"  # cross | replica | update
    names: dict[str, Any] = field(default_factory=dict)
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    component: Any = None
    nested: bool = False


def _no_step(frame: Frame, step: dict[str, Any]) -> Any:
    """Raise, because no program runner is set yet."""
    raise VocabularyError(f"nothing executes {step} yet")


def replica_context() -> hs.ReplicaContext:
    """Return the current replica context."""
    context = hs.get_replica_context()
    if context is None:
        raise AttributeError("there is no replica context here")
    return context


def variable_kind(variable: Any) -> str:
    """Return the vocabulary's word for the class of a variable."""
    if isinstance(variable, hs.SyncOnReadVariable):
        return "sync_on_read"
    if isinstance(variable, hs.MirroredVariable):
        return "mirrored"
    return "plain"


class Session:
    """One program on one rank.

    ``comms`` maps a number n to the communicator of the first n ranks (None on other
    ranks). ``directory`` is shared by all ranks. ``opened`` collects the strategies,
    which the caller closes. ``agree`` returns whether a condition holds on all ranks of
    the job.
    """

    def __init__(
        self,
        case: dict[str, Any],
        comms: Mapping[int, Any],
        directory: Path,
        opened: list[Any],
        agree: Callable[[bool], bool],
    ) -> None:
        self.case = case
        self.kind: str = case["strategy"]
        self.comms = comms
        self.directory = directory
        self.opened = opened
        self.agree = agree
        self.strategies: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self.variables: dict[str, Any] = {}
        self.variable_names: dict[int, str] = {}
        self.recalls: dict[str, Any] = {}
        self.shared_objects: dict[str, Opaque] = {}
        self.iterator: Any = None
        self.events: list[dict[str, Any]] = []
        # The program's runner sets this function, which executes a step in a function.
        self.run_step: Callable[[Frame, dict[str, Any]], Any] = _no_step
        self.replicas = 0
        self.strategy: Any = None
        self.use_strategy(case["replicas"])

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return int(self.comms[max(self.comms)].rank)

    @property
    def num_local(self) -> int:
        """The number of replicas of the current strategy on this rank."""
        return len(self.strategy.local_replicas) if self.active else 0

    @property
    def active(self) -> bool:
        """Whether this rank is part of the current strategy."""
        return self.strategy is not None

    def use_strategy(self, replicas: int, kind: str | None = None) -> None:
        """Continue the program with a new strategy."""
        self.kind = kind or self.kind
        self.replicas = replicas
        self.strategy = self.make_strategy(replicas, self.kind)

    def make_strategy(self, replicas: int, kind: str) -> Any:
        """Make a strategy; return None on ranks that are not part of it."""
        if kind == "default":
            return hs.get_strategy()
        if kind == "one_device":
            strategy: Any = hs.OneDeviceStrategy("CPU:0")
        else:
            # If there are more replicas than ranks, they are logical replicas.
            comm = self.comms[min(replicas, max(self.comms))]
            if comm is None:
                return None
            # The replay catches exceptions, so the other replicas must be notified.
            if kind == "mirrored":
                devices = None
                if replicas > comm.size:
                    devices = [f"CPU:{number}" for number in range(replicas)]
                strategy = hs.MirroredStrategy(devices, comm=comm, on_error="raise")
            elif kind == "multi_worker":
                strategy = hs.MultiWorkerMirroredStrategy(
                    replicas_per_worker=1, comm=comm, on_error="raise"
                )
            elif kind == "central_storage":
                strategy = hs.CentralStorageStrategy(comm=comm, on_error="raise")
            else:
                raise VocabularyError(f"unknown strategy {kind}")
        self.opened.append(strategy)
        return strategy

    @contextmanager
    def where(self, place: str) -> Iterator[None]:
        """Enter the scope as many times as ``place`` says."""
        depth = {"outside": 0, "scope": 1, "nested_scope": 2}[place]
        # The cases of the default strategy enter no scope, by definition.
        if self.kind == "default":
            depth = 0
        with ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(self.strategy.scope())
            yield

    def add_variable(self, name: str, variable: Any) -> None:
        """Record a variable under the program's name for it."""
        self.variables[name] = variable
        self.variable_names[id(variable)] = name

    def encode(self, value: Any) -> Any:
        """Return a value of this program in JSON form."""
        return encode(value, self.variable_names)

    def log(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Record an event of the current step, for the declared differences.

        Values that are combined or assigned are also recorded as this rank's part
        alone, with the values of variables instead of their names.
        """
        event = {"kind": kind, "replica": own_index(), **fields}
        if "value" in fields:
            event["part"] = encode(fields["value"], {})
            event["value"] = self.encode(fields["value"])
        self.events.append(event)
        return event

    def facts(self) -> dict[str, Any]:
        """Return this rank's components of every variable, without communication."""
        facts = {}
        for name, variable in self.variables.items():
            kind = variable_kind(variable)
            parts = [variable.numpy()] if kind == "plain" else variable.values
            facts[name] = {
                "value": [own(encode_tensor(part)) for part in parts],
                "class": kind,
                "aggregation": variable.aggregation.name,
                "dtype": np.dtype(variable.dtype).name,
            }
        return facts

    def object_with(self, label: str) -> Opaque:
        """Return the object with this label, the same object for each call."""
        return self.shared_objects.setdefault(label, Opaque(label))


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an exception in JSON form, with the interpreter's own errors marked."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    blamed = isinstance(error, VocabularyError) or (
        last.filename.startswith(_HERE) and last.name not in _PROGRAM_FUNCTIONS
    )
    seen = {
        "error": type(error).__name__,
        "classes": [c.__name__ for c in type(error).__mro__],
        "message": str(error)[:2000],
        "at": f"{Path(last.filename).name}:{last.lineno} in {last.name}",
    }
    if blamed:
        seen["interpreter"] = "".join(traceback.format_exception(error))[-3000:]
    return seen
