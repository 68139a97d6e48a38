"""NCCL: communicators of several processes of one host.

As in CuPy, this module needs its own import. Variables of the environment:
``HPCSTRAT_STANDIN_NCCL=0`` (no library), ``HPCSTRAT_STANDIN_NCCL_VERSION`` (22809),
``HPCSTRAT_STANDIN_NCCL_TIMEOUT`` (seconds until all ranks must have joined, 30).

As in NCCL since 2.22, the ranks connect for an algorithm at its first use, in
``groupEnd`` of the caller's thread. ``HPCSTRAT_STANDIN_NCCL_FAULT`` (read there) names
an algorithm, its fault, and the faulty rank: with ``tree error 1`` the connection
fails, with ``ring stuck 0`` it never ends, with ``ring endless 1`` the kernel does not
end, with ``ring wrong 0`` sums are wrong.
"""

import os
import threading

import numpy as np

from cupy import _nccl_shared, _queues, _standin, _store
from cupy.cuda import runtime

available = os.environ.get("HPCSTRAT_STANDIN_NCCL", "1") not in {"", "0"}

NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)

_ERRORS = {
    1: ("NCCL_ERROR_UNHANDLED_CUDA_ERROR", "unhandled cuda error"),
    2: ("NCCL_ERROR_SYSTEM_ERROR", "unhandled system error"),
    3: ("NCCL_ERROR_INTERNAL_ERROR", "internal error"),
    4: ("NCCL_ERROR_INVALID_ARGUMENT", "invalid argument"),
    5: ("NCCL_ERROR_INVALID_USAGE", "invalid usage"),
    6: ("NCCL_ERROR_REMOTE_ERROR", "remote process exited or network error"),
}
_TYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
_REDUCTIONS = {
    NCCL_SUM: np.add,
    NCCL_PROD: np.multiply,
    NCCL_MAX: np.maximum,
    NCCL_MIN: np.minimum,
    NCCL_AVG: np.add,
}
# Since 2.22, NCCL connects the ranks at the first use of an algorithm.
_LATE = 22200
_ALGORITHMS = ["tree", "ring"]
_TREE_BYTES = 64 << 10
# Since 2.30, NCCL lets ranks share a device if a variable allows it.
_SHARING = 23000
_LET_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
_group = threading.local()


class NcclError(RuntimeError):
    """A call of NCCL that failed."""

    def __init__(self, status):
        self.status = status
        name, text = _ERRORS[status]
        super().__init__(f"{name}: {text}")

    def __reduce__(self):
        return type(self), (self.status,)


def check_status(status):
    """Raise an error for a status other than success."""
    if status:
        raise NcclError(status)


def get_version():
    """Return the version's number."""
    return int(os.environ.get("HPCSTRAT_STANDIN_NCCL_VERSION", "22809"))


def get_build_version():
    """Return the version's number."""
    return get_version()


def get_unique_id():
    """Return 128 bytes that one process sends to the others to form a communicator."""
    _queues.visible()
    return _nccl_shared.new_id()


def _dtype(datatype):
    if datatype == NCCL_BFLOAT16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    if not 0 <= datatype < len(_TYPES):
        raise NcclError(4)
    return np.dtype(_TYPES[datatype])


def _buffer(ptr, count, datatype):
    dtype = _dtype(datatype)
    raw, block = _store.view(ptr, count * dtype.itemsize)
    if count and (block is None or not block.on_device):
        raise NcclError(4)
    return raw.view(dtype)


