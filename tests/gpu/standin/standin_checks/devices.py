"""Checks of streams, events, memory, kernels and devices."""

import numpy as np
import pytest


def check_poison():
    import cupy as cp

    cp._standin.longest_delay = 0.3
    array = cp.full(1000, 7, dtype=np.uint8)
    seen = set()
    for _ in range(10):
        # Read the device's memory from the host without synchronization.
        seen.add(int(array._host[500]))
        array.fill(7)
    assert 0xCB in seen
    assert (array.get() == 7).all()
    assert cp.empty(3, np.uint8)._host.tolist() == [0xCB] * 3


def check_streams():
    import cupy as cp

    cp._standin.longest_delay = 0.02
    slow, fast = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    assert slow != fast
    assert cp.cuda.get_current_stream() == cp.cuda.Stream.null
    with slow:
        assert cp.cuda.get_current_stream() == slow
        array = cp.zeros(10, dtype=np.int64)
        for _ in range(20):
            array += 1
        with fast:
            wrong = array + 0
        event = slow.record()
    assert not slow.done
    with fast:
        early = wrong.get()
        fast.wait_event(event)
        right = array + 0
        assert right.get().tolist() == [20] * 10
    assert early.tolist() != [20] * 10
    assert slow.done
    assert event.done
    order = []
    for number in range(5):
        slow.launch_host_func(order.append, number)
    slow.synchronize()
    assert order == [0, 1, 2, 3, 4]
    other = cp.cuda.Stream.from_external(slow)
    assert other == slow
    assert other.is_non_blocking


def check_legacy_stream():
    import cupy as cp

    cp._standin.longest_delay = 0.02
    blocking = cp.cuda.Stream()
    with blocking:
        array = cp.zeros(10)
        for _ in range(10):
            array += 1
    # The default stream waits for blocking streams, and these wait for it.
    array += 1
    with blocking:
        result = array * 2
    assert result.get(stream=blocking).tolist() == [22] * 10
    with blocking:
        for _ in range(10):
            array += 1
    # The default stream also waits for the work of a deleted stream.
    del blocking
    assert array.get().tolist() == [21] * 10


def check_events():
    import cupy as cp

    cp._standin.longest_delay = 0.01
    stream = cp.cuda.Stream(non_blocking=True)
    first, last = cp.cuda.Event(), cp.cuda.Event()
    assert first.done
    first.record(stream)
    with stream:
        cp.zeros(10)
    last.record(stream)
    last.synchronize()
    assert cp.cuda.get_elapsed_time(first, last) > 0
    quick = cp.cuda.Event(disable_timing=True)
    quick.record()
    quick.synchronize()
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError):
        cp.cuda.get_elapsed_time(quick, last)


def check_errors_of_work():
    import cupy as cp

    array = cp.zeros(3)
    taken = array[cp.array([0, 5])]
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="IndexError"):
        taken.get()
    assert array.get().tolist() == [0, 0, 0]


_PAIRS = """
struct alignas(16) Pair { double one, other; };
extern "C" __global__ void twice(Pair* pair) { *pair = Pair{1.0, 2.0}; }
"""


def check_death_of_a_context():
    import cupy as cp

    error = cp.cuda.runtime.CUDARuntimeError
    kernel = cp.RawKernel(_PAIRS, "twice")
    memory = cp.zeros(4)
    kernel((1,), (1,), (memory,))
    assert memory.get().tolist() == [1, 2, 0, 0]
    event = cp.cuda.Event()
    event.record()
    kernel((1,), (1,), (memory[1:],))
    with pytest.raises(error, match="misaligned address"):
        cp.cuda.Stream.null.synchronize()
    # The error stays: events recorded before the fault fail, too.
    assert cp.cuda.runtime.eventQuery(event.ptr) == 716
    with pytest.raises(error, match="misaligned address"):
        memory.get()
    with pytest.raises(error, match="misaligned address"):
        cp.zeros(3)


