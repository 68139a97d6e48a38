"""Parquet columns have pyarrow's values, or are refused by an error that names them."""

from __future__ import annotations

import datetime
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcstrat.data import Dataset

pytestmark = pytest.mark.framework("pyarrow")

NAMES = ["m", "m/s", "temperature [K]", "a", "a.b", "x*", "list", "element"]


def types_and_values() -> tuple[list[Any], list[Any]]:
    """Return readable and other types, each with values for rows."""
    import pyarrow as pa

    days = [datetime.datetime(2020, 3, day, 9) for day in (1, 29)]
    zoned = [day.replace(tzinfo=datetime.UTC) for day in days]
    readable = [
        (pa.int8(), [-128, 127]),
        (pa.uint64(), [2**64 - 1, 0]),
        (pa.int64(), [-(2**63), 5]),
        (pa.float16(), [np.float16(1.5), np.float16(-2)]),
        (pa.float32(), [0.5, float("nan"), float("-inf")]),
        (pa.bool_(), [True, False]),
        (pa.string(), ["", "a\0b", "\u00e9t\u00e9"]),
        (pa.large_string(), ["row", "x" * 20]),
        (pa.binary(3), [b"\0\0\0", b"a\xff\0"]),
        (pa.timestamp("us"), days),
        (pa.timestamp("ms", tz="Europe/Berlin"), zoned),
        (pa.duration("s"), [datetime.timedelta(-3), datetime.timedelta(0, 7)]),
        (pa.date32(), [day.date() for day in days]),
        (pa.dictionary(pa.int8(), pa.string()), ["low", "high"]),
    ]
    others = [
        (pa.binary(), [b"", b"a\0"]),
        (pa.decimal128(9, 2), [Decimal("12.34")]),
        (pa.time64("us"), [datetime.time(3)]),
        (pa.struct([("p", pa.int32())]), [{"p": 1}]),
        (pa.map_(pa.string(), pa.int32()), [[("k", 1)]]),
        (pa.null(), [None]),
        (pa.string(), ["z\0"]),
    ]
    return readable, others


class Drawn:
    """A column drawn from a seed: its type, and rows for several files."""

    def __init__(self, chance: random.Random, lengths: list[int]) -> None:
        import pyarrow as pa

        self.chance = chance
        readable, others = types_and_values()
        self.is_bad = chance.random() < 0.2
        self.type, self.values = chance.choice(others if self.is_bad else readable)
        self.leaf = self.type
        self.levels: list[int] = []
        for _ in range(chance.choice([0, 0, 1, 2])):
            length = chance.randrange(1, 4)
            self.levels.insert(0, length)
            make = chance.choice(
                [pa.list_, pa.large_list, lambda kind, n=length: pa.list_(kind, n)]
            )
            self.type = make(self.type)
        # The fault of one row in one file: a null, or a list of another length.
        self.fault = chance.choice([None, None, None, "null", "length"])
        self.files = [[self.row(0) for _ in range(n)] for n in lengths]
        if self.fault and not self.is_bad and max(lengths) > 1:
            longest = max(self.files, key=len)
            longest[-1], self.is_bad = self.wrong(), True

    def row(self, level: int) -> Any:
        if level == len(self.levels):
            return self.chance.choice(self.values)
        return [self.row(level + 1) for _ in range(self.levels[level])]

    def wrong(self) -> Any:
        import pyarrow as pa

        if not self.levels:
            return None
        row = self.row(0)
        if self.fault == "null" or pa.types.is_fixed_size_list(self.type):
            row[0] = None
            return row
        return row + row


def plain(value: Any, kind: Any) -> Any:
    """Return a value of pyarrow as the library's arrays have it."""
    from pyarrow import types

    if isinstance(value, list):
        return [plain(each, kind) for each in value]
    if types.is_fixed_size_binary(kind):
        return list(value)
    if types.is_timestamp(kind):
        if kind.tz:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        return int(np.datetime64(value, kind.unit).astype(int))
    if types.is_duration(kind):
        return int(np.timedelta64(value, kind.unit).astype(int))
    if types.is_date(kind):
        return int(np.datetime64(value, "D").astype(int))
    return value


@pytest.mark.parametrize("seed", range(60))
def test_columns_have_the_values_of_pyarrow_or_are_refused(
    tmp_path: Path, seed: int
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    chance = random.Random(seed)
    lengths = [chance.choice([0, 1, 5, 9]) for _ in range(chance.randrange(1, 4))]
    drawn = {n: Drawn(chance, lengths) for n in chance.sample(NAMES, 4)}
    paths = [tmp_path / f"{index}.parquet" for index in range(len(lengths))]
    for index, path in enumerate(paths):
        columns = {n: pa.array(d.files[index], d.type) for n, d in drawn.items()}
        parquet.write_table(
            pa.table(columns), path, row_group_size=chance.choice([2, 9])
        )
    total = sum(lengths)
    places = np.array([chance.randrange(total) for _ in range(total)], np.int64)
    for name, column in drawn.items():
        if column.is_bad and (total or column.leaf != pa.string()):
            with pytest.raises(ValueError, match="columns=") as caught:
                Dataset.from_files(paths, name).stage.read(slice(0, total), 0)  # type: ignore[attr-defined]
            assert name in str(caught.value)
            assert str(tmp_path) in str(caught.value)
            continue
        stage: Any = Dataset.from_files(paths, name).stage
        tables = [parquet.read_table(path) for path in paths]
        rows = [row for table in tables for row in table.column(name).to_pylist()]
        wanted = [plain(row, column.leaf) for row in rows]
        for order in (slice(0, total), places):
            found = stage.read(order, 0)
            found = found.astype(int) if found.dtype.kind in "mM" else found
            expected = (
                wanted if isinstance(order, slice) else [wanted[i] for i in order]
            )
            assert repr(found.tolist()) == repr(expected), (name, column.type)
    good = [name for name, column in drawn.items() if not column.is_bad]
    if good and total:
        element: Any = next(iter(Dataset.from_files(paths, good)))
        assert good == ([*element] if len(good) > 1 else good)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.Table.from_arrays(
        [pa.array([1]), pa.array([2]), pa.array([3])], list("aab")
    )
    parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"one column 'a' in .*found 2"):
        Dataset.from_files(tmp_path / "twice.parquet")
    assert int(next(iter(Dataset.from_files(tmp_path / "twice.parquet", "b")))) == 3
