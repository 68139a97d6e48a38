"""End a rank at one point of a save: ``save_step.py FOLDER HOW END``.

Steps 1 and 2 are saved first, then step 3 by ``HOW``: ``wait`` (for the save) or ``go``
(continue while the save runs). ``END`` is the signal that the rank sends to itself:
``kill`` or ``stop``. The environment names the point: ``SAVE_STEP_PLACE`` is one of
`PLACES`, ``SAVE_STEP_RANK`` the rank. The rank makes ``FOLDER/reached`` at this point.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcstrat as hs
from tests.mpi.programs import save_loop
from tests.mpi.programs.save_trace import around_calls

ENDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
OLD, NEW = 2, 3


@dataclass(frozen=True)
class Place:
    """A moment of a save.

    The moment is ``before``, ``amid`` (half of the data is written) or ``after`` a call
    of this kind (`save_trace.KINDS`); ``index`` calls of this kind come before it. Only
    these ``ranks`` reach the moment, in saves of these ``hows``; afterwards the newest
    checkpoint is of one of these ``steps``.
    """

    when: str
    kind: str
    index: int = 0
    ranks: tuple[int, ...] = (0,)
    hows: tuple[str, ...] = ("wait", "go")
    steps: tuple[int, ...] = (OLD,)

    def __str__(self) -> str:
        """Return the moment as text."""
        return f"{self.when} {self.kind} {self.index}"


def _by_all(when: str, kind: str, index: int = 0) -> Place:
    return Place(when, kind, index, ranks=(0, 1))


def _of_threads(when: str, kind: str, *steps: int) -> Place:
    return Place(when, kind, ranks=(1,), hows=("go",), steps=steps)


def _published(when: str, kind: str) -> Place:
    return Place(when, kind, steps=(NEW,))


_PLACES = (
    Place("before", "create"),
    Place("after", "create"),
    _by_all("before", "open"),
    _by_all("before", "write block"),
    _by_all("amid", "write block"),
    _by_all("after", "write block"),
    _by_all("amid", "write block", 1),
    _by_all("after", "write block", 1),
    _by_all("before", "flush block"),
    _by_all("after", "flush block"),
    _of_threads("before", "write verdict", OLD),
    # Replica 0 may have time to finish the save, because it no longer needs other
    # ranks.
    _of_threads("amid", "write verdict", OLD),
    _of_threads("after", "write verdict", OLD, NEW),
    _of_threads("after", "flush verdict", OLD, NEW),
    Place("before", "write table"),
    Place("amid", "write table"),
    Place("after", "write table"),
    Place("amid", "write record"),
    Place("after", "write record"),
    Place("after", "cut"),
    Place("after", "flush record"),
    Place("before", "link"),
    _published("after", "link"),
    _published("after", "remove name"),
    _published("before", "flush folder"),
    _published("after", "flush folder"),
    _published("before", "remove old"),
    _published("after", "remove old"),
)
PLACES = {str(place): place for place in _PLACES}


class _Seam:
    """A hook around file calls that sends a signal to this process at one place."""

    def __init__(self, place: Place, reached: Path, number: int) -> None:
        self.place, self.reached, self.number = place, reached, number
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _end(self) -> None:
        self.reached.touch()
        os.kill(os.getpid(), self.number)

    def __call__(
        self, kind: str, act: Callable[[], Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Make the call, and end the process before, amid or after it at the place."""
        with self._lock:
            here = kind == self.place.kind and self._counts[kind] == self.place.index
            self._counts[kind] += 1
        if here and self.place.when == "before":
            self._end()
        if here and self.place.when == "amid":
            file, data, offset = arguments
            # Write half of the data through the page cache, which allows any length.
            half = os.open(f"/proc/self/fd/{file}", os.O_WRONLY)
            os.lseek(half, offset, os.SEEK_SET)
            os.write(half, data[: data.nbytes // 2])
            self._end()
        result = act()
        if here and self.place.when == "after":
            self._end()
        return result


def main() -> None:
    """Save steps 1 to 3; end at the given place of the third save."""
    where, how, end = sys.argv[1:]
    strategy = hs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        objects = save_loop.make_objects()
    checkpoints = Path(where) / "checkpoints"
    manager = hs.CheckpointManager(checkpoints, max_to_keep=2, **objects)
    for step in range(1, NEW):
        save_loop.assign(strategy, objects, step)
        manager.save(step)
    save_loop.assign(strategy, objects, NEW)
    place = PLACES[os.environ["SAVE_STEP_PLACE"]]
    seam = _Seam(place, Path(where) / "reached", ENDS[end])
    if strategy.replica_id != int(os.environ["SAVE_STEP_RANK"]):
        # A place without a kind, which no call reaches.
        seam.place = Place("", "")
    strategy.barrier()
    with around_calls(checkpoints, seam):
        manager.save(NEW, asynchronous=how == "go")
        manager.wait()
    print("saved", flush=True)


if __name__ == "__main__":
    main()
