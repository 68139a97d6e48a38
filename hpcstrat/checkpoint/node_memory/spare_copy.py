"""A copy of a snapshot on a spare node, by the processes that write snapshots.

The process on the spare node listens, and writes its port and a random token to a file
of the order, which only this user can read. The others connect, send the token, the
index of their node, and its blocks in the order's own order. The hash of each block is
compared.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from hpcstrat.checkpoint.file.commit_record import block_hash
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.checkpoint.node_memory.save_orders import OrderFile
from hpcstrat.checkpoint.node_memory.slot_files import SlotMap, SnapshotFolder
from hpcstrat.errors import CheckpointError

__all__ = ["receive_copy", "send_copy"]

_GREETING = struct.Struct("<32sQ")
_SECONDS, _NAP_SECONDS = 20.0, 0.05


def send_copy(file: OrderFile, source: SlotMap) -> None:
    """Send this node's blocks to the spare node."""
    order, node = file.order, watcher().node
    host, port, token = file.await_note("address")
    with socket.create_connection((host, port), timeout=_SECONDS) as stream:
        stream.sendall(_GREETING.pack(token, order.nodes.index(node)))
        for block in order.blocks_of(node):
            file.require()
            stream.sendall(source.block(block).data)
        # The end of the connection shows that the blocks have arrived.
        stream.recv(1)


def receive_copy(file: OrderFile) -> None:
    """Receive the blocks of all nodes, and keep them as a snapshot of this node."""
    order, token = file.order, secrets.token_bytes(32)
    folder = SnapshotFolder(order.folder)
    folder.make()
    slot, plan = folder.older_slot(), order.record.about.plan
    folder.reserve(slot, plan, range(plan.num_blocks))
    place = SlotMap(folder.data_path(slot), plan)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", 0), backlog=256))
        server.settimeout(_NAP_SECONDS)
        # The address at which the watchers of other nodes reach that of this node.
        host = os.environ["HPCSTRAT_WATCH_ADDRESS"]
        file.note("address", (host, server.getsockname()[1], token))
        # All connections move, so that none is taken for a lost one.
        with ThreadPoolExecutor(len(order.nodes)) as pool:
            receiving = []
            for _ in order.nodes:
                stream, node = _accepted(server, file, token)
                stack.enter_context(stream)
                receiving.append(pool.submit(_receive, file, place, stream, node))
            for one in receiving:
                one.result()
    file.begin_publication()
    everything = np.ones(plan.num_blocks, bool)
    folder.keep(slot, replace(order.record, held=everything))
    file.end()


def _accepted(
    server: socket.socket, file: OrderFile, token: bytes
) -> tuple[socket.socket, str]:
    """Return the next connection of a process that knows the token, and its node."""
    while True:
        file.require()
        try:
            stream, _ = server.accept()
        except TimeoutError:
            continue
        stream.settimeout(_SECONDS)
        greeting = bytearray(_GREETING.size)
        _receive_into(stream, memoryview(greeting))
        given, index = _GREETING.unpack(greeting)
        if hmac.compare_digest(given, token):
            return stream, file.order.nodes[index]
        stream.close()


def _receive(file: OrderFile, place: SlotMap, stream: socket.socket, node: str) -> None:
    """Receive the blocks of one node."""
    for block in file.order.blocks_of(node):
        file.require()
        data = place.block(block).data
        _receive_into(stream, data)
        if block_hash(data) != int(file.order.record.hashes[block]):
            raise CheckpointError(f"expected block {block} as it was, found others")
    # The sender waits for this.
    stream.shutdown(socket.SHUT_RDWR)


def _receive_into(stream: socket.socket, place: memoryview) -> None:
    while place:
        if not (count := stream.recv_into(place)):
            raise ConnectionError("expected more of a snapshot, found its end")
        place = place[count:]
