"""Digests of calls are equal exactly if the calls are equal."""

from __future__ import annotations

import subprocess
import sys
import traceback
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.channel.call import describe_call, dtype_text, signature_text
from hpcstrat.engine.channel.disagreement import FAILED, LEFT, Announcement, explain
from hpcstrat.engine.tree import flatten
from hpcstrat.errors import CollectiveError, ReplicaError

TEXTS = st.text(max_size=20)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SIGNATURES = st.lists(st.tuples(st.sampled_from("bifdF"), SHAPES), max_size=12)


def arrays_of(signature: Any) -> list[Any]:
    return [np.zeros(shape, code) for code, shape in signature]


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_digests_are_equal_for_equal_texts_only(
    what: str, details: str, other: str, more: str
) -> None:
    first, second = describe_call(what, details), describe_call(other, more)
    same = (what, details) == (other, more)
    # Exclude null bytes in names, because a null byte separates the two texts.
    if "\0" not in what + details + other + more:
        assert (first.digest == second.digest) == same
    assert 0 <= first.digest < 1 << 63


def test_digests_are_the_same_in_every_process() -> None:
    program = (
        "from hpcstrat.engine.channel.call import describe_call;"
        "print(describe_call('reduce(SUM)', 'float32[4]').digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert int(done.stdout) == describe_call("reduce(SUM)", "float32[4]").digest


def test_texts_of_dtypes_do_not_depend_on_earlier_dtypes() -> None:
    aligned = np.dtype("i1,i4", align=True)
    packed = np.dtype(
        {"names": ["f0", "f1"], "formats": ["i1", "i4"], "offsets": [0, 4]}
    )
    # These are equal, and have the same hash, in NumPy 2.
    for dtype in (aligned, packed, np.dtype(">f4"), np.dtype("f4"), np.dtype("M8[s]")):
        assert dtype_text(dtype) == str(dtype)


@given(SIGNATURES, SIGNATURES)
def test_signatures_tell_all_types_and_shapes_apart(first: Any, second: Any) -> None:
    texts = [signature_text(None, arrays_of(s)) for s in (first, second)]
    same = [(np.dtype(c), s) for c, s in first] == [(np.dtype(c), s) for c, s in second]
    assert (texts[0] == texts[1]) == same


def test_signatures_tell_structures_apart() -> None:
    arrays = [np.zeros(2), np.zeros(2)]
    trees = ([0, 0], (0, 0), {"a": 0, "b": 0}, {"a": 0, "c": 0}, [[0], 0], [0, [0]])
    texts = {signature_text(flatten(tree)[1], arrays) for tree in trees}
    assert len(texts) == len(trees)


def test_signature_of_one_array_is_short() -> None:
    array = np.zeros((4, 2), np.float32)
    assert signature_text(None, [array]) == "float32[4, 2]"
    assert signature_text(flatten(array)[1], [array]) == "float32[4, 2]"
    assert signature_text(None, []) == "no arrays"


def test_long_texts_are_cut_for_people_but_not_for_the_digest() -> None:
    first, second = (describe_call("x", "y" * 1000 + end) for end in "ab")
    assert len(first.text) < 450
    assert "characters in all" in first.text
    assert first.digest != second.digest


def test_call_site_is_the_first_frame_outside_the_library() -> None:
    assert call_site().startswith("test_call.py:")


def test_call_site_is_not_what_calls_decorated_functions() -> None:
    decorated = contextmanager(lambda: iter([None]))()(call_site)
    for function in (without_fp_warnings(call_site), decorated):
        assert function().startswith("test_call.py:")


def test_explanations_name_ranks_and_calls() -> None:
    announcements = [
        Announcement(rank, 0, "reduce", site="a.py:1") for rank in range(3)
    ]
    announcements.append(Announcement(3, 0, "gather", site="b.py:2"))
    error = explain(announcements)
    assert type(error) is CollectiveError
    assert "ranks 0, 1, 2 called reduce (a.py:1)" in str(error)
    assert "rank 3 called gather (b.py:2)" in str(error)


def test_many_ranks_are_counted_not_listed() -> None:
    announcements = [Announcement(rank, 0, "reduce") for rank in range(999)]
    announcements.append(Announcement(999, 0, "gather"))
    error = explain(announcements)
    assert "999 ranks (0, 1, 2" in str(error)
    assert len(str(error)) < 300


def test_ranks_that_left_are_named() -> None:
    error = explain([Announcement(0, 0, "reduce"), Announcement(1, LEFT, "left")])
    assert error.ranks == (1,)
    assert "rank 1 had left" in str(error)


def test_equal_calls_after_different_steps_are_explained() -> None:
    error = explain([Announcement(r, 0, "reduce", steps=(r, 0, 0)) for r in range(2)])
    told = "rank 0: 0 calls of run, 0 of next(); rank 1: 1 call of run, 0 of next()"
    assert f", after different numbers of steps ({told})" in str(error)


def test_steps_are_told_wherever_they_differ() -> None:
    one, two = (Announcement(r, 0, f"call {r}", steps=(0, r, 0)) for r in range(2))
    told = "0 of next(); rank 1: 0 calls of run, 1 of next()"
    assert told in str(explain([one, two]))
    left = Announcement(1, LEFT, "left", steps=(7, 0, 0))
    assert "rank 1: 7 calls of run" in str(explain([one, left]))


BUILTINS = [
    *(ValueError, KeyError, IndexError, TypeError, OSError, FileNotFoundError),
    *(ImportError, AttributeError, StopIteration, UnicodeDecodeError, SyntaxError),
    *(UnicodeEncodeError, ExceptionGroup, MemoryError, RecursionError, TimeoutError),
    *(AssertionError, NotImplementedError, EOFError, NameError, Exception),
    *(IndentationError, StopAsyncIteration, BlockingIOError, KeyboardInterrupt),
]


def _explained(kind: Any) -> Any:
    names = [f"{c.__module__}:{c.__qualname__}" for c in kind.__mro__[:-2]]
    failed = Announcement(1, FAILED, "run", "the reason", tuple(names))
    return explain([Announcement(0, 0, "reduce"), failed])


@pytest.mark.parametrize("kind", BUILTINS)
def test_errors_of_other_replicas_keep_all_their_text(kind: Any) -> None:
    error = _explained(kind)
    assert isinstance(error, ReplicaError)
    assert error.ranks == (1,)
    assert "rank 1 failed in run: the reason" in str(error)
    shown = "".join(traceback.format_exception(error))
    assert "rank 1 failed in run: the reason" in shown
    assert not isinstance(error, (StopIteration, StopAsyncIteration))


@pytest.mark.parametrize("kind", [ValueError, TypeError, OSError, EOFError])
def test_common_errors_of_other_replicas_are_caught_by_their_class(kind: Any) -> None:
    assert isinstance(_explained(kind), kind)
