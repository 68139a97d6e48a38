"""CuPy's universal functions: NumPy's, run in the order of streams."""

import numpy as np

from cupy import _core, _submit

NAMES = """
abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and
bitwise_not bitwise_or bitwise_xor cbrt ceil conj conjugate copysign cos cosh deg2rad
degrees divide divmod equal exp exp2 expm1 fabs float_power floor floor_divide fmax fmin
fmod frexp gcd greater greater_equal heaviside hypot invert isfinite isinf isnan lcm
ldexp left_shift less less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor maximum minimum mod modf multiply negative nextafter
not_equal positive power rad2deg radians reciprocal remainder right_shift rint sign
signbit sin sinh sqrt square subtract tan tanh true_divide trunc
""".split()


class ufunc:
    """A universal function of NumPy on CuPy arrays."""

    def __init__(self, function, name):
        self._function = function
        self.name = f"cupy_{name}"
        self.__name__ = name
        self.nin = function.nin
        self.nout = function.nout
        self.nargs = function.nargs

    def __repr__(self):
        return f"<ufunc '{self.name}'>"

    def __call__(self, *args, out=None, where=True, dtype=None, casting="same_kind"):
        nin = self.nin
        if not nin <= len(args) <= self.nargs:
            raise TypeError(f"Wrong number of arguments for {self.name}")
        args, outs = list(args[:nin]), list(args[nin:])
        if out is not None:
            if outs:
                raise ValueError(
                    "Cannot specify 'out' as both a positional and keyword"
                )
            outs = list(out) if isinstance(out, tuple) else [out]
        for value in outs:
            if not isinstance(value, _core.ndarray):
                raise TypeError("Output arguments type must be cupy.ndarray")
        hosts = [_scalar(value) for value in args]
        if not isinstance(where, bool):
            where = _submit.host(where)
        return self._submit(hosts, outs, where, dtype, casting)

    def _submit(self, hosts, outs, where, dtype, casting):
        function = self._function
        kinds = {"casting": casting}
        if dtype is not None:
            kinds["dtype"] = dtype
        shapes = [value.shape for value in hosts if isinstance(value, np.ndarray)]
        if isinstance(where, np.ndarray):
            shapes.append(where.shape)
        shape = np.broadcast_shapes(*shapes)
        targets = [_submit.host(value) for value in outs]
        types = self._types(hosts, targets, kinds)
        if not outs:
            order = _order(hosts)
            made = [_core.new(shape, kind, order) for kind in types]
            targets = [array._host for array in made]
        else:
            made = outs
            for target in targets:
                if np.broadcast_shapes(shape, target.shape) != target.shape:
                    raise ValueError(
                        f"non-broadcastable output operand with shape {target.shape} "
                        f"doesn't match the broadcast shape {shape}"
                    )

        def work():
            function(*hosts, out=tuple(targets), where=where, **kinds)

        _submit.submit(work)
        return made[0] if self.nout == 1 else tuple(made)

    def _types(self, hosts, targets, kinds):
        # Compute with one element of each operand to find the types of the results.
        ones = [
            np.ones((), value.dtype) if isinstance(value, np.ndarray) else value
            for value in hosts
        ]
        if self.__name__ == "power":
            # NumPy, unlike CuPy, refuses negative powers of integers.
            ones[1] = abs(ones[1])
        if targets:
            kinds = {**kinds, "out": tuple(np.ones((), x.dtype) for x in targets)}
        with np.errstate(all="ignore"):
            values = self._function(*ones, **kinds)
        return [x.dtype for x in (values if isinstance(values, tuple) else (values,))]

    def reduce(self, array, axis=0, dtype=None, out=None, keepdims=False):
        """Reduce along an axis."""
        kwargs = {"axis": axis, "dtype": dtype, "keepdims": keepdims}
        if out is not None:
            kwargs["out"] = out
        made = _submit.run(self._function.reduce, (array,), kwargs, _core.new)
        return made if out is None else out

    def accumulate(self, array, axis=0, dtype=None, out=None):
        """Reduce along an axis, and return all intermediate results."""
        kwargs = {"axis": axis, "dtype": dtype}
        if out is not None:
            kwargs["out"] = out
        made = _submit.run(self._function.accumulate, (array,), kwargs, _core.new)
        return made if out is None else out

    def outer(self, A, B, **kwargs):
        """Apply the function to all pairs of elements."""
        return self(A[(...,) + (None,) * B.ndim], B, **kwargs)

    def at(self, a, indices, b=None):
        """Change elements in place; apply repeated indices one after the other."""
        if self.__name__ not in {
            "add", "subtract", "maximum", "minimum",
            "bitwise_and", "bitwise_or", "bitwise_xor",
        }:  # fmt: skip
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        function = self._function
        target = _submit.host(a)
        places = _submit.each(indices, _submit.host)
        values = _scalar(b)
        _submit.submit(lambda: function.at(target, places, values))


def _scalar(value):
    if _submit.is_array(value):
        return _submit.host(value)
    if isinstance(value, bool | int | float | complex | np.generic):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        return _core.asarray(value)._host
    if isinstance(value, np.ndarray) and not value.ndim:
        return value[()]
    raise _submit.unsupported(value)


def _order(hosts):
    arrays = [value for value in hosts if isinstance(value, np.ndarray) and value.ndim]
    fortran = arrays and all(
        x.flags.f_contiguous and not x.flags.c_contiguous for x in arrays
    )
    return "F" if fortran else "C"


table = {name: ufunc(getattr(np, name), name) for name in NAMES}
"""Every function by CuPy's name."""
