"""Variables as arguments of NumPy functions, and operations that need real arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

pytestmark = pytest.mark.rule


START = np.array([[1.0, -2.0], [3.0, 4.0]])


@pytest.fixture(params=["plain", "on_write", "on_read"])
def variable(request: pytest.FixtureRequest, strategy: Any) -> Any:
    """Return a variable of the kind of the test's parameter."""
    if request.param == "plain":
        return hs.Variable(START)
    options = {"synchronization": request.param, "aggregation": "only_first_replica"}
    with strategy.scope():
        return hs.Variable(START, name="x", **options)


def test_functions_take_variables_as_their_arrays(
    strategy: Any, job: Any, variable: Any
) -> None:
    def check() -> None:
        for found, expected in (
            (np.dot(variable, START), START @ START),
            (np.dot(a=START, b=variable), START @ START),
            (np.block([[variable, START]]), np.block([[START, START]])),
            (np.linalg.norm(variable), np.linalg.norm(START)),
            (np.einsum("ij,jk", variable, variable), START @ START),
            (np.where(variable > 0, variable, 0), np.where(START > 0, START, 0)),
            (np.sum(variable, axis=0, where=variable > 0), [4, 4]),
            (np.asarray(variable), START),
        ):
            np.testing.assert_array_equal(found, expected)
        out = np.empty((2, 2))
        assert np.dot(variable, START, out=out) is out
        assert np.shape(variable) == (2, 2)

    check()
    strategy.run(check)


def test_functions_write_into_no_variable(
    strategy: Any, job: Any, variable: Any
) -> None:
    def check() -> None:
        with pytest.raises(TypeError, match="use assign"):
            np.dot(START, START, out=variable)
        with pytest.raises(TypeError, match="use assign"):
            np.add(START, START, out=variable)
        with pytest.raises(TypeError, match="use assign"):
            np.copyto(variable, START * 2)
        with pytest.raises(TypeError, match="use assign"):
            np.put(v=1, a=variable, ind=0)

    check()
    np.testing.assert_array_equal(variable.numpy(), START)


def test_functions_refuse_what_has_a_value_for_each_replica(
    strategy: Any, job: Any
) -> None:
    value = strategy.experimental_distribute_values_from_function(lambda _: START)
    with pytest.raises(ValueError, match=r"strategy\.reduce"):
        np.dot(value, START)
    found = strategy.run(lambda: np.dot(value, START).sum())
    assert strategy.local_value(found) == (START @ START).sum()


@pytest.mark.parametrize("name", ["T", "sum", "reshape", "astype", "nbytes"])
def test_attributes_of_arrays_name_value(
    strategy: Any, job: Any, variable: Any, name: str
) -> None:
    with pytest.raises(AttributeError, match=rf"value\(\)\.{name}"):
        getattr(variable, name)
    with pytest.raises(AttributeError) as raised:
        getattr(variable, "nothing_known")  # noqa: B009 - to look for it
    assert "value()" not in str(raised.value)
    assert not hasattr(variable, "__array_interface__")


def test_writes_to_elements_name_the_methods(variable: Any) -> None:
    with pytest.raises(TypeError, match="use assign, assign_add or assign_sub, or sca"):
        variable[0, 0] = 7.0
    # Indexing returns a copy, so the variable does not change.
    variable[0:1][...] = 7.0
    np.testing.assert_array_equal(variable, START)
