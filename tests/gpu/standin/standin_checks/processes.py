"""Checks of objects that processes share: memory, events, communicators."""

import contextlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest


@contextlib.contextmanager
def peer(check):
    """Start the peer process of a check, which reads lines from this process."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "standin_checks", check],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        output = process.communicate(timeout=30)[0]
        assert process.returncode == 0, output
    finally:
        process.kill()


def tell(process, *values):
    """Write a line to the peer process."""
    process.stdin.write(" ".join(map(str, values)) + "\n")
    process.stdin.flush()


def hear(stream):
    """Read a line from the peer process."""
    return stream.readline().split()


def _communicate(rank, unique_id):
    import cupy as cp
    from cupy.cuda import nccl

    cp.cuda.Device(rank).use()
    comm = nccl.NcclCommunicator(2, unique_id, rank)
    assert (comm.rank_id(), comm.size()) == (rank, 2)
    stream = cp.cuda.Stream(non_blocking=True)
    # The length needs more than one slot, and is not a multiple of a slot.
    length = 100_003
    with stream:
        own = cp.arange(length, dtype=np.float32) + rank
        total = cp.empty_like(own)
        single = nccl.NCCL_FLOAT32
        at = stream.ptr
        comm.allReduce(own.data.ptr, total.data.ptr, length, single, nccl.NCCL_SUM, at)
        both = cp.empty((2, length), np.float32)
        comm.allGather(own.data.ptr, both.data.ptr, length, single, at)
        part = cp.empty(length, np.float32)
        comm.reduceScatter(
            both.data.ptr, part.data.ptr, length, single, nccl.NCCL_MAX, at
        )
        other = cp.empty_like(own)
        nccl.groupStart()
        comm.send(own.data.ptr, length, single, 1 - rank, at)
        comm.recv(other.data.ptr, length, single, 1 - rank, at)
        nccl.groupEnd()
        sent = cp.full(3, rank, np.int64)
        comm.broadcast(sent.data.ptr, sent.data.ptr, 3, nccl.NCCL_INT64, 1, at)
        one = cp.zeros(3, np.int64)
        comm.reduce(sent.data.ptr, one.data.ptr, 3, nccl.NCCL_INT64, 0, 0, at)
        plain = np.arange(length, dtype=np.float32)
        np.testing.assert_array_equal(total.get(), plain * 2 + 1)
        np.testing.assert_array_equal(both.get(), [plain, plain + 1])
        np.testing.assert_array_equal(part.get(), plain + rank)
        np.testing.assert_array_equal(other.get(), plain + 1 - rank)
        assert sent.get().tolist() == [1] * 3
        assert one.get().tolist() == [2 - 2 * rank] * 3
    comm.check_async_error()
    host = np.zeros(3)
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        comm.allReduce(host.ctypes.data, host.ctypes.data, 3, 8, 0, 0)
    # Only one rank makes this call, so its work waits until it is aborted.
    if rank == 0:
        with stream:
            comm.allReduce(own.data.ptr, own.data.ptr, length, single, 0, at)
        time.sleep(0.1)
        assert not stream.done
        comm.abort()
        stream.synchronize()
    with contextlib.suppress(nccl.NcclError):
        comm.destroy()
    return comm


def check_nccl_first():
    from cupy.cuda import nccl

    unique_id = nccl.get_unique_id()
    assert isinstance(unique_id, bytes)
    with peer("nccl_second") as second:
        tell(second, unique_id.hex())
        _communicate(0, unique_id)


def check_nccl_second():
    _communicate(1, bytes.fromhex(hear(sys.stdin)[0]))


# NCCL's version, and the variable that lets ranks share a device.
VERSIONS = [("22809", "1"), ("23001", "0"), ("23001", "1")]


def check_nccl_shared_device():
    from cupy.cuda import nccl

    ids = [nccl.get_unique_id() for _ in VERSIONS]
    with peer("nccl_shared_guest") as guest:
        tell(guest, *(unique_id.hex() for unique_id in ids))
        _join(ids, 0)


def check_nccl_shared_guest():
    _join([bytes.fromhex(text) for text in hear(sys.stdin)], 1)


def _join(ids, rank):
    from cupy.cuda import nccl

    for (version, told), unique_id in zip(VERSIONS, ids, strict=True):
        os.environ["HPCSTRAT_STANDIN_NCCL_VERSION"] = version
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = told
        assert nccl.get_version() == int(version)
        if (version, told) == VERSIONS[-1]:
            assert nccl.NcclCommunicator(2, unique_id, rank).size() == 2
            continue
        with pytest.raises(nccl.NcclError) as caught:
            nccl.NcclCommunicator(2, unique_id, rank)
        assert caught.value.status == 5
