"""Linear algebra; to find errors, most functions wait for the device, like CuPy's."""

import numpy as np

from cupy import _core, _signatures, _submit


def norm(x, ord=None, axis=None, keepdims=False):
    """Return the norm of an array."""
    if not _submit.is_array(x):
        raise _submit.unsupported(x)
    kwargs = {"ord": ord, "axis": axis, "keepdims": keepdims}
    return _submit.run(np.linalg.norm, (x,), kwargs, _core.new)


def _now(name):
    function = getattr(np.linalg, name)

    def call(*args, **kwargs):
        _signatures.check(f"linalg.{name}", args, kwargs)
        if not args or not _submit.is_array(args[0]):
            raise TypeError(f"cupy.linalg.{name}: expected a cupy.ndarray")
        return _submit.run_now(function, args, kwargs, _core.new)

    call.__name__ = name
    call.__signature__ = _signatures.table[f"linalg.{name}"]
    return call


for _name in "cholesky det inv lstsq matrix_power pinv qr slogdet solve svd".split():
    globals()[_name] = _now(_name)
