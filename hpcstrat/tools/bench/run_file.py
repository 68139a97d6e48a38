"""The file of one run, which has all measurements of one launch as JSON.

This is version 1 of the format. Names never change, because other programs read the
file. Sizes are in bytes, and times are in seconds::

    {
     "format": "hpcstrat scaling", "format_version": 1,
     "topology": {
      "num_replicas": 4,
      "replicas_per_worker": [2, 2],   a worker: the replicas that share a node's memory
      "cores_per_worker": [2, 2],      the cores on which their ranks may run
      "worker_of_replica": [0, 0, 1, 1],
      "ranks_per_replica": 1,          missing in files of earlier versions
      "device": "CPU"
     },
     "reduction": {                    the options of sums over replicas
      "bytes_per_pack": 0, "implementation": "AUTO", "wire_dtype": null,
      "slot_bytes": 524288             the largest piece in shared memory
     },
     "sessions": [{                    a run that was killed and continued has several
      "started": "2026-11-23T10:00:00+00:00", "command": "...",
      "hosts": ["node1", "node2"],     the host of each worker
      "versions": {...}, "environment": {...},
      "energy": {"joules": ..., ...}   since a later version: `EnergyMeter.result`
     }],
     "links": {                        medians over pairs of replicas
      "inside": {"latency_seconds": ..., "bytes_per_second": ..., "num_measured": 2,
                 "measured": [[0, 1, 5.6e-07, 2e+10], ...]},   slowest 2016 pairs
      "between": null,                 between two workers; null if there is one worker
      "large_bytes": 4194304,
      "slow": [{"hosts": [...], "latency_ratio": ..., "bandwidth_ratio": ...}]
     },
     "parts": [{
      "name": "step", "scaling": "weak",
      "parameters": {...},             describe the work; equal in runs of any size
      "session": 0,                    index of the session that measured it
      "batch_size": 64,                examples of all replicas; 0 if there is no batch
      "calls_per_repeat": 1,
      "seconds": [...],                of each repeat, per call, of the slowest rank
      "own_seconds": [...],            mean of the ranks, like all times below
      "late_seconds": [...],           waiting for replicas that arrive later
      "communication_seconds": [...],  in calls, after all replicas have arrived
      "input_seconds": [...],          in next() of a data set
      "num_calls": 2,                  calls that replica 0 makes in one step
      "reduced_bytes": 102228132,      bytes that it passes to these calls
      "algorithm": "reduce_in_memory", that sums "nbytes" bytes; empty if there is
      "piece_bytes": 262144,           a single replica
      "others_share": [0.01, 0.02],    of each worker's host, used by other programs
      "replicas": {                    sums over the repeats, one for each replica,
       "own_seconds": [...],           means of its ranks
       "late_seconds": [...],
       "communication_seconds": [...], "input_seconds": [...]
      }
     }],
     "expected": null                  or expected times, as described in `expectation`
    }

Names of parts are ``all_reduce`` (parameters: ``nbytes``), ``gradients`` (``model``,
``nbytes``, ``num_arrays``), ``step``, ``save``, ``restore`` and ``input``. Scaling is
``same`` if the arguments of a call do not depend on the number of replicas, ``weak`` if
the global batch grows with the number of replicas, and ``strong`` if all replicas
together always do the same work.
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
# The parameters that each known part must have; other parameters are only shown.
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
    """An error of a benchmark or of its report; its message advises what to do."""


@dataclass(slots=True)
class Part:
    """One measured part of a run; the module's docstring describes the fields."""

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
        """A key by which the same part is found in runs of other sizes."""
        # Sort the names, because another program may write them in any order.
        words = json.dumps(self.parameters, sort_keys=True)
        return self.name, self.scaling, words


