"""Benchmark of the calls that move data between ranks, with their alternatives.

Run it on two ranks of a quiet machine with two cores, or on more ranks, which then
share the cores::

    mpirun --bind-to core -n 2 python benchmarks/bench_calls.py --json FILE
    mpirun --oversubscribe -n 4 python benchmarks/bench_calls.py --json FILE

Or run it as root, without a launcher, between pretend hosts of this machine::

    python benchmarks/bench_calls.py --hosts 2 --ranks-per-host 1 --json FILE

Each call is measured beside mpi4py's fastest call of the same purpose, which fills
arrays that exist, and beside torch's gloo, if torch is installed. A size is the number
of bytes that one rank sends to one other rank. Each result is checked before its call
is timed, and the inputs are rewritten before each call. ``timing.py`` describes how
times are measured, and ``cores.py`` explains why there are two results of each: for
cores that share a cache, and for cores that do not.

The calls named ``strategy`` and ``context`` are those of users, which return new
arrays; the calls named ``into arrays`` fill arrays that exist, as torch's process group
and Horovod's functions need. In ``exchange`` each rank sends an array to each of its
two neighbors in a ring, which are one rank if there are two ranks. In ``halo`` each
rank gets its rows of a field, which is not periodic, between one row of each neighbor.
mpi4py receives these rows in an array that exists, into which the own rows are copied;
the last column leaves out the copy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from buffers import fill
from cores import LATENCY, CoreWatch, by_state
from gloo import start_gloo
from on_hosts import on_hosts
from report import describe, environment, parse_size, row, size_text, write_json
from timing import measure_for

import hpcstrat as hs

Array = np.ndarray[Any, np.dtype[np.float32]]

SIZES = "4,4KiB,64KiB,256KiB,1MiB,4MiB"
GLOO = "torch gloo"
ROOT = 0
# Rows of each rank's part of a field, in `Calls.halo`.
HALO_ROWS = 16
# Gloo has separate rounds, because other calls took longer right after a gloo call.
GLOO_SHARE = 0.25


@dataclass(frozen=True)
class Way:
    """A way to make a call.

    Parameters
    ----------
    name : str
        Starts with the name of the library.
    call : callable
        Makes the call; takes no arguments.
    results : callable
        Returns the arrays that the last call has filled or made.
    wanted : sequence of ndarray
        The arrays that ``results`` must return.
    base : str
        Name of the alternative to compare with, in the same rounds; empty for none.
    equal : str
        Name of the same call with equal lengths; empty for none.
    """

    name: str
    call: Callable[[], object]
    results: Callable[[], Sequence[Array]]
    wanted: Sequence[Array]
    base: str = ""
    equal: str = ""


class Calls:
    """The arrays of one size, and the ways to make each call with them.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part; the calls are made in its replica
        context.
    nbytes : int
        Number of bytes that one rank sends to one other rank.
    gloo : module or None
        ``torch.distributed``, as an alternative.
    """

    def __init__(
        self, strategy: hs.MultiWorkerMirroredStrategy, nbytes: int, gloo: Any
    ) -> None:
        self.strategy, self.gloo = strategy, gloo
        self.comm: Any = strategy.topology.replica_comm
        self.rank, self.size = self.comm.rank, self.comm.size
        self.length = max(nbytes // 4, 1)
        self.moves: Any = strategy.collectives.moves
        self._inputs: list[tuple[Array, Array]] = []

    def rewrite(self) -> None:
        """Write this rank's numbers into the inputs, as a step of training does.

        Not collective.
        """
        for array, numbers in self._inputs:
            np.copyto(array, numbers)

    def _given(self, numbers: Array) -> Array:
        """Return an input that `rewrite` fills with these numbers."""
        array = np.empty_like(numbers)
        self._inputs.append((array, numbers))
        return array

    def _numbers(self, source: int, target: int = 0, length: int = -1) -> Array:
        """Return the numbers that one rank sends to another one."""
        numbers = np.empty(self.length if length < 0 else length, np.float32)
        fill(numbers, source * self.size + target)
        return numbers

    def _rooms(self, arrays: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Return an array for the results, and its parts, one for each array."""
        whole = np.zeros(sum(array.size for array in arrays), np.float32)
        ends = np.cumsum([array.size for array in arrays])
        return whole, np.split(whole, ends[:-1])

    def _tensors(self, *arrays: Array) -> list[Any]:
        import torch

        return [torch.from_numpy(array) for array in arrays]

    def all_gather(self) -> Iterator[Way]:
        """Gather equal lengths, and then unequal lengths of about the same sum."""
        yield from self._all_gather([self.length] * self.size, "", "Allgather")
        mean = 2 * self.length / (self.size + 1)
        lengths = [max(round(mean * (rank + 1)), 1) for rank in range(self.size)]
        lengths[-1] += len({*lengths}) == 1 < self.size
        yield from self._all_gather(lengths, ", unequal", "Allgatherv")

    def _all_gather(self, lengths: list[int], end: str, name: str) -> Iterator[Way]:
        every = [self._numbers(r, length=count) for r, count in enumerate(lengths)]
        own = self._given(every[self.rank])
        whole, parts = self._rooms(every)
        wanted, kept = [np.concatenate(every)], [whole]
        gather, into = hs.get_replica_context().all_gather, self.moves.all_gather_into
        allocated = self.comm.Allgatherv if end else self.comm.Allgather
        given = [whole, lengths] if end else whole

        def by_context() -> None:
            kept[0] = gather(own, 0)

        for first, call, results in (
            ("hpcstrat, context", by_context, kept),
            (
                "hpcstrat, into arrays",
                lambda: into(own, parts, "all_gather"),
                [whole],
            ),
            (f"mpi4py, {name}", lambda: allocated(own, given), [whole]),
        ):
            is_base = first.startswith("mpi4py")
            base = "" if is_base else f"mpi4py, {name}{end}"
            equal = first.replace("Allgatherv", "Allgather") if end else ""
            yield Way(first + end, call, lambda r=results: r, wanted, base, equal)
        if self.gloo is not None and not end:
            sent, found = self._tensors(own, whole)
            into_tensor = _by_name(
                self.gloo, "all_gather_single", "all_gather_into_tensor"
            )
            yield Way(
                GLOO,
                lambda: into_tensor(found, sent),
                lambda: [whole],
                wanted,
            )

    def broadcast(self) -> Iterator[Way]:
        """Copy the first replica's array to all replicas."""
        wanted = [self._numbers(ROOT)]
        is_root = self.rank == ROOT
        array = self._given(wanted[0]) if is_root else np.zeros_like(wanted[0])
        kept = [array]

        def to_new() -> None:
            kept[0] = self.strategy.collectives.broadcast(array, ROOT, "broadcast")

        moves, base = self.moves, "mpi4py, Bcast"
        yield Way("hpcstrat, new array", to_new, lambda: kept, wanted, base)
        yield Way(
            "hpcstrat, into arrays",
            lambda: moves.broadcast_into(array, ROOT, "broadcast"),
            lambda: [array],
            wanted,
            base,
        )
        yield Way(base, lambda: self.comm.Bcast(array, ROOT), lambda: [array], wanted)
        if self.gloo is not None:
            [tensor] = self._tensors(array)
            yield Way(
                GLOO,
                lambda: self.gloo.broadcast(tensor, ROOT),
                lambda: [array],
                wanted,
            )

    def _sent(self) -> tuple[Array, list[Array]]:
        """Return an input with an array for each rank, and its parts."""
        ranks = range(self.size)
        whole = self._given(
            np.concatenate([self._numbers(self.rank, rank) for rank in ranks])
        )
        return whole, np.split(whole, self.size)

    def all_to_all(self) -> Iterator[Way]:
        """Send an array to each replica, and receive one from each."""
        sent, sends = self._sent()
        wanted = [self._numbers(rank, self.rank) for rank in range(self.size)]
        whole, parts = self._rooms(wanted)
        base = "mpi4py, Alltoall"
        yield Way(
            "hpcstrat, into arrays",
            lambda: self.moves.all_to_all(sends, parts, "all_to_all"),
            lambda: parts,
            wanted,
            base,
        )
        yield Way(base, lambda: self.comm.Alltoall(sent, whole), lambda: parts, wanted)
        if self.gloo is not None:
            given, found = self._tensors(sent, whole)
            yield Way(
                GLOO,
                lambda: self.gloo.all_to_all_single(found, given),
                lambda: parts,
                wanted,
            )

    def exchange(self) -> Iterator[Way]:
        """Send an array to each neighbor in a ring, and receive one from each."""
        comm: Any = self.comm
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        neighbors = sorted({left, right} - {self.rank})
        if not neighbors:
            return
        sends = {
            rank: self._given(self._numbers(self.rank, rank)) for rank in neighbors
        }
        wanted = [self._numbers(rank, self.rank) for rank in neighbors]
        found = {
            rank: np.zeros_like(array)
            for rank, array in zip(neighbors, wanted, strict=True)
        }
        # The order in which each rank sends: first to the right, then to the left.
        shifts = [(right, left), (left, right)][: len(neighbors)]

        def by_mpi() -> None:
            for target, source in shifts:
                comm.Sendrecv(sends[target], target, 0, found[source], source, 0)

        base = "mpi4py, Sendrecv"
        yield Way(
            "hpcstrat, into arrays",
            self._exchange(sends, found),
            lambda: list(found.values()),
            wanted,
            base,
        )
        yield Way(base, by_mpi, lambda: list(found.values()), wanted)
        if self.gloo is not None:
            given = {r: self._tensors(array)[0] for r, array in sends.items()}
            into = {r: self._tensors(array)[0] for r, array in found.items()}

            def by_gloo() -> None:
                work = [self.gloo.irecv(tensor, rank) for rank, tensor in into.items()]
                work += [self.gloo.isend(tensor, r) for r, tensor in given.items()]
                for one in work:
                    one.wait()

            yield Way(GLOO, by_gloo, lambda: list(found.values()), wanted)

    def _exchange(
        self, sends: dict[int, Array], found: dict[int, Array]
    ) -> Callable[[], object]:
        return lambda: self.moves.exchange(sends, found, "exchange")

    def halo(self) -> Iterator[Way]:
        """Exchange the first and last of a field's rows, one row of this size each."""
        comm: Any = self.comm
        neighbors = [
            (rank, own, pad)
            for rank, own, pad in ((self.rank - 1, 0, 0), (self.rank + 1, -1, -1))
            if 0 <= rank < self.size
        ]
        shape = self.size, HALO_ROWS, self.length
        field = self._numbers(0, length=math.prod(shape)).reshape(shape)
        own = self._given(field[self.rank].copy())
        right = np.zeros((HALO_ROWS + 2, self.length), np.float32)
        right[1:-1] = field[self.rank]
        for rank, _, pad in neighbors:
            right[pad] = field[rank][-1 if rank < self.rank else 0]
        padded, edges = np.zeros_like(right), np.zeros((2, self.length), np.float32)
        kept, fields = [padded], self.strategy.collectives.fields
        room = np.zeros_like(right)

        def to_new() -> None:
            kept[0] = fields.halo(own, 0, 1)

        def to_room() -> None:
            fields.halo(own, 0, 1, out=room)

        def to_padded() -> None:
            for rank, own_row, pad in neighbors:
                comm.Sendrecv(own[own_row], rank, 0, padded[pad], rank, 0)
            padded[1:-1] = own
            for pad in {0, -1} - {pad for _, _, pad in neighbors}:
                padded[pad] = 0

        def to_edges() -> None:
            for rank, own_row, pad in neighbors:
                comm.Sendrecv(own[own_row], rank, 0, edges[pad], rank, 0)

        base = "mpi4py, Sendrecv and copy"
        yield Way("hpcstrat, new array", to_new, lambda: kept, [right], base)
        yield Way("hpcstrat, into an array", to_room, lambda: [room], [right], base)
        yield Way(base, to_padded, lambda: [padded], [right])
        wanted = [right[pad] for _, _, pad in neighbors]
        found = [edges[pad] for _, _, pad in neighbors]
        yield Way("mpi4py, Sendrecv of edges", to_edges, lambda: found, wanted)

    def gather(self) -> Iterator[Way]:
        """Gather one array of each replica on the first replica."""
        every = [self._numbers(rank) for rank in range(self.size)]
        own = self._given(every[self.rank])
        whole, rooms = self._rooms(every)
        is_root = self.rank == ROOT
        parts, wanted = (rooms, every) if is_root else (None, [])
        base = "mpi4py, Gather"
        yield Way(
            "hpcstrat, into arrays",
            lambda: self.moves.gather_into(own, parts, ROOT, "gather"),
            lambda: parts or [],
            wanted,
            base,
        )
        yield Way(
            base,
            lambda: self.comm.Gather(own, whole if is_root else None, ROOT),
            lambda: parts or [],
            wanted,
        )
        if self.gloo is not None:
            [tensor], into = self._tensors(own), parts and self._tensors(*parts)
            yield Way(
                GLOO,
                lambda: self.gloo.gather(tensor, into, ROOT),
                lambda: parts or [],
                wanted,
            )

    def scatter(self) -> Iterator[Way]:
        """Send one array of the first replica to each replica."""
        sent, sends = self._sent() if self.rank == ROOT else (None, None)
        wanted = [self._numbers(ROOT, self.rank)]
        result = np.zeros_like(wanted[0])
        base = "mpi4py, Scatter"
        yield Way(
            "hpcstrat, into arrays",
            lambda: self.moves.scatter_into(sends, result, ROOT, "scatter"),
            lambda: [result],
            wanted,
            base,
        )
        yield Way(
            base,
            lambda: self.comm.Scatter(sent, result, ROOT),
            lambda: [result],
            wanted,
        )
        if self.gloo is not None:
            [tensor], given = self._tensors(result), sends and self._tensors(*sends)
            yield Way(
                GLOO,
                lambda: self.gloo.scatter(tensor, given, ROOT),
                lambda: [result],
                wanted,
            )

    def reduce_scatter(self) -> Iterator[Way]:
        """Add the replicas' arrays for each replica on this replica."""
        sent, parts = self._sent()
        ranks = range(self.size)
        # Sums of these small integers are exact.
        wanted = [sum(self._numbers(rank, self.rank) for rank in ranks)]
        result = np.zeros(self.length, np.float32)
        base = "mpi4py, Reduce_scatter_block"
        yield Way(
            "hpcstrat, into arrays",
            lambda: self.moves.collectives.parts.reduce_scatter(
                np.add, parts, result, "scatter"
            ),
            lambda: [result],
            wanted,
            base,
        )
        yield Way(
            base,
            lambda: self.comm.Reduce_scatter_block(sent, result),
            lambda: [result],
            wanted,
        )
        if self.gloo is not None:
            given, found = self._tensors(sent, result)
            to_tensor = _by_name(
                self.gloo, "reduce_scatter_single", "reduce_scatter_tensor"
            )
            yield Way(
                GLOO,
                lambda: to_tensor(found, given),
                lambda: [result],
                wanted,
            )

    def barrier(self) -> Iterator[Way]:
        """Wait for all replicas."""
        base = "mpi4py, Barrier"
        for name, call in (
            ("hpcstrat, strategy", self.strategy.barrier),
            (base, self.comm.Barrier),
            (GLOO, self.gloo and self.gloo.barrier),
        ):
            if call is not None:
                against = base if name.startswith("hpcstrat") else ""
                yield Way(name, call, list, [], against)


