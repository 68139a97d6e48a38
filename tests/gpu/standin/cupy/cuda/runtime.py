"""The CUDA runtime's calls, with CuPy's names."""

import contextlib

import numpy as np

from cupy import _errors, _events, _queues, _standin, _store
from cupy._errors import CUDARuntimeError

is_hip = False
memcpyHostToHost = 0
memcpyHostToDevice = 1
memcpyDeviceToHost = 2
memcpyDeviceToDevice = 3
memcpyDefault = 4
memoryTypeUnregistered = 0
memoryTypeHost = 1
memoryTypeDevice = 2
memoryTypeManaged = 3
hostAllocDefault = 0
hostAllocPortable = 1
hostAllocMapped = 2
hostAllocWriteCombined = 4
streamDefault = 0
streamNonBlocking = 1
streamLegacy = 1
streamPerThread = 2
eventDefault = 0
eventBlockingSync = 1
eventDisableTiming = 2

_peers = set()


# Devices


def driverGetVersion():
    return _standin.driver_version()


def runtimeGetVersion():
    return 12090


def getDeviceCount():
    return len(_queues.visible())


def getDevice():
    return _queues.current_device()


def setDevice(device):
    _queues.set_device(device)


def _check_device(device):
    if not 0 <= device < len(_queues.visible()):
        raise CUDARuntimeError(_errors.INVALID_DEVICE)
    return _queues.visible()[device]


def deviceGetPCIBusId(device):
    return f"0000:{_check_device(device) + 1:02X}:00.0"


def deviceGetByPCIBusId(pci_bus_id):
    for device in range(getDeviceCount()):
        if deviceGetPCIBusId(device).lower() == pci_bus_id.lower():
            return device
    raise CUDARuntimeError(_errors.INVALID_DEVICE)


def getDeviceProperties(device):
    physical = _check_device(device)
    return {
        "name": b"Stand-in for a GPU on host memory",
        "uuid": b"hpcstratstandi" + bytes([0, physical]),
        "totalGlobalMem": _store.TOTAL_BYTES,
        "multiProcessorCount": 2,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerMultiProcessor": 2048,
        "maxGridSize": (2147483647, 65535, 65535),
        "maxThreadsDim": (1024, 1024, 64),
        "warpSize": 32,
        "major": 8,
        "minor": 0,
        "pciBusID": physical + 1,
        "pciDeviceID": 0,
        "pciDomainID": 0,
        "unifiedAddressing": 1,
        "asyncEngineCount": 2,
        "integrated": 0,
        "canMapHostMemory": 1,
        "ECCEnabled": 0,
        "concurrentKernels": 1,
    }


def deviceCanAccessPeer(device, peerDevice):
    _check_device(device)
    _check_device(peerDevice)
    return int(device != peerDevice)


def deviceEnablePeerAccess(peerDevice):
    _check_device(peerDevice)
    pair = getDevice(), peerDevice
    if pair[0] == pair[1]:
        raise CUDARuntimeError(_errors.INVALID_DEVICE)
    if pair in _peers:
        raise CUDARuntimeError(_errors.PEER_ALREADY)
    _peers.add(pair)


def deviceDisablePeerAccess(peerDevice):
    _peers.discard((getDevice(), peerDevice))


def deviceSynchronize():
    _standin.count("device_synchronizations")
    _queues.drain_device(_queues.current_device())


def memGetInfo():
    free = _store.TOTAL_BYTES - _store.used_bytes(getDevice())
    return free, _store.TOTAL_BYTES


# Memory


def malloc(size):
    return _store.allocate_cuda(size, getDevice()).ptr if size else 0


def free(ptr):
    _store.free_pointer(ptr)


def hostAlloc(size, flags):
    return _store.allocate_pinned(size).ptr


def freeHost(ptr):
    _store.free_pinned(ptr)


def hostRegister(ptr, size, flags):
    _queues.visible()
    _store.register(ptr, size)


def hostUnregister(ptr):
    _store.unregister(ptr)


class PointerAttributes:
    """The attributes that CUDA reports for an address."""

    def __init__(self, device, devicePointer, hostPointer, type):
        self.device = device
        self.devicePointer = devicePointer
        self.hostPointer = hostPointer
        self.type = type


def pointerGetAttributes(ptr):
    block = _store.find(ptr)
    if block is None:
        return PointerAttributes(-2, 0, ptr, memoryTypeUnregistered)
    if block.on_device:
        return PointerAttributes(block.device, ptr, 0, memoryTypeDevice)
    return PointerAttributes(getDevice(), ptr, ptr, memoryTypeHost)


