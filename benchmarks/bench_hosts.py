"""Benchmark of the allreduce between hosts with a slow network: seconds and bytes.

Run it as root, with an MPI library and without a launcher::

    python benchmarks/bench_hosts.py --json FILE --picture FILE

The program makes pretend hosts on this machine by ``tests/cluster/hosts_up.sh``
(network namespaces with a network of a limited rate), runs itself there, and removes
the hosts. The ranks are placed on the hosts in turn, which is the worst placement for
an algorithm that ignores hosts. Each alternative is checked before it is timed;
``timing.py`` describes how times are measured. The byte counts are the bytes that left
each host's interface, with headers and acknowledgments. torch's gloo is measured if
torch is installed. With ``--overlap``, a program starts the sum, and computes for as
long as the sum alone takes. The hidden share is the part of the sum's time that does
not lengthen the step. A host must send ``2 (hosts - 1) / hosts`` times the buffer, as
if it were one rank (Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from buffers import in_pieces
from drawing import save_figure
from gloo import start_gloo
from on_hosts import on_hosts
from report import (
    byte_ticks,
    describe,
    environment,
    output_options,
    parse_size,
    row,
    size_text,
    styles,
    write_json,
)
from timing import measure_for

import hpcstrat as hs

HIERARCHICAL = "hpcstrat, hierarchical"
HALF = "hpcstrat, hierarchical, float16 on the wire"
FLAT = "mpi4py, Allreduce"
PIECES = (256 << 10, 1 << 20)
GLOO = "torch gloo"
# Seconds of a model's layer; after each layer, the program may test a started sum.
LAYER_SECONDS = 0.002
MAKE: dict[str, Callable[[], dict[str, Any]]] = {
    "hpcstrat, default": dict,
    HIERARCHICAL: lambda: {"cross_device_ops": hs.HierarchicalCopyAllReduce()},
    HALF: lambda: {
        "cross_device_ops": hs.HierarchicalCopyAllReduce(),
        "communication_options": hs.CommunicationOptions(wire_dtype="float16"),
    },
    "hpcstrat, MpiAllReduce": lambda: {"cross_device_ops": hs.MpiAllReduce()},
}
# Count the bytes of many reductions together, so that the barriers around the count,
# and late acknowledgments of TCP, add little.
COUNTED_BYTES = 8 << 20
MOST_COUNTED = 64


@dataclass(frozen=True)
class Found:
    """The results for one buffer size.

    Parameters
    ----------
    least : int
        Bytes that each host must send in full precision.
    times : dict of str to ndarray of shape (rounds,)
        Seconds, from `timing.measure`.
    sent : dict of str to list of float
        Bytes that each host sends for a reduction.
    """

    least: int
    times: dict[str, Any]
    sent: dict[str, list[float]]

    def share(self, name: str) -> float:
        """Return the most bytes that a host has sent, relative to the least possible.

        Not collective.

        Parameters
        ----------
        name : str
            The alternative.

        Returns
        -------
        float
            1 if the host sends only the bytes that any algorithm must send in full
            precision.
        """
        return max(self.sent[name]) / self.least


class Case:
    """The buffers of one size, and all alternatives that sum them.

    Parameters
    ----------
    strategies : dict of str to hpcstrat strategy
        Strategies over all ranks, by name.
    nbytes : int
        Size of a buffer.
    gloo : module or None
        ``torch.distributed``, as an alternative.
    """

    def __init__(
        self, strategies: dict[str, Any], nbytes: int, gloo: Any = None
    ) -> None:
        self.default, self.gloo = next(iter(strategies.values())), gloo
        self.topology = next(iter(strategies.values())).topology
        self.comm, self.mpi = self.topology.replica_comm, self.topology.mpi
        # Use small integers, because their sums are exact, also in float16.
        numbers = np.arange(nbytes // 4) % 7
        self.own = (numbers + self.comm.rank).astype(np.float32)
        self.expected = sum(numbers + rank for rank in range(self.comm.size))
        self.total = np.empty_like(self.own)
        self.calls: dict[str, Callable[[], object]] = {
            name: lambda strategy=strategy: strategy.reduce(
                "sum", self.own, axis=None, out=self.total
            )
            for name, strategy in strategies.items()
        }
        self.calls[FLAT] = lambda: self.comm.Allreduce(self.own, self.total)
        for piece in PIECES:
            if piece < nbytes:
                name = f"{FLAT} of {size_text(piece)} each"
                self.calls[name] = in_pieces(self.comm, self.own, self.total, piece)
        if gloo is not None:
            import torch

            # This alternative sums in place. Its values grow from call to call, unread.
            self.tensor = torch.from_numpy(self.total)
            self.calls[GLOO] = lambda: gloo.all_reduce(self.tensor)

    def check(self) -> None:
        """Sum once by each alternative, and raise if a sum is wrong.

        Collective over all replicas.
        """
        for name, call in self.calls.items():
            self.total[...] = self.own if name == GLOO else 0
            call()
            if not np.array_equal(self.total, self.expected):
                raise ArithmeticError(
                    f"expected the exact sum of {self.own.size} numbers by {name}, "
                    "found another; do not use its times"
                )

    def sent_bytes(self, call: Callable[[], object]) -> list[float]:
        """Count the bytes that each host sends for a reduction.

        Collective over all replicas.

        Parameters
        ----------
        call : callable
            Makes the reduction; a call before this one has connected the hosts.

        Returns
        -------
        list of float
            Bytes of each host, as the mean of several reductions.
        """
        counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
        count = min(max(COUNTED_BYTES // self.own.nbytes, 1), MOST_COUNTED)
        self.comm.Barrier()
        before = int(counter.read_text())
        # No rank of this host may send before all ranks of it have read the counters.
        self.topology.worker_comm.Barrier()
        for _ in range(count):
            call()
        # Wait for all hosts, because a host may still send when the others have ended.
        self.comm.Barrier()
        sent = (int(counter.read_text()) - before) / count
        by_host = dict(self.comm.allgather((self.topology.worker_id, sent)))
        return [by_host[worker] for worker in sorted(by_host)]

    def run(self, seconds: float) -> Found:
        """Check all alternatives, count their bytes, and time them.

        Collective over all replicas.

        Parameters
        ----------
        seconds : float
            Seconds of the measurement.

        Returns
        -------
        Found
            The same on all ranks.
        """
        self.check()
        self.total.fill(0)
        sent = {name: self.sent_bytes(call) for name, call in self.calls.items()}
        times = measure_for(self.comm, self.mpi, self.calls, seconds, least=5)
        hosts = self.topology.num_workers
        return Found(2 * (hosts - 1) * self.own.nbytes // hosts, times, sent)

    def hidden(self, alone: dict[str, Any], seconds: float) -> dict[str, float]:
        """Compute while a sum is in progress; return the hidden share of the sum.

        Collective over all replicas. The share is 1 if the step takes no longer than
        its computation.

        Parameters
        ----------
        alone : dict of str to ndarray of shape (rounds,)
            Seconds of the sum alone, from `run`.
        seconds : float
            Seconds of the measurement.

        Returns
        -------
        dict of str to float
            Hidden shares, by alternative, with and without tests between layers.
        """
        ours, steps, takes = next(iter(self.calls)), {}, {}
        for name in (ours, GLOO) if self.gloo is not None else (ours,):
            takes[name] = float(np.median(alone[name]))
            for asks in (False, True):
                words = f"{name}, {'asked between layers' if asks else 'left alone'}"
                takes[words] = takes[name]
                steps[words] = self._step(name, takes[name], asks=asks)
        times = measure_for(self.comm, self.mpi, steps, seconds, least=5)
        return {
            words: 2 - float(np.median(values)) / takes[words]
            for words, values in times.items()
        }

    def _step(self, name: str, seconds: float, *, asks: bool) -> Callable[[], object]:
        if name == GLOO:

            def by_gloo() -> None:
                work = self.gloo.all_reduce(self.tensor, async_op=True)
                _compute(seconds, work.is_completed if asks else None)
                work.wait()

            return by_gloo

        def replica() -> None:
            context = hs.get_replica_context()
            started = context.start_all_reduce("sum", self.own, out=self.total)
            _compute(seconds, started.test if asks else None)
            started.wait()

        return lambda: self.default.run(replica)


def _compute(seconds: float, ask: Callable[[], object] | None) -> None:
    """Compute for some seconds, and call ``ask`` after each layer."""
    matrix = np.ones((64, 64), np.float32)
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        while time.perf_counter() < min(start + LAYER_SECONDS, end):
            matrix @ matrix
        if ask is not None:
            ask()


def table(found: Found) -> str:
    """Return the results for one size as aligned lines.

    Not collective.

    Parameters
    ----------
    found : Found
        Times and bytes.

    Returns
    -------
    str
        A heading, and a line for each alternative.
    """
    cells = [["", "median ms", "min", "max", "faster", "KiB sent by hosts", "x least"]]
    flat = np.median(found.times[FLAT])
    for name, values in found.times.items():
        seconds = (np.median(values), values.min(), values.max())
        line = [name, *(f"{t * 1e3:.2f}" for t in seconds)]
        line.append(f"{flat / seconds[0]:.2f}")
        line.append(" ".join(f"{sent / 1024:.1f}" for sent in found.sent[name]))
        line.append(f"{found.share(name):.3f}")
        cells.append(line)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(widths[0]), *map(str.rjust, line, widths[1:])])
        for name, *line in cells
    )


def draw(path: str, all_found: dict[int, Found], title: str) -> None:
    """Draw the times, and the bytes that the hosts sent.

    Not collective.

    Parameters
    ----------
    path : str
        The picture; its suffix names the format.
    all_found : dict of int to Found
        For each size in bytes.
    title : str
        Title with the measurement and the machine.
    """
    from matplotlib.figure import Figure

    sizes = list(all_found)
    figure = Figure(figsize=(9, 8), layout="constrained")
    seconds, share = figure.subplots(2, 1, sharex=True)
    names = list(all_found[sizes[0]].times)
    for name, style in styles(names, by_family=False).items():
        medians = [np.median(found.times[name]) * 1e3 for found in all_found.values()]
        seconds.plot(sizes, medians, **style)
        shares = [found.share(name) for found in all_found.values()]
        share.plot(sizes, shares, **style)
    seconds.set(yscale="log", ylabel="time of an all-reduce in ms")
    share.set_yscale("log", base=2)
    share.set(
        xlabel="size of each rank's buffer",
        ylabel="bytes sent by a host, relative to\nwhat it must in full precision",
    )
    low, high = share.get_ylim()
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if low <= t <= high]
    share.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    share.axhline(1, color="gray", linewidth=0.8, zorder=0)
    byte_ticks(share, sizes)
    save_figure(path, figure, title)


def measure(options: dict[str, Any]) -> None:
    """Measure in this job, whose ranks are on several hosts.

    Collective over all ranks of the job.

    Parameters
    ----------
    options : dict
        The command line.
    """
    with ExitStack() as stack:
        strategies = {
            name: stack.enter_context(
                hs.MultiWorkerMirroredStrategy(
                    **make(), progress_thread=options["progress_thread"]
                )
            )
            for name, make in MAKE.items()
        }
        topology = next(iter(strategies.values())).topology
        mpi = topology.mpi
        hosts = topology.num_workers
        what = (
            f"all_reduce of float32, {hosts} hosts x {topology.worker_comm.size} ranks "
            f"dealt in turn, {options['rate'] or 'no limit'} from each host, "
            f"{options['delay_us']} us of delay"
        )
        where = describe(mpi)
        hs.print_once(
            f"{what}\n{where}\nfaster: than {FLAT}; least: what a host must send in "
            "full precision"
        )
        gloo = start_gloo(strategies["hpcstrat, default"], "eth0")
        all_found, all_hidden = {}, {}
        for nbytes in options["sizes"]:
            case = Case(strategies, nbytes, gloo)
            found = all_found[nbytes] = case.run(options["seconds"])
            rounds = len(found.times[FLAT])
            hs.print_once(
                f"\n{size_text(nbytes)}, {rounds} rounds; least: "
                f"{found.least / 1024:.1f} KiB\n{table(found)}"
            )
            if options["overlap"]:
                hidden = case.hidden(found.times, options["seconds"])
                all_hidden[nbytes] = hidden
                for words, share in hidden.items():
                    hs.print_once(f"hidden behind computing: {share:6.1%}  {words}")
        if gloo is not None:
            gloo.destroy_process_group()
        if topology.replica_id:
            return
        if options["json_path"]:
            _write(options, what, mpi, all_found, all_hidden)
        if options["picture"]:
            draw(options["picture"], all_found, f"{what}\n{where}")


def _write(
    options: dict[str, Any],
    what: str,
    mpi: Any,
    all_found: dict[int, Found],
    all_hidden: dict[int, dict[str, float]],
) -> None:
    rows = [
        row(what, name, mpi.COMM_WORLD.size, nbytes, values)
        | {
            "rounds": len(values),
            "sent_bytes_of_each_host": found.sent[name],
            "least_sent_bytes": found.least // (2 if name == HALF else 1),
        }
        for nbytes, found in all_found.items()
        for name, values in found.times.items()
    ]
    where = environment(mpi) | {"command": options["on_hosts"]}
    if all_hidden:
        where["hidden"] = {str(nbytes): each for nbytes, each in all_hidden.items()}
    write_json(options["json_path"], mpi, rows, environment=where)


def _parse_sizes(_context: Any, _option: Any, text: str) -> list[int]:
    return [max(parse_size(word), 4) for word in text.split(",")]


@click.command(context_settings={"show_default": True})
@click.option("--hosts", "num_hosts", default=2, help="Number of hosts.")
@click.option("--ranks-per-host", default=4, help="Ranks on each of them.")
@click.option(
    "--rate", default="100mbit", help="Limit of what each host sends; '' for none."
)
@click.option("--delay-us", default=0, help="How much later frames come.")
@click.option("--overlap", is_flag=True, help="Compute while sums are under way, too.")
@click.option(
    "--progress-thread",
    is_flag=True,
    help="Take what is started further in a thread, too.",
)
@click.option(
    "--sizes",
    default="4KiB,64KiB,1MiB,4MiB",
    callback=_parse_sizes,
    help="Of a buffer.",
)
@click.option("--seconds", default=20.0, help="How long to measure each size.")
@click.option("--on-hosts", hidden=True, help="Set in the job itself: the command.")
@output_options
def main(**options: Any) -> None:
    """Measure the all-reduce between pretend hosts; needs root."""
    if options["on_hosts"]:
        measure(options)
    else:
        names = ("num_hosts", "ranks_per_host", "rate", "delay_us")
        sys.exit(on_hosts(*(options[name] for name in names), in_turn=True))


if __name__ == "__main__":
    main()