class NcclCommunicator:
    """A rank of a communicator, on the current device."""

    def __init__(self, ndev, commId, rank, config=None):
        self._shared = None
        if not isinstance(commId, bytes):
            raise TypeError(
                "Argument 'commId' has incorrect type (expected bytes, got "
                f"{type(commId).__name__})"
            )
        if len(commId) != 128 or not 0 <= rank < ndev:
            raise NcclError(4)
        self._device = runtime.getDevice()
        seconds = float(os.environ.get("HPCSTRAT_STANDIN_NCCL_TIMEOUT", "30"))
        bus_id = runtime.deviceGetPCIBusId(self._device)
        try:
            shared = _nccl_shared.Shared(commId, ndev, rank, bus_id, seconds)
        except _nccl_shared.Lost as exc:
            raise NcclError(exc.status) from exc
        may_share = get_version() >= _SHARING and os.environ.get(_LET_SHARE) == "1"
        if not may_share and not shared.one_device_each():
            raise NcclError(5)
        self._shared = shared
        self._changed = threading.Condition()
        self._issued = self._finished = 0
        self._connected = set()
        if get_version() < _LATE:
            for algorithm in _ALGORITHMS:
                self._connect(algorithm)

    def _connect(self, algorithm):
        if algorithm in self._connected:
            return
        shared, fault = self._live(), self._fault(algorithm)
        try:
            if fault == "error":
                raise NcclError(2)
            shared.connect(_ALGORITHMS.index(algorithm), stuck=fault == "stuck")
        except _nccl_shared.Lost as exc:
            raise NcclError(exc.status or 3) from exc
        self._connected.add(algorithm)

    def _fault(self, algorithm):
        """Return the fault of an algorithm on this rank, or ""."""
        words = os.environ.get("HPCSTRAT_STANDIN_NCCL_FAULT", "").split()
        matches = words and words[::2] == [algorithm, str(self._live().rank)]
        return words[1] if matches else ""

    @property
    def comm(self):
        """The address of NCCL's communicator; 0 after the communicator's end."""
        return 0 if self._shared is None else id(self._shared)

    def _live(self):
        if self._shared is None:
            raise NcclError(4)
        return self._shared

    def device_id(self):
        """Return the number of the device."""
        self._live()
        return self._device

    def rank_id(self):
        """Return this rank's number."""
        return self._live().rank

    def size(self):
        """Return the number of ranks."""
        return self._live().size

    def __del__(self):
        """Destroy the communicator, like CuPy, also when the interpreter ends."""
        self.destroy()

    def destroy(self):
        """End the communicator after the started calls, together with all ranks."""
        if self._shared is not None:
            with self._changed:
                while self._finished < self._issued:
                    self._changed.wait(0.1)
            self._shared.leave()
            self._shared = None

    def abort(self):
        """Stop this rank's started calls, and end, as all living ranks must."""
        if self._shared is not None:
            self._shared.aborted = True
            self._shared.leave()
            self._shared = None

    def check_async_error(self):
        """Raise an error that has happened since the calls were started."""
        check_status(self._live().lost)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        """Reduce; all ranks get the result."""
        send, recv = self._buffers(sendbuf, recvbuf, count, count, datatype)
        call = (1, count, datatype, op, 0)
        self._start(call, stream, _reduced(self._live(), send, recv, op, None), recv)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        """Reduce; one rank gets the result."""
        shared = self._live()
        send = _buffer(sendbuf, count, datatype)
        recv = _buffer(recvbuf, count, datatype) if shared.rank == root else None
        call = (2, count, datatype, op, root)
        self._start(call, stream, _reduced(shared, send, recv, op, root))

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        """Copy an array from one rank to all ranks."""
        shared = self._live()
        recv = _buffer(recvbuff, count, datatype)
        send = _buffer(sendbuff, count, datatype) if shared.rank == root else recv
        call = (3, count, datatype, 0, root)
        self._start(call, stream, _broadcast(shared, send, recv, root))

    def bcast(self, buff, count, datatype, root, stream):
        """Copy an array from one rank to all ranks, in place."""
        self.broadcast(buff, buff, count, datatype, root, stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        """Reduce an array; each rank gets its part of the result."""
        shared = self._live()
        total = recvcount * shared.size
        send, recv = self._buffers(sendbuf, recvbuf, total, recvcount, datatype)
        call = (4, recvcount, datatype, op, 0)
        self._start(call, stream, _scattered(shared, send, recv, op))

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        """Join all ranks' parts; all ranks get the result."""
        shared = self._live()
        total = count * shared.size
        send, recv = self._buffers(sendbuf, recvbuf, count, total, datatype)
        call = (5, count, datatype, 0, 0)
        self._start(call, stream, _gathered(shared, send, recv))

    def send(self, sendbuf, count, datatype, peer, stream):
        """Send to another rank, which must receive."""
        data = _buffer(sendbuf, count, datatype).view(np.uint8)
        self._start_message("send", peer, stream, self._live().send(data, peer))

    def recv(self, recvbuf, count, datatype, peer, stream):
        """Receive from another rank, which must send."""
        data = _buffer(recvbuf, count, datatype).view(np.uint8)
        self._start_message("recv", peer, stream, self._live().receive(data, peer))

    def _buffers(self, sendbuf, recvbuf, sent, received, datatype):
        self._live()
        return _buffer(sendbuf, sent, datatype), _buffer(recvbuf, received, datatype)

    def _start(self, call, stream, steps, recv=None):
        if call[3] not in _REDUCTIONS:
            raise NcclError(4)
        small = call[0] == 1 and call[1] * _dtype(call[2]).itemsize <= _TREE_BYTES
        algorithm = "tree" if small else "ring"
        fault = self._fault(algorithm)
        steps = _checked(self._live(), call, steps, endless=fault == "endless")
        if fault == "wrong" and call[0] == 1:
            steps = _spoiled(steps, recv)
        self._put((self, "collective"), stream, steps, algorithm)

    def _start_message(self, way, peer, stream, steps):
        if not 0 <= peer < self._live().size:
            raise NcclError(4)
        self._put((self, way, peer), stream, steps)

    def _put(self, chain, stream, steps, algorithm=None):
        _standin.count("collectives")
        queue = _queues.find_queue(stream)
        if queue.device != self._device:
            raise NcclError(4)
        if getattr(_group, "depth", 0):
            _group.calls.append((queue, chain, steps, algorithm))
        else:
            _submit([(queue, chain, steps, algorithm)])


def _checked(shared, call, steps, endless):
    while endless:
        shared.check()
        yield
    yield from shared.agree(call)
    yield from steps


def _spoiled(steps, recv):
    yield from steps
    recv[-1:] += 1


def _chunks(data):
    step = _nccl_shared.SLOT // data.itemsize
    for start in range(0, data.size, step):
        yield slice(start, min(start + step, data.size))


def _total(shared, count, dtype, op):
    # Add in rank order, unlike NCCL, whose order depends on its choice of algorithm.
    slots = [slot[: count * dtype.itemsize].view(dtype) for slot in shared.slots]
    total = slots[0].copy()
    for slot in slots[1:]:
        total = _REDUCTIONS[op](total, slot)
    if op == NCCL_AVG:
        total = (total / shared.size).astype(dtype)
    return total


def _own(shared, part):
    shared.slots[shared.rank, : part.nbytes] = part.view(np.uint8)


def _reduced(shared, send, recv, op, root):
    for chunk in _chunks(send):
        part = send[chunk]
        _own(shared, part)
        yield from shared.meet()
        if root in {None, shared.rank}:
            recv[chunk] = _total(shared, part.size, part.dtype, op)
        yield from shared.meet()


def _scattered(shared, send, recv, op):
    for chunk in _chunks(recv):
        for rank in range(shared.size):
            part = send[rank * recv.size : (rank + 1) * recv.size][chunk]
            _own(shared, part)
            yield from shared.meet()
            if rank == shared.rank:
                total = _total(shared, part.size, part.dtype, op)
            yield from shared.meet()
        recv[chunk] = total


def _gathered(shared, send, recv):
    for chunk in _chunks(send):
        part = send[chunk]
        _own(shared, part)
        yield from shared.meet()
        for rank, slot in enumerate(shared.slots):
            whole = recv[rank * send.size : (rank + 1) * send.size]
            whole[chunk] = slot[: part.nbytes].view(send.dtype)
        yield from shared.meet()


def _broadcast(shared, send, recv, root):
    for chunk in _chunks(send):
        part = send[chunk]
        if shared.rank == root:
            _own(shared, part)
        yield from shared.meet()
        recv[chunk] = shared.slots[root, : part.nbytes].view(recv.dtype)
        yield from shared.meet()


def _submit(calls):
    """Put calls into their streams; the calls of one stream run at the same time."""
    queues = {}
    for _, chain, _, algorithm in calls:
        if algorithm is not None:
            chain[0]._connect(algorithm)
    for queue, chain, steps, _ in calls:
        queues.setdefault(queue, {}).setdefault(chain, []).append(steps)
    for queue, chains in queues.items():
        turns = {}
        for chain in chains:
            comm = chain[0]
            if comm not in turns:
                comm._issued += 1
                turns[comm] = comm._issued
        queue.put(_Work(list(chains.values()), turns))


class _Work:
    """Calls of one stream; a communicator makes its calls in the order of issue."""

    def __init__(self, chains, turns):
        self.chains = chains
        self.turns = turns

    def __call__(self):
        for comm, turn in self.turns.items():
            with comm._changed:
                while comm._finished < turn - 1 and not _queues.ending():
                    comm._changed.wait(0.1)
        try:
            with np.errstate(all="ignore"):
                _nccl_shared.run_together(self.chains)
        except _nccl_shared.Lost as exc:
            check_status(exc.status)
        finally:
            for comm in self.turns:
                with comm._changed:
                    comm._finished += 1
                    comm._changed.notify_all()


def groupStart():
    """Collect calls until ``groupEnd``."""
    _group.depth = getattr(_group, "depth", 0) + 1
    if _group.depth == 1:
        _group.calls = []


def groupEnd():
    """Start the collected calls."""
    if not getattr(_group, "depth", 0):
        raise NcclError(5)
    _group.depth -= 1
    if not _group.depth:
        calls, _group.calls = _group.calls, []
        _submit(calls)


if not available:
    # Without the library, CuPy's module contains only this variable.
    for _name in [name for name in globals() if not name.startswith("_")]:
        if _name != "available":
            del globals()[_name]