@dataclass(slots=True)
class MeasuredRun:
    """The content of a run's file, as the module's docstring describes it.

    ``path`` is the path from which the file was read.
    """

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
        """The number of replicas on each worker."""
        return tuple(self.topology["replicas_per_worker"])

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self.topology["replicas_per_worker"])

    @property
    def ranks_per_replica(self) -> int:
        """The number of ranks of each replica."""
        return int(self.topology["ranks_per_replica"])

    @property
    def cores_per_rank(self) -> float:
        """The smallest number of cores per rank; below 1, ranks share cores."""
        pairs = zip(
            self.topology["cores_per_worker"], self.replicas_per_worker, strict=True
        )
        smallest = min(cores / replicas for cores, replicas in pairs)
        return float(smallest / self.ranks_per_replica)

    @property
    def of_ranks(self) -> str:
        """The words that follow "replicas" if these have several ranks, or ""."""
        count = self.ranks_per_replica
        return f" of {count} ranks each" if count > 1 else ""

    @property
    def layout(self) -> str:
        """The number of replicas, and the workers' sizes, such as ``4 (2 x 2)``."""
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
        """Return the content of the file as a dict."""
        # Omit the path, because the file may be moved.
        content = asdict(self)
        del content["path"]
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **content}


def write_run(run: MeasuredRun, path: str) -> None:
    """Write the file of a run atomically, like `write_json`."""
    write_json(run.to_json(), path)


def write_json(content: Any, path: str) -> None:
    """Write JSON to a file atomically; after an OSError the old file is unchanged.

    Only one rank may call this function. If ``path`` exists and is not a regular file,
    such as /dev/stdout, the text is written to it directly.
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
            # Flush before the rename: a full disk may be reported only by fsync.
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def load_json(path: str, form: str, version: int, made_by: str) -> dict[str, Any]:
    """Read a JSON file of format ``form``; raise BenchError for another format."""
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
    # Check the type, because the user may pass any JSON file, such as a list.
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
    """Read a run's file; raise BenchError if it is damaged or has another format."""
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
    # A missing field raises KeyError, which names the field.
    for name in _REQUIRED:
        content[name]
    for name in _TOPOLOGY:
        content["topology"][name]
    # Drop fields of later versions of hpcstrat, which this version does not know.
    known = {part_field.name for part_field in fields(Part)}
    run = MeasuredRun(
        topology={"ranks_per_replica": 1, **content["topology"]},
        reduction=dict(content["reduction"]),
        sessions=list(content["sessions"]),
        links=dict(content["links"]),
        parts=[
            Part(**{name: value for name, value in part.items() if name in known})
            for part in content["parts"]
        ],
        # Optional, because only other programs write this field.
        expected=content.get("expected"),
        path=path,
    )
    _check_topology(run)
    for session in run.sessions:
        # Check the types now, so that no error occurs while a page is being written.
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
    """Raise ValueError or TypeError if replicas and workers are inconsistent."""
    sizes = run.replicas_per_worker
    # Check the sizes first, because the check of the cores divides by them.
    if min(sizes, default=0) < 1 or sum(sizes) != run.num_replicas:
        raise ValueError(f"{run.num_replicas} replicas, of other numbers per worker")
    if run.ranks_per_replica < 1:
        raise ValueError(f"{run.ranks_per_replica} ranks of a replica")
    if run.cores_per_rank <= 0:
        raise ValueError("a worker without cores")
    if Counter(run.topology["worker_of_replica"]) != dict(enumerate(sizes)):
        raise ValueError("replicas of other workers than these")


def _check_part(part: Part, run: MeasuredRun) -> None:
    """Raise ValueError, TypeError or KeyError if a part has impossible figures."""
    where = f"in the part {part.name}, {part.scaling}"
    for name in _PARAMETERS.get(part.name, ()):
        part.parameters[name]
    if part.scaling not in SCALINGS:
        raise ValueError(f"an unknown scaling {where}")
    if not part.seconds or not all(float(value) > 0 for value in part.seconds):
        raise ValueError(f"no times, or none above 0, {where}")
    for name in ("own", "late", "communication", "input"):
        values = getattr(part, f"{name}_seconds")
        # A part of single calls has none of these times; a part of steps has all four.
        if len(values) != (len(part.seconds) if part.own_seconds else 0):
            raise ValueError(f"another number of {name}_seconds {where}")
    for name, values in part.replicas.items():
        if len(values) != run.num_replicas:
            raise ValueError(f"{len(values)} of replicas.{name} {where}")
    # The list is empty if a host's operating system does not report busy times.
    if len(part.others_share) not in (0, run.num_workers):
        raise ValueError(f"another number of others_share {where}")
    if not 0 <= part.session < len(run.sessions):
        raise ValueError(f"a session that is none {where}")
