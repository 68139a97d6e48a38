"""A copy of a snapshot on a spare node, by the processes that write snapshots.

The process on the spare node listens, and writes its port and a random token to a file
of the order, which only this user can read. The others connect, send the token, their
record, and the blocks that the order gives them. The hash of each block is compared.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from hpcstrat.checkpoint.file.commit_record import block_hash
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.checkpoint.node_memory.save_orders import (
    GivenUpError,
    OrderFile,
    SaveOrder,
)
from hpcstrat.checkpoint.node_memory.slot_files import (
    Record,
    SlotMap,
    SnapshotFolder,
)
from hpcstrat.errors import CheckpointError

__all__ = ["receive_copy", "send_copy"]

_TOKEN_BYTES = 32
_NUMBER = struct.Struct("<Q")
_END = (1 << 64) - 1
_SECONDS, _NAP_SECONDS = 20.0, 0.05


def send_copy(
    file: OrderFile, order: SaveOrder, source: tuple[SlotMap, Record]
) -> None:
    """Send this node's blocks to the spare node."""
    while (address := file.address()) is None:
        file.require()
        time.sleep(_NAP_SECONDS)
    host, port, token = address
    slot, record = source
    packed = record.pack()
    own = np.flatnonzero(order.writers == order.nodes.index(watcher().node))
    with socket.create_connection((host, port), timeout=_SECONDS) as stream:
        stream.sendall(bytes.fromhex(token) + _NUMBER.pack(len(packed)) + packed)
        for block in own.tolist():
            file.require()
            stream.sendall(_NUMBER.pack(block))
            stream.sendall(slot.block(block).data)
        stream.sendall(_NUMBER.pack(_END))
        # The end of the connection shows that the blocks have arrived.
        stream.recv(1)


def receive_copy(file: OrderFile, order: SaveOrder) -> None:
    """Receive the blocks of all nodes, and keep them as a snapshot of this node."""
    folder, token = SnapshotFolder(order.folder), secrets.token_bytes(_TOKEN_BYTES)
    folder.make()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            socket.create_server(("", 0), backlog=len(order.nodes))
        )
        server.settimeout(_NAP_SECONDS)
        # The address at which the watchers of other nodes reach that of this node.
        host = os.environ["HPCSTRAT_WATCH_ADDRESS"]
        file.note_address(host, server.getsockname()[1], token.hex())
        streams = [
            stack.enter_context(_accepted(server, file, token)) for _ in order.nodes
        ]
        records = [_received_record(stream, order) for stream in streams]
        record = records[0]
        slot, place = _reserved(folder, record)
        receive = partial(_receive_blocks, file, place, record)
        # All connections move, so that none is taken for a lost one.
        pool = stack.enter_context(ThreadPoolExecutor(len(streams)))
        for _ in pool.map(receive, streams):
            pass
    if not file.begin_publication():
        raise GivenUpError
    everything = np.ones(len(record.hashes), bool)
    folder.keep(slot, Record(record.common, record.hashes, everything))
    file.end()


def _accepted(server: socket.socket, file: OrderFile, token: bytes) -> socket.socket:
    """Return the next connection of a process that knows the token."""
    while True:
        file.require()
        try:
            stream, _ = server.accept()
        except TimeoutError:
            continue
        stream.settimeout(_SECONDS)
        if hmac.compare_digest(_received(stream, _TOKEN_BYTES), token):
            return stream
        stream.close()


def _received_record(stream: socket.socket, order: SaveOrder) -> Record:
    [size] = _NUMBER.unpack(_received(stream, _NUMBER.size))
    record = Record.unpack(_received(stream, size))
    if record is None or record.digest != order.digest:
        raise CheckpointError("expected the record of the snapshot, found another one")
    return record


def _received(stream: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    _receive_into(stream, memoryview(data))
    return bytes(data)


def _receive_into(stream: socket.socket, place: memoryview) -> None:
    while place:
        if not (count := stream.recv_into(place)):
            raise ConnectionError("expected more of a snapshot, found its end")
        place = place[count:]


def _reserved(folder: SnapshotFolder, record: Record) -> tuple[int, SlotMap]:
    """Reserve the older slot of this node; raise OSError if there is too little."""
    _, _, _, _, plan = record.contents()
    blocks = range(plan.num_blocks)
    needed, free = folder.missing_bytes(plan, blocks)
    if free < needed:
        raise CheckpointError(
            f"expected {needed >> 20} MiB for copies of snapshots in {folder.path}, "
            f"found {free >> 20} MiB"
        )
    slot = folder.older_slot()
    folder.reserve(slot, plan, blocks)
    return slot, SlotMap(folder.data_path(slot), plan)


def _receive_blocks(
    file: OrderFile, place: SlotMap, record: Record, stream: socket.socket
) -> None:
    for number in itertools.count():
        [block] = _NUMBER.unpack(_received(stream, _NUMBER.size))
        if block == _END:
            return
        if block >= len(record.hashes) or number > len(record.hashes):
            raise CheckpointError(f"expected a block, found the number {block}")
        file.require()
        data = place.block(block).data
        _receive_into(stream, data)
        if block_hash(data) != int(record.hashes[block]):
            raise CheckpointError(f"expected block {block} as it was, found others")
