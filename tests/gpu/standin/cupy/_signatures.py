"""The parameters that CuPy 14's functions have; NumPy's often have more."""

import inspect

_TEXT = """
all(a, axis=, out=, keepdims=)
allclose(a, b, rtol=, atol=, equal_nan=)
amax(a, axis=, out=, keepdims=)
amin(a, axis=, out=, keepdims=)
any(a, axis=, out=, keepdims=)
append(arr, values, axis=)
argmax(a, axis=, dtype=, out=, keepdims=)
argmin(a, axis=, dtype=, out=, keepdims=)
argpartition(a, kth, axis=)
argsort(a, axis=, kind=)
argwhere(a)
around(a, decimals=, out=)
array_equal(a1, a2, equal_nan=)
array_split(ary, indices_or_sections, axis=)
atleast_1d(*arys)
atleast_2d(*arys)
atleast_3d(*arys)
average(a, axis=, weights=, returned=, *, keepdims=)
bincount(x, weights=, minlength=)
broadcast_to(array, shape)
can_cast(from_, to, casting=)
clip(a, a_min, a_max, out=)
column_stack(tup)
compress(condition, a, axis=, out=)
concatenate(tup, axis=, out=, *, dtype=, casting=)
convolve(a, v, mode=)
corrcoef(a, y=, rowvar=, bias=, ddof=, *, dtype=)
correlate(a, v, mode=)
count_nonzero(a, axis=)
cov(a, y=, rowvar=, bias=, ddof=, fweights=, aweights=, *, dtype=)
cross(a, b, axisa=, axisb=, axisc=, axis=)
cumprod(a, axis=, dtype=, out=)
cumsum(a, axis=, dtype=, out=)
cumulative_sum(x, *, axis=, dtype=, out=, include_initial=)
diag(v, k=)
diagflat(v, k=)
diagonal(a, offset=, axis1=, axis2=)
diff(a, n=, axis=, prepend=, append=)
digitize(x, bins, right=)
dot(a, b, out=)
dsplit(ary, indices_or_sections)
dstack(tup)
einsum(*operands, **kwargs)
expand_dims(a, axis)
extract(condition, a)
fill_diagonal(a, val, wrap=)
flatnonzero(a)
flip(a, axis=)
fliplr(a)
flipud(a)
gradient(f, *varargs, axis=, edge_order=)
histogram(x, bins=, range=, density=, weights=)
hsplit(ary, indices_or_sections)
hstack(tup, *, dtype=, casting=)
inner(a, b)
interp(x, xp, fp, left=, right=, period=)
isclose(a, b, rtol=, atol=, equal_nan=)
iscomplexobj(x)
isin(element, test_elements, assume_unique=, invert=)
isneginf(x, out=)
isposinf(x, out=)
isrealobj(x)
kron(a, b)
lexsort(keys)
linalg.cholesky(a)
linalg.det(a)
linalg.inv(a)
linalg.lstsq(a, b, rcond=)
linalg.matrix_power(M, n)
linalg.pinv(a, rcond=)
linalg.qr(a, mode=)
linalg.slogdet(a)
linalg.solve(a, b)
linalg.svd(a, full_matrices=, compute_uv=)
logspace(start, stop, num=, endpoint=, base=, dtype=, axis=)
matrix_transpose(x)
max(a, axis=, out=, keepdims=)
mean(a, axis=, dtype=, out=, keepdims=)
median(a, axis=, out=, overwrite_input=, keepdims=)
min(a, axis=, out=, keepdims=)
moveaxis(a, source, destination)
nan_to_num(x, copy=, nan=, posinf=, neginf=)
nanargmax(a, axis=, dtype=, out=, keepdims=)
nanargmin(a, axis=, dtype=, out=, keepdims=)
nanmax(a, axis=, out=, keepdims=)
nanmean(a, axis=, dtype=, out=, keepdims=)
nanmin(a, axis=, out=, keepdims=)
nanprod(a, axis=, dtype=, out=, keepdims=)
nanstd(a, axis=, dtype=, out=, ddof=, keepdims=)
nansum(a, axis=, dtype=, out=, keepdims=)
nanvar(a, axis=, dtype=, out=, ddof=, keepdims=)
ndim(a)
nonzero(a)
outer(a, b, out=)
packbits(a, axis=, bitorder=)
pad(array, pad_width, mode=, **kwargs)
partition(a, kth, axis=)
percentile(a, q, axis=, out=, overwrite_input=, method=, keepdims=, *, interpolation=)
permute_dims(a, axes=)
prod(a, axis=, dtype=, out=, keepdims=)
ptp(a, axis=, out=, keepdims=)
quantile(a, q, axis=, out=, overwrite_input=, method=, keepdims=, *, interpolation=)
ravel(a, order=)
repeat(a, repeats, axis=)
reshape(a, newshape, order=, *, copy=)
result_type(*arrays_and_dtypes)
roll(a, shift, axis=)
rollaxis(a, axis, start=)
rot90(a, k=, axes=)
round(a, decimals=, out=)
searchsorted(a, v, side=, sorter=)
select(condlist, choicelist, default=)
setdiff1d(ar1, ar2, assume_unique=)
shape(a)
size(a, axis=)
sort(a, axis=, kind=)
split(ary, indices_or_sections, axis=)
squeeze(a, axis=)
stack(tup, axis=, out=, *, dtype=, casting=)
std(a, axis=, dtype=, out=, ddof=, keepdims=)
sum(a, axis=, dtype=, out=, keepdims=)
swapaxes(a, axis1, axis2)
take(a, indices, axis=, out=)
take_along_axis(a, indices, axis)
tensordot(a, b, axes=)
tile(A, reps)
trace(a, offset=, axis1=, axis2=, dtype=, out=)
transpose(a, axes=)
trapezoid(y, x=, dx=, axis=)
tri(N, M=, k=, dtype=)
tril(m, k=)
trim_zeros(filt, trim=)
triu(m, k=)
union1d(arr1, arr2)
unique(ar, return_index=, return_inverse=, return_counts=, axis=, *, equal_nan=)
unpackbits(a, axis=, bitorder=)
unwrap(p, discont=, axis=, *, period=)
var(a, axis=, dtype=, out=, ddof=, keepdims=)
vdot(a, b)
vsplit(ary, indices_or_sections)
vstack(tup, *, dtype=, casting=)
where(condition, x=, y=)
"""


def _parameters(text):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in filter(None, (part.strip() for part in text.split(","))):
        name = part.strip("*=")
        if part.startswith("*"):
            only = inspect.Parameter.KEYWORD_ONLY
            various = {
                1: inspect.Parameter.VAR_POSITIONAL,
                2: inspect.Parameter.VAR_KEYWORD,
            }
            kind = only
            if name:
                stars = len(part) - len(part.lstrip("*"))
                yield inspect.Parameter(name, various[stars])
            continue
        default = None if part.endswith("=") else inspect.Parameter.empty
        yield inspect.Parameter(name, kind, default=default)


def _table():
    found = {}
    for line in _TEXT.strip().replace(",\n   ", ",").splitlines():
        name, _, rest = line.partition("(")
        found[name] = inspect.Signature(list(_parameters(rest.rstrip(")"))))
    return found


table = _table()
"""The signature of each function, with None for every default."""


def check(name, args, kwargs):
    """Raise the error of CuPy's function for arguments that it does not accept."""
    if name in table:
        try:
            table[name].bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{name}(): {exc}") from None
