"""Benchmark of the allreduce from 4 B to 256 MiB, with its alternatives.

Run it on two ranks of a quiet machine with two cores::

    mpirun -n 2 python benchmarks/bench_allreduce.py --json FILE --picture FILE

The benchmark compares hpcstrat's ``all_reduce`` (in place, into ``out=``, and with a
result array that the next call replaces, as in a training loop); mpi4py's ``Allreduce``
(of the whole buffer, and in pieces of the best size, which a short trial finds for each
buffer size); torch's gloo, if torch is installed and all ranks are on one machine; and
a copy of the buffer by all ranks at once. Each sum is checked before it is timed, and
the inputs are rewritten before each call. ``timing.py`` describes how times are
measured, and ``cores.py`` explains why there are two results of each: for cores that
share a cache, and for cores that do not. With ``--device`` the buffers are on GPUs: see
``device_allreduce.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from buffers import fill, in_pieces, require_sum
from cores import LATENCY, CoreWatch, by_state, describe_cores
from device_allreduce import SECONDS as DEVICE_SECONDS
from device_allreduce import SIZES as DEVICE_SIZES
from device_allreduce import measure_device
from device_ways import BY_HAND
from devices import device_options, given, start
from drawing import draw_sizes
from gloo import start_gloo
from report import (
    describe,
    output_options,
    parse_size,
    row,
    size_text,
    table,
    write_json,
)
from timing import measure_for

import hpcstrat as hs

SIZES = ",".join(size_text(4**k).replace(" ", "") for k in range(1, 15))
PIECES = [1 << k for k in range(16, 23)]

WHOLE = "mpi4py, whole"
BEST = "mpi4py, pieces"
BEST_IN_PLACE = "mpi4py, pieces in place"
FLOOR = "memcpy"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line; ``main`` describes the options."""

    sizes: list[int]
    dtype: str
    seconds: float
    hot: bool
    json_path: str | None
    picture: str | None


@dataclass(frozen=True)
class Alternative:
    """A way to sum a buffer.

    Parameters
    ----------
    call : callable
        Takes no arguments.
    result : callable
        Returns the array that holds the sum after ``call``.
    """

    call: Callable[[], object]
    result: Callable[[], Any]


