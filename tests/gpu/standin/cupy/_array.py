"""``cupy.ndarray``: arithmetic, indexing and NumPy's protocols."""

import functools

import numpy as np

import cupy
from cupy import _core, _dlpack, _indexing, _submit, _ufuncs


def wrap(host, owner):
    """Return a view: an array over part of the memory of ``owner``."""
    array = ndarray.__new__(ndarray)
    array._host = host
    array._base = owner if owner.base is None else owner.base
    array._data = owner.data + (host.ctypes.data - owner._host.ctypes.data)
    return array


def _binary(name, reflected=False):
    function = _ufuncs.table[name]

    def operator(self, other):
        if _refuses(other):
            return NotImplemented
        return function(other, self) if reflected else function(self, other)

    return operator


def _in_place(name):
    function = _ufuncs.table[name]

    def operator(self, other):
        return function(self, other, out=self)

    return operator


def _refuses(other):
    # Let classes that know CuPy's arrays compute the result, by NumPy's rule.
    if isinstance(other, _core.Base | np.ndarray | np.generic):
        return False
    return getattr(other, "__array_ufunc__", 0) is None


def _unary(name):
    function = _ufuncs.table[name]

    def operator(self):
        return function(self)

    return operator


def _reduction(name, *, positions=("axis", "dtype", "out", "keepdims")):
    function = getattr(np, name)

    def method(self, *args, **kwargs):
        kwargs = {**dict(zip(positions, args, strict=False)), **kwargs}
        unknown = set(kwargs) - set(positions)
        if unknown:
            raise TypeError(f"{name}() got an unexpected keyword {sorted(unknown)}")
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        out = kwargs.get("out")
        made = _submit.run(function, (self,), kwargs, _core.new)
        return made if out is None else out

    method.__name__ = name
    return method


_SHORT = ("axis", "out", "keepdims")
_SPREAD = ("axis", "dtype", "out", "ddof", "keepdims")


