"""Halos, transposes and their adjoints, compared with NumPy on the whole field."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.calls.field_moves import FieldMoves, grid_lines
from tests.fuzz.calls.arrays import FORMS, NUMBERS, TYPES, contents, difference, numbers
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome
from tests.whole_fields import adjoint_of_halo, halo_of, lengths_of_part, parts_of


@pytest.fixture
def fields(strategy: Any) -> FieldMoves:
    """Return the calls that move parts of fields between a strategy's replicas."""
    made: FieldMoves = strategy.collectives.fields
    return made


def assert_equal(found: Any, wanted: np.ndarray) -> None:
    text = difference(found, wanted)
    assert not text, text


class Case:
    """A random field, its division, and a halo; equal on all ranks."""

    def __init__(self, seed: int, size: int) -> None:
        self.draw = draw = Random(seed)
        self.size = size
        self.ndim = draw.randint(1, 4)
        self.axis = draw.randrange(self.ndim)
        self.periodic = draw.random() < 0.5
        most = draw.choice((1, 3, 3, 40))
        self.width = draw.randint(0, most), draw.randint(0, most)
        self.others = [draw.choice((0, 1, 2, 5, 33)) for _ in range(self.ndim)]
        if draw.random() < 0.8:
            self.others = [max(1, length) for length in self.others]
        self.again()

    def again(self) -> None:
        """Draw the lengths along the axis."""
        draw = self.draw
        self.lengths = [draw.choice((0, 1, 2, 3, 7, 30)) for _ in range(self.size)]
        if draw.random() < 0.3:
            self.lengths = [draw.choice((1, 6, 400))] * self.size
        if self.periodic:
            # The halo must not be wider than the field.
            missing = max(self.width) - sum(self.lengths)
            self.lengths[draw.randrange(self.size)] += max(missing, 0)
        self.shape = list(self.others)
        self.shape[self.axis] = sum(self.lengths)

    def call(self, move: Any, array: Any) -> Any:
        return move(array, self.axis, self.width, periodic=self.periodic)

    def whole(self, dtype: Any, seed: int) -> np.ndarray:
        count = int(np.prod(self.shape))
        return contents(dtype, count, (seed, 1)).reshape(self.shape)


@pytest.mark.parametrize("seed", seeds(60))
def test_halos_have_the_rows_of_the_whole_field(
    fields: FieldMoves, job: Any, seed: int
) -> None:
    case = Case(seed, job.size)
    dtype, form = case.draw.choice(TYPES), case.draw.choice(FORMS)
    # Repeat the call with the same lengths, and with others.
    for number, changes in enumerate((False, False, True, False, True)):
        if changes:
            case.again()
        whole = case.whole(dtype, number)
        own = form(parts_of(whole, case.axis, case.lengths)[job.rank])
        before = own.copy()
        given = case.axis, case.lengths, job.rank, case.width
        wanted = halo_of(whole, *given, periodic=case.periodic)
        # Some of the ranks give an array for the result.
        out = np.empty_like(wanted) if (number + job.rank + seed) % 3 else None
        halo = functools.partial(fields.halo, out=out)
        found = case.call(halo, own)
        assert out is None or found is out
        assert_equal(found, wanted)
        assert_equal(own, before)


def test_a_wrong_array_for_a_halo_is_an_error_of_all(
    fields: FieldMoves, job: Any
) -> None:
    own = np.arange(6.0).reshape(3, 2)
    good = np.empty((5, 2))
    wrong = [np.empty((4, 2)), np.empty((5, 2), np.float32), [0.0]]
    wrong += [np.frombuffer(bytes(80)).reshape(5, 2)]
    for out in wrong:
        given: Any = out if job.rank == 0 else good
        error = outcome(fields.halo, own, 0, 1, out=given)
        assert_told(error, ValueError, job.rank == 0, "as out, found")
    error = outcome(fields.halo, [own, own], 0, 1, out=good)
    assert_told(error, ValueError, True, "single array with out")
    strided = np.empty((5, 4))[:, ::2]
    assert fields.halo(own, 0, 1, out=strided) is strided
    assert_equal(strided, fields.halo(own, 0, 1))
    # The result may be in the memory of the own rows.
    padded = np.full((5, 2), float(job.rank + 1))
    found = fields.halo(padded[1:-1], 0, 1, out=padded)
    last = job.rank + 2.0 if job.rank + 1 < job.size else 0.0
    assert found is padded
    assert padded[:, 0].tolist() == [float(job.rank), *[job.rank + 1.0] * 3, last]


