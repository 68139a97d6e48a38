"""Checks of arrays, copies, functions, and the interfaces for other libraries."""

import numpy as np
import pytest


def check_copies():
    import cupy as cp

    counts = cp._standin.counts
    stream = cp.cuda.Stream(non_blocking=True)
    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = cp.array(host)
    host[:] = -1
    assert array.get()[1].tolist() == [3, 4, 5]
    cp._standin.reset()
    cp._standin.longest_delay = 0.05
    pinned = np.frombuffer(cp.cuda.alloc_pinned_memory(24), np.float32, 6)
    pinned = pinned.reshape(2, 3)
    before = pinned.copy()
    array.get(stream=stream, out=pinned, blocking=False)
    assert counts.pageable == 0
    late = pinned.copy()
    stream.synchronize()
    assert late.tobytes() == before.tobytes()
    assert pinned[1].tolist() == [3, 4, 5]
    array.get(stream=stream, out=host, blocking=False)
    assert host[1].tolist() == [3, 4, 5]
    assert counts.pageable == 1
    assert counts.device_to_host == 2
    assert counts.device_to_host_bytes == 48
    assert counts.stream_synchronizations == 1
    array.set(np.zeros((2, 3), np.float32))
    assert float(array.sum()) == 0
    assert counts.stream_synchronizations == 2
    cp.cuda.Device().synchronize()
    assert counts.device_synchronizations == 1
    target = cp.cuda.alloc(24)
    cp._standin.reset()
    target.copy_from_device_async(array.data, 24, stream)
    target.memset_async(1, 4, stream)
    raw = np.empty(24, np.uint8)
    target.copy_to_host_async(raw.ctypes.data, 24, stream)
    assert raw.tolist() == [1] * 4 + [0] * 20
    assert counts.device_to_device == 1


def check_refusals():
    import cupy as cp

    array, host = cp.zeros(3), np.zeros(3)
    implicit = "Implicit conversion to a NumPy array is not allowed"
    with pytest.raises(TypeError, match=implicit):
        np.asarray(array)
    unsupported = r"Unsupported type <class 'numpy\.ndarray'>"
    for action in (
        lambda: array + host,
        lambda: host + array,
        lambda: np.add(array, host),
        lambda: cp.add(host, host),
        lambda: cp.sqrt(host),
    ):
        with pytest.raises(TypeError, match=unsupported):
            action()
    for action in (
        lambda: cp.concatenate([array, host]),
        lambda: np.concatenate([array, host]),
        lambda: cp.sum(host),
        lambda: array @ host,
        lambda: cp.sum(array, where=True),
        lambda: array.set([1, 2, 3]),
        lambda: array.set(np.zeros(3, np.float32)),
        lambda: hash(array),
        lambda: cp.RawModule(code="", options=[]),
        lambda: cp.add(array, 1, out=host),
        lambda: array.get(out=np.zeros(3, np.float32)),
    ):
        with pytest.raises(TypeError):
            action()
    for action in (
        lambda: array.__setitem__(slice(None), host),
        lambda: array.__setitem__(0, [1]),
        lambda: cp.copyto(array, host),
        lambda: array.fill(host),
        lambda: bool(array),
    ):
        with pytest.raises(ValueError, match=r"non-scalar|ambiguous"):
            action()
    assert not isinstance(array, np.ndarray)
    assert not hasattr(array.flags, "writeable")
    assert not hasattr(array, "ctypes")
    for name in ("data", "base", "strides", "anything"):
        with pytest.raises(AttributeError):
            setattr(array, name, None)
    integers = cp.zeros(3, int)
    with pytest.raises(TypeError, match="same_kind"):
        integers += 0.5


def check_functions():
    import cupy as cp

    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = cp.asarray(host)
    assert (array + np.float64(1)).dtype == np.float64
    assert (array + 1.0).dtype == np.float32
    for name in ("sum", "mean", "max", "argmax", "std", "prod", "cumsum"):
        for axis in (None, 0, 1):
            own = getattr(cp, name)(array, axis=axis)
            expected = np.asarray(getattr(np, name)(host, axis=axis))
            assert isinstance(own, cp.ndarray)
            assert own.dtype == expected.dtype
            assert own.shape == expected.shape
            np.testing.assert_allclose(own.get(), expected)
            method = getattr(array, name)(axis)
            np.testing.assert_allclose(method.get(), expected)
            dispatched = getattr(np, name)(array, axis=axis)
            np.testing.assert_allclose(dispatched.get(), expected)
    for name in ("sqrt", "exp", "isfinite", "negative", "square"):
        own = getattr(np, name)(array)
        assert isinstance(own, cp.ndarray)
        np.testing.assert_allclose(own.get(), getattr(np, name)(host))
    out = cp.empty_like(array)
    assert np.multiply(array, 2, out=out) is out
    np.copyto(out, out + 1)
    np.testing.assert_array_equal(out.get(), host * 2 + 1)
    assert np.zeros_like(array).get().sum() == 0
    assert np.stack([array, array]).shape == (2, 3, 4)
    np.testing.assert_allclose((array @ array.T).get(), host @ host.T)
    own = cp.einsum("ij,kj->ik", array, array)
    np.testing.assert_allclose(own.get(), host @ host.T)
    own = cp.tensordot(array, array, axes=([0], [0]))
    np.testing.assert_allclose(own.get(), np.tensordot(host, host, ([0], [0])))
    assert cp.unique(cp.array([3, 1, 3])).get().tolist() == [1, 3]
    assert cp.where(array > 5, array, 0).get().sum() == host[host > 5].sum()
    assert bool(cp.allclose(array, array))
    assert bool(cp.array_equal(array, array))
    assert [part.shape for part in cp.split(array, 2, axis=1)] == [(3, 2)] * 2
    assert cp.get_array_module(array) is cp
    assert cp.get_array_module(host) is np
    repeated = cp.zeros(3)
    cp.add.at(repeated, cp.array([0, 0, 2]), 1.0)
    assert repeated.get().tolist() == [2, 0, 1]
    cp.random.seed(1)
    assert cp.random.standard_normal((2, 3), dtype=np.float32).dtype == np.float32
    cp.testing.assert_allclose(array, host)
    fortran = cp.asarray(np.asfortranarray(host))
    assert fortran.flags.f_contiguous
    assert (fortran * 2).flags.f_contiguous


