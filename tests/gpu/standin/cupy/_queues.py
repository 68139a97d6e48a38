"""The streams' threads: work runs in order, later, and errors show at a wait.

A queue is what a stream, given by its pointer, does. The legacy default stream of a
device waits for its blocking streams and they for it, as CUDA says; every wait is for
work that was submitted before, so that no circle can come about.
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
# Faults of kernels, by device: nothing can be done on it any more, in this process.
_deaths = {}
_freed = collections.deque()
_current = threading.local()
_ending = threading.Event()
# A driver lets the host wait once about as much work lies in a stream.
_MOST_WAITING = 1024


class Queue:
    """The work of one stream, done by one thread."""

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
            # Nothing here may keep memory alive while the thread sleeps.
            del work, needs
            with self.changed:
                self.works.popleft()
                self.completed += 1
                self.changed.notify_all()

    def wait_ticket(self, ticket):
        """Wait until the work with this ticket and all before it have run."""
        with self.changed:
            while self.completed < ticket and not _ending.is_set():
                self.changed.wait(0.1)

    def needed(self):
        """Return what a wait for this stream waits for: queues and tickets."""
        with _order:
            return [*self._needs(), (self, self.submitted)]

    def done(self):
        """Tell whether all that was submitted has run."""
        return all(queue.completed >= ticket for queue, ticket in self.needed())

    def drain(self):
        """Wait for all that was submitted, then raise what went wrong in it."""
        for queue, ticket in self.needed():
            queue.wait_ticket(ticket)
        raise_errors(self.device)

    def close(self):
        """Let the thread end after the work that was submitted."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def settle_freed():
    """Do what giving memory back to the pool means, for all that was freed."""
    # Memory that was given back to the pool belongs to whatever its stream does next:
    # another stream that still uses it would read what that next operation wrote.
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
    """Take pool memory that Python has freed; the collector may call it anywhere.

    Therefore the books are not changed here: ``settle`` does it at the next operation.
    """
    _freed.append((queue, raw, settle))


def check_life(device):
    """Raise what has ended the context of this process on a device."""
    if device in _deaths:
        raise CUDARuntimeError(_deaths[device])


def status_of(device):
    """Return the number of what has ended the context of this process, or 0."""
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
    """Return the physical numbers of the visible devices; raise without any."""
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
    """Return the stream with this pointer; 0 is the current device's default."""
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
    """Destroy a stream; its work still runs."""
    queue = _queues.pop(ptr, None)
    if queue is None:
        raise CUDARuntimeError(INVALID_HANDLE)
    queue.close()
    if queue.completed < queue.submitted:
        _retired.append(queue)


def _streams():
    """Return the streams that exist, or still have work after their end."""
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
    """Tell whether the process ends, so that waits have to give up."""
    return _ending.is_set()


@atexit.register
def _end():
    _ending.set()
    for queue in [*_streams(), *_null.values()]:
        thread = queue.thread
        queue.close()
        if thread is not None:
            # A thread inside NumPy while the interpreter goes would crash it.
            thread.join(2.0)
