"""Indexing: slices return views; arrays of indices return copies, made later."""

import numpy as np

from cupy import _core, _submit
from cupy.cuda import stream


def _basic(key):
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        if isinstance(part, bool | np.bool_):
            return False
        if not (
            part is None
            or part is Ellipsis
            or isinstance(part, int | np.integer | slice)
        ):
            return False
    return True


def _parts(key):
    """Return the indices in NumPy's form, and whether a mask is among them."""
    parts = key if isinstance(key, tuple) else (key,)
    hosts, masks = [], False
    for part in parts:
        value = part
        if _submit.is_array(part):
            value = _submit.host(part)
        elif isinstance(part, list | np.ndarray):
            # CuPy copies such indices to the device.
            value = np.array(part)
            value = value.astype(np.intp) if not value.size else value
        elif isinstance(part, str | float):
            raise IndexError(
                f"Only integers, slices and arrays are valid, not {part!r}"
            )
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "iub":
                raise IndexError("arrays used as indices must be of integer or boolean")
            masks = masks or value.dtype.kind == "b"
        elif isinstance(value, bool | np.bool_):
            masks = True
        hosts.append(value)
    return tuple(hosts), masks


def get(array, key):
    """Return ``array[key]``."""
    if _basic(key):
        parts = key if isinstance(key, tuple) else (key,)
        # With an ellipsis, NumPy returns a view even if all axes have an integer.
        if not any(part is Ellipsis for part in parts):
            parts = (*parts, Ellipsis)
        return _core.wrap(array._host[parts], array)
    parts, masks = _parts(key)
    _submit.check_device(array)
    source = array._host
    if masks:
        stream._synchronize()
        planned = source[parts]
    else:
        planned = _submit.plan(_get, (source, parts), {})
    made = _core.new(planned.shape, source.dtype)
    target = made._host
    _submit.submit(lambda: np.copyto(target, source[parts]))
    return made


def _get(host, parts):
    return host[parts]


def put(array, key, value):
    """Do ``array[key] = value``."""
    target = array._host
    _submit.check_device(array)
    if isinstance(value, list | tuple) or (
        isinstance(value, np.ndarray) and value.ndim
    ):
        raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
    source = _submit.host(value)
    if _basic(key):
        parts = key if isinstance(key, tuple) else (key,)
        if not any(part is Ellipsis for part in parts):
            parts = (*parts, Ellipsis)
        place = target[parts]
        shape = getattr(source, "shape", ())
        if np.broadcast_shapes(shape, place.shape) != place.shape:
            raise ValueError(
                f"could not broadcast input array from shape {shape} into {place.shape}"
            )
        if not isinstance(source, np.ndarray):
            source = np.asarray(source).astype(target.dtype)
        _submit.submit(lambda: np.copyto(place, source, casting="unsafe"))
        return
    parts, masks = _parts(key)
    if not masks:
        place = _submit.plan(_get, (target, parts), {})
        np.broadcast_to(_submit.shadow(np.asarray(source)), place.shape)

    def work():
        target[parts] = source

    _submit.submit(work)


def viewed(array, function, *args, **kwargs):
    """Return the result of a NumPy function as a view, or as a copy made later."""
    host = function(array._host, *args, **kwargs)
    if not array.size or np.may_share_memory(host, array._host):
        return _core.wrap(host, array)
    made = _core.new(host.shape, host.dtype)
    source, target = array._host, made._host
    _submit.submit(lambda: np.copyto(target, function(source, *args, **kwargs)))
    return made
