"""The state of a run, as one watcher knows it."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from hpcstrat.elastic.watching import claims
from hpcstrat.elastic.watching.claims import Generation
from hpcstrat.elastic.watching.run_launch import RunLaunch

__all__ = ["RunState", "WatchOptions"]

_ANNOUNCEMENT_SECONDS = 20.0
_HALF_WRITTEN_SECONDS = 2.0


@dataclass(frozen=True)
class WatchOptions:
    """Options of a watcher.

    ``folder`` has the claims, the secret and the logs; ``marker`` is the file that
    shows that the program is complete. ``least`` is the number of nodes below which the
    job is queued again. After ``most_failures`` starts in a row without progress, the
    watchers end.
    """

    folder: Path
    marker: Path
    launch: RunLaunch
    least: int
    most_failures: int = 3
    gather_seconds: float = 30.0
    silent_seconds: float = 3.0
    start_seconds: float = 120.0


@dataclass
class RunState:
    """The nodes of a run and its current generation; ``reason`` ends the watcher.

    ``lost`` has how each lost node was noticed: ``closed`` or ``silent``. ``step`` is
    the largest step that a rank of any node has reported. If ``is_stopping``, nothing
    is started any more.
    """

    options: WatchOptions
    node: str
    nodes: tuple[str, ...]
    generation: Generation
    present: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    step: int = -1
    reason: str = ""
    is_stopping: bool = False
    _last_line: str = ""
    _doubted: tuple[int, float] = (0, 0.0)

    def living(self) -> list[str]:
        """Return this node and those with which it is connected, in order."""
        return [n for n in self.nodes if n == self.node or n in self.present]

    def has_lost_node(self) -> bool:
        """Return whether the current generation has lost a node that runs ranks."""
        return any(name in self.lost for name in self.generation.nodes)

    def reached(self) -> tuple[int, float]:
        """Return the largest step, and the time of the newest checkpoint file."""
        newest = 0.0
        for path in self.options.marker.parent.rglob("*.h5"):
            with contextlib.suppress(OSError):
                newest = max(newest, path.stat().st_mtime)
        return self.step, newest

    def log(self, text: str) -> None:
        """Write a line to stderr and to the log of this node, unless it is repeated."""
        if text == self._last_line:
            return
        self._last_line = text
        clock = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(clock))
        line = f"{stamp}.{int(clock % 1 * 1000):03d} {self.node}: {text}\n"
        # The reader of stderr, or the folder, may be gone.
        with contextlib.suppress(OSError):
            sys.stderr.write(line)
            sys.stderr.flush()
        path = self.options.folder / f"log-{self.node}"
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(line)

    def may_pass(self, number: int) -> bool:
        """Return whether a newer claim of somebody else leads to no run.

        If that claim has led to a run without this node, this watcher is to end.
        """
        now = time.monotonic()
        if self._doubted[0] != number:
            self._doubted = number, now
        waited = now - self._doubted[1]
        claim = claims.read(self.options.folder, number)
        if claim is None:
            # Its watcher was lost as it wrote the claim, or will see a newer one.
            return waited > _HALF_WRITTEN_SECONDS
        job = self.generation.job
        if claim.job != job and not self.generation.number:
            # A claim of an earlier job in this folder.
            return True
        if claim.job != job or self.node not in claim.members:
            self.log(
                f"the run goes on without this node, as generation {number} of "
                f"{claim.job}; this node ends its ranks"
            )
            self.reason = "fenced"
            return False
        # Its leader will tell this node, unless it is lost.
        return claim.leader not in self.present or waited > _ANNOUNCEMENT_SECONDS
