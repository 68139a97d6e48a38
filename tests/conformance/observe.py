"""Values of programs in JSON form, for results and expectations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.engine.context import current

__all__ = [
    "OWN",
    "UNION",
    "Opaque",
    "dtype_of",
    "encode",
    "encode_tensor",
    "own",
    "own_component",
]

# The mark of this rank's entry in a list with one entry for each replica. Joining the
# ranks puts the entries together in rank order.
OWN = "@own"
# The mark of a list of which each rank may know only a part.
UNION = "@union"


class Opaque:
    """An object that programs can pass around and recognize by its label."""

    def __init__(self, label: str) -> None:
        self.label = label


def own(value: Any) -> dict[str, Any]:
    """Mark ``value`` as this rank's entry of a list over all replicas."""
    return {OWN: value}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy type of a name, including the half types of ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        half: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return half


def encode_tensor(value: Any) -> dict[str, Any]:
    """Return an array in JSON form."""
    array = np.asarray(value)
    return {
        "tensor": array.tolist(),
        "dtype": array.dtype.name,
        "shape": list(array.shape),
    }


def own_component(value: Any) -> Any:
    """Return the component of the running replica, or of this rank's first replica."""
    entry = current()
    index = 0 if entry is None or entry.index is None else entry.index
    return value.values[index]


def _encode_container(value: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Return a list, tuple or mapping in JSON form."""
    if isinstance(value, Mapping):
        return {"dict": {str(k): encode(v, names) for k, v in value.items()}}
    kind = "tuple" if isinstance(value, tuple) else "list"
    return {kind: [encode(item, names) for item in value]}


def encode(value: Any, names: Mapping[int, str]) -> Any:
    """Return any value of a program in JSON form.

    ``names`` maps the ``id`` of a variable object to its name in the program.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return {"py": value}
    if id(value) in names:
        return {"variable": names[id(value)]}
    if isinstance(value, np.ndarray | np.generic):
        return encode_tensor(value)
    if isinstance(value, Opaque):
        return {"object": value.label}
    if isinstance(value, hs.IndexedSlices):
        slices = {
            "values": encode_tensor(value.values),
            "indices": encode_tensor(value.indices),
            "dense_shape": value.dense_shape and [int(n) for n in value.dense_shape],
        }
        return {"indexed_slices": slices}
    if isinstance(value, Mapping | list | tuple):
        return _encode_container(value, names)
    if isinstance(value, hs.DistributedValues):
        kind = "mirrored" if isinstance(value, hs.Mirrored) else "per_replica"
        return {kind: [own(encode(part, names)) for part in value.values]}
    if isinstance(value, np.dtype):
        return {"py": value.name}
    if hasattr(value, "__array__"):
        return encode_tensor(value)
    return {"object": type(value).__name__}