def check_loading_waits():
    import threading

    import cupy as cp

    goes_on, loaded = threading.Event(), threading.Event()
    side = cp.cuda.Stream(non_blocking=True)
    side.launch_host_func(lambda _: goes_on.wait(20), None)

    def load():
        cp.RawKernel(_PAIRS, "twice").compile()
        loaded.set()

    thread = threading.Thread(target=load)
    thread.start()
    assert not loaded.wait(1.0)
    goes_on.set()
    assert loaded.wait(20)
    thread.join()


def check_freed_memory():
    import cupy as cp

    cp._standin.longest_delay = 0.02
    pool = cp.get_default_memory_pool()
    side = cp.cuda.Stream(non_blocking=True)
    with side:
        array = cp.zeros(4, np.uint8)
        for _ in range(10):
            array += 1
        # Later operations of the same stream run after the use of the freed memory.
        result = (array * 1) + 0
        before = pool.used_bytes()
        del array
        assert pool.used_bytes() == before - 4
        assert result.get().tolist() == [10] * 4
    shared = cp.full(4, 3, np.uint8)
    cp.cuda.Stream.null.synchronize()
    with side:
        for _ in range(30):
            result += 0
        copied = shared + 0
    # The default stream may reuse the memory, because it does not wait for the side
    # stream.
    del shared
    other = cp.zeros(4)
    cp.cuda.Stream.null.synchronize()
    assert copied.get(stream=side).tolist() == [0xCB] * 4
    assert other.get().tolist() == [0] * 4


def check_memory():
    import cupy as cp

    runtime = cp.cuda.runtime
    failure = runtime.CUDARuntimeError
    memory = cp.cuda.Memory(1000)
    pointer = cp.cuda.MemoryPointer(memory, 16)
    assert (pointer + 8).ptr == memory.ptr + 24
    array = cp.ndarray((4,), np.int32, pointer)
    array[...] = 3
    assert array.get().tolist() == [3] * 4
    for action in (
        lambda: runtime.free(pointer.ptr),
        lambda: runtime.memcpy(memory.ptr, memory.ptr, 2000, 3),
        lambda: runtime.memcpy(memory.ptr, memory.ptr, 20, 2),
        lambda: runtime.malloc(1 << 50),
    ):
        with pytest.raises(failure):
            action()
    assert runtime.pointerGetAttributes(pointer.ptr).type == 2
    page = np.zeros(4096, np.uint8)
    assert runtime.pointerGetAttributes(page.ctypes.data).type == 0
    runtime.hostRegister(page.ctypes.data, 4096, 0)
    assert runtime.pointerGetAttributes(page.ctypes.data + 5).type == 1
    with pytest.raises(failure, match="AlreadyRegistered"):
        runtime.hostRegister(page.ctypes.data + 4000, 4096, 0)
    runtime.hostUnregister(page.ctypes.data)
    with pytest.raises(failure, match="NotRegistered"):
        runtime.hostUnregister(page.ctypes.data)
    free, total = runtime.memGetInfo()
    assert 0 < free < total
    pool = cp.cuda.MemoryPool(lambda size: cp.cuda.MemoryPointer(memory, 0))
    cp.cuda.set_allocator(pool.malloc)
    assert cp.empty(3).data.mem is memory
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    with cp.cuda.using_allocator(None):
        assert isinstance(cp.empty(3).data.mem, cp.cuda.Memory)


KERNELS = r"""
typedef unsigned long long size;
template <typename T> struct Pair { T* data; size length; };
template <typename T> __device__ __forceinline__ T twice(const T& x) { return x + x; }
extern "C" __global__ void __launch_bounds__(256) scale(
    const float* __restrict__ from, float* __restrict__ to, long long n, float factor) {
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += step)
    to[i] = fmaf(factor, twice(from[i]), OFFSET);
}
template <typename T> __global__ void fill(Pair<T> pair, T value) {
  for (size i = 0; i < pair.length; ++i) pair.data[i] = value;
}
extern "C" __global__ void count(unsigned int* total) { atomicAdd(total, 1u); }
"""


