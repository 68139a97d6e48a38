"""Helpers of GPU benchmarks: options, hardware, clocks, results.

Work on a GPU continues after the call that started it has returned. Therefore a call is
timed in two ways: alone, until its stream (not the device) has been synchronized; and
as one of many calls in flight, by the seconds for which the call blocks the program,
and the seconds of the device between two events.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from report import describe, write_json
from timing import measure_for

import hpcstrat as hs
from hpcstrat.engine.gpu import library

__all__ = ["Bench", "Flight", "Output", "device_options", "given", "start"]

_FLIGHT_SECONDS = 0.2
_MOST_IN_FLIGHT = 100


@dataclass(frozen=True, kw_only=True)
class Output:
    """The destinations of a benchmark's figures.

    Parameters
    ----------
    smoke : bool
        Whether this run only tests the program: it prints, and writes no file.
    results : str, optional
        Folder for a file named by the hardware.
    json_path : str, optional
        A file for the figures.
    picture : str, optional
        A picture to draw.
    """

    smoke: bool
    results: str | None = None
    json_path: str | None = None
    picture: str | None = None


@dataclass(frozen=True)
class Flight:
    """The times of calls that are in flight together, per call, on the slowest rank.

    Parameters
    ----------
    calls : int
        Number of calls.
    host_seconds : float
        Seconds for which a call blocks the program.
    device_seconds : float
        Seconds of the device per call, between events before the first call and after
        the last.
    seconds : float
        Seconds per call, from the first call until the stream has finished the last.
    """

    calls: int
    host_seconds: float
    device_seconds: float
    seconds: float


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a GPU benchmark to a command.

    Not collective.

    Parameters
    ----------
    command : callable
        A command with the parameters ``device``, ``smoke`` and ``results``.

    Returns
    -------
    callable
        The command, decorated.
    """
    for option in (
        click.option("--results", help="With --device: folder for a file of figures."),
        click.option(
            "--smoke", is_flag=True, help="With --device: try it; write nothing."
        ),
        click.option("--device", is_flag=True, help="Measure arrays on GPUs."),
    ):
        command = option(command)
    return command


def given(name: str) -> bool:
    """Return whether an option was on the command line.

    Not collective.

    Parameters
    ----------
    name : str
        Name of the parameter.

    Returns
    -------
    bool
        False if the option has its default.
    """
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _refuse(message: str) -> NoReturn:
    """Print on one rank why nothing is measured, and exit on all with status 2."""
    hs.print_once(message, file=sys.stderr)
    sys.exit(2)


def _cupy(smoke: bool) -> Any:
    """Return the module CuPy, or exit if there is no GPU."""
    if importlib.util.find_spec("cupy") is None:
        _refuse(
            "expected a GPU, and CuPy, found that CuPy is not installed; install "
            "hpcstrat with its extra cuda12 or cuda13, where there is a GPU"
        )
    reason = library.why_no_gpu()
    if reason:
        _refuse(f"expected a GPU, found {reason}; run this where there is one")
    import cupy

    if hasattr(cupy, "_standin") and not smoke:
        _refuse(
            "expected a GPU, found the stand-in for CuPy of the tests, whose times "
            "mean nothing; add --smoke to try the program, which then writes nothing"
        )
    return cupy


def start(smoke: bool, results: str | None, words: Mapping[str, Any]) -> Bench:
    """Create a strategy on the GPUs, and return its `Bench`.

    Collective over all ranks of the job. Without a GPU, the program exits with status
    2.

    Parameters
    ----------
    smoke : bool
        Whether this run only tests the program.
    results : str or None
        Folder for a file named by the hardware.
    words : mapping of str to object
        The command line, with ``json_path`` and ``picture``.

    Returns
    -------
    Bench
        Ready for use.

    Raises
    ------
    click.UsageError
        If a test run has an option that writes a file.
    """
    output = Output(
        smoke=smoke,
        results=results,
        json_path=words["json_path"],
        picture=words["picture"],
    )
    if smoke and (results or output.json_path or output.picture):
        raise click.UsageError(
            "expected --smoke alone, found that figures are to be written; leave out "
            "--smoke, or --json, --picture and --results"
        )
    cupy = _cupy(smoke)
    return Bench(cupy, hs.MultiWorkerMirroredStrategy(), output)