def _kind(source, target, kind):
    actual = (
        "device" if source is not None and source.on_device else "host",
        "device" if target is not None and target.on_device else "host",
    )
    told = {
        memcpyHostToHost: ("host", "host"),
        memcpyHostToDevice: ("host", "device"),
        memcpyDeviceToHost: ("device", "host"),
        memcpyDeviceToDevice: ("device", "device"),
        memcpyDefault: actual,
    }
    if told.get(kind) != actual:
        raise CUDARuntimeError(_errors.INVALID_VALUE)
    return "_to_".join(actual)


def memcpyAsync(dst, src, size, kind, stream):
    if not size:
        return
    source, from_block = _store.view(src, size)
    target, to_block = _store.view(dst, size)
    name = _kind(from_block, to_block, kind)
    queue = _queues.find_queue(stream)
    if name != "host_to_host":
        _standin.count_copy(name, size)
    pageable = from_block is None or to_block is None
    if pageable:
        _standin.count("pageable")
    if from_block is None:
        # CUDA copies memory that is not page-locked to a buffer before it returns.
        source = source.copy()
    ticket = queue.put(lambda: np.copyto(target, source))
    if pageable and to_block is None:
        queue.wait_ticket(ticket)


def memcpy(dst, src, size, kind):
    null = _queues.null_queue(getDevice())
    if kind == memcpyHostToDevice and _store.find(src) is None:
        # Return when pageable memory was read, before the data have arrived.
        null.drain()
        memcpyAsync(dst, src, size, kind, 0)
        return
    memcpyAsync(dst, src, size, kind, 0)
    if kind != memcpyDeviceToDevice:
        null.drain()


def memcpyPeerAsync(dst, dstDevice, src, srcDevice, size, stream):
    memcpyAsync(dst, src, size, memcpyDeviceToDevice, stream)


def memcpyPeer(dst, dstDevice, src, srcDevice, size):
    memcpyAsync(dst, src, size, memcpyDeviceToDevice, 0)


def memsetAsync(ptr, value, size, stream):
    target, block = _store.view(ptr, size)
    if size and block is None:
        raise CUDARuntimeError(_errors.INVALID_VALUE)
    _queues.find_queue(stream).put(lambda: target.fill(value & 0xFF))


def memset(ptr, value, size):
    memsetAsync(ptr, value, size, 0)


# Streams


def streamCreate():
    return _queues.new_queue(True).ptr


def streamCreateWithFlags(flags):
    return _queues.new_queue(not flags & streamNonBlocking, flags).ptr


def streamCreateWithPriority(flags, priority):
    return _queues.new_queue(not flags & streamNonBlocking, flags, priority).ptr


def streamGetFlags(stream):
    return _queues.find_queue(stream).flags


def streamGetPriority(stream):
    return _queues.find_queue(stream).priority


def streamDestroy(stream):
    _queues.remove_queue(stream)


def streamSynchronize(stream):
    _standin.count("stream_synchronizations")
    _queues.find_queue(stream).drain()


def streamQuery(stream):
    # CuPy returns the status here instead of raising.
    return 0 if _queues.find_queue(stream).done() else _errors.NOT_READY


def streamWaitEvent(stream, event, flags=0):
    state = _events.find(event)
    number = state.recorded()
    if not number:
        return
    _queues.find_queue(stream).put(lambda: state.wait(number))


def launchHostFunc(stream, callback, arg):
    _queues.find_queue(stream).put(lambda: callback(arg))


def streamAddCallback(stream, callback, arg, flags=0):
    _queues.find_queue(stream).put(lambda: callback(stream, 0, arg))


# Events


def eventCreate():
    return _events.create(0).ptr


def eventCreateWithFlags(flags):
    return _events.create(flags).ptr


def eventDestroy(event):
    _events.destroy(event)


def eventRecord(event, stream):
    _events.find(event).record(_queues.find_queue(stream))


def eventQuery(event):
    state = _events.find(event)
    if _queues.status_of(state.device):
        return _queues.status_of(state.device)
    return 0 if state.reached(state.recorded()) else _errors.NOT_READY


def eventSynchronize(event):
    _standin.count("event_synchronizations")
    state = _events.find(event)
    state.wait(state.recorded())
    _queues.raise_errors(state.device)


def eventElapsedTime(start, end):
    first, last = _events.find(start), _events.find(end)
    if (first.flags | last.flags) & eventDisableTiming:
        raise CUDARuntimeError(_errors.INVALID_HANDLE)
    for state in (first, last):
        if not state.recorded():
            raise CUDARuntimeError(_errors.INVALID_HANDLE)
        if not state.reached(state.recorded()):
            raise CUDARuntimeError(_errors.NOT_READY)
    return (last.time - first.time) * 1000.0


def profilerStart():
    pass


def profilerStop():
    pass


@contextlib.contextmanager
def _device(device):
    """Make ``device`` the thread's current device inside of a ``with`` block."""
    before = getDevice()
    setDevice(device)
    try:
        yield
    finally:
        setDevice(before)
