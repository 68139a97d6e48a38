"""Faults planted at every event of collective calls: all ranks raise, or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.mpi.programs.planted import CALLS
from tests.mpi.programs.started import start

_SAMPLE = "all_reduce,start_all_reduce,gather,broadcast_object,assign,next_dealt"


def _swept(n: int, limit: float, *options: str) -> dict[str, Any]:
    ended = start(n, "planted.py", *options, limit=limit, OMP_NUM_THREADS="1")
    assert ended.stdout, str(ended)
    last: dict[str, Any] = json.loads(ended.stdout.strip().rpartition("\n")[2])
    assert ended.returncode == 0, last["wrong"]
    return last["counts"]


def test_a_sample_of_faults_is_told_to_all_ranks() -> None:
    counts = _swept(2, 120, "--calls", _SAMPLE, "--every", "97", "--ranks", "1")
    found = [key for count in counts.values() for key in count]
    for outcome in ("all raised", "all raised, broken", "next raised, broken"):
        assert outcome in found, counts


def test_calls_in_signal_handlers_are_refused_and_change_no_sum() -> None:
    calls = _SAMPLE.removeprefix("all_reduce,") + ",run_raising,apply_gradients,save"
    counts = _swept(
        2, 120, "--calls", calls, "--kinds", "call", "--every", "41", "--ranks", "1"
    )
    assert all(count["refused"] for count in counts.values()), counts


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_in_a_signal_handler_is_refused(n: int, call: str) -> None:
    counts = _swept(n, 3600, "--calls", call, "--kinds", "call")
    assert counts[call]["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["reduce", "all_reduce"])
def test_every_fault_of_the_short_way_is_told_to_both_workers(call: str) -> None:
    assert _swept(2, 600, "--calls", call, "--layout", "1")[call]["events"]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_every_fault_is_told_to_all_ranks(n: int, call: str) -> None:
    assert _swept(n, 3600, "--calls", call)[call]["events"]
