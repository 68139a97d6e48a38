"""``bench_checkpoint.py --device``: save and restore of variables on GPUs.

Save: hpcstrat's synchronous save, and its asynchronous save (seconds for which the
program is blocked, seconds until its stream has done the copies, and seconds until all
data are on the disk); the usual code by hand, ``cupy.asnumpy`` of every array and h5py
by one rank; and the lower bound, a copy of each rank's half to page-locked memory.
Restore: hpcstrat's restore; and by hand, h5py on each rank and copies to the device.
Files are flushed to the disk, and dropped from the page cache before each read. In the
first and the last round, the restored values are compared with the saved ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from devices import Bench
from report import row, size_text, table
from writers import PlainH5py, drop_cache, remove

import hpcstrat as hs

__all__ = ["measure_device"]

NUM_VARIABLES = 16
SYNCHRONOUS = "hpcstrat"
BLOCKING = "hpcstrat, asynchronous: standstill"
COPIED = "hpcstrat, asynchronous: until copied"
DURABLE = "hpcstrat, asynchronous: until durable"
BY_HAND = "asnumpy, h5py by rank 0"
COPY = "half to pinned memory"
_PAUSE_SECONDS = 1.0

Times = dict[str, list[float]]


class Case:
    """The variables, and all alternatives that save and restore them.

    Collective over all replicas.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    folder : Path
        A folder of the file system to be measured; the same on all ranks.
    nbytes : int
        Size of all variables together.
    """

    def __init__(self, bench: Bench, folder: Path, nbytes: int):
        self.bench, self.folder = bench, folder
        cupy = bench.cupy
        shape = (max(nbytes // NUM_VARIABLES // 4 // 256, 1), 256)
        generator = np.random.default_rng(0)
        self.host = {
            f"w{index}": generator.random(shape, np.float32)
            for index in range(NUM_VARIABLES)
        }
        self.nbytes = sum(array.nbytes for array in self.host.values())
        with bench.stream, bench.strategy.scope():
            self.variables = {
                name: hs.Variable(cupy.asarray(array), name=name)
                for name, array in self.host.items()
            }
            half = self.nbytes // bench.comm.size // 4
            self.half = cupy.ones(half, np.float32)
        memory = cupy.cuda.alloc_pinned_memory(self.half.nbytes)
        self.pinned = np.frombuffer(memory, np.float32, half)
        self.manager = hs.CheckpointManager(
            folder / "hpcstrat", max_to_keep=2, weights=self.variables
        )
        self.step = 0
        self.saves: Times = {}
        self.loads: Times = {}

    def timed(self, times: Times, name: str, call: Callable[[], object]) -> None:
        """Time a call, and its work on the stream, on the slowest rank.

        Collective over all replicas.

        Parameters
        ----------
        times : dict of str to list of float
            Lists to which the seconds are appended.
        name : str
            Name of the call.
        call : callable
            A collective call.
        """
        bench = self.bench
        bench.comm.Barrier()
        start = time.perf_counter()
        call()
        bench.stream.synchronize()
        self._keep(times, name, time.perf_counter() - start)

    def _keep(self, times: Times, name: str, seconds: float) -> None:
        longest = self.bench.comm.allreduce(seconds, op=self.bench.mpi.MAX)
        times.setdefault(name, []).append(float(longest))

    def _save(self, **options: Any) -> None:
        self.step += 1
        self.manager.save(self.step, **options)

    def _asynchronous(self) -> None:
        bench = self.bench
        bench.comm.Barrier()
        start = time.perf_counter()
        self._save(asynchronous=True)
        self._keep(self.saves, BLOCKING, time.perf_counter() - start)
        bench.stream.synchronize()
        self._keep(self.saves, COPIED, time.perf_counter() - start)
        self.manager.wait()
        self._keep(self.saves, DURABLE, time.perf_counter() - start)

    def _restore(self) -> None:
        for name, variable in self.variables.items():
            variable.assign(self.bench.cupy.zeros(self.host[name].shape, np.float32))
        self.bench.stream.synchronize()
        drop_cache(self.folder / "hpcstrat")
        self.timed(self.loads, SYNCHRONOUS, self.manager.restore)

    def require_restored(self) -> None:
        """Raise if the variables do not hold the saved values.

        Not collective.

        Raises
        ------
        AssertionError
            If a value differs.
        """
        for name, variable in self.variables.items():
            found = self.bench.cupy.asnumpy(variable.value())
            np.testing.assert_array_equal(found, self.host[name], err_msg=name)

    def _by_hand(self) -> None:
        bench, path = self.bench, self.folder / "other.h5"
        arrays = {name: variable.value() for name, variable in self.variables.items()}

        def save() -> None:
            host = {name: bench.cupy.asnumpy(array) for name, array in arrays.items()}
            PlainH5py(bench.comm, host).save(path)

        def load() -> None:
            host = {n: np.empty(a.shape, a.dtype) for n, a in self.host.items()}
            PlainH5py(bench.comm, host).load(path)
            for name, array in arrays.items():
                array.set(host[name])

        self.timed(self.saves, BY_HAND, save)
        if bench.comm.rank == 0:
            for found in path.parent.glob(f"{path.name}*"):
                drop_cache(found)
        self.timed(self.loads, BY_HAND, load)
        bench.comm.Barrier()
        if bench.comm.rank == 0:
            remove(path)
        bench.comm.Barrier()

    def _floor(self) -> None:
        stream = self.bench.stream
        self.timed(
            *(self.saves, COPY),
            lambda: self.half.get(stream=stream, out=self.pinned, blocking=False),
        )

    def run(self, rounds: int) -> None:
        """Time all alternatives in turn.

        Collective over all replicas.

        Parameters
        ----------
        rounds : int
            Number of timed rounds.
        """
        order = np.random.default_rng(0)
        pause = 0.0 if self.bench.smoke else _PAUSE_SECONDS
        ways = [self._asynchronous, self._by_hand, self._floor]
        with self.bench.stream:
            for number in range(rounds + 1):
                if number == 1:
                    # Drop the first round, because it allocates buffers and makes
                    # plans.
                    self.require_restored()
                    self.saves, self.loads = {}, {}
                self.timed(self.saves, SYNCHRONOUS, self._save)
                time.sleep(pause)
                self._restore()
                for place in order.permutation(len(ways)):
                    time.sleep(pause)
                    ways[place]()
            self.require_restored()


def measure_device(bench: Bench, nbytes: int, rounds: int, folder: str) -> Any:
    """Measure saves and restores, print the times, and write them.

    Collective over all replicas.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    nbytes : int
        Size of all variables together.
    rounds : int
        Number of measurements of each alternative.
    folder : str
        A folder of the file system to be measured.

    Returns
    -------
    dict of str to ndarray of shape (rounds,)
        Seconds of saves.
    """
    if bench.smoke:
        nbytes, rounds = min(nbytes, 1 << 20), 1
    root = bench.comm.rank == 0
    with tempfile.TemporaryDirectory(dir=folder if root else None) as own:
        shared = Path(bench.strategy.broadcast_object(own))
        case = Case(bench, shared, nbytes)
        case.run(rounds)
        case.manager.close()
        bench.strategy.barrier()
    saves = {name: np.array(values) for name, values in case.saves.items()}
    loads = {name: np.array(values) for name, values in case.loads.items()}
    what = f"{NUM_VARIABLES} mirrored variables on GPUs, {size_text(case.nbytes)}"
    hs.print_once(
        f"{what}; {bench.where()}\n{rounds} rounds\n\nsave; faster: than {BY_HAND}\n"
        f"{table(saves, BY_HAND, COPY)}\n\nrestore; faster: than {BY_HAND}\n"
        f"{table(loads, BY_HAND, BY_HAND)}"
    )
    if root:
        rows = [
            row(name, impl, bench.comm.size, case.nbytes, values)
            for name, times in {"save": saves, "load": loads}.items()
            for impl, values in times.items()
        ]
        bench.write("checkpoint", rows, rounds=rounds)
    bench.strategy.close()
    return saves