@pytest.mark.parametrize("seed", seeds(60))
def test_adjoints_of_halos_add_the_pads_of_all_ranks(
    fields: FieldMoves, job: Any, seed: int
) -> None:
    case = Case(seed, job.size)
    dtype, form = case.draw.choice(NUMBERS), case.draw.choice(FORMS)
    for number, changes in enumerate((False, False, True, False, True)):
        if changes:
            case.again()
        pads = []
        for rank, length in enumerate(case.lengths):
            shape = list(case.shape)
            shape[case.axis] = length + sum(case.width)
            values = numbers(dtype, int(np.prod(shape)), (seed, number, rank))
            pads.append(values.reshape(shape))
        wanted = adjoint_of_halo(
            pads, case.axis, job.rank, case.width, periodic=case.periodic
        )
        assert_equal(case.call(fields.halo_adjoint, form(pads[job.rank])), wanted)


@pytest.mark.parametrize("width", [(1, 2), (9, 9)])
def test_pads_are_added_in_one_order(
    fields: FieldMoves, job: Any, width: tuple[int, int]
) -> None:
    # Sums of these numbers depend on the order of their terms.
    for lengths in ([3] * job.size, [r % 3 + 4 for r in range(job.size)]):
        for periodic in (False, sum(lengths) >= 9):
            pads = [
                np.random.default_rng(rank).standard_normal((2, n + sum(width), 3))
                for rank, n in enumerate(lengths)
            ]
            wanted = adjoint_of_halo(pads, 1, job.rank, width, periodic=periodic)
            own = pads[job.rank]
            found = fields.halo_adjoint(own, 1, width, periodic=periodic)
            assert_equal(found, wanted)


def test_half_precision_is_added_in_float32(fields: FieldMoves, job: Any) -> None:
    # In float16, 2048 + 1 is 2048, each time that 1 is added.
    own = np.full(1 + 2 * job.size, 1, np.float16)
    own[job.size] = 2048
    found = fields.halo_adjoint(own, 0, job.size)
    assert found.dtype == np.float16
    assert found.tolist() == [np.float16(2048 + job.size - 1)]


@pytest.mark.parametrize("seed", seeds(40))
def test_transposes_divide_the_whole_field_along_the_other_axis(
    fields: FieldMoves, job: Any, seed: int
) -> None:
    draw = Random(seed)
    ndim = draw.randint(2, 4)
    split, whole = draw.sample(range(ndim), 2)
    dtype, form = draw.choice(TYPES), draw.choice(FORMS)
    for number in range(4):
        if number % 2 == 0:
            shape = [draw.choice((0, 1, 2, 3, 7, 40)) for _ in range(ndim)]
        values = contents(dtype, int(np.prod(shape)), (seed, number))
        array = values.reshape(shape)
        by_split, by_whole = (
            parts_of(array, axis, lengths_of_part(shape[axis], job.size))[job.rank]
            for axis in (split, whole)
        )
        assert_equal(fields.transpose(form(by_split), split, whole), by_whole)
        # The adjoint is the inverse.
        assert_equal(fields.transpose(by_whole, whole, split), by_split)


def test_fields_of_many_pieces_are_moved(fields: FieldMoves, job: Any) -> None:
    lengths = [400 + 3 * rank for rank in range(job.size)]
    whole = np.arange(sum(lengths) * 700.0).reshape(-1, 700)
    for axis, array in enumerate((whole, whole.T.copy())):
        own = parts_of(array, axis, lengths)[job.rank]
        for width in (300, 900):
            wanted = halo_of(
                array, axis, lengths, job.rank, (width, width), periodic=False
            )
            for _ in range(2):
                assert_equal(fields.halo(own, axis, width), wanted)
        square = parts_of(array, axis, lengths_of_part(sum(lengths), job.size))
        turned = fields.transpose(square[job.rank], axis, 1 - axis)
        part = lengths_of_part(700, job.size)
        assert_equal(turned, parts_of(array, 1 - axis, part)[job.rank])


