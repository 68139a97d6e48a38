"""The threads of streams: work runs in order, later, and a wait raises its errors.

A queue does the work of a stream, which is found by its pointer. The legacy default
stream of a device waits for blocking streams, and these wait for it, as in CUDA. Every
wait is for work that was submitted before, so that no deadlock is possible.
"""

import atexit
import collections
import itertools
import threading

from cupy import _standin
from cupy._errors import (
    INSUFFICIENT_DRIVER,
    INVALID_DEVICE,
    INVALID_HANDLE,
    LAUNCH_FAILURE,
    MISALIGNED_ADDRESS,
    NO_DEVICE,
    CUDARuntimeError,
)

_order = threading.RLock()
_numbers = itertools.count(0x5EA00010, 16)
_queues = {}
_null = {}
_retired = []
_errors = collections.defaultdict(list)
# Kernel faults by device: after a fault, each call on this device fails in this
# process.
_deaths = {}
_freed = collections.deque()
_current = threading.local()
_ending = threading.Event()
# A driver makes the host wait when a stream has about this much work.
_MOST_WAITING = 1024


class Queue:
    """The work of one stream, which one thread does."""

    def __init__(self, device, blocking=True, ptr=None, flags=0, priority=0):
        self.device = device
        self.blocking = blocking
        self.flags = flags
        self.priority = priority
        self.ptr = next(_numbers) if ptr is None else ptr
        self.changed = threading.Condition()
        self.works = collections.deque()
        self.submitted = 0
        self.completed = 0
        self.closed = False
        self.thread = None

    def put(self, work):
        """Submit ``work``, a callable without arguments; return its ticket."""
        check_life(self.device)
        settle_freed()
        self.wait_ticket(self.submitted - _MOST_WAITING)
        return self._put(work)

    def _put(self, work):
        with _order:
            needs = self._needs()
            with self.changed:
                if self.closed:
                    raise CUDARuntimeError(INVALID_HANDLE)
                self.works.append((work, needs))
                self.submitted += 1
                ticket = self.submitted
                if self.thread is None:
                    self.thread = threading.Thread(
                        target=self._run, name=f"stream {self.ptr:#x}", daemon=True
                    )
                    self.thread.start()
                self.changed.notify_all()
        return ticket

    def _needs(self):
        if not self.blocking:
            return []
        null = _null.get(self.device)
        if self is not null:
            others = [] if null is None else [null]
        else:
            others = [
                queue
                for queue in _streams()
                if queue.device == self.device and queue.blocking
            ]
        return [
            (queue, queue.submitted)
            for queue in others
            if queue.completed < queue.submitted
        ]

    def _run(self):
        while True:
            with self.changed:
                while not self.works and not self.closed:
                    self.changed.wait()
                if not self.works:
                    return
                work, needs = self.works[0]
            for queue, ticket in needs:
                queue.wait_ticket(ticket)
            _standin.pause()
            if _ending.is_set():
                return
            try:
                work()
            except BaseException as exc:
                if getattr(exc, "status", 0) == MISALIGNED_ADDRESS:
                    _deaths[self.device] = exc.status
                _errors[self.device].append(exc)
            # No reference here may keep memory alive while the thread sleeps.
            del work, needs
            with self.changed:
                self.works.popleft()
                self.completed += 1
                self.changed.notify_all()

    def wait_ticket(self, ticket):
        """Wait until the work with this ticket, and all earlier work, has run."""
        with self.changed:
            while self.completed < ticket and not _ending.is_set():
                self.changed.wait(0.1)

    def needed(self):
        """Return the queues and tickets that a wait for this stream has to wait for."""
        with _order:
            return [*self._needs(), (self, self.submitted)]

    def done(self):
        """Return whether all submitted work has run."""
        return all(queue.completed >= ticket for queue, ticket in self.needed())

    def drain(self):
        """Wait for all submitted work, then raise its first error."""
        for queue, ticket in self.needed():
            queue.wait_ticket(ticket)
        raise_errors(self.device)

    def close(self):
        """End the thread after the submitted work."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def settle_freed():
    """Return freed memory to the pool: update its counts, and overwrite the memory."""
    # Memory that was returned to the pool belongs to the next operation of its stream.
    # Another stream that still uses it would read the data of this operation.
    while _freed:
        try:
            queue, raw, settle = _freed.popleft()
        except IndexError:
            return
        settle()
        if not queue.closed:
            queue._put(_Poison(raw))


class _Poison:
    def __init__(self, raw):
        self.raw = raw

    def __call__(self):
        self.raw[:] = _standin.POISON


def give_back(queue, raw, settle):
    """Queue pool memory that Python has freed; the garbage collector may call this.

    The call may come anywhere, so no count changes here: the next operation
    calls ``settle``.
    """
    _freed.append((queue, raw, settle))


def check_life(device):
    """Raise the fault that has ended this process's context on a device, if any."""
    if device in _deaths:
        raise CUDARuntimeError(_deaths[device])


