"""Predictions, from the trace to the command; most need no SimGrid."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import hpcstrat as hs
from hpcstrat.cli.main import main
from hpcstrat.errors import HpcstratError
from hpcstrat.tools.bench.prediction.dry_run import (
    AllReduced,
    Begun,
    MemoryCopy,
    Phantom,
    SimulatedJob,
    Traffic,
    dry_run,
)
from hpcstrat.tools.bench.prediction.forecast import (
    ForecastStep,
    predict,
    predict_point,
)
from hpcstrat.tools.bench.prediction.inputs import KnownFigures, read_given
from hpcstrat.tools.bench.prediction.platforms import NETWORKS, Network
from hpcstrat.tools.bench.prediction.simulator import Simulator
from hpcstrat.tools.bench.prediction.traces import Machine, Writer
from hpcstrat.tools.bench.run_file import BenchError

needs_simgrid = pytest.mark.skipif(
    shutil.which("smpirun") is None,
    reason="needs SimGrid's smpirun: apt-get install libsimgrid-dev",
)

MIB = 1 << 20
LATENCY, BANDWIDTH = 2e-6, 1e10
MACHINE = Machine(1e-6, 1e10, 1e10)
GIVEN = ["--latency", "2us", "--bandwidth", "10GB/s", "--compute-ms", "1"]


def command(*words: str) -> Result:
    """Run the command ``hpcstrat bench predict``."""
    return CliRunner().invoke(main, ["bench", "predict", *words])


def network(kind: str = "ethernet") -> Network:
    """Return a network with default values, except for its link."""
    return Network(kind, LATENCY, BANDWIDTH)


def test_phantoms_count_what_numpy_would_move() -> None:
    traffic = Traffic()
    array: Any = Phantom(100, np.dtype(np.float32), traffic)
    total = np.add(array, array[:], array)
    assert total is array
    assert traffic.take() == 3 * 400
    array[10:20][...] = array[20:30]
    assert traffic.take() == 2 * 40
    kept = np.empty(100, np.float32)
    kept[...] = array
    assert traffic.take() == 2 * 400
    assert not np.may_share_memory(array, kept)


def test_a_node_sends_what_an_all_reduce_needs() -> None:
    for workers, each in ((2, 1), (4, 2), (8, 4)):
        sent = 0
        for position in range(each):
            events = dry_run(
                [(3 * MIB,)], SimulatedJob(workers, each), position=position
            )
            for event in events:
                if isinstance(event, Begun):
                    sent += sum(size for _, size in event.sent)
        least = 2 * (workers - 1) / workers * 12 * MIB
        assert sent == pytest.approx(least, rel=1e-3)


def test_all_bytes_are_in_all_reduces_of_many_workers() -> None:
    events = dry_run([(3 * MIB,), (5,)], SimulatedJob(1000, 4))
    all_reduced = [event for event in events if isinstance(event, AllReduced)]
    assert {event.num_ranks for event in all_reduced} == {1000}
    nbytes = 4 * sum(event.nbytes for event in all_reduced)
    assert nbytes == pytest.approx(4 * (3 * MIB + 5), rel=1e-3)
    assert not any(event.in_place for event in all_reduced)
    assert any(isinstance(event, MemoryCopy) for event in events)


def test_gradients_of_a_flat_reduction_are_never_in_place() -> None:
    many = [(1000,)] * 5000
    events = dry_run(many, SimulatedJob(64, 1), ops=hs.MpiAllReduce())
    all_reduced = [event for event in events if isinstance(event, AllReduced)]
    assert sum(event.nbytes for event in all_reduced) == 20_000_000
    assert not any(event.in_place for event in all_reduced)


def test_half_precision_is_refused() -> None:
    options = hs.CommunicationOptions(wire_dtype="float16")
    with pytest.raises(HpcstratError, match="full precision"):
        dry_run([(MIB,)], SimulatedJob(2, 2), options=options)


def test_an_open_mpi_all_reduce_in_place_goes_up_and_down_a_tree() -> None:
    job = SimulatedJob(64)
    writer = Writer(job, MACHINE)
    (_, *tree) = writer.lines([AllReduced(MIB, 64, in_place=True)])
    assert tree == [f"reduce {MIB} 0 0", f"bcast {MIB} 0"]
    (_, whole) = writer.lines([AllReduced(MIB, 64, in_place=False)])
    assert whole == f"allreduce {MIB} 0"
    mpich = Writer(job, replace(MACHINE, mpi="mpich"))
    assert mpich.lines([AllReduced(MIB, 64, in_place=True)])[1:] == [whole]


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("nodes", [2, 33, 513, 10_000])
def test_platforms_have_all_nodes(kind: str, nodes: int) -> None:
    platform = NETWORKS[kind](network(kind), nodes)
    assert len(set(platform.hosts)) == nodes
    root = xml.etree.ElementTree.fromstring(platform.xml)
    found = 0
    for cluster in root.iter("cluster"):
        low, _, high = cluster.attrib["radical"].partition("-")
        size = int(high) - int(low) + 1
        found += size
        if cluster.get("topology") == "FAT_TREE":
            _, down, *_ = cluster.attrib["topo_parameters"].split(";")
            assert math.prod(map(int, down.split(","))) == size
        if cluster.get("topology") == "DRAGONFLY":
            groups, _, switches, each = cluster.attrib["topo_parameters"].split(";")
            (groups, switches) = (int(w.split(",")[0]) for w in (groups, switches))
            assert groups * switches * int(each) == size
            # SimGrid indexes the switches by group, so that there must be enough of
            # them.
            assert groups <= switches
    assert found >= nodes


@needs_simgrid
def test_two_nodes_take_what_a_calculation_by_hand_says() -> None:
    job = SimulatedJob(2, 2)
    step = ForecastStep(1e-3, ((16 * MIB,),))
    # The memory's time is hidden behind the network's, or vice versa.
    machine = replace(MACHINE, memory_bytes_per_second=1e15)
    point = predict_point(step, job, machine, network())
    nbytes = 64 * MIB
    # Each host sends half of its values, and then half of the sum.
    assert point.bandwidth_seconds == pytest.approx(nbytes / BANDWIDTH, rel=0.01)
    # The header costs one message, and two steps inside of a node.
    assert point.header_seconds == pytest.approx(LATENCY + 2 * 1e-6, rel=0.02)
    # Only the last piece has visible latency, because other pieces overlap.
    assert 2 * LATENCY < point.latency_seconds < 0.02 * nbytes / BANDWIDTH
    assert point.step_seconds == pytest.approx(
        sum(
            (
                *(point.compute_seconds, point.inside_seconds, point.header_seconds),
                *(point.latency_seconds, point.bandwidth_seconds),
            )
        ),
        rel=1e-6,
    )


@needs_simgrid
@pytest.mark.parametrize("kind", NETWORKS)
def test_pieces_that_are_the_same_are_simulated_once(kind: str) -> None:
    step = ForecastStep(1e-3, ((2 * MIB,), (3,)))
    for job in (SimulatedJob(12, 2), SimulatedJob(4, 2), SimulatedJob(12, 1)):
        points = [
            predict_point(step, job, MACHINE, network(kind), folds=folds)
            for folds in (False, True)
        ]
        times = [point.step_seconds for point in points]
        assert times[1] == pytest.approx(times[0], rel=0.01)


@needs_simgrid
def test_more_nodes_are_less_efficient() -> None:
    step = ForecastStep(1e-3, ((MIB,),))
    points = list(
        predict(step, SimulatedJob(1, 2), MACHINE, network("fat-tree"), [1, 2, 16, 64])
    )
    efficiencies = [point.efficiency for point in points]
    assert efficiencies[0] == 1
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert points[-1].num_replicas == 128


@needs_simgrid
def test_the_command_writes_what_a_report_expects(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"
    words = ["--network", "fat-tree", "--nodes", "1,4", "--gradients", "1MiB"]
    done = command(*GIVEN, *words, "--json", str(path))
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    found = content["format"], content["format_version"]
    assert found == ("hpcstrat expected", 1)
    assert [point["num_replicas"] for point in content["points"]] == [1, 4]
    assert content["points"][0]["seconds"] == pytest.approx(1e-3)
    assert content["points"][1]["seconds"] > 1e-3
    assert "fat tree" in done.output


def test_a_missing_simgrid_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = command(*GIVEN, "--network", "fat-tree", "--gradients", "1MiB")
    assert done.exit_code == 1
    assert "expected SimGrid's smpirun" in done.output
    assert "apt-get install" in done.output


def test_a_missing_matplotlib_is_said_before_anything_is_simulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, begun = tmp_path / "smpirun", tmp_path / "begun"
    program.write_text(f"#!/bin/sh\ntouch {begun}\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    words = ["--network", "fat-tree", "--gradients", "1MiB", "--nodes", "2"]
    done = command(*GIVEN, *words, "--picture", str(tmp_path / "picture.png"))
    assert done.exit_code == 1
    assert "expected matplotlib" in done.output
    assert not begun.exists()


def test_a_simgrid_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "smpirun"
    program.write_text("#!/bin/sh\necho no memory left >&2\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = command(
        *(*GIVEN, "--network", "dragonfly", "--gradients", "1MiB", "--nodes", "2")
    )
    assert done.exit_code == 1
    assert "exit status 7 and: no memory left" in done.output


def test_an_unknown_network_is_said() -> None:
    done = command(*GIVEN, "--network", "token-ring")
    assert done.exit_code == 2
    for kind in NETWORKS:
        assert kind in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--latency", "2"], "such as 1.5us"),
        (["--bandwidth", "fast"], "such as 12.5GB/s"),
        (["--nodes", "1,,4"], "such as 1,2,4"),
        (["--gradients", "resnet51"], "such as 100MB"),
    ],
)
def test_words_that_are_none_are_said(words: list[str], said: str) -> None:
    done = command("--network", "fat-tree", *words)
    assert done.exit_code == 2
    assert said in done.output


def scaling_run(**changes: Any) -> dict[str, Any]:
    """Return the file of a run with two replicas on one node, and with their link."""
    step = {
        "name": "step",
        "scaling": "weak",
        "parameters": {"model": "resnet50"},
        "seconds": [0.3, 0.3],
        "own_seconds": [0.3, 0.3],
        "late_seconds": [0.02, 0.02],
        "communication_seconds": [0.08, 0.08],
        "input_seconds": [0.0, 0.0],
        "reduced_bytes": 102_228_128,
    }
    link = {"latency_seconds": 2e-6, "bytes_per_second": 1e10}
    return {
        "format": "hpcstrat scaling",
        "format_version": 1,
        "topology": {
            "num_replicas": 2,
            "replicas_per_worker": [2],
            "cores_per_worker": [2],
            "worker_of_replica": [0, 0],
            "device": "CPU",
        },
        "reduction": {"wire_dtype": None, "slot_bytes": 1 << 18},
        "sessions": [
            {
                "started": "2026-11-23T10:00:00+00:00",
                "command": "hpcstrat bench scaling",
                "hosts": ["node1"],
                "versions": {"mpi": "MPICH Version: 5.0.2"},
                "environment": {},
            }
        ],
        "links": {"inside": link, "between": None},
        "parts": [step],
        **changes,
    }


def test_a_run_says_what_a_step_computes_and_how_fast_memory_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(scaling_run()))
    given = read_given(str(path))
    assert given.compute == pytest.approx(0.2)
    assert given.mpi == "mpich"
    assert (given.replicas_per_node, given.slot_bytes) == (2, 1 << 18)
    assert given.latency is None
    nbytes = 4 * sum(math.prod(shape) for shape in given.shapes or ())
    assert nbytes == pytest.approx(102_228_128, rel=1e-3)
    known = KnownFigures(latency=2e-6, bandwidth=1e10).over(given)
    step, machine = known.step(), known.machine()
    # The prediction equals the run's own copy time.
    (one,) = predict(step, known.job(), machine, known.network("fat-tree"), [1])
    assert one.inside_seconds == pytest.approx(0.08, rel=0.02)
    with pytest.raises(HpcstratError, match="--latency"):
        given.network("fat-tree")


def test_a_doctor_gives_links_and_memory(tmp_path: Path) -> None:
    def link(latency: float, bandwidth: float) -> dict[str, float]:
        names = "latency_seconds", "bandwidth_bytes_per_second"
        return dict(zip(names, (latency, bandwidth), strict=True))

    content = {
        "measures": {
            "hosts": [{"ranks": [0, 1], "memory_together": 3e10}],
            "links": {
                "inside": [link(1e-6, 8e9)],
                "between": [link(2e-6, 1e10), link(3e-6, 9e9), link(9e-6, 1e9)],
            },
        }
    }
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(content))
    assert read_given(str(path)) == KnownFigures(
        latency=3e-6,
        bandwidth=9e9,
        inside_latency=1e-6,
        inside_bandwidth=8e9,
        memory=1.5e10,
        replicas_per_node=2,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not JSON"),
        ("[1]", "another JSON"),
        ('{"links": {"between": [{}], "inside": []}}', "KeyError"),
        (json.dumps(scaling_run(parts=[{}])), "expected all fields"),
        (
            json.dumps(scaling_run(reduction={"wire_dtype": "float16"})),
            "full precision",
        ),
    ],
    ids=["none", "no_json", "other", "links", "run", "half"],
)
def test_a_bad_file_is_said(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(HpcstratError, match=said) as error:
        read_given(str(path))
    assert str(path) in str(error.value)
    assert ";" in str(error.value)


@needs_simgrid
def test_what_is_predicted_before_a_failure_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replay = Simulator.replay

    def failing(self: Simulator, traces: Any, *args: Any) -> Any:
        if len(traces) == 4:
            raise BenchError("expected a replay, found none; look for it")
        return replay(self, traces, *args)

    monkeypatch.setattr(Simulator, "replay", failing)
    path = tmp_path / "expected.json"
    words = ["--network", "fat-tree", "--nodes", "1,2,4", "--gradients", "1MiB"]
    done = command(*GIVEN, *words, "--json", str(path))
    assert done.exit_code == 1
    assert "found none" in done.output
    points = json.loads(path.read_text())["points"]
    assert [point["num_nodes"] for point in points] == [1, 2]