class Bench:
    """A strategy on GPUs, a stream for the measurements, and timers of host and device.

    Collective over all replicas.

    Parameters
    ----------
    cupy : module
        CuPy.
    strategy : hpcstrat strategy
        A strategy of all ranks.
    output : Output
        The destinations of the figures.

    Attributes
    ----------
    rank : int
        This replica.
    stream : cupy.cuda.Stream
        The stream of all measurements; not the null stream, for which other streams
        wait.
    hardware : dict
        Name and number of the GPUs, number of ranks, versions.
    """

    def __init__(self, cupy: Any, strategy: Any, output: Output):
        self.cupy, self.strategy, self.output = cupy, strategy, output
        self.comm = strategy.topology.replica_comm
        # Copy the communicator, because closing the strategies frees it.
        self.rank = self.comm.rank
        self.mpi = strategy.topology.mpi
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.hardware = self._hardware()

    @property
    def smoke(self) -> bool:
        """Return whether this run only tests the program."""
        return self.output.smoke

    def _hardware(self) -> dict[str, Any]:
        runtime = self.cupy.cuda.runtime
        number = runtime.getDevice()
        name = runtime.getDeviceProperties(number)["name"].decode()
        place = platform.node(), runtime.deviceGetPCIBusId(number)
        found = self.comm.allgather((name, place))
        gpus = len({place for _, place in found})
        # Record the sharing, because ranks that share a GPU run in turns, unlike on two
        # GPUs.
        sharing = os.environ.get("GPU_SHARING", "time slices, unless there is MPS")
        return {
            "gpu": " and ".join(sorted({name for name, _ in found})),
            "gpus": gpus,
            "shared_by": sharing if gpus < self.comm.size else "",
            "ranks": self.comm.size,
            "workers": self.strategy.topology.num_workers,
            **asdict(library.versions()),
        }

    def where(self) -> str:
        """Return a line that describes the machine of a benchmark.

        Not collective.

        Returns
        -------
        str
            The GPUs, and the line of `report.describe`.
        """
        count, name = self.hardware["gpus"], self.hardware["gpu"]
        shared = self.hardware["shared_by"]
        how = f" shared by {shared}" if shared else ""
        return f"{count} x {name}{how}, {describe(self.mpi)}"

    def measure(
        self, calls: Mapping[str, Callable[[], object]], seconds: float, least: int = 7
    ) -> dict[str, Any]:
        """Time single calls on the device, each until the stream has finished it.

        Collective over all replicas.

        Parameters
        ----------
        calls : mapping of str to callable
            See `timing.measure`.
        seconds : float
            Seconds of all measurements together.
        least : int
            Minimum number of rounds, even if they take longer.

        Returns
        -------
        dict of str to ndarray of shape (rounds,)
            See `timing.measure`.
        """
        waited = {name: self._waited(call) for name, call in calls.items()}
        if self.smoke:
            seconds, least = 0.001, 1
        with self.stream:
            return measure_for(self.comm, self.mpi, waited, seconds, least=least)

    def _waited(self, call: Callable[[], object]) -> Callable[[], None]:
        stream = self.stream

        def call_and_wait() -> None:
            call()
            stream.synchronize()

        return call_and_wait

    def in_flight(
        self, call: Callable[[], object], expected_seconds: float, *, most: int = 0
    ) -> Flight:
        """Time many calls that are started without waiting for the device in between.

        Collective over all replicas.

        Parameters
        ----------
        call : callable
            Takes no arguments.
        expected_seconds : float
            Approximate seconds of a call; the same on every rank.
        most : int
            Maximum number of calls; 0 means 100.

        Returns
        -------
        Flight
            The times, which are the same on every rank.
        """
        most = 3 if self.smoke else most or _MOST_IN_FLIGHT
        calls = int(min(max(_FLIGHT_SECONDS / max(expected_seconds, 1e-9), 3), most))
        begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        with self.stream:
            call()
            self.stream.synchronize()
            self.comm.Barrier()
            begin.record(self.stream)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            issued = time.perf_counter()
            end.record(self.stream)
            self.stream.synchronize()
            done = time.perf_counter()
        device = self.cupy.cuda.get_elapsed_time(begin, end) / 1e3
        own = issued - start, device, done - start
        longest = [self.comm.allreduce(value, op=self.mpi.MAX) for value in own]
        return Flight(calls, *(value / calls for value in longest))

    def write(self, what: str, rows: list[dict[str, Any]], **more: Any) -> None:
        """Write the figures to the files of the command line; called on rank 0 only.

        Not collective.

        Parameters
        ----------
        what : str
            First word of the file's name.
        rows : list of dict
            From `report.row`.
        **more : object
            Further entries of the file.
        """
        for path in self._paths(what):
            write_json(path, self.mpi, rows, hardware=self.hardware, **more)
            print(f"figures are in {path}")

    def _paths(self, what: str) -> list[str]:
        paths = [self.output.json_path] if self.output.json_path else []
        if self.output.results:
            folder = Path(self.output.results)
            folder.mkdir(parents=True, exist_ok=True)
            name = re.sub("[^a-z0-9]+", "-", self.hardware["gpu"].lower()).strip("-")
            count, ranks = self.hardware["gpus"], self.hardware["ranks"]
            paths.append(str(folder / f"{what}_{count}x{name}_{ranks}ranks.json"))
        return paths
