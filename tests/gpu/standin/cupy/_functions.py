"""Functions that NumPy computes on the arrays' memory, by name.

To add one, write its name into the right table: ``LATER`` if the results' shapes do not
depend on the data; ``NOW`` if the shapes do, so that CuPy waits, too; ``VIEWS`` if CuPy
returns a view whenever NumPy does; ``PLAIN`` if the function needs only shapes or
types. The parameters of CuPy's function go to ``_signatures.py``.
"""

import numpy as np

from cupy import _core, _indexing, _signatures, _submit

LATER = """
all allclose amax amin any append argmax argmin argpartition argsort around array_equal
average clip column_stack concatenate convolve corrcoef correlate count_nonzero cov
cross cumprod cumsum cumulative_sum diag diagflat diff digitize dot dstack einsum
fill_diagonal flip fliplr flipud gradient hstack inner interp isclose isin isneginf
isposinf kron lexsort logspace max mean median min nan_to_num nanargmax nanargmin nanmax
nanmean nanmin nanprod nanstd nansum nanvar outer packbits pad partition percentile prod
ptp quantile repeat roll round rot90 searchsorted select sort stack std sum take
take_along_axis tensordot tile trace trapezoid tri tril triu unpackbits unwrap var vdot
vstack where
""".split()
NOW = """
argwhere bincount compress extract flatnonzero histogram nonzero setdiff1d union1d
unique trim_zeros
""".split()
VIEWS = """
atleast_1d atleast_2d atleast_3d broadcast_to diagonal expand_dims moveaxis ravel
reshape rollaxis squeeze swapaxes transpose matrix_transpose permute_dims
""".split()
PLAIN = "shape ndim size result_type can_cast may_share_memory iscomplexobj isrealobj"
SPLITS = "split array_split hsplit vsplit dsplit".split()


def _first_is_array(name, args, kwargs):
    """Refuse lists and NumPy arrays as arrays, like CuPy's functions."""

    def found(value):
        if isinstance(value, list | tuple):
            return any(found(item) for item in value)
        return _submit.is_array(value)

    if not any(found(value) for value in [*args, *kwargs.values()]):
        raise TypeError(f"cupy.{name}: expected a cupy.ndarray, got {args!r:.80}")
    first = args[0] if args else None
    if isinstance(first, list | tuple):
        for value in first:
            if isinstance(value, np.ndarray) or not _submit.is_array(value):
                raise TypeError("Only cupy arrays can be concatenated")


def _later(name):
    function = getattr(np, name)

    def call(*args, **kwargs):
        _signatures.check(name, args, kwargs)
        _first_is_array(name, args, kwargs)
        if kwargs.get("out", 0) is None:
            del kwargs["out"]
        made = _submit.run(function, args, kwargs, _core.new)
        return kwargs.get("out", made)

    return _named(call, name)


def _now(name):
    function = getattr(np, name)

    def call(*args, **kwargs):
        _signatures.check(name, args, kwargs)
        _first_is_array(name, args, kwargs)
        return _submit.run_now(function, args, kwargs, _core.new)

    return _named(call, name)


def _view(name):
    function = getattr(np, name)

    def call(a, *args, **kwargs):
        _signatures.check(name, (a, *args), kwargs)
        if not _submit.is_array(a):
            raise TypeError(f"cupy.{name}: expected a cupy.ndarray, got {type(a)}")
        return _indexing.viewed(a, function, *args, **kwargs)

    return _named(call, name)


def _plain(name):
    function = getattr(np, name)

    def call(*args, **kwargs):
        _signatures.check(name, args, kwargs)
        bare = _submit.each(args, lambda x: getattr(x, "_host", x))
        return function(*bare, **kwargs)

    return _named(call, name)


def _split(name):
    function = getattr(np, name)

    def call(ary, indices_or_sections, *args, **kwargs):
        _signatures.check(name, (ary, indices_or_sections, *args), kwargs)
        if not _submit.is_array(ary):
            raise TypeError(f"cupy.{name}: expected a cupy.ndarray, got {type(ary)}")
        parts = function(ary._host, indices_or_sections, *args, **kwargs)
        return [_core.wrap(part, ary) for part in parts]

    return _named(call, name)


def _named(call, name):
    call.__name__ = call.__qualname__ = name
    call.__module__ = "cupy"
    if name in _signatures.table:
        call.__signature__ = _signatures.table[name]
    call.__doc__ = f"NumPy's ``{name}`` on CuPy's arrays."
    return call


def matmul(x1, x2, /, out=None):
    """Multiply matrices."""
    for value in (x1, x2):
        if not _submit.is_array(value):
            raise _submit.unsupported(value)
    kwargs = {} if out is None else {"out": out}
    made = _submit.run(np.matmul, (x1, x2), kwargs, _core.new)
    return made if out is None else out


def may_share_memory(a, b, max_work=None):
    """Return whether two arrays may overlap."""
    both = isinstance(a, _core.ndarray) and isinstance(b, _core.ndarray)
    return both and bool(np.may_share_memory(a._host, b._host))


def shares_memory(a, b, max_work=None):
    """Return whether two arrays overlap."""
    both = isinstance(a, _core.ndarray) and isinstance(b, _core.ndarray)
    return both and bool(np.shares_memory(a._host, b._host))


def byte_bounds(a):
    """Return the first address of an array, and the address after its last byte."""
    low, high = np.lib.array_utils.byte_bounds(a._host)
    start = a.data.ptr - a._host.ctypes.data
    return low + start, high + start


def repeat(a, repeats, axis=None):
    """Repeat elements, each the same number of times, or by a list of numbers."""
    if _submit.is_array(repeats):
        raise ValueError("cupy.ndaray cannot be specified as `repeats` argument.")
    return _repeat(a, repeats, axis)


table = {}
for _names, _make in (
    (LATER, _later),
    (NOW, _now),
    (VIEWS, _view),
    (PLAIN.split(), _plain),
    (SPLITS, _split),
):
    for _name in _names:
        if hasattr(np, _name):
            table[_name] = _make(_name)
table["matmul"] = matmul
table["byte_bounds"] = byte_bounds
_repeat = table["repeat"]
table["repeat"] = repeat
table["may_share_memory"] = may_share_memory
table["shares_memory"] = shares_memory
