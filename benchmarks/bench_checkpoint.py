"""Benchmark of saving and restoring mirrored variables, with the alternatives.

Run it on two ranks of a quiet machine with two cores, in a folder of the file system to
be measured::

    mpirun -n 2 python benchmarks/bench_checkpoint.py --folder DIR --json FILE

Save: hpcstrat's synchronous save; its asynchronous save (seconds for which the program
is blocked, and seconds until all data are on the disk); h5py by one rank, also after a
gather; np.savez by one rank; and torch.save, torch.distributed.checkpoint and Orbax, if
they are installed. The lower bounds are O_DIRECT writes of each rank's half from memory
that is ready, into one file per rank or into one shared file; and, for the blocked
seconds, a memory copy of each rank's half. All files are flushed to the disk (fsync).
Only hpcstrat's files have hashes, and only hpcstrat's appear atomically.

Restore: hpcstrat's restore, which checks every hash; its reading and checking alone;
raw O_DIRECT reads of each rank's half; and the load function of each alternative, on
each rank. Files are dropped from the page cache before each read.

Training: small steps with NumPy, alone, and during repeated asynchronous saves: by
hpcstrat (also with ``max_write_bandwidth``), by h5py in a thread, and by
torch.distributed.checkpoint's async_save. The bytes that each alternative saves per
second are reported, too, because an alternative that saves less often slows the steps
less.

With ``--device`` the variables are on GPUs: see ``device_checkpoint.py``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from device_checkpoint import COPY as DEVICE_COPY
from device_checkpoint import measure_device
from devices import device_options, start
from gloo import start_gloo
from report import (
    describe,
    draw_bars,
    output_options,
    parse_size,
    row,
    size_text,
    table,
    write_json,
)
from writers import (
    RAW_FILES,
    RAW_SHARED,
    Background,
    Writer,
    alternatives,
    backgrounds,
    drop_cache,
    remove,
)

import hpcstrat as hs

NUM_VARIABLES = 16
SYNCHRONOUS = "hpcstrat"
BLOCKING = "hpcstrat, asynchronous: standstill"
DURABLE = "hpcstrat, asynchronous: until durable"
COPY = "memcpy of each rank's half"
COPY_WHOLE = "memcpy of as much in one piece"
HASHES = "hashes of each rank's half"
READ = "hpcstrat: verified read"
READ_NEW = "hpcstrat: verified read, into new memory"
NEW = "hpcstrat, into new memory"
ALONE = "steps alone"
SAVING = "steps while saving"
PACED = "steps while saving at most 600 MB/s"
_BANDWIDTH = 600e6
# A step of the training part: some Python code, and matrix products in the cache.
ROWS, WIDTH, PRODUCTS = 64, 128, 20
_PAUSE_SECONDS = 0.5
# Pause, because a virtual machine is slower for some seconds after memory was freed.
_LONG_PAUSE_SECONDS = 4.0
_TURNS = 3

Times = dict[str, np.ndarray[Any, np.dtype[np.float64]]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line; ``main`` describes the options."""

    size: str
    rounds: int
    seconds: float
    folder: str
    json_path: str | None
    picture: str | None


