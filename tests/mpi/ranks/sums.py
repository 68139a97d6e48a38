"""Arrays of every type and shape, with the expected sums over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import hpcstrat as hs

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

DTYPES = [np.dtype(c) for c in "bBhHiIlLqQefdgFDG"]
FAMILIES = {
    "narrow integers": [np.dtype(code) for code in "bBhH"],
    "integers": [np.dtype(code) for code in "iIlLqQ"],
    "floats": [np.dtype(code) for code in "fdg"],
    "complex": [np.dtype(code) for code in "FDG"],
    "half": [np.dtype(np.float16)],
    "big-endian": [np.dtype(c) for c in (">i2", ">u4", ">i8", ">f2", ">f4", ">c8")],
}
if ml_dtypes is not None:
    FAMILIES["half"].append(np.dtype(ml_dtypes.bfloat16))
NATIVE = [d for family in FAMILIES.values() for d in family if d.isnative]


def random_parts(
    seed: int, size: int, shape: Any, dtype: Any = np.float64
) -> list[np.ndarray[Any, Any]]:
    """Return the array of every replica; the same list on every rank."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    parts = []
    for _ in range(size):
        if dtype.kind in "iu":
            info, native = np.iinfo(dtype), dtype.newbyteorder("=")
            part = rng.integers(info.min, info.max, shape, native, endpoint=True)
        elif dtype.kind == "c":
            part = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        else:
            part = rng.standard_normal(shape)
        parts.append(np.asarray(part).astype(dtype))
    return parts


def assert_sum(
    found: Any, parts: list[np.ndarray[Any, Any]], op: str = "sum", note: str = ""
) -> None:
    """Compare with the sum of the parts: integers exactly, floats within rounding."""
    divisor = 1 if op == "sum" else len(parts)
    native = parts[0].dtype.newbyteorder("=")
    assert type(found) is np.ndarray, note
    assert found.shape == parts[0].shape, note
    if native.kind in "iu" and op == "sum":
        assert found.dtype == native, note
        exact = np.add.reduce([p.astype(native) for p in parts], axis=0, dtype=native)
        np.testing.assert_array_equal(found, exact, err_msg=note)
        return
    assert found.dtype == (np.float64 if native.kind in "iu" else native), note
    wide = np.clongdouble if native.kind == "c" else np.longdouble
    terms = [part.astype(native).astype(wide) for part in parts]
    half = native.name == "bfloat16"
    eps = 2.0**-7 if half else np.finfo(found.dtype).eps
    bound = np.add.reduce([abs(term) for term in terms], axis=0) * eps
    error = abs(found.astype(wide) - np.add.reduce(terms, axis=0) / divisor)
    assert np.all(error <= bound * len(parts) / divisor), note


def all_reduce(strategy: Any, op: str, value: Any, options: Any = None) -> Any:
    """Reduce a value in replica context."""

    def step() -> Any:
        return hs.get_replica_context().all_reduce(op, value, options)

    return strategy.local_value(strategy.run(step))


def both_ways(strategy: Any, op: str, value: Any) -> Iterator[Any]:
    """Reduce a value in cross-replica context, then in replica context."""
    yield strategy.reduce(op, value, axis=None)
    yield all_reduce(strategy, op, value)


def lock(array: Any) -> bool:
    """Make an array read-only; return False for CuPy, which has no read-only arrays."""
    if hasattr(array.flags, "writeable"):
        array.flags.writeable = False
        return True
    return False


def is_writable(array: Any) -> bool:
    """Return whether an array is writable; CuPy's arrays always are."""
    return bool(getattr(array.flags, "writeable", True))


def _unaligned(array: Any) -> Any:
    return np.frombuffer(b"x" + array.tobytes(), array.dtype, offset=1).reshape(
        array.shape
    )


VIEWS: dict[str, Callable[[Any], Any]] = {
    "fortran": np.asfortranarray,
    "transposed": lambda a: a.T,
    "reversed": lambda a: a[::-1, :, ::-1],
    "strided": lambda a: a[::2, 1::3],
    "zero stride": lambda a: np.broadcast_to(a[:1], a.shape),
    "unaligned": _unaligned,
    "empty": lambda a: a[:, 2:2],
    "zero-dimensional": lambda a: a[0, 0, 0],
    "array of no dimensions": lambda a: np.array(a[0, 0, 0]),
}
