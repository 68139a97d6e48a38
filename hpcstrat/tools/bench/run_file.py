"""The file of one run: all measurements of one launch, as JSON.

This is version 1 of the format. Names never change, because other programs read them;
sizes are in bytes, times in seconds::

    {
     "format": "hpcstrat scaling", "format_version": 1,
     "topology": {
      "num_replicas": 4,
      "replicas_per_worker": [2, 2],   a worker is what shares a node's memory
      "cores_per_worker": [2, 2],      on which its replicas may run
      "worker_of_replica": [0, 0, 1, 1],
      "device": "CPU"
     },
     "reduction": {                    the options of sums over replicas
      "bytes_per_pack": 0, "implementation": "AUTO", "wire_dtype": null,
      "slot_bytes": 524288             the largest piece in shared memory
     },
     "sessions": [{                    a run that was killed, and goes on, has several
      "started": "2026-11-23T10:00:00+00:00", "command": "...",
      "hosts": ["node1", "node2"],     of each worker
      "versions": {...}, "environment": {...}
     }],
     "links": {                        between two replicas, medians of
      "inside": {"latency_seconds": ..., "bytes_per_second": ..., "num_measured": 2,
                 "measured": [[0, 1, 5.6e-07, 2e+10], ...]},   ranks; the slowest 2016
      "between": null,                 of two workers; null where there is one
      "large_bytes": 4194304,
      "slow": [{"hosts": [...], "latency_ratio": ..., "bandwidth_ratio": ...}]
     },
     "parts": [{
      "name": "step", "scaling": "weak",
      "parameters": {...},             what is measured: the same at every size
      "session": 0,                    which one measured it
      "batch_size": 64,                examples of all replicas; 0 where there are none
      "calls_per_repeat": 1,
      "seconds": [...],                of each repeat, per call: the slowest replica's
      "own_seconds": [...],            the mean of the replicas, as all below
      "late_seconds": [...],           waiting for replicas that came later to a call
      "communication_seconds": [...],  in calls, once all had come
      "input_seconds": [...],          in next() of a data set
      "num_calls": 2,                  that replica 0 makes in one step
      "reduced_bytes": 102228132,      that it gives to them
      "algorithm": "reduce_in_memory", of sums of the parameter "nbytes" bytes; empty
      "piece_bytes": 262144,           for a single replica
      "others_share": [0.01, 0.02],    of each worker's host, busy with other programs
      "replicas": {                    sums over the repeats, in the replicas' order
       "own_seconds": [...], "late_seconds": [...],
       "communication_seconds": [...], "input_seconds": [...]
      }
     }],
     "expected": null                  or as of --expected, see `expectation`
    }

Names of parts are ``all_reduce`` (parameters: ``nbytes``), ``gradients`` (``model``,
``nbytes``, ``num_arrays``), ``step``, ``save`` and ``restore``, ``input``. Scaling is
``same`` where the work of each replica does not depend on their number, ``weak`` where
the batch grows with it, ``strong`` where all together do the same.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hpcstrat.errors import HpcstratError

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "BenchError",
    "MeasuredRun",
    "Part",
    "load_json",
    "read_run",
    "write_json",
    "write_run",
]

FORMAT = "hpcstrat scaling"
FORMAT_VERSION = 1

LINKS = ("inside", "between")
SCALINGS = ("same", "weak", "strong")
# Known parameters of parts by name; others are only shown.
_PARAMETERS = {
    "all_reduce": ("nbytes",),
    "gradients": ("nbytes",),
    "save": ("nbytes",),
    "restore": ("nbytes",),
    "input": ("row_bytes",),
}
_REQUIRED = ("topology", "reduction", "sessions", "links", "parts")
_TOPOLOGY = (
    "num_replicas",
    "replicas_per_worker",
    "cores_per_worker",
    "worker_of_replica",
    "device",
)


class BenchError(HpcstratError):
    """An error of a benchmark or its report; the message says what to do."""


@dataclass(slots=True)
class Part:
    """One measured part; the module documents the fields."""

    name: str
    scaling: str
    parameters: dict[str, Any]
    seconds: list[float]
    session: int = 0
    batch_size: int = 0
    calls_per_repeat: int = 1
    own_seconds: list[float] = field(default_factory=list)
    late_seconds: list[float] = field(default_factory=list)
    communication_seconds: list[float] = field(default_factory=list)
    input_seconds: list[float] = field(default_factory=list)
    num_calls: int = 0
    reduced_bytes: int = 0
    algorithm: str = ""
    piece_bytes: int = 0
    others_share: list[float] = field(default_factory=list)
    replicas: dict[str, list[float]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """A key that is the same in runs of other sizes."""
        # Sorted: other programs may write the names of a file in any order.
        words = json.dumps(self.parameters, sort_keys=True)
        return self.name, self.scaling, words


@dataclass(slots=True)
class MeasuredRun:
    """The content of a file; the module documents it. ``path`` is where it was read."""

    topology: dict[str, Any]
    reduction: dict[str, Any] = field(default_factory=dict)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    links: dict[str, Any] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    expected: dict[str, Any] | None = None
    path: str = ""

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return int(self.topology["num_replicas"])

    @property
    def replicas_per_worker(self) -> tuple[int, ...]:
        """The number of replicas of each worker."""
        return tuple(self.topology["replicas_per_worker"])

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self.topology["replicas_per_worker"])

    @property
    def cores_per_replica(self) -> float:
        """Cores per replica of the worker that has the fewest; below 1 they share
        cores.
        """
        pairs = zip(
            self.topology["cores_per_worker"], self.replicas_per_worker, strict=True
        )
        return float(min(cores / replicas for cores, replicas in pairs))

    @property
    def layout(self) -> str:
        """The replicas in words, such as ``4 (2 x 2)``."""
        sizes = self.replicas_per_worker
        if len(sizes) == 1:
            return str(self.num_replicas)
        if len(set(sizes)) == 1:
            return f"{self.num_replicas} ({len(sizes)} x {sizes[0]})"
        rest = "..." if len(sizes) > 4 else ""
        return f"{self.num_replicas} ({' + '.join(map(str, sizes[:4]))}{rest})"

    def part(self, key: tuple[str, str, str]) -> Part | None:
        """Return the measured part with this key, or None."""
        return next((part for part in self.parts if part.key == key), None)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        # The path of a file is not part of the measurement: the file may be moved.
        content = asdict(self)
        del content["path"]
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **content}


def write_run(run: MeasuredRun, path: str) -> None:
    """Replace the file of a run by a new one, as `write_json` does."""
    write_json(run.to_json(), path)


def write_json(content: Any, path: str) -> None:
    """Replace a file by a new one atomically; on OSError the old one stays.

    One rank calls it. A target that is not a regular file, such as /dev/stdout, is
    written to directly.
    """
    text = json.dumps(content, indent=1)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        return
    path = os.path.realpath(path)
    partial = f"{path}.part"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            # Before it replaces the other: the error of a full disk may come only here.
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def load_json(path: str, form: str, version: int, made_by: str) -> dict[str, Any]:
    """Return the content of a file of one of our formats; BenchError for another."""
    what = f"a file of {made_by}"
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise BenchError(
            f"expected {what}, found that {path} cannot be read: {error.strerror}; "
            "check the path"
        ) from error
    except ValueError as error:
        raise BenchError(
            f"expected {what}, found that {path} is not JSON: {error}; omit it, or "
            "measure again"
        ) from error
    # Any JSON may be given: a list has no fields.
    found = content.get("format") if isinstance(content, dict) else None
    if found != form:
        raise BenchError(
            f"expected {what}, found in {path} "
            f"{f'the format {found!r}' if found else 'another JSON'}; omit it"
        )
    if content.get("format_version") != version:
        raise BenchError(
            f"expected version {version} of the format, found "
            f"{content.get('format_version')!r} in {path}; use the hpcstrat that wrote "
            "it, or measure again"
        )
    return dict(content)


def read_run(path: str) -> MeasuredRun:
    """Read a file; BenchError if it has another format, or is damaged."""
    content = load_json(path, FORMAT, FORMAT_VERSION, "hpcstrat bench scaling")
    try:
        return _parsed(content, path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"expected all fields of version {FORMAT_VERSION}, found in {path} "
            f"{_words(error)}; omit it, or measure again"
        ) from error


def _words(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"none with the name {error.args[0]!r}"
    return str(error)


def _parsed(content: dict[str, Any], path: str) -> MeasuredRun:
    # Read only for the KeyError, which names the missing field.
    for name in _REQUIRED:
        content[name]
    for name in _TOPOLOGY:
        content["topology"][name]
    # Fields of a later version that this one does not know are dropped.
    known = {part_field.name for part_field in fields(Part)}
    run = MeasuredRun(
        topology=dict(content["topology"]),
        reduction=dict(content["reduction"]),
        sessions=list(content["sessions"]),
        links=dict(content["links"]),
        parts=[
            Part(**{name: value for name, value in part.items() if name in known})
            for part in content["parts"]
        ],
        # Only other programs write it, so that files may lack it.
        expected=content.get("expected"),
        path=path,
    )
    _check_topology(run)
    for session in run.sessions:
        # Check values before half of a page is made.
        str(session["started"]), dict(session["versions"])
        if len(session["hosts"]) != run.num_workers:
            raise ValueError(f"{len(session['hosts'])} hosts of a session")
    for link in filter(None, (run.links.get(name) for name in LINKS)):
        if min(link["latency_seconds"], link["bytes_per_second"]) <= 0:
            raise ValueError("a link without latency or bandwidth")
    for part in run.parts:
        _check_part(part, run)
    return run


def _check_topology(run: MeasuredRun) -> None:
    """Refuse replicas and workers that are inconsistent; ValueError, TypeError."""
    sizes = run.replicas_per_worker
    # Checked before the cores are divided by these.
    if min(sizes, default=0) < 1 or sum(sizes) != run.num_replicas:
        raise ValueError(f"{run.num_replicas} replicas, of other numbers per worker")
    if run.cores_per_replica <= 0:
        raise ValueError("a worker without cores")
    if Counter(run.topology["worker_of_replica"]) != dict(enumerate(sizes)):
        raise ValueError("replicas of other workers than these")


def _check_part(part: Part, run: MeasuredRun) -> None:
    """Refuse impossible figures; ValueError, TypeError, IndexError."""
    where = f"in the part {part.name}, {part.scaling}"
    for name in _PARAMETERS.get(part.name, ()):
        part.parameters[name]
    if part.scaling not in SCALINGS:
        raise ValueError(f"an unknown scaling {where}")
    if not part.seconds or not all(float(value) > 0 for value in part.seconds):
        raise ValueError(f"no times, or none above 0, {where}")
    for name in ("own", "late", "communication", "input"):
        values = getattr(part, f"{name}_seconds")
        # Single calls have times only; steps have all four.
        if len(values) != (len(part.seconds) if part.own_seconds else 0):
            raise ValueError(f"another number of {name}_seconds {where}")
    for name, values in part.replicas.items():
        if len(values) != run.num_replicas:
            raise ValueError(f"{len(values)} of replicas.{name} {where}")
    # It is empty if a host's system does not report busy times.
    if len(part.others_share) not in (0, run.num_workers):
        raise ValueError(f"another number of others_share {where}")
    if not 0 <= part.session < len(run.sessions):
        raise ValueError(f"a session that is none {where}")