def check_indexing():
    import cupy as cp

    host = np.arange(24).reshape(2, 3, 4)
    array = cp.asarray(host)
    for key in (
        0,
        (1, 2),
        (1, 2, 3),
        slice(None, None, -1),
        (slice(1), None, ..., 2),
        np.newaxis,
    ):
        view = array[key]
        assert view.base is array
        assert cp.shares_memory(view, array)
        np.testing.assert_array_equal(view.get(), host[key])
    picked = array[cp.array([1, 0, 1])]
    assert picked.base is None
    np.testing.assert_array_equal(picked.get(), host[[1, 0, 1]])
    np.testing.assert_array_equal(array[:, [0, 2]].get(), host[:, [0, 2]])
    np.testing.assert_array_equal(array[array > 7].get(), host[host > 7])
    array[0] = 5
    array[1, 1] = cp.arange(4)
    array[array > 20] = 0
    host[0], host[1, 1], host[host > 20] = 5, np.arange(4), 0
    np.testing.assert_array_equal(array.get(), host)
    part = array[:, 1]
    assert part.data.ptr - array.data.ptr == part.base.strides[1]
    assert not part.flags.c_contiguous
    assert part.reshape(-1).base is None
    assert array.reshape(-1).base is array
    assert array.reshape(-1).view(np.uint8).nbytes == array.nbytes
    for bad in ((1, 2, 3, 4), 9, "x", 0.5):
        with pytest.raises((IndexError, ValueError)):
            array[bad]


class Foreign:
    """Another library's array, exported through DLPack."""

    def __init__(self, array):
        self.array = array
        self.streams = []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None):
        import cupy as cp

        self.streams.append(stream)
        # The producer's current stream, which is CuPy's default stream here.
        with cp.cuda.Stream.null:
            return self.array.__dlpack__(stream=stream)


class Described:
    """Another library's array, exported through the older CUDA array interface."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array


def check_interfaces():
    import cupy as cp

    cp._standin.longest_delay = 0.02
    array = cp.arange(12, dtype=np.float32).reshape(3, 4)[:, 1:]
    described = array.__cuda_array_interface__
    assert described["version"] == 3
    assert described["stream"] == 1
    assert described["strides"] == (16, 4)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        assert array.__cuda_array_interface__["stream"] == stream.ptr
    cp._standin.reset()
    same = cp.asarray(Described(array))
    assert cp._standin.counts.stream_synchronizations == 1
    assert same.data.ptr == array.data.ptr
    assert same.strides == array.strides
    np.testing.assert_array_equal(same.get(), array.get())
    for copy in (cp.from_dlpack(array), cp.from_dlpack(Foreign(array))):
        assert copy.data.ptr == array.data.ptr
        np.testing.assert_array_equal(copy.get(), array.get())
    foreign = Foreign(array)
    array += 1
    with stream:
        # The consumer's stream is passed on, and waits for the producer's stream.
        result = cp.from_dlpack(foreign) * 2
        np.testing.assert_array_equal(result.get(), array.get() * 2)
    assert foreign.streams == [stream.ptr]
    assert array.__dlpack_device__() == (2, 0)
    capsule = array.__dlpack__()
    del array, same, copy, foreign
    kept = cp.from_dlpack(capsule)
    assert float(kept.sum()) > 0
    with pytest.raises(ValueError, match="multiple times"):
        cp.from_dlpack(capsule)
    with pytest.raises(TypeError, match="CPU arrays"):
        cp.from_dlpack(np.zeros(3))
    with pytest.raises((BufferError, RuntimeError, ValueError, TypeError)):
        np.from_dlpack(kept)
    kept.__dlpack__()
    from cupy import _dlpack

    del kept
    _dlpack._sweep()
    assert not _dlpack._exported
