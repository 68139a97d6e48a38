"""Values of the program that differ between replicas are found and named."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from tests.mpi.ranks.differing import named_ranks
from tests.mpi.ranks.effort import examples, in_step
from tests.mpi.ranks.outcomes import assert_usable, outcome
from tests.mpi.ranks.sums import DTYPES

pytestmark = pytest.mark.calls


PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)


class Point(NamedTuple):
    """A named tuple, as a node of a tree."""

    x: Any
    y: Any


def nan(payload: int) -> float:
    """Return a quiet NaN with the given payload bits."""
    return float(struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | payload))[0])


def padded(filling: int) -> Any:
    """Return equal elements, with given padding bytes between their fields."""
    array = np.full(3 * PADDED.itemsize, filling, np.uint8).view(PADDED)
    array["a"], array["b"] = 1, 2
    return array


def everything() -> dict[str, Any]:
    """Return a new tree with leaves of all kinds."""
    numbers = np.arange(12.0).reshape(3, 4)
    return {
        "arrays": [numbers, numbers.T, numbers[:, ::2], numbers.astype(">f4")],
        "nothing": [np.zeros((0, 3)), [], (), {}, None],
        "scalars": (np.float32(1), 1, 1.5, True, 2 + 1j, 10**30, nan(5), -0.0),
        "texts": ["a", b"\0b", "\ud800", np.array(["x", "yy"])],
        "points": Point(np.array([nan(1), nan(2)]), OrderedDict(b=1, a=2)),
        "times": np.array(["2026-01-01"], "M8[s]"),
        "masked": np.ma.MaskedArray([1.0, 2.0], [False, True]),
        "padded": padded(0),
    }


def test_equal_values_pass(strategy: Any, job: Any) -> None:
    value = everything()
    # Masked elements and padding between fields are not part of the value.
    value["masked"].data[1] = job.rank
    value["padded"] = padded(job.rank)
    with strategy.scope():
        variable = hs.Variable(np.ones(3), name="x")
    strategy.check_equal([value, variable])
    strategy.check_equal(np.ones(3))
    strategy.check_equal(None)
    assert_usable(strategy, job)


def replaced(value: Any, **other: Any) -> Any:
    """Return a copy of a tree with some entries replaced."""
    return {**value, **other}


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "value": ([1, np.zeros(3)], [1, np.array([0, 0, 2.0])], r"tree\[1\] .*\(2,\): 2.0"),
    "sign of zero": ([0.0], [-0.0], r"tree\[0\] .*float -0.0"),
    "payload": ({"a": nan(1)}, {"a": nan(2)}, r"tree\['a'\]"),
    "payload in an array": (np.array([nan(1)]), np.array([nan(2)]), r"\(0,\): nan \("),
    "dtype": ({"a": np.zeros(3)}, {"a": np.zeros(3, "f4")}, r"float32\[3\]"),
    "byte order": (np.zeros(3), np.zeros(3, ">f8"), ">f8"),
    "shape": (np.zeros(4), np.zeros((2, 2)), r"float64\[2, 2\]"),
    "kind of number": ((1,), (True,), "bool True"),
    "array or number": (np.ones(()), 1.0, "float 1.0"),
    "long texts": ("a" * 99 + "b", "a" * 99 + "c", "tree to be equal"),
    "bytes": (b"a", b"b", "bytes b'b'"),
    "a leaf more": ([1], [1, 2], r"int 2 as tree\[1\]"),
    "a leaf less": ([1, 2], [1], "nothing on replica"),
    "key": ({"a": 1, "c": 2}, {"a": 1, "d": 2}, r"as tree\['d'\]"),
    "containers": ([1], (1,), r"structure .*\(\*,\)"),
    "empty containers": ({"a": []}, {"a": {}}, "structure"),
    "name of a field": (Point(1, [2]), Point(1, [3]), r"tree.y\[0\]"),
    "mask": (np.ma.MaskedArray([1], [False]), np.ma.MaskedArray([1], [True]), "mask"),
    "field": (np.zeros(2, PADDED), np.array([(0, 0), (0, 1)], PADDED), r"tree\['b'\]"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_differences_are_named_on_every_rank(
    strategy: Any, job: Any, case: str
) -> None:
    usual, odd, pattern = DIFFERENT[case]
    strategy.check_equal(usual)
    strategy.check_equal(odd)
    if job.size == 1:
        return
    faulty = job.size - 1
    with pytest.raises(hs.DivergenceError, match=pattern) as raised:
        strategy.check_equal(odd if job.rank == faulty else usual)
    assert raised.value.ranks == (faulty,)
    assert raised.value.variable.startswith("tree")
    assert len(set(job.allgather(str(raised.value)))) == 1
    assert_usable(strategy, job)


def test_ranks_that_all_differ(strategy: Any, job: Any) -> None:
    """A rank without the leaf, or with a leaf of another shape, takes part, too."""
    if job.size < 3:
        pytest.skip("needs three ranks")
    values = [[np.zeros(3)], [np.ones(3)], [], [np.zeros(2)]]
    with pytest.raises(hs.DivergenceError, match=r"tree\[0\] .*element \(0,\): 1.0"):
        strategy.check_equal(values[job.rank % len(values)])
    assert_usable(strategy, job)


@pytest.mark.parametrize(
    "refused",
    [np.array([object()]), {1, 2}, np.zeros(2, [("a", "O")]), object(), np.float64],
    ids=["objects", "set", "references", "object", "type"],
)
def test_what_has_no_bits_is_refused(strategy: Any, job: Any, refused: Any) -> None:
    faulty = job.rank == job.size - 1
    tree = {"a": 1, "b": [refused if faulty else 2]}
    expected = ValueError if faulty else hs.ReplicaError
    with pytest.raises(expected, match=r"tree\['b'\]\[0\]"):
        strategy.check_equal(tree)
    assert_usable(strategy, job)


def test_another_call_and_another_context(strategy: Any, job: Any) -> None:
    with pytest.raises(RuntimeError, match="cross-replica"):
        strategy.run(strategy.check_equal, args=(1,))
    if job.size > 1:
        error = outcome(
            *((strategy.check_equal, 1) if job.rank else (strategy.barrier,))
        )
        assert isinstance(error, hs.CollectiveError)
        assert "check_equal" in str(error)
        assert_usable(strategy, job)


@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
    length=st.integers(1, 9000),
    seed=st.integers(0, 10**6),
)
@settings(in_step, max_examples=examples(20))
def _a_flipped_bit_is_found(
    strategy: Any, job: Any, *, dtypes: Any, length: int, seed: int
) -> None:
    drawn = np.random.default_rng(seed)
    arrays = [(drawn.random(length) * 100).astype(dtype) for dtype in dtypes]
    which, place = int(drawn.integers(len(arrays))), int(drawn.integers(length))
    faulty = int(drawn.integers(job.size))
    strategy.check_equal(arrays)
    if job.rank == faulty:
        rows = arrays[which].view(np.uint8).reshape(length, -1)
        rows[place, int(drawn.integers(min(rows.shape[1], 10)))] ^= 1
    with pytest.raises(hs.DivergenceError) as raised:
        strategy.check_equal(arrays)
    assert raised.value.variable == f"tree[{which}]"
    assert raised.value.element == (place,)
    assert raised.value.ranks == named_ranks(faulty, job.size)


def test_a_flipped_bit_is_found(strategy: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("one copy does not differ")
    _a_flipped_bit_is_found(strategy, job)


def test_tensors_of_torch(strategy: Any, job: Any) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    half = torch.arange(4.0, dtype=torch.bfloat16)
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    small = torch.ones(2, 2, dtype=torch.float8_e5m2).t()
    tree = [dict(model.named_parameters()), model.state_dict(), half, conjugate, small]
    strategy.check_equal([tree, optimizer.state_dict()])
    with pytest.raises(ValueError, match=r"state_dict\(\)"):
        strategy.check_equal(model)
    if job.size == 1:
        return
    half[2] += job.rank == 1
    with pytest.raises(hs.DivergenceError, match=r"tree\[2\]") as raised:
        strategy.check_equal(tree)
    assert (raised.value.element, raised.value.ranks) == ((2,), (1,))
    with torch.no_grad():
        model.bias += job.rank == 1
    with pytest.raises(hs.DivergenceError, match=r"\['bias'\]"):
        strategy.check_equal(dict(model.named_parameters()))
    assert_usable(strategy, job)
