"""A rehearsal sends as many messages, of the same sizes, as the replicas themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.interruptible import InterruptibleComm
from hpcstrat.tools.bench.prediction.dry_run import (
    AllReduced,
    Announced,
    Begun,
    Ended,
    Event,
    MemoryCopy,
    SimulatedJob,
    Stepped,
    Turned,
    dry_run,
)

pytestmark = pytest.mark.algorithm

OPS = {
    "": None,
    "hierarchical": hs.HierarchicalCopyAllReduce(),
    "flat": hs.MpiAllReduce(),
}
SHAPES = {
    # Arrays of several pieces with a short last piece, and arrays below MPI's limits.
    "one": ((700_001,),),
    "many": ((1000, 300), (7,), (131, 1009), (200_000,)),
    # Small arrays that fit into the header of two workers, but not of three workers.
    "small": ((5000,), (3,)),
}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Return a list that gets the events of the library from now on, in order."""
    events: list[Event] = []

    def sizes(arrays: Any) -> tuple[tuple[int, int], ...]:
        return tuple((rank, array.nbytes) for rank, array in arrays.items())

    def note(owner: Any, name: str, event: Callable[..., Event | None]) -> None:
        real = getattr(owner, name)

        def noting(self: Any, *args: Any, **words: Any) -> Any:
            found = event(self, *args)
            if found is not None:
                events.append(found)
            return real(self, *args, **words)

        monkeypatch.setattr(owner, name, noting)

    def announced(
        _: Channel, __: Any, ___: Any = None, carried: Any = None
    ) -> Announced:
        return Announced(0 if carried is None else carried.nbytes)

    note(Channel, "agree", announced)
    note(Channel, "step", lambda *_: Stepped())
    note(
        InterruptibleComm,
        "Iallreduce",
        lambda comm, send, receive, *_: AllReduced(
            receive.nbytes, comm.size, send is comm.mpi.IN_PLACE
        ),
    )
    note(
        InterruptibleComm,
        "start",
        lambda _, sent, received, tag: Begun(tag, sizes(sent), sizes(received)),
    )
    return events


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_messages_and_bytes_are_those_of_the_library(
    make_strategy: Any, job: Any, noted: list[Event], shapes: str, ops: str
) -> None:
    # Turn the kernel off, because its steps cannot be observed.
    made = {"comm": job, "settings": hs.Settings(native=False)}
    with make_strategy(cross_device_ops=OPS[ops], **made) as strategy:
        topology = strategy.topology
        each = topology.smallest_worker
        if each * topology.num_workers != topology.num_replicas:
            pytest.skip("a rehearsal is of workers that are all alike")
        arrays = [np.ones(shape, np.float32) for shape in SHAPES[shapes]]
        del noted[:]
        strategy.reduce("sum", arrays, axis=None)
        found = list(noted)
        if topology.num_workers == 1 and shapes == "small" and ops != "flat":
            pytest.skip("a small reduction is no algorithm of pieces")
        job = SimulatedJob(
            topology.num_workers, each, topology.num_cores, topology.slot_bytes
        )
        rehearsed = dry_run(
            SHAPES[shapes],
            job,
            worker=topology.worker_id,
            position=topology.worker_comm.rank,
            ops=OPS[ops],
        )
    # Ignore copies in a replica's own memory, which other replicas cannot observe.
    unseen = MemoryCopy | Turned | Ended
    assert _by_kind(found) == _by_kind(
        e for e in rehearsed if not isinstance(e, unseen)
    )


def _by_kind(events: Iterable[Event]) -> dict[Any, list[Event]]:
    """Return the events of each kind in order; kinds may interleave in any way."""
    found: dict[Any, list[Event]] = {}
    for event in events:
        found.setdefault((type(event), getattr(event, "tag", 0)), []).append(event)
    return found