class ndarray(_core.Base):
    """An array in the memory of a device."""

    __slots__ = ()

    sum = _reduction("sum")
    prod = _reduction("prod")
    mean = _reduction("mean")
    var = _reduction("var", positions=_SPREAD)
    std = _reduction("std", positions=_SPREAD)
    max = _reduction("max", positions=_SHORT)
    min = _reduction("min", positions=_SHORT)
    ptp = _reduction("ptp", positions=_SHORT)
    all = _reduction("all", positions=_SHORT)
    any = _reduction("any", positions=_SHORT)
    argmax = _reduction("argmax", positions=("axis", "out", "keepdims"))
    argmin = _reduction("argmin", positions=("axis", "out", "keepdims"))
    cumsum = _reduction("cumsum", positions=("axis", "dtype", "out"))
    cumprod = _reduction("cumprod", positions=("axis", "dtype", "out"))
    argsort = _reduction("argsort", positions=("axis",))
    trace = _reduction("trace", positions=("offset", "axis1", "axis2", "dtype", "out"))

    __neg__ = _unary("negative")
    __pos__ = _unary("positive")
    __abs__ = _unary("absolute")
    __invert__ = _unary("invert")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        name = ufunc.__name__
        if name == "matmul" and method == "__call__":
            return cupy.matmul(*inputs, **kwargs)
        own = _ufuncs.table.get(name)
        if own is None:
            return NotImplemented
        if "out" in kwargs:
            out = kwargs["out"]
            if len(out) != 1:
                raise ValueError(
                    "The 'out' parameter must have exactly one array value"
                )
            kwargs["out"] = out[0]
        # CuPy's own ufuncs have more methods, which NumPy's ufuncs do not call.
        return own(*inputs, **kwargs) if method == "__call__" else NotImplemented

    def __array_function__(self, func, types, args, kwargs):
        try:
            path = func.__module__.split(".")[1:]
            module = functools.reduce(getattr, path, cupy)
            own = getattr(module, func.__name__)
        except AttributeError:
            return NotImplemented
        if own is func or not all(issubclass(t, ndarray | np.ndarray) for t in types):
            return NotImplemented
        return own(*args, **kwargs)

    def __matmul__(self, other):
        return cupy.matmul(self, other)

    def __rmatmul__(self, other):
        return cupy.matmul(other, self)

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key):
        return _indexing.get(self, key)

    def __setitem__(self, key, value):
        _indexing.put(self, key, value)

    def scatter_add(self, slices, value):
        """Add values at indices that may repeat."""
        cupy.add.at(self, slices, value)

    @property
    def T(self):
        return self if self.ndim < 2 else self.transpose()

    @property
    def mT(self):
        return self.swapaxes(-1, -2)

    @property
    def real(self):
        return wrap(self._host.real, self) if self.dtype.kind == "c" else self

    @real.setter
    def real(self, value):
        wrap(self._host.real, self)[...] = value

    @property
    def imag(self):
        if self.dtype.kind == "c":
            return wrap(self._host.imag, self)
        return _core.zeros(self.shape, self.dtype)

    @imag.setter
    def imag(self, value):
        if self.dtype.kind != "c":
            raise TypeError("cupy.ndarray does not have imaginary part to set")
        wrap(self._host.imag, self)[...] = value

    @property
    def flat(self):
        """The elements in order; here only for assignments to all elements."""
        return self.reshape(-1)

    def conj(self):
        return cupy.conjugate(self)

    conjugate = conj

    def view(self, dtype=None, type=None):
        return wrap(
            self._host.view() if dtype is None else self._host.view(dtype), self
        )

    def reshape(self, *shape, order="C", copy=None):
        if len(shape) == 1 and not isinstance(shape[0], int | np.integer):
            shape = shape[0]
        return self._viewed(np.reshape, shape, order=order)

    def ravel(self, order="C"):
        return self._viewed(np.ravel, order=order)

    def flatten(self, order="C"):
        return self.copy(order).ravel(order)

    def transpose(self, *axes):
        if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], tuple | list)):
            axes = axes[0]
        return wrap(self._host.transpose(axes or None), self)

    def swapaxes(self, axis1, axis2):
        return wrap(self._host.swapaxes(axis1, axis2), self)

    def squeeze(self, axis=None):
        return wrap(self._host.squeeze(axis), self)

    def diagonal(self, offset=0, axis1=0, axis2=1):
        return wrap(np.diagonal(self._host, offset, axis1, axis2), self)

    def _viewed(self, function, *args, **kwargs):
        return _indexing.viewed(self, function, *args, **kwargs)

    def copy(self, order="C"):
        return self.astype(self.dtype, order=order)

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if casting is not None:
            raise TypeError("casting is not supported yet")
        if subok is not None:
            raise TypeError("subok is not supported yet")
        dtype = _core.known(np.dtype(dtype))
        if order not in {"C", "F", "A", "K"}:
            raise ValueError(f"order not understood. order={order}")
        flags = self.flags
        kept = {"C": flags.c_contiguous, "F": flags.f_contiguous, "A": flags.forc}
        if not copy and dtype == self.dtype and kept.get(order, True):
            return self
        if order in {"A", "K"}:
            order = "F" if flags.fnc else "C"
        made = _core.new(self.shape, dtype, order)
        _core.copy_elements(made, self)
        return made

    def clip(self, min=None, max=None, out=None):
        return cupy.clip(self, min, max, out=out)

    def dot(self, b, out=None):
        return cupy.dot(self, b, out=out)

    def round(self, decimals=0, out=None):
        return cupy.around(self, decimals, out=out)

    def repeat(self, repeats, axis=None):
        return cupy.repeat(self, repeats, axis)

    def take(self, indices, axis=None, out=None):
        return cupy.take(self, indices, axis, out=out)

    def nonzero(self):
        return cupy.nonzero(self)

    def searchsorted(self, v, side="left", sorter=None):
        return cupy.searchsorted(self, v, side, sorter)

    def sort(self, axis=-1):
        target = self._host
        _submit.check_device(self)
        _submit.submit(lambda: target.sort(axis))

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return _dlpack.export(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self):
        return (2, self.data.device_id)

    def toDlpack(self):
        return _dlpack.export(self, None, None, None, None)


_OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
}
for _name, _function in _OPERATORS.items():
    setattr(ndarray, f"__{_name}__", _binary(_function))
    setattr(ndarray, f"__r{_name}__", _binary(_function, reflected=True))
    setattr(ndarray, f"__i{_name}__", _in_place(_function))
ndarray.__divmod__ = _binary("divmod")
ndarray.__rdivmod__ = _binary("divmod", reflected=True)
_COMPARISONS = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}
_COMPARISONS |= {"gt": "greater", "ge": "greater_equal"}
for _name, _function in _COMPARISONS.items():
    setattr(ndarray, f"__{_name}__", _binary(_function))

_core.ndarray = ndarray
_core.wrap = wrap
