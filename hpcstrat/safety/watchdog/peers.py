"""The processes of a job, and messages between their watchdogs.

Messages are UDP datagrams, because the watchdog's thread must not call MPI. Each
message is JSON, signed with a secret key that the ranks have exchanged by MPI.
Datagrams without a valid signature are ignored. Network failures raise no errors: a
rank that cannot be reached counts as a rank that does not answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array
from hpcstrat.safety.watchdog.stacks import Process

__all__ = ["Mail", "Peers", "open_socket"]

_KEY_BYTES = 16
_SIGNATURE_BYTES = 16
_LARGEST_BYTES = 32 << 10
_MOST_ADDRESSES = 4
_MOST_AT_ONCE = 256
_SIOCGIFADDR = 0x8915
_HOST_CHARACTERS = 48

_ROW = np.dtype(
    [
        ("worker", "<i4"),
        ("port", "<i4"),
        ("signal", "<i4"),
        ("handle", "<i4"),
        ("pid", "<i8"),
        ("start", "<u8"),
        ("main", "<u8"),
        ("net", "<u8"),
        ("pids", "<u8"),
        ("addresses", "<u4", (_MOST_ADDRESSES,)),
        ("host", f"S{_HOST_CHARACTERS}"),
    ]
)


def open_socket() -> socket.socket | None:
    """Return a new nonblocking UDP socket for `Mail`, or None on failure."""
    opened = None
    try:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.setblocking(False)
        opened.bind(("", 0))
    except OSError:
        if opened is not None:
            opened.close()
        return None
    return opened


class Peers:
    """The processes of all ranks of a topology, and the secret key for messages.

    Collective over ``topology.replica_comm``.
    """

    def __init__(self, topology: Topology, process: Process, port: int) -> None:
        row = np.zeros((), _ROW)
        row["worker"], row["port"] = topology.worker_id, port
        row["pid"], row["start"], row["main"] = process.pid, process.start, process.main
        row["signal"], row["handle"] = process.signal, process.handle
        row["net"], row["pids"] = _namespace("net"), _namespace("pid")
        # This may cut the last character in two; `host` then replaces that character.
        row["host"] = platform.node().encode()[:_HOST_CHARACTERS]
        if port:
            found = _addresses()[:_MOST_ADDRESSES]
            row["addresses"][: len(found)] = found
        table = np.empty(topology.num_replicas, _ROW)
        comm, byte = topology.replica_comm, topology.mpi.BYTE
        comm.Allgather([row.tobytes(), byte], [table.view(np.uint8), byte])
        key = bytearray(secrets.token_bytes(_KEY_BYTES))
        comm.Bcast([key, byte], root=0)
        self.key = bytes(key)
        self._table: Array = table
        self._own = table[topology.replica_id]

    def host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return bytes(self._table[rank]["host"]).decode(errors="replace")

    def worker(self, rank: int) -> int:
        """Return the worker of a rank."""
        return int(self._table[rank]["worker"])

    def ranks(self, worker: int) -> list[int]:
        """Return the ranks of a worker."""
        found: list[int] = np.flatnonzero(self._table["worker"] == worker).tolist()
        return found

    def process(self, rank: int) -> Process | None:
        """Return a rank's process; None if in another container or on another host."""
        row, own = self._table[rank], self._own
        if not own["pids"] or row["pids"] != own["pids"]:
            return None
        names = ("pid", "start", "main", "signal", "handle")
        return Process(*(int(row[name]) for name in names))

    def places(self, rank: int) -> list[tuple[str, int]]:
        """Return the addresses (host and port) to send messages for a rank to."""
        row, own = self._table[rank], self._own
        port = int(row["port"])
        if not port:
            return []
        if own["net"] and row["net"] == own["net"]:
            return [("127.0.0.1", port)]
        return [
            (socket.inet_ntoa(int(address).to_bytes(4, "big")), port)
            for address in row["addresses"]
            if address
        ]


class Mail:
    """Sends messages to watchdogs of other workers, and receives their messages."""

    def __init__(self, peers: Peers, opened: socket.socket) -> None:
        self._peers = peers
        self.socket = opened

    def send(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        """Send a message to each of ``ranks``; a message may be lost."""
        data = json.dumps(message).encode()
        datagram = _signature(self._peers.key, data) + data
        if len(datagram) > _LARGEST_BYTES:
            return
        for place in (place for rank in ranks for place in self._peers.places(rank)):
            with contextlib.suppress(OSError):
                self.socket.sendto(datagram, place)

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived, without waiting."""
        for _ in range(_MOST_AT_ONCE):
            try:
                datagram = self.socket.recv(_LARGEST_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                # The error may be of an earlier message that has found no receiver.
                continue
            signature, data = datagram[:_SIGNATURE_BYTES], datagram[_SIGNATURE_BYTES:]
            if hmac.compare_digest(signature, _signature(self._peers.key, data)):
                message = json.loads(data)
                if isinstance(message, dict):
                    yield message

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def _signature(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=_SIGNATURE_BYTES).digest()


def _namespace(kind: str) -> int:
    """Return a number for this process's Linux namespace of a kind; 0 if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        number = os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0
    text = boot + str(number).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _addresses() -> Sequence[int]:
    """Return this host's IPv4 addresses, except loopback addresses."""
    found = []
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                # ``answer`` is a struct ifreq, with the address at byte 20.
                if answer[20] != 127:
                    found.append(int.from_bytes(answer[20:24], "big"))
    return found
