"""Streams and events."""

import threading

from cupy import _events, _queues, _standin
from cupy.cuda import runtime

_local = threading.local()


class Event:
    """A point in the work of a stream."""

    def __init__(self, block=False, disable_timing=False):
        self.ptr = 0
        self._state = _events.create(
            (runtime.eventBlockingSync if block else 0)
            | (runtime.eventDisableTiming if disable_timing else 0)
        )
        self.ptr = self._state.ptr

    def __del__(self):
        if getattr(self, "ptr", 0) and not _queues.ending():
            _events.destroy(self.ptr)

    @property
    def done(self):
        """Whether the work before the latest recording has run."""
        return runtime.eventQuery(self.ptr) == 0

    def record(self, stream=None):
        """Record the event in a stream, by default in the current stream."""
        if stream is None:
            stream = get_current_stream()
        runtime.eventRecord(self.ptr, stream.ptr)

    def synchronize(self):
        """Wait until the stream has passed the latest recording."""
        runtime.eventSynchronize(self.ptr)


def get_elapsed_time(start_event, end_event):
    """Return the milliseconds between two events."""
    return runtime.eventElapsedTime(start_event.ptr, end_event.ptr)


class _BaseStream:
    def __init__(self, ptr, device_id=-1):
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other):
        if isinstance(other, _BaseStream):
            return self.ptr == other.ptr
        return False

    def __hash__(self):
        return self.ptr

    def __enter__(self):
        device = self._check_device()
        _stack().append((device, get_current_stream()))
        _streams()[device] = self
        return self

    def __exit__(self, *args):
        device, before = _stack().pop()
        _streams()[device] = before

    def __repr__(self):
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def __cuda_stream__(self):
        return (0, self.ptr)

    def _check_device(self):
        device = runtime.getDevice()
        if self.device_id not in {-1, device}:
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) "
                f"does not match with the current device ({device})"
            )
        return device

    def use(self):
        """Make this stream the thread's current stream of its device."""
        _streams()[self._check_device()] = self
        return self

    @property
    def _queue(self):
        return _queues.find_queue(self.ptr)

    @property
    def done(self):
        """Whether all work of the stream has run."""
        return runtime.streamQuery(self.ptr) == 0

    @property
    def is_non_blocking(self):
        """Whether the default stream does not wait for this stream."""
        return not self._queue.blocking

    @property
    def priority(self):
        """The stream's priority."""
        return self._queue.priority

    def synchronize(self):
        """Wait for all work of the stream."""
        runtime.streamSynchronize(self.ptr)

    def launch_host_func(self, callback, arg):
        """Call ``callback(arg)`` in stream order."""
        self._queue.put(lambda: callback(arg))

    def add_callback(self, callback, arg):
        """Call ``callback(stream, status, arg)`` in stream order."""
        self._queue.put(lambda: callback(self, 0, arg))

    def record(self, event=None):
        """Record an event, by default a new one, and return it."""
        if event is None:
            event = Event()
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event):
        """Make the stream's later work wait for an event."""
        runtime.streamWaitEvent(self.ptr, event.ptr)


class Stream(_BaseStream):
    """A new stream, or, with ``null`` or ``ptds``, one of CUDA's default streams."""

    null = None
    ptds = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self._owned = False
        if null:
            ptr, device = 0, -1
        elif ptds:
            ptr, device = runtime.streamPerThread, -1
        else:
            flags = runtime.streamNonBlocking if non_blocking else 0
            ptr = runtime.streamCreateWithPriority(flags, priority or 0)
            device = runtime.getDevice()
            self._owned = True
        super().__init__(ptr, device)

    def __del__(self):
        if getattr(self, "_owned", False) and not _queues.ending():
            _queues.remove_queue(self.ptr)

    @classmethod
    def from_external(cls, obj):
        """Wrap a stream of another library that has ``__cuda_stream__``."""
        try:
            version, ptr = obj.__cuda_stream__()
        except AttributeError as exc:
            raise AttributeError(
                f"Object of type {type(obj).__name__} does not implement the CUDA "
                "stream protocol (__cuda_stream__ method)"
            ) from exc
        if version != 0:
            raise ValueError(f"unsupported version of __cuda_stream__: {version}")
        stream = cls.__new__(cls)
        stream._owned = False
        stream._foreign_stream_ref = obj
        _BaseStream.__init__(stream, ptr, runtime.getDevice())
        return stream


class ExternalStream(_BaseStream):
    """A stream that another library owns."""

    def __init__(self, ptr, device_id=-1):
        super().__init__(ptr, device_id)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


def _stack():
    return _local.__dict__.setdefault("stack", [])


def _streams():
    return _local.__dict__.setdefault("streams", {})


def get_current_stream(device_id=-1):
    """Return the thread's current stream of a device."""
    device = runtime.getDevice() if device_id == -1 else device_id
    return _streams().get(device, Stream.null)


def _current_queue():
    """Return the queue of the current stream of the current device."""
    return _queues.find_queue(get_current_stream().ptr)


def _synchronize():
    """Wait for the current stream, like every call that needs a value."""
    _standin.count("stream_synchronizations")
    _current_queue().drain()
