"""The state that the processes of an NCCL communicator share: a memory file.

The file has a row of 64 numbers per rank, which only this rank writes, one slot per
rank for collectives, and one per pair of ranks for messages. All ranks poll the file.
"""

import fcntl
import hashlib
import mmap
import os
import socket
import struct
import time

import numpy as np

from cupy import _queues

SLOT = 1 << 20
"""Bytes that a rank passes on at once."""

_MAGIC = b"hpcsnccl"
_ID = struct.Struct("<8sQQQ96x")
_ROW = 64
_JOINED, _PID, _DEVICE, _STEP, _CALL, _GONE, _CONNECTED = 0, 1, 2, 4, 8, 16, 17
_created = []


class Lost(Exception):
    """The communicator was aborted, or its id belongs to another communicator."""

    def __init__(self, status):
        self.status = status
        super().__init__(status)


def new_id():
    """Make the file of a communicator; it exists as long as this process."""
    fd = os.memfd_create("standin-nccl")
    os.ftruncate(fd, 4096)
    _created.append(fd)
    return _ID.pack(_MAGIC, os.getpid(), fd, os.fstat(fd).st_ino)


def _open(unique_id):
    magic, pid, fd, number = _ID.unpack(unique_id)
    if magic != _MAGIC:
        raise Lost(4)
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as exc:
        raise Lost(2) from exc
    if os.fstat(own).st_ino != number:
        os.close(own)
        raise Lost(2)
    return own


class Shared:
    """The mapping of the file on one rank."""

    def __init__(self, unique_id, size, rank, bus_id, seconds):
        self.size = size
        self.rank = rank
        self.aborted = False
        self.lost = 0
        self._checked = 0.0
        self._map(_open(unique_id))
        row = self.rows[rank]
        if row[_JOINED]:
            raise Lost(5)
        where = f"{socket.gethostname()} {bus_id}".encode()
        digest = hashlib.sha256(where).digest()
        row[_DEVICE : _DEVICE + 2] = np.frombuffer(digest, np.int64, 2)
        row[_PID] = os.getpid()
        row[_JOINED] = 1
        deadline = time.monotonic() + seconds
        while not self.rows[:, _JOINED].all():
            if time.monotonic() > deadline or _queues.ending():
                raise Lost(2)
            time.sleep(0.0005)

    def _map(self, fd):
        head = 4096
        rows = self.size * _ROW * 8
        slots = self.size * SLOT
        boxes = self.size * self.size
        total = head + rows + slots + boxes * (SLOT + 16)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_size < total:
            os.ftruncate(fd, total)
        memory = np.frombuffer(mmap.mmap(fd, total), np.uint8)
        numbers = memory[:head].view(np.int64)
        if not numbers[0]:
            numbers[0] = self.size
        same = int(numbers[0]) == self.size
        # Closing the descriptor releases the lock.
        os.close(fd)
        if not same:
            raise Lost(4)
        parts = np.split(memory, np.cumsum([head, rows, slots, boxes * SLOT]))
        self.rows = parts[1].view(np.int64).reshape(self.size, _ROW)
        self.slots = parts[2].reshape(self.size, SLOT)
        self.boxes = parts[3].reshape(self.size, self.size, SLOT)
        self.passed = parts[4].view(np.int64).reshape(self.size, self.size, 2)

    def one_device_each(self):
        """Return whether all ranks have different devices."""
        devices = self.rows[:, _DEVICE : _DEVICE + 2].tolist()
        return len({tuple(device) for device in devices}) == self.size

    def connect(self, number, stuck):
        """Wait until all ranks connect for an algorithm; raise if a rank has left."""
        self.rows[self.rank, _CONNECTED + number] = not stuck
        while not self.rows[:, _CONNECTED + number].all():
            self.check()
            if self.lost or self.rows[:, _GONE].any():
                raise Lost(6)
            time.sleep(0.0005)

    def leave(self):
        """Notify the other ranks that this rank leaves; wait until they leave, too.

        A rank that aborts does not wait for ranks whose processes have died.
        """
        self.rows[self.rank, _GONE] = 1
        for row in self.rows:
            while not row[_GONE]:
                if self.aborted and not os.path.exists(f"/proc/{row[_PID]}"):
                    break
                time.sleep(0.0005)

    def check(self):
        """Stop an operation that was aborted; record ranks that have died."""
        if self.aborted or _queues.ending():
            raise Lost(0)
        now = time.monotonic()
        if now - self._checked > 0.05:
            self._checked = now
            for pid in self.rows[:, _PID].tolist():
                if not os.path.exists(f"/proc/{pid}"):
                    self.lost = 6

    def meet(self):
        """Wait until all ranks have called this; yield during the wait."""
        steps = self.rows[:, _STEP]
        steps[self.rank] += 1
        mine = int(steps[self.rank])
        while (steps < mine).any():
            self.check()
            yield

    def agree(self, call):
        """Compare the calls of all ranks, which NCCL itself does not compare."""
        end = _CALL + len(call)
        self.rows[self.rank, _CALL:end] = call
        yield from self.meet()
        same = (self.rows[:, _CALL:end] == call).all()
        yield from self.meet()
        if not same:
            raise Lost(5)

    def send(self, data, peer):
        """Send bytes to another rank."""
        box, passed = self.boxes[self.rank, peer], self.passed[self.rank, peer]
        for start in range(0, max(data.nbytes, 1), SLOT):
            part = data[start : start + SLOT]
            while passed[0] != passed[1]:
                self.check()
                yield
            box[: part.nbytes] = part
            passed[0] += 1
        # A message counts as sent when it has arrived, because NCCL promises no buffer.
        while passed[0] != passed[1]:
            self.check()
            yield

    def receive(self, data, peer):
        """Receive bytes from another rank."""
        box, passed = self.boxes[peer, self.rank], self.passed[peer, self.rank]
        for start in range(0, max(data.nbytes, 1), SLOT):
            part = data[start : start + SLOT]
            while passed[0] == passed[1]:
                self.check()
                yield
            part[:] = box[: part.nbytes]
            passed[1] += 1


def run_together(chains):
    """Run chains of generators at the same time, each chain in its order."""
    waiting = [list(chain) for chain in chains]
    tries = 0
    while waiting:
        advanced = False
        for chain in waiting:
            try:
                next(chain[0])
            except StopIteration:
                chain.pop(0)
                advanced = True
        waiting = [chain for chain in waiting if chain]
        tries = 0 if advanced else tries + 1
        time.sleep(0 if tries < 20 else 0.0001)
