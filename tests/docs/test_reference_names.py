"""Every public name of tf.distribute exists, or raises an error with a replacement."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from typing import Any

import pytest

import hpcstrat as hs
from tests.docs import reference_names as names
from tests.docs import reference_surface as surface

ROWS = {row.name: row for row in names.rows()}
DIVERGENCES = names.PAGE.parents[1] / "divergences.md"


def _of(row: names.Row) -> Any:
    """Return hpcstrat's object for a name, taken from an instance if necessary."""
    value: Any = hs
    for part in row.here.split(".")[1:]:
        if value is hs.Strategy and part == "extended":
            return hs.get_strategy().extended
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", [n for n, r in ROWS.items() if r.status == names.SAME])
def test_names_are_there_with_their_arguments(name: str) -> None:
    entry, found = surface.captured()[name], _of(ROWS[name])
    if entry["kind"] == "module":
        assert inspect.ismodule(found)
    elif entry["kind"] in ("class", "function", "method"):
        assert callable(found)
        taken = inspect.signature(found).parameters
        others = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        missing = set(entry["parameters"]) - names.LEFT_OUT.get(name, set())
        assert others or missing <= taken.keys()


@pytest.mark.parametrize("name", list(names.ERRORS))
def test_errors_say_what_to_use(name: str) -> None:
    row = ROWS[name]
    makers = [_of(row)]
    if hasattr(makers[0], "create"):
        makers.append(makers[0].create)
    for make in makers:
        required = [
            p
            for p in inspect.signature(make).parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        with pytest.raises(NotImplementedError, match=r"^expected .*, found .*; ") as e:
            make(*["" for _ in required])
        # The page and the error name the same replacement.
        for word in re.findall(r"names `(\w+)`", row.note):
            assert word in str(e.value)


def test_absent_classes_answer_isinstance() -> None:
    strategy = hs.get_strategy()
    assert not isinstance(strategy, hs.TPUStrategy)
    assert issubclass(hs.TPUStrategy, hs.Strategy)
    assert hs.experimental.TPUStrategy is hs.TPUStrategy


def test_rows_of_divergences_are_there() -> None:
    there = set(re.findall(r"^\| `([\w-]+)` \|", DIVERGENCES.read_text(), re.M))
    declared = {row.declared for row in ROWS.values()} - {""}
    assert declared <= there
    assert all(row.declared for row in ROWS.values() if row.status == names.ERROR)
    assert set(names.LEFT_OUT) <= {row.name for row in ROWS.values() if row.declared}


def test_the_page_has_the_table_of_today() -> None:
    text = names.PAGE.read_text()
    assert text == names.written(text), "python -m tests.docs.reference_names"
    shown = text.split(names.BEGIN)[1].split(names.END)[0]
    lacking = [n for n in ROWS if f"`{n.rpartition('.')[2]}`" not in shown
               and f"`{n}`" not in shown]  # fmt: skip
    assert lacking == []


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is missing")
def test_captured_names_are_those_of_tensorflow() -> None:
    import tensorflow as tf

    if not tf.__version__.startswith(f"{surface.VERSION}."):
        pytest.skip(f"TensorFlow {tf.__version__} has other names")
    assert surface.installed() == surface.captured()