def test_trees_of_fields_are_one_call(
    strategy: Any, fields: FieldMoves, job: Any
) -> None:
    wholes = [np.arange(12.0 * job.size).reshape(-1, 3), np.arange(5 * job.size)]
    lengths = [4] * job.size, [5] * job.size
    owns = [parts_of(w, 0, n)[job.rank] for w, n in zip(wholes, lengths, strict=True)]
    wanted = [
        halo_of(w, 0, n, job.rank, (1, 1), periodic=True)
        for w, n in zip(wholes, lengths, strict=True)
    ]
    channel = strategy.collectives.channel
    for tree in (owns, owns, {"u": owns[0], "v": [owns[1]]}):
        before = 0 if channel is None else channel.num_calls
        found = fields.halo(tree, 0, 1, periodic=True)
        # The first call of a kind may exchange the lengths.
        assert channel is None or channel.num_calls - before <= 2
        leaves = found if isinstance(found, list) else [found["u"], *found["v"]]
        for one, right in zip(leaves, wanted, strict=True):
            assert_equal(one, right)
        sums = fields.halo_adjoint(found, 0, 1, periodic=True)
        assert type(sums) is type(tree)


def test_lines_of_a_grid_exchange_by_themselves(fields: FieldMoves, job: Any) -> None:
    shapes = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}
    grid = shapes[job.size]
    position = np.unravel_index(job.rank, grid)
    lengths = [[3 + r for r in range(grid[0])], [2 + 2 * r for r in range(grid[1])]]
    whole = np.arange(1.0 * sum(lengths[0]) * sum(lengths[1])).reshape(
        sum(lengths[0]), -1
    )
    own, lines = whole, []
    for axis in range(2):
        own = parts_of(own, axis, lengths[axis])[position[axis]]
        lines.append(grid_lines(grid, axis))
    for axis in range(2):
        other = parts_of(whole, 1 - axis, lengths[1 - axis])[position[1 - axis]]
        given = other, axis, lengths[axis], int(position[axis]), (1, 2)
        for _ in range(3):
            found = fields.halo(own, axis, (1, 2), lines=lines[axis], periodic=True)
            assert_equal(found, halo_of(*given, periodic=True))
        # The adjoint of a halo of ones counts the copies of each row.
        count = fields.halo_adjoint(
            np.ones_like(found), axis, (1, 2), lines=lines[axis], periodic=True
        )
        assert count.shape == own.shape
        assert count.sum() * job.size >= own.size


def test_lengths_of_one_rank_that_change_are_noticed_by_all(
    fields: FieldMoves, job: Any
) -> None:
    for step in range(30):
        lengths = [4] * job.size
        lengths[step % job.size] += step // 3 % 3
        whole = np.arange(2 * sum(lengths)).reshape(2, -1) + step
        own = parts_of(whole, 1, lengths)[job.rank].copy()
        given = whole, 1, lengths, job.rank, (2, 1)
        found = fields.halo(own, 1, (2, 1))
        assert_equal(found, halo_of(*given, periodic=False))
        sums = fields.halo_adjoint(found, 1, (2, 1))
        pads = [
            halo_of(*given[:3], rank, (2, 1), periodic=False)
            for rank in range(job.size)
        ]
        wanted = adjoint_of_halo(pads, 1, job.rank, (2, 1), periodic=False)
        assert_equal(sums, wanted)


