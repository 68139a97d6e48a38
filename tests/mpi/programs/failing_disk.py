"""Make file calls of one rank fail: ``failing_disk.py FOLDER LIBRARY HOW``.

LIBRARY is the library of ``tests/faults/failing.c``, which is also in ``LD_PRELOAD``.
``HOW`` is ``wait``, ``go`` (saves in the background), ``restore``, or ``limit`` (a
limit on the size of files). For each kind of call, the first call fails, then in
another run the second, and so on, until there are no more calls of this kind. The
program prints the problems it found and the number of failures.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat.checkpoint.file.extents import part_of
from hpcstrat.checkpoint.file.reader import open_checkpoint
from hpcstrat.errors import CheckpointError
from tests.folders import listed

# Large enough that each of the two replicas writes some blocks.
_COUNT = 400_000
_LATER = "ckpt-0000000002.h5"
# The call, its error, and whether all later calls fail, too.
_SAVING = (
    ("pwrite", errno.EIO, False),
    ("pwrite", errno.EDQUOT, True),
    ("fsync", errno.EIO, False),
    ("fsync", errno.ENOSPC, True),
    ("ftruncate", errno.EIO, False),
    ("fallocate", errno.EDQUOT, True),
    ("fallocate", errno.EIO, False),
    ("link", errno.EIO, False),
)


class Case:
    """A job with the checkpoint of step 1 in its folder."""

    def __init__(self, folder: Path, library: str) -> None:
        self.folder, self.library = folder, ctypes.CDLL(library)
        self.library.failing_calls.restype = ctypes.c_long
        self.strategy = hs.MultiWorkerMirroredStrategy()
        self.comm = MPI.COMM_WORLD.Dup()
        with self.strategy.scope():
            self.x = hs.Variable(np.full(_COUNT, 1.0))
        self.manager = hs.CheckpointManager(folder, x=self.x)
        path = self.manager.save(1)
        vouched = open_checkpoint(path).vouched
        assert vouched is not None
        self.blocks = [part_of(vouched.plan.num_blocks, r, 2) for r in range(2)]
        assert min(map(len, self.blocks)) > 1
        self.problems: list[str] = []
        self.failures = 0

    @contextmanager
    def failing(
        self, rank: int, call: str, code: int, after: int, lasting: bool
    ) -> Iterator[list[int]]:
        """Make calls fail on one rank; yield a list that gets the number of calls."""
        found: list[int] = []
        folder = os.fsencode(self.folder)
        if self.comm.rank == rank:
            self.library.failing_arm(
                call.encode(), code, ctypes.c_long(after), int(lasting), folder
            )
        try:
            yield found
        finally:
            self.library.failing_disarm()
            found.append(self.comm.bcast(self.library.failing_calls(), rank))

    def said(self, action: Callable[[], Any]) -> str:
        """Return the error text of an action, or "" if it succeeds; collective."""
        text = ""
        try:
            action()
        except CheckpointError as error:
            text = str(error)
        texts = self.comm.allgather(text)
        self.expect(len(set(texts)) == 1, f"ranks differ: {texts}")
        return texts[0]

    def expect(self, met: bool, problem: str) -> None:
        """Record a problem of this rank if the expectation is not met."""
        if not met:
            self.problems.append(f"{self.title} on rank {self.comm.rank}: {problem}")

    def check_folder(self, step: int) -> None:
        """Expect no files but the checkpoints up to a step, and restore the newest."""
        self.comm.Barrier()
        names = [f"ckpt-{number:010d}.h5" for number in range(1, step + 1)]
        there = sorted(listed(self.folder))
        self.expect(there == names, f"found {there}")
        self.comm.Barrier()
        self.x.component[...] = -1
        restored = self.manager.restore()
        self.expect(restored == step, f"restored {restored}")
        self.expect(bool((self.x.component == step).all()), "other values")
        self.comm.Barrier()
        if self.comm.rank == 0:
            (self.folder / _LATER).unlink(missing_ok=True)
        self.comm.Barrier()

    def save(self, asynchronous: bool) -> None:
        """Save step 2, and wait until the save has ended."""
        self.x.assign(np.full(_COUNT, 2.0))
        self.manager.save(2, asynchronous=asynchronous)
        if asynchronous:
            # The variable may change during the save without an effect on the file.
            self.x.component[...] = 7
        self.manager.wait()

    def try_saving(
        self, asynchronous: bool, rank: int, what: tuple[str, int, bool], after: int
    ) -> bool:
        """Save once; return whether a call has failed."""
        call, code, lasting = what
        self.title = f"{call} {errno.errorcode[code]} {after} of rank {rank}"
        with self.failing(rank, call, code, after, lasting) as calls:
            text = self.said(lambda: self.save(asynchronous))
        failed = calls[0] > after
        self.failures += failed
        # A background save may succeed although a later write of rank 1 failed, because
        # its data were already on the disk. Such a failure need not be reported.
        data = len(self.blocks[rank]) if call == "pwrite" else 1
        counts = rank == 0 or not asynchronous or after < data
        self.expect(failed or not text, f"nothing failed, but: {text}")
        if failed and counts:
            self.expect(os.strerror(code) in text, f"the error is: {text!r}")
            known = rank == 0 or f"on rank {rank}" in text
            self.expect(known, f"the rank is not named: {text!r}")
        if failed and call == "fsync" and not lasting and counts:
            # In the background, rank 1 also writes and flushes its verdict.
            most = after + 1 + (asynchronous and rank > 0)
            self.expect(calls[0] <= most, "fsync was tried again")
        self.check_folder(1 if text else 2)
        return failed

    def try_restoring(self, rank: int, after: int, newest: bool) -> bool:
        """Restore step 2 or the newest; return whether a call has failed."""
        self.title = f"read {after} of rank {rank}, newest: {newest}"
        self.x.component[...] = 7
        path = None if newest else self.folder / _LATER
        with self.failing(rank, "preadv", errno.EIO, after, False) as calls:
            text = self.said(lambda: self.manager.restore(path))
        failed = calls[0] > after
        self.failures += failed
        if newest:
            self.expect(not text, text)
            wanted = 1 if failed else 2
        else:
            self.expect((os.strerror(errno.EIO) in text) == failed, text)
            wanted = 7 if failed else 2
        self.expect(bool((self.x.component == wanted).all()), "other values")
        return failed

    def limit(self, rank: int, asynchronous: bool) -> None:
        """Save while one rank may not write files as large as a checkpoint."""
        self.title = f"limit on rank {rank}, asynchronous: {asynchronous}"
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.comm.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        text = self.said(lambda: self.save(asynchronous))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.failures += 1
        self.expect(os.strerror(errno.EFBIG) in text, f"the error is: {text!r}")
        self.check_folder(1)
        self.expect(not self.said(lambda: self.save(asynchronous)), "no later save")
        self.check_folder(2)


def main() -> None:
    """Run the case that HOW names, with each call failing once."""
    folder, library, how = sys.argv[1:]
    case = Case(Path(folder), library)
    if how == "restore":
        case.save(False)
        for rank, newest in itertools.product(range(2), (False, True)):
            after = 0
            while case.try_restoring(rank, after, newest):
                after += 1
    elif how == "limit":
        for rank, asynchronous in itertools.product(range(2), (False, True)):
            case.limit(rank, asynchronous)
    else:
        for rank, what in itertools.product(range(2), _SAVING):
            after = 0
            while case.try_saving(how == "go", rank, what, after):
                after += 1
    problems = case.comm.allreduce(case.problems)
    if case.comm.rank == 0:
        print("\n".join([*problems, f"failures {case.failures}"]), flush=True)
    case.strategy.close()


if __name__ == "__main__":
    main()
