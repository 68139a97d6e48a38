"""A rehearsal does what the replicas do: as many messages, of as many bytes."""

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
    # Of several pieces, the last of which is short; and of less than MPI's own limits.
    "one": ((700_001,),),
    "many": ((1000, 300), (7,), (131, 1009), (200_000,)),
    # In the header of two workers, and not of three.
    "small": ((5000,), (3,)),
}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Return what the library does from now on, in its order."""
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
    # The kernel's steps are seen by nobody.
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
    # Each replica's memory is its own: nothing of it is seen from outside.
    unseen = MemoryCopy | Turned | Ended
    assert _by_kind(found) == _by_kind(
        e for e in rehearsed if not isinstance(e, unseen)
    )


def _by_kind(events: Iterable[Event]) -> dict[Any, list[Event]]:
    """Return what was done in its order, of each kind: messages come when they do."""
    found: dict[Any, list[Event]] = {}
    for event in events:
        found.setdefault((type(event), getattr(event, "tag", 0)), []).append(event)
    return found