def test_arguments_that_are_wrong_by_themselves_are_refused(
    strategy: Any, fields: FieldMoves, job: Any
) -> None:
    last, own = job.rank == job.size - 1, np.ones((4, 3))
    wrong: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (fields.halo, (own, 2, 1), ValueError, "found axis 2"),
        (fields.halo, (own, -1, 1), ValueError, "found axis -1"),
        (fields.halo, (own, "x", 1), TypeError, "found 'x'"),
        (fields.halo, (own, 0, -1), ValueError, "found -1"),
        (fields.halo, (own, 0, (1, -2)), ValueError, "found (1, -2)"),
        (fields.halo, (own, 0, 1.0), TypeError, "found 1.0"),
        (fields.halo, (own, 0, (1, 2, 3)), TypeError, "found (1, 2, 3)"),
        (fields.halo, ([], 0, 1), ValueError, "found []"),
        (fields.halo, (np.float64(1), 0, 1), ValueError, "found axis 0"),
        (fields.halo, (np.array([{}]), 0, 1), ValueError, "expected numbers"),
        (fields.halo_adjoint, (own, 0, 3), ValueError, "found shape (4, 3)"),
        (fields.halo_adjoint, (own > 0, 0, 1), ValueError, "bool"),
        (fields.transpose, (own, 0, 0), ValueError, "found 0 twice"),
        (fields.transpose, (own, 0, 2), ValueError, "found axis 2"),
    ]
    right = fields.halo, (own, 0, 1)
    for call, arguments, kind, text in wrong:
        made, given = (call, arguments) if last else right
        assert_told(outcome(made, *given), kind, last, text)
        assert_usable(strategy, job)


def test_ranks_that_disagree_raise_errors_that_name_both(
    strategy: Any, fields: FieldMoves, job: Any
) -> None:
    if job.size == 1:
        return
    odd, own = job.rank == 1, np.ones((4, 3))
    pairs: list[tuple[Any, Any, str]] = [
        ((own, 0, 1), (own, 0, 2), r"width=\(1, 1\).*width=\(2, 2\)"),
        ((own, 0, 1), (own, 1, 1), r"axis=0.*axis=1"),
        ((own, 0, 1), (own.astype("f4"), 0, 1), r"float64.*float32"),
        ((own, 0, 1), (own[..., None], 0, 1), r"2 dimensions.*3 dimensions"),
        ((own, 0, 1), (own[:, :2], 0, 1), r"\(4, 3\) at position 0 and \(4, 2\)"),
    ]
    for _ in range(2):
        for right, wrong, text in pairs:
            for call in (fields.halo, fields.halo_adjoint):
                with pytest.raises(hs.CollectiveError, match=text):
                    call(*(wrong if odd else right), periodic=False)
                assert_usable(strategy, job)
        with pytest.raises(hs.CollectiveError, match=r"periodic=False.*periodic=True"):
            fields.halo(own, 0, 1, periodic=odd)
        assert_usable(strategy, job)
        with pytest.raises(hs.CollectiveError, match=r"halo.*halo_adjoint"):
            (fields.halo_adjoint if odd else fields.halo)(own, 0, 1)
        assert_usable(strategy, job)
        # The right call afterwards.
        assert fields.halo(own, 0, 1).shape == (6, 3)


def test_a_periodic_halo_wider_than_the_field_is_refused_everywhere(
    strategy: Any, fields: FieldMoves, job: Any
) -> None:
    for lengths in ([2] * job.size, [3] + [1] * (job.size - 1), [0] * job.size):
        own, whole = np.ones((lengths[job.rank], 2)), sum(lengths)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"width {whole + 1} and {whole} rows"):
                fields.halo(own, 0, (0, whole + 1), periodic=True)
            assert_usable(strategy, job)
        assert (
            fields.halo(own, 0, whole, periodic=True).shape[0] == len(own) + 2 * whole
        )


def test_lengths_that_part_does_not_give_are_refused_everywhere(
    strategy: Any, fields: FieldMoves, job: Any
) -> None:
    if job.size == 1:
        return
    own = np.ones((5 if job.rank == 0 else 2, 4))
    for _ in range(2):
        found = str([5] + [2] * (job.size - 1)).replace("[", r"\[").replace("]", r"\]")
        with pytest.raises(ValueError, match=f"found {found}; divide the array"):
            fields.transpose(own, 0, 1)
        assert_usable(strategy, job)