class Case:
    """The buffers of one size, and the ways to sum them.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part; the case is used in its replica
        context.
    nbytes : int
        Size of a buffer.
    options : Options
        The command line.
    watch : CoreWatch
        Detects whether the ranks' cores share a cache.
    """

    def __init__(
        self,
        strategy: hs.MultiWorkerMirroredStrategy,
        nbytes: int,
        options: Options,
        watch: CoreWatch,
    ):
        self.options, self.watch = options, watch
        dtype = np.dtype(options.dtype)
        self.comm = strategy.topology.replica_comm
        self.mpi = strategy.topology.mpi
        length = max(nbytes // dtype.itemsize, 1)
        self.own, self.total, self.inplace, self.numbers = (
            np.empty(length, dtype) for _ in range(4)
        )
        self.kept: Any = None
        fill(self.numbers, self.comm.rank)
        self.total.fill(0)
        self.rewrite()

    def rewrite(self) -> None:
        """Write this rank's numbers into the inputs, as a step of training does.

        Not collective.
        """
        np.copyto(self.own, self.numbers)
        np.copyto(self.inplace, self.numbers)

    def by_hpcstrat(self) -> dict[str, Alternative]:
        """Return the calls of hpcstrat that sum the buffer, by name.

        Not collective.
        """
        own, total, inplace = self.own, self.total, self.inplace
        all_reduce = hs.get_replica_context().all_reduce

        def allocate() -> None:
            self.kept = all_reduce("sum", own)

        return {
            "hpcstrat, in place": Alternative(
                lambda: all_reduce("sum", inplace, out=inplace), lambda: inplace
            ),
            "hpcstrat, out=": Alternative(
                lambda: all_reduce("sum", own, out=total), lambda: total
            ),
            "hpcstrat, allocating": Alternative(allocate, lambda: self.kept),
        }

    def by_mpi4py(self) -> dict[str, Alternative]:
        """Return the calls of mpi4py that sum the whole buffer by one ``Allreduce``.

        Not collective.
        """
        own, total, inplace, comm = self.own, self.total, self.inplace, self.comm
        in_place = self.mpi.IN_PLACE
        return {
            WHOLE: Alternative(lambda: comm.Allreduce(own, total), lambda: total),
            "mpi4py, whole in place": Alternative(
                lambda: comm.Allreduce(in_place, inplace), lambda: inplace
            ),
        }

    def by_gloo(self, gloo: Any) -> dict[str, Alternative]:
        """Return the call of gloo that sums the buffer, or an empty dict without gloo.

        Not collective.
        """
        if gloo is None:
            return {}
        import torch

        tensor = torch.from_numpy(self.inplace)
        return {
            "torch gloo, in place": Alternative(
                lambda: gloo.all_reduce(tensor), lambda: self.inplace
            )
        }

    def measure(self, calls: Any, share: float, least: int = 7) -> dict[Any, Any]:
        """Time some calls, for a share of the seconds that each buffer size has.

        Collective over all replicas.
        """
        return measure_for(
            self.comm,
            self.mpi,
            calls,
            self.options.seconds * share,
            least=least,
            hot=self.options.hot,
            rewrite=self.rewrite,
            watch=self.watch,
        )

    def best_pieces(self) -> tuple[str, dict[str, Alternative]]:
        """Try mpi4py's ``Allreduce`` in pieces; return the best sizes and their calls.

        Collective over all replicas.
        """
        nbytes = self.own.nbytes
        pieces = [p for p in PIECES if p < nbytes] + [nbytes]
        best, found = [], {}
        for name, send, receive in (
            (BEST, self.own, self.total),
            (BEST_IN_PLACE, self.mpi.IN_PLACE, self.inplace),
        ):
            calls = {p: in_pieces(self.comm, send, receive, p) for p in pieces}
            times = self.measure(calls, 1 / 8, least=5)
            self.watch.take()
            # All ranks choose the same piece size, because they have the same times.
            piece = min(pieces, key=lambda p, times=times: float(np.median(times[p])))
            best.append("whole" if piece == nbytes else size_text(piece))
            found[name] = Alternative(calls[piece], lambda array=receive: array)
        return f"{best[0]}, in place {best[1]}", found

    def check(self, ways: dict[str, Alternative]) -> None:
        """Sum once by each alternative, and raise if a sum is wrong.

        Collective over all replicas.
        """
        for name, way in ways.items():
            self.rewrite()
            self.total.fill(0)
            way.call()
            require_sum(name, way.result(), self.comm.size)

    def run(self, gloo: Any) -> tuple[str, dict[str, dict[str, Any]]]:
        """Check and time all alternatives for one buffer size.

        Collective over all replicas.

        Parameters
        ----------
        gloo : module or None
            ``torch.distributed``, ready for use.

        Returns
        -------
        pieces : str
            The best piece sizes of mpi4py's ``Allreduce``, as text.
        times : dict of str to dict of str to ndarray of shape (rounds,)
            Seconds of each alternative, for each state of the cores, from
            `cores.by_state`.
        """
        pieces, best = self.best_pieces()
        ways = {**self.by_hpcstrat(), **self.by_mpi4py(), **best}
        self.check(ways)
        calls = {name: way.call for name, way in ways.items()}
        calls[FLOOR] = lambda: np.copyto(self.total, self.own)
        times = by_state(self.measure(calls, 1), self.watch)
        # Gloo has separate rounds, because other calls took longer right after a gloo
        # call.
        slow = self.by_gloo(gloo)
        self.check(slow)
        calls = {name: way.call for name, way in slow.items()}
        if calls:
            its_times = by_state(self.measure(calls, 1 / 4), self.watch)
            for state in times.keys() & its_times.keys():
                times[state] = its_times[state] | times[state]
        return pieces, times


def same_place(name: str) -> str:
    """Return the mpi4py alternative to compare with: in place if ``name`` is in place.

    Not collective.

    Parameters
    ----------
    name : str
        The alternative.

    Returns
    -------
    str
        The name of the mpi4py alternative; empty for gloo, which has separate rounds.
    """
    if name.startswith(("torch", LATENCY)):
        return ""
    return BEST_IN_PLACE if name.endswith("in place") else BEST


def measure_sizes(
    strategy: hs.MultiWorkerMirroredStrategy, options: Options
) -> tuple[dict[int, dict[str, dict[str, Any]]], dict[int, str]]:
    """Measure each buffer size, and print its times.

    Collective over all replicas; in replica context.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    options : Options
        The command line.

    Returns
    -------
    times : dict of int to dict of str to dict of str to ndarray of shape (rounds,)
        Seconds of each alternative, for each size and each state of the cores.
    pieces : dict of int to str
        The best piece sizes of mpi4py's ``Allreduce``, for each buffer size.
    """
    topology = strategy.topology
    gloo, watch = start_gloo(strategy), CoreWatch(topology.replica_comm, topology.mpi)
    times, pieces = {}, {}
    for size in options.sizes:
        case = Case(strategy, size, options, watch)
        nbytes = case.own.nbytes
        pieces[nbytes], times[nbytes] = case.run(gloo)
        for state, by_name in times[nbytes].items():
            where = describe_cores(state, by_name)
            hs.print_once(
                f"\n{size_text(nbytes)}, {where}; mpi4py's best pieces: "
                f"{pieces[nbytes]}\n" + table(by_name, WHOLE, FLOOR, same_place)
            )
    if gloo is not None:
        gloo.destroy_process_group()
    watch.close()
    return times, pieces


def _parse_sizes(_context: Any, _option: Any, text: str) -> list[int]:
    return [parse_size(word) for word in text.split(",")]


def _on_gpus(bench: Any, words: dict[str, Any]) -> None:
    sizes = words["sizes"] if given("sizes") else DEVICE_SIZES
    seconds = words["seconds"] if given("seconds") else DEVICE_SECONDS
    times = measure_device(bench, sizes, seconds)
    if bench.rank == 0 and words["picture"]:
        title = f"all-reduce\n{bench.where()}"
        in_states = {size: {"": by_name} for size, by_name in times.items()}
        draw_sizes(words["picture"], in_states, title, BY_HAND)


@click.command(context_settings={"show_default": True})
@click.option("--sizes", default=SIZES, callback=_parse_sizes, help="Of a buffer.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64", "int32", "int64"]),
    default="float32",
)
@click.option("--seconds", default=5.0, help="How long to measure each size.")
@click.option(
    "--hot", is_flag=True, help="Call once, untimed, right before each timed call."
)
@device_options
@output_options
def main(device: bool, smoke: bool, results: str | None, **words: Any) -> None:
    """Measure the all-reduce of hpcstrat, mpi4py and torch's gloo."""
    if device:
        _on_gpus(start(smoke, results, words), words)
        return
    options = Options(**words)
    strategy = hs.MultiWorkerMirroredStrategy()
    mpi = strategy.topology.mpi
    what = f"all_reduce of {options.dtype}{', hot' * options.hot}"
    where = describe(mpi)
    hs.print_once(
        f"{what}, {where}\nfaster: than {WHOLE}; above pieces: median of differences "
        "to mpi4py's best pieces, in place or not, in the same round"
    )
    # All sizes are measured in one call of `run`: bench_overhead.py measures `run`
    # itself.
    times, pieces = strategy.local_value(
        strategy.run(measure_sizes, args=(strategy, options))
    )
    if strategy.replica_id:
        return
    if options.json_path:
        found = [
            (nbytes, state, by_name)
            for nbytes, by_state in times.items()
            for state, by_name in by_state.items()
        ]
        rows = [
            row(what, name, mpi.COMM_WORLD.size, nbytes, values, cores=state)
            for nbytes, state, by_name in found
            for name, values in by_name.items()
        ]
        write_json(
            options.json_path,
            mpi,
            rows,
            best_pieces={size_text(size): name for size, name in pieces.items()},
            rounds={
                f"{size_text(size)}, {state}": len(by_name[FLOOR])
                for size, state, by_name in found
            },
            median_seconds_above_best_pieces={
                f"{size_text(size)}, {state}": {
                    name: float(np.median(values - by_name[same_place(name)]))
                    for name, values in by_name.items()
                    if same_place(name)
                }
                for size, state, by_name in found
            },
        )
    if options.picture:
        draw_sizes(options.picture, times, f"{what}\n{where}", WHOLE)


if __name__ == "__main__":
    main()