def _by_name(module: Any, *names: str) -> Any:
    """Return a module's first function of these names, which versions may lack."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


KINDS: dict[str, Callable[[Calls], Iterator[Way]]] = {
    "all_gather": Calls.all_gather,
    "broadcast": Calls.broadcast,
    "all_to_all": Calls.all_to_all,
    "exchange": Calls.exchange,
    "halo": Calls.halo,
    "gather": Calls.gather,
    "scatter": Calls.scatter,
    "reduce_scatter": Calls.reduce_scatter,
    "barrier": Calls.barrier,
}


def check(calls: Calls, way: Way) -> None:
    """Make a call once, and raise if a result is wrong; collective."""
    calls.rewrite()
    before = way.results()
    inputs = [array for array, _ in calls._inputs]
    for array in before:
        if not any(np.may_share_memory(array, own) for own in inputs):
            array.fill(-1)
    way.call()
    found = way.results()
    right = [np.array_equal(a, b) for a, b in zip(found, way.wanted, strict=True)]
    if not all(right):
        raise ArithmeticError(
            f"expected the arrays of all ranks from {way.name}, found other numbers; "
            "do not use its times"
        )


@dataclass(frozen=True)
class Found:
    """The times of a call of one size, for one state of the cores."""

    kind: str
    nbytes: int
    state: str
    ways: Sequence[Way]
    times: dict[str, Any]

    def median(self, name: str) -> float:
        """Return the median seconds of an alternative; not collective."""
        return float(np.median(self.times[name]))

    def ratios(self, way: Way) -> dict[str, float]:
        """Return the ratios of a way's median to those of its alternatives."""
        names = {"median_over_mpi4py": way.base, "median_over_equal": way.equal}
        own = self.median(way.name)
        return {key: own / self.median(name) for key, name in names.items() if name}

    def rows(self, num_ranks: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of the JSON file; not collective."""
        size, cores = self.nbytes, self.state
        for way in self.ways:
            seconds = self.times[way.name]
            more: dict[str, Any] = {"cores": cores, "rounds": len(seconds)}
            more |= self.ratios(way)
            yield row(self.kind, way.name, num_ranks, size, seconds, **more)
        if LATENCY in self.times:
            seconds = self.times[LATENCY]
            yield row(self.kind, LATENCY, num_ranks, size, seconds, cores=cores)


def lines(found: Sequence[Found]) -> str:
    """Return a table of a call: a line for each size and each state of the cores.

    Not collective.

    Parameters
    ----------
    found : sequence of Found
        The times of one call.

    Returns
    -------
    str
        Medians, with the ratios to mpi4py's median, and for unequal lengths with the
        ratio to equal lengths.
    """
    ways = [way for way in found[0].ways if way.name in found[0].times]
    cells = [["size", "cores", "rounds", *(way.name for way in ways)]]
    for one in found:
        rounds = len(next(iter(one.times.values())))
        cells.append([size_text(one.nbytes), one.state, str(rounds)])
        for way in ways:
            text = ""
            if way.name in one.times:
                ratios = one.ratios(way).values()
                text = f"{one.median(way.name) * 1e6:.2f}"
                text += "".join(f" ({ratio:.2f})" for ratio in ratios)
            cells[-1].append(text)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in cells
    )


class Bench:
    """Measures calls between the replicas of a strategy.

    Parameters
    ----------
    strategy : hpcstrat strategy
        Its replicas take part.
    options : dict
        The command line.
    """

    def __init__(
        self, strategy: hs.MultiWorkerMirroredStrategy, options: dict[str, Any]
    ) -> None:
        self.strategy, self.options = strategy, options
        topology = strategy.topology
        self.comm, self.mpi = topology.replica_comm, topology.mpi
        one_machine = not options["on_hosts"]
        # If ranks share cores, the watch would make them wait for whole time slices.
        watched = one_machine and not topology.shares_cores
        self.watch = CoreWatch(self.comm, self.mpi) if watched else None
        self.gloo = None
        if options["gloo"]:
            self.gloo = start_gloo(strategy, "lo" if one_machine else "eth0")

    def close(self) -> None:
        """Free what the measurements used; collective over all replicas."""
        if self.gloo is not None:
            self.gloo.destroy_process_group()
        if self.watch is not None:
            self.watch.close()

    def measure(self) -> list[Found]:
        """Measure each call at each size, and print the times.

        Collective over all replicas; in replica context.
        """
        every: list[Found] = []
        for kind in self.options["calls"]:
            sizes = self.options["sizes"] if kind != "barrier" else [0]
            found = [one for size in sizes for one in self._measure_size(kind, size)]
            if found:
                hs.print_once(f"\n{kind}, median us (ratios)\n{lines(found)}")
            every += found
        return every

    def _measure_size(self, kind: str, nbytes: int) -> Iterator[Found]:
        calls = Calls(self.strategy, nbytes, self.gloo)
        ways = list(KINDS[kind](calls))
        for way in ways:
            check(calls, way)
        slow = [way for way in ways if way.name == GLOO]
        quick = [way for way in ways if way.name != GLOO]
        times = self._times(calls, quick, 1.0)
        for state, more in self._times(calls, slow, GLOO_SHARE).items():
            if state in times:
                times[state] = more | times[state]
        for state, by_name in times.items():
            known = [way for way in ways if way.name in by_name]
            yield Found(kind, nbytes, state, known, by_name)

    def _times(
        self, calls: Calls, ways: Sequence[Way], share: float
    ) -> dict[str, dict[str, Any]]:
        """Return the times of each state of the cores, by the names of the ways."""
        if not ways:
            return {}
        times = measure_for(
            self.comm,
            self.mpi,
            {way.name: way.call for way in ways},
            self.options["seconds"] * share,
            rewrite=calls.rewrite,
            watch=self.watch,
        )
        return {"": times} if self.watch is None else by_state(times, self.watch)


def measure_all(options: dict[str, Any]) -> None:
    """Measure in this job; collective over all ranks of the job.

    Parameters
    ----------
    options : dict
        The command line.
    """
    strategy = hs.MultiWorkerMirroredStrategy()
    topology = strategy.topology
    network = ""
    if options["on_hosts"]:
        network = (
            f"{topology.num_workers} hosts x {topology.worker_comm.size} ranks, "
            f"{options['rate'] or 'no limit'} from each host, {options['delay_us']} us "
            "of delay, "
        )
    hs.print_once(
        f"calls that move data, {network}{describe(topology.mpi)}\n"
        "in brackets: the ratio to mpi4py's median in the same rounds, and for unequal "
        "lengths also to equal lengths"
    )
    bench = Bench(strategy, options)
    found: list[Found] = strategy.local_value(strategy.run(bench.measure))
    bench.close()
    if topology.replica_id == 0 and options["json_path"]:
        where = environment(topology.mpi)
        if options["on_hosts"]:
            where["command"] = options["on_hosts"]
        rows = [line for one in found for line in one.rows(bench.comm.size)]
        write_json(options["json_path"], topology.mpi, rows, environment=where)


def _parse_sizes(_context: Any, _option: Any, text: str) -> list[int]:
    return [max(parse_size(word), 4) for word in text.split(",")]


def _parse_calls(_context: Any, _option: Any, text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise click.BadParameter(
            f"expected some of {', '.join(KINDS)}, found {', '.join(unknown)}; name "
            "others"
        )
    return names


@click.command(context_settings={"show_default": True})
@click.option(
    "--sizes", default=SIZES, callback=_parse_sizes, help="Of what a rank sends."
)
@click.option(
    "--calls", default=",".join(KINDS), callback=_parse_calls, help="Which calls."
)
@click.option("--seconds", default=1.0, help="How long to measure a call of a size.")
@click.option("--gloo/--no-gloo", default=True, help="Measure torch's gloo, too.")
@click.option("--hosts", "num_hosts", default=1, help="Number of pretend hosts.")
@click.option("--ranks-per-host", default=1, help="Ranks on each pretend host.")
@click.option("--rate", default="", help="Limit of what each host sends; '' for none.")
@click.option("--delay-us", default=0, help="How much later frames come.")
@click.option("--on-hosts", hidden=True, help="Set in the job itself: the command.")
@click.option("--json", "json_path", help="File for the figures.")
def main(**options: Any) -> None:
    """Measure the calls that move data, of hpcstrat, mpi4py and torch's gloo."""
    if options["num_hosts"] == 1 or options["on_hosts"]:
        measure_all(options)
    else:
        names = ("num_hosts", "ranks_per_host", "rate", "delay_us")
        sys.exit(on_hosts(*(options[name] for name in names)))


if __name__ == "__main__":
    main()