def check_kernels():
    import cupy as cp

    cp._standin.longest_delay = 0.02
    module = cp.RawModule(
        code=KERNELS, options=("-DOFFSET=1.0f",), name_expressions=["fill<double>"]
    )
    kernel = module.get_function("scale")
    source = cp.arange(1000, dtype=np.float32)
    target = cp.empty_like(source)
    cp._standin.reset()
    kernel((3,), (128,), (source, target, 1000, np.float32(0.5)))
    assert cp._standin.counts.launches == 1
    np.testing.assert_array_equal(target.get(), np.arange(1000) + 1)
    stream = cp.cuda.Stream(non_blocking=True)
    total = cp.zeros(1, np.uint32)
    cp.cuda.Stream.null.synchronize()
    with stream:
        module.get_function("count")((3, 2), (4, 5, 6), (total,))
    assert int(total.get(stream=stream)[0]) == 6 * 120
    pair = np.zeros((), np.dtype([("data", np.uint64), ("length", np.uint64)]))
    filled = cp.empty(5)
    pair["data"], pair["length"] = filled.data.ptr, 5
    module.get_function("fill<double>")((1,), (1,), (pair[()], 2.5))
    assert filled.get().tolist() == [2.5] * 5
    with pytest.raises(TypeError, match="arguments of"):
        kernel((1,), (1,), (source, target, np.int32(1000), np.float32(1)))
    with pytest.raises(TypeError, match="expected tuple"):
        kernel(1, (1,), (source, target, 1000, np.float32(1)))
    with pytest.raises(TypeError, match="Unsupported type"):
        kernel((1,), (1,), (np.zeros(3), target, 1000, np.float32(1)))
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError):
        kernel((1,), (2048,), (source, target, 1000, np.float32(1)))
    from cupy.cuda.compiler import CompileException

    barrier = 'extern "C" __global__ void f() { __syncthreads(); }'
    with pytest.raises(CompileException, match="__syncthreads"):
        cp.RawKernel(barrier, "f")((1,), (1,), ())


def check_devices():
    import cupy as cp

    runtime = cp.cuda.runtime
    assert runtime.getDeviceCount() == 2
    ids = [runtime.deviceGetPCIBusId(device) for device in range(2)]
    assert ids == ["0000:03:00.0", "0000:01:00.0"]
    assert runtime.deviceGetByPCIBusId(ids[1]) == 1
    with cp.cuda.Device(1):
        assert runtime.getDevice() == 1
        array = cp.zeros(3)
        stream = cp.cuda.Stream()
    assert runtime.getDevice() == 0
    assert array.device == cp.cuda.Device(1)
    with pytest.warns(cp._util.PerformanceWarning, match="Peer access"):
        array + 1
    with pytest.raises(RuntimeError, match="device that the stream"):
        stream.use()
    with pytest.raises(runtime.CUDARuntimeError):
        cp.cuda.Device(2).use()
    assert cp.cuda.Device(0).compute_capability == "80"
    runtime.deviceEnablePeerAccess(1)
    with pytest.raises(runtime.CUDARuntimeError, match="AlreadyEnabled"):
        runtime.deviceEnablePeerAccess(1)


def check_nothing():
    import cupy as cp

    assert not hasattr(cp.cuda, "nccl")
    from cupy.cuda import nccl

    assert not nccl.available
    assert not hasattr(nccl, "NcclCommunicator")

    assert not cp.cuda.is_available()
    for action in (
        cp.cuda.runtime.getDeviceCount,
        lambda: cp.zeros(3),
        cp.cuda.get_current_stream,
        lambda: cp.cuda.alloc_pinned_memory(3),
    ):
        with pytest.raises(
            cp.cuda.runtime.CUDARuntimeError, match="cudaErrorNoDevice: no CUDA-cap"
        ) as caught:
            action()
        assert caught.value.status == 100
