"""The leading watcher decides about a start only when it knows who is left."""

from __future__ import annotations

import time
from pathlib import Path

from hpcstrat.elastic.watching import claims
from hpcstrat.elastic.watching.claims import Generation
from hpcstrat.elastic.watching.leader import Leader
from hpcstrat.elastic.watching.mesh import Identity
from hpcstrat.elastic.watching.node_programs import NodePrograms
from hpcstrat.elastic.watching.run_launch import RunLaunch
from hpcstrat.elastic.watching.run_state import RunState, WatchOptions
from tests.unit.elastic.watching.test_mesh import JOB, SECRET, meeting

SECONDS = 20


def test_a_leader_that_is_cut_off_claims_nothing(tmp_path: Path) -> None:
    """Its nodes become silent one after the other: the first is no small part."""
    launch = RunLaunch("mpirun", (), 3, 3, ("true",))
    options = WatchOptions(tmp_path, tmp_path / "done", launch, least=1)
    nodes = ("a", "b", "c")
    state = RunState(options, "a", nodes, Generation(0, "", nodes, (), job=JOB))
    variables = {"HPCSTRAT_WATCH_SOCKET": str(tmp_path / "socket")}
    programs = NodePrograms("none", variables, tmp_path / "output")
    with meeting("abc", silent_seconds=2.0) as met:
        leader = Leader(state, met.start("a"), programs, {})
        streams = {}
        for name in "bc":
            streams[name] = met.greet("a", Identity(SECRET, JOB, name), "peer")
            assert met.next("a", "came") == (name,)
            state.present.add(name)
        leader.lead()
        assert claims.newest(tmp_path) == 1
        # The last sign of life of c comes later than that of b.
        time.sleep(0.4)
        streams["c"].send("alive")
        until = time.monotonic() + SECONDS
        while state.present:
            assert time.monotonic() < until
            while not met.events["a"].empty():
                kind, name, why = met.events["a"].get()
                assert (kind, why) == ("lost", "silent")
                state.present.discard(name)
                state.lost[name] = why
            leader.lead()
            time.sleep(0.01)
        leader.lead()
        assert list(state.lost) == ["b", "c"]
        assert claims.newest(tmp_path) == 1
        for stream in streams.values():
            stream.socket.close()