def status_of(device):
    """Return the status that has ended this process's context on a device, or 0."""
    return _deaths.get(device, 0)


def raise_errors(device):
    """Raise the first error of the device's work since the last such call."""
    check_life(device)
    errors = _errors[device]
    if not errors:
        return
    first = errors[0]
    errors.clear()
    if isinstance(first, CUDARuntimeError):
        raise first
    error = CUDARuntimeError(LAUNCH_FAILURE)
    error._add_info(f"{type(first).__name__}: {first}")
    raise error from first


def visible():
    """Return the physical numbers of the visible devices; raise if there are none."""
    if _standin.driver_version() < 12000:
        raise CUDARuntimeError(INSUFFICIENT_DRIVER)
    devices = _standin.physical_devices()
    if not devices:
        raise CUDARuntimeError(NO_DEVICE)
    return devices


def current_device():
    """Return the number of the calling thread's device."""
    visible()
    return getattr(_current, "device", 0)


def set_device(device):
    """Make ``device`` the calling thread's device."""
    if not 0 <= device < len(visible()):
        raise CUDARuntimeError(INVALID_DEVICE)
    _current.device = device


def null_queue(device):
    """Return the legacy default stream of ``device``."""
    with _order:
        if device not in _null:
            _null[device] = Queue(device, ptr=0)
        return _null[device]


def new_queue(blocking, flags=0, priority=0):
    """Make a stream of the current device."""
    queue = Queue(current_device(), blocking, flags=flags, priority=priority)
    with _order:
        _queues[queue.ptr] = queue
    return queue


def find_queue(ptr):
    """Return the stream with this pointer; 0 and 1 are the device's default stream."""
    if ptr in {0, 1}:
        return null_queue(current_device())
    if ptr == 2:
        return _per_thread()
    queue = _queues.get(ptr)
    if queue is None:
        raise CUDARuntimeError(INVALID_HANDLE)
    return queue


def _per_thread():
    queues = _current.__dict__.setdefault("per_thread", {})
    device = current_device()
    if device not in queues:
        queues[device] = new_queue(True)
    return queues[device]


def remove_queue(ptr):
    """Destroy a stream; its submitted work still runs."""
    queue = _queues.pop(ptr, None)
    if queue is None:
        raise CUDARuntimeError(INVALID_HANDLE)
    queue.close()
    if queue.completed < queue.submitted:
        _retired.append(queue)


def _streams():
    """Return the streams that exist, or that were destroyed but still have work."""
    _retired[:] = [x for x in list(_retired) if x.completed < x.submitted]
    return [*list(_queues.values()), *_retired]


def drain_device(device):
    """Wait for all streams of ``device``."""
    with _order:
        waits = [
            (queue, queue.submitted)
            for queue in [*_streams(), *_null.values()]
            if queue.device == device
        ]
    for queue, ticket in waits:
        queue.wait_ticket(ticket)
    raise_errors(device)


def ending():
    """Return whether the process is ending, so that waits must stop."""
    return _ending.is_set()


@atexit.register
def _end():
    _ending.set()
    for queue in [*_streams(), *_null.values()]:
        thread = queue.thread
        queue.close()
        if thread is not None:
            # A thread inside NumPy would crash while the interpreter ends.
            thread.join(2.0)
