"""Assertions that accept arrays of CuPy and NumPy."""

import numpy as np

import cupy


def assert_allclose(
    actual,
    desired,
    rtol=1e-7,
    atol=0,
    equal_nan=True,
    err_msg="",
    verbose=True,
    *,
    strict=False,
):
    """Raise unless the elements are close."""
    np.testing.assert_allclose(
        cupy.asnumpy(actual),
        cupy.asnumpy(desired),
        rtol=rtol,
        atol=atol,
        equal_nan=equal_nan,
        err_msg=err_msg,
        verbose=verbose,
        strict=strict,
    )


def assert_array_equal(
    actual, desired, err_msg="", verbose=True, *, strict=False, strides_check=False
):
    """Raise unless the elements are equal."""
    np.testing.assert_array_equal(
        cupy.asnumpy(actual),
        cupy.asnumpy(desired),
        err_msg=err_msg,
        verbose=verbose,
        strict=strict,
    )
    if strides_check and actual.strides != desired.strides:
        raise AssertionError(f"strides: {actual.strides}, {desired.strides}")


def assert_array_almost_equal(actual, desired, decimal=6, err_msg="", verbose=True):
    """Raise unless the elements are equal to this number of decimals."""
    np.testing.assert_array_almost_equal(
        cupy.asnumpy(actual), cupy.asnumpy(desired), decimal, err_msg, verbose
    )
