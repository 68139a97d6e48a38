"""Settings of replica 0 count on every rank; wrong settings are an error on all."""

from __future__ import annotations

from typing import Any

import pytest

import hpcstrat as hs


@pytest.fixture
def alone(job: Any) -> Any:
    """Yield a new communicator of all ranks, whose strategies share nothing."""
    comm = job.Dup()
    yield comm
    comm.Free()


def test_settings_of_replica_0_hold(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCSTRAT_WARN_SECONDS", str(40 + alone.rank))
    with hs.MultiWorkerMirroredStrategy(
        comm=alone, settings=hs.Settings(limit_seconds=900 + alone.rank)
    ) as strategy:
        found = strategy.settings.warn_seconds, strategy.settings.limit_seconds
        assert found == (40.0, 900.0)


@pytest.mark.parametrize("name", ["HPCSTRAT_WARN_SECOND", "HPCSTRAT_LIMIT_SECONDS"])
def test_wrong_environment_of_replica_0_is_an_error_on_every_rank(
    alone: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if alone.rank == 0:
        monkeypatch.setenv(name, "later")
    with pytest.raises(ValueError, match=rf"expected .*{name}"):
        hs.MultiWorkerMirroredStrategy(comm=alone)
    monkeypatch.delenv(name, raising=False)
    hs.MultiWorkerMirroredStrategy(comm=alone).close()


def test_open_strategies_have_the_same_settings(strategy: Any, job: Any) -> None:
    if job.size == 1 or strategy.topology.num_workers > 1:
        return
    # The settings of replica 0 count here, too.
    same = hs.Settings(warn_seconds=strategy.settings.warn_seconds + job.rank)
    hs.MirroredStrategy(settings=same).close()
    with pytest.raises(ValueError, match="expected the settings of the strategies"):
        hs.MirroredStrategy(settings=hs.Settings(warn_seconds=1234))
    assert strategy.reduce("sum", 1.0, axis=None) == job.size