class Case:
    """The variables, and all alternatives that save them.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    folder : Path
        A folder of the file system to be measured; the same on all ranks.
    nbytes : int
        Size of all variables together.
    """

    def __init__(
        self, strategy: hs.MultiWorkerMirroredStrategy, folder: Path, nbytes: int
    ):
        self.strategy = strategy
        self.comm, self.mpi = strategy.topology.replica_comm, strategy.topology.mpi
        self.folder = folder
        shape = (nbytes // NUM_VARIABLES // 4 // 1024, 1024)
        generator = np.random.default_rng(0)
        self.arrays = {
            f"w{index}": generator.random(shape, np.float32)
            for index in range(NUM_VARIABLES)
        }
        self.nbytes = sum(array.nbytes for array in self.arrays.values())
        with strategy.scope():
            self.variables = {n: hs.Variable(a, name=n) for n, a in self.arrays.items()}
        self.manager = self.new_manager()
        self.gloo = start_gloo(strategy)
        self.writers = alternatives(strategy, self.arrays, self.gloo)
        half = self.nbytes // self.comm.size
        self.half = np.zeros(half, np.uint8), np.ones(half, np.uint8)
        self.half[0][:] = 1
        start = self.comm.rank * half
        self.parts = _cut([*self.arrays.values()], start, start + half)
        self.step = 0

    def new_manager(
        self, folder: str = "hpcstrat", **options: Any
    ) -> hs.CheckpointManager:
        """Return a checkpoint manager with a subfolder of its own.

        Collective over all replicas.

        Parameters
        ----------
        folder : str
            Name of the subfolder.
        **options : object
            Options of ``CheckpointManager``.

        Returns
        -------
        hpcstrat.CheckpointManager
            A manager of all variables.
        """
        return hs.CheckpointManager(
            self.folder / folder, max_to_keep=2, weights=self.variables, **options
        )

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds that a call takes on the slowest rank.

        Collective over all replicas.

        Parameters
        ----------
        call : callable
            A collective call.

        Returns
        -------
        float
            Seconds.
        """
        self.comm.Barrier()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        return float(self.comm.allreduce(seconds, op=self.mpi.MAX))

    def save_ours(self, **options: Any) -> None:
        """Save the next step.

        Collective over all replicas.

        Parameters
        ----------
        **options : object
            Options of ``CheckpointManager.save``.
        """
        self.step += 1
        self.manager.save(self.step, **options)

    def copy_half(self) -> None:
        """Copy this rank's half of the variables' memory, as an asynchronous save must.

        Not collective.
        """
        done = 0
        for part in self.parts:
            self.half[0][done : done + part.size] = part
            done += part.size

    def copy_whole(self) -> None:
        """Copy as many bytes as a half has, in one piece.

        Not collective. For large sizes, memcpy bypasses the caches.
        """
        np.copyto(*self.half)

    def hash_half(self) -> None:
        """Hash as many bytes as a half has.

        Not collective.
        """
        import xxhash

        xxhash.xxh3_64_intdigest(self.half[1].data)

    def save_and_load(self, rounds: int) -> tuple[Times, Times]:
        """Time all saves and loads, in random order in each round.

        Collective over all replicas.

        Parameters
        ----------
        rounds : int
            Number of timed rounds.

        Returns
        -------
        saves, loads : dict of str to ndarray of shape (rounds,)
            Seconds.
        """
        saves: dict[str, list[float]] = {}
        loads: dict[str, list[float]] = {}
        order = np.random.default_rng(0)
        ways: list[Callable[[Any, Any], None]] = [
            self._ours,
            self._ours_asynchronous,
            self._floors,
            *(self._of(writer) for writer in self.writers),
        ]
        for number in range(rounds + 1):
            if number == 1:
                # Drop the first round, because it allocates buffers and makes plans.
                saves, loads = {}, {}
            for place in order.permutation(len(ways)):
                # Wait, because a disk stays busy for some seconds after files were
                # removed.
                time.sleep(_LONG_PAUSE_SECONDS)
                ways[place](saves, loads)
        names = [SYNCHRONOUS, BLOCKING, DURABLE, READ, NEW, READ_NEW]
        names += [COPY, COPY_WHOLE, HASHES]
        names += [writer.name for writer in self.writers]
        return (
            {name: np.array(saves[name]) for name in names if name in saves},
            {name: np.array(loads[name]) for name in names if name in loads},
        )

    def _ours(self, saves: Any, loads: Any) -> None:
        saves.setdefault(SYNCHRONOUS, []).append(self.timed(self.save_ours))
        self._restore(loads, (SYNCHRONOUS, READ), self.manager)
        # A new manager has untouched memory, as in a new program. In a virtual machine,
        # the first page faults can take longer than the reads.
        with self.new_manager() as manager:
            self._restore(loads, (NEW, READ_NEW), manager)

    def _restore(
        self, loads: Any, names: tuple[str, str], manager: hs.CheckpointManager
    ) -> None:
        time.sleep(_PAUSE_SECONDS)
        drop_cache(self.folder / "hpcstrat")
        loads.setdefault(names[0], []).append(self.timed(manager.restore))
        assert manager.last_restore is not None
        seconds = manager.last_restore.read_seconds
        seconds = self.comm.allreduce(seconds, op=self.mpi.MAX)
        loads.setdefault(names[1], []).append(seconds)

    def _ours_asynchronous(self, saves: Any, loads: Any) -> None:
        del loads
        self.comm.Barrier()
        start = time.perf_counter()
        blocking = self.timed(lambda: self.save_ours(asynchronous=True))
        self.manager.wait()
        total = self.comm.allreduce(time.perf_counter() - start, op=self.mpi.MAX)
        saves.setdefault(BLOCKING, []).append(blocking)
        saves.setdefault(DURABLE, []).append(total)

    def _floors(self, saves: Any, loads: Any) -> None:
        del loads
        saves.setdefault(COPY, []).append(self.timed(self.copy_half))
        saves.setdefault(COPY_WHOLE, []).append(self.timed(self.copy_whole))
        saves.setdefault(HASHES, []).append(self.timed(self.hash_half))

    def _of(self, writer: Writer) -> Callable[[Any, Any], None]:
        def save_and_load(saves: Any, loads: Any) -> None:
            path = self.folder / "other"
            seconds = self.timed(lambda: writer.save(path))
            saves.setdefault(writer.name, []).append(seconds)
            if self.comm.rank == 0:
                for found in path.parent.glob(f"{path.name}*"):
                    drop_cache(found)
            seconds = self.timed(lambda: writer.load(path))
            loads.setdefault(writer.name, []).append(seconds)
            self.comm.Barrier()
            if self.comm.rank == 0:
                remove(path)
            self.comm.Barrier()

        return save_and_load

    def training(self, seconds: float) -> tuple[Times, dict[str, float]]:
        """Time steps alone, and during repeated saves by each alternative in turn.

        Collective over all replicas.

        Parameters
        ----------
        seconds : float
            Seconds of all measurements together.

        Returns
        -------
        times : dict of str to ndarray
            Mean seconds of a step, for each turn.
        saved : dict of str to float
            Bytes that each alternative saved per second. The last save of a turn does
            not count, because it may not have finished.
        """
        others = backgrounds(self.comm, self.arrays, self.gloo)
        paced = self.new_manager("paced", max_write_bandwidth=_BANDWIDTH)
        saves = {
            ALONE: _no_save,
            SAVING: partial(self._save_or_skip, self.manager),
            PACED: partial(self._save_or_skip, paced),
        }
        for other in others:
            saves[f"{SAVING}: {other.name}"] = partial(self._start_or_skip, other)
        share = seconds / len(saves) / (1 + _TURNS)
        times: dict[str, list[float]] = {name: [] for name in saves}
        saved = dict.fromkeys(saves, 0.0)
        for turn in range(1 + _TURNS):
            for name, save in saves.items():
                step, count, spent = self._train(save, share)
                self.manager.wait()
                paced.wait()
                for other in others:
                    other.wait()
                time.sleep(_PAUSE_SECONDS)
                # Drop the first turn, because it allocates buffers.
                if turn:
                    times[name].append(step)
                    done = max(count - 1, 0)
                    saved[name] += done * self.nbytes / spent / _TURNS
        paced.close()
        return {name: np.array(values) for name, values in times.items()}, saved

    def _train(
        self, save: Callable[[], bool], seconds: float
    ) -> tuple[float, int, float]:
        """Return the seconds of a step, the number of saves, and the total seconds."""
        generator = np.random.default_rng(1)
        inputs = generator.random((ROWS, WIDTH), np.float32)
        weights = generator.random((WIDTH, WIDTH), np.float32)
        output = np.empty((ROWS, WIDTH), np.float32)
        self.comm.Barrier()
        steps, count, start = 0, 0, time.perf_counter()
        end = start + seconds
        # The ranks decide together when to stop, because saves are collective.
        while self.comm.allreduce(time.perf_counter() < end, op=self.mpi.LAND):
            for _ in range(50):
                for _ in range(PRODUCTS):
                    np.matmul(inputs, weights, out=output)
                steps += 1
            count += save()
        spent = time.perf_counter() - start
        return spent / steps, count, spent

    def _save_or_skip(self, manager: hs.CheckpointManager) -> bool:
        self.step += 1
        path = manager.save(self.step, asynchronous=True, on_busy="skip")
        return path is not None

    def _start_or_skip(self, other: Background) -> bool:
        if self.comm.allreduce(other.busy(), op=self.mpi.LOR):
            return False
        self.step += 1
        # Overwrite the last save but one.
        other.start(self.folder / f"{type(other).__name__}{self.step % 2}")
        return True


def _cut(arrays: list[Any], start: int, stop: int) -> list[Any]:
    """Return a byte range of concatenated arrays, as views of the arrays."""
    found = []
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        found.append(flat[max(start, 0) : max(stop, 0)])
        start, stop = start - flat.size, stop - flat.size
    return [part for part in found if part.size]


def _no_save() -> bool:
    return False


@click.command(context_settings={"show_default": True})
@click.option("--size", default="1GiB", help="Size of all variables together.")
@click.option("--rounds", default=5, help="How often each is measured.")
@click.option("--seconds", default=48.0, help="How long the training is measured.")
@click.option("--folder", default=".", help="A folder of the file system to measure.")
@device_options
@output_options
def main(device: bool, smoke: bool, results: str | None, **given: Any) -> None:
    """Measure checkpoints."""
    options = Options(**given)
    if device:
        bench = start(smoke, results, given)
        size = parse_size(options.size)
        found = measure_device(bench, size, options.rounds, options.folder)
        if bench.rank == 0 and options.picture:
            title = f"save\n{bench.where()}"
            draw_bars(options.picture, found, DEVICE_COPY, title)
        return
    rounds = options.rounds
    strategy = hs.MultiWorkerMirroredStrategy()
    mpi, rank = strategy.topology.mpi, strategy.replica_id
    where = describe(mpi)
    with tempfile.TemporaryDirectory(dir=options.folder if rank == 0 else None) as own:
        shared = Path(strategy.broadcast_object(own))
        case = Case(strategy, shared, parse_size(options.size))
        saves, loads = case.save_and_load(rounds)
        steps, saved = case.training(options.seconds)
        case.manager.close()
        strategy.barrier()
    if rank:
        return
    what = f"{NUM_VARIABLES} mirrored variables, {size_text(case.nbytes)}"
    print(f"{what}; {where}\n{rounds} rounds\n")
    print(f"save; faster: than {RAW_SHARED}\n" + table(saves, RAW_SHARED, RAW_SHARED))
    print(f"\nload; faster: than {RAW_FILES}\n" + table(loads, RAW_FILES, RAW_FILES))
    print(f"\ntraining; faster: than {ALONE}\n" + table(steps, ALONE, ALONE))
    for name, speed in saved.items():
        print(f"{name}: {speed / 1e9:.2f} GB saved in a second")
    if options.json_path:
        parts = {"save": saves, "load": loads, "training": steps}
        rows = [
            row(name, impl, mpi.COMM_WORLD.size, case.nbytes, values)
            for name, times in parts.items()
            for impl, values in times.items()
        ]
        write_json(options.json_path, mpi, rows, rounds=rounds)
    if options.picture:
        draw_bars(options.picture, saves, RAW_SHARED, f"save of {what}\n{where}")


if __name__ == "__main__":
    main()
