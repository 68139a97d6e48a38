"""The requests that the coordinator and the workers send to parameter servers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.errors import UnavailableError
from hpcstrat.parameter_server.handles import error_of
from hpcstrat.parameter_server.mailbox import Mailbox, one_thread_at_a_time
from hpcstrat.parameter_server.shared_files import FilePlace, Reader, Readers


class Client:
    """Sends updates of variables to servers, and reads values of variables from them.

    If ``flushes`` is true, `done` waits for the updates. It is false on a worker that
    runs scheduled functions, which waits before it reports the end of a function. A
    thread must hold ``lock`` while it sends several updates and waits for them;
    otherwise another thread may receive the errors of these updates.
    """

    def __init__(self, mailbox: Mailbox, servers: Sequence[int]) -> None:
        self.mailbox, self.lock = mailbox, mailbox.lock
        self.flushes = True
        self._sent: Counter[int] = Counter()
        self._dirty: dict[int, None] = {}
        # By server of this node: the number of updates that this rank had sent when its
        # last function ended. `_settle` waits for them before this rank reads a value.
        self._unseen: dict[int, int] = {}
        self._readers = Readers()
        # By server of this node, in shared memory: for each rank, the number of its
        # updates that were made, and the number that failed.
        self._counts: dict[int, tuple[Array, Array]] = {}
        # By server: the number of errors that this rank has received.
        self._failed: Counter[int] = Counter()
        self._rules: dict[tuple[int, int], Any] = {}
        self.use(servers)

    def use(self, servers: Sequence[int]) -> None:
        """Set the ranks that are servers from now on."""
        self.servers = tuple(servers)
        bells = self.mailbox.wakeup_pipes
        for server in self.servers:
            # Keep the counts of lost servers, because a thread that waits for a lost
            # server may still read them.
            if (place := bells.place(server)) is not None:
                self._counts[server] = bells.applied[place], bells.failed[place]

    def reader(
        self, server: int, place: FilePlace, shape: Any, dtype: Any
    ) -> Reader | None:
        """Return a reader of a shard in shared memory, or None.

        The result is None if the server is on another node, or if this process cannot
        map the shard.
        """
        if server not in self._counts:
            return None
        return self._readers.reader(place, shape, dtype)

    def alive(self) -> list[int]:
        """Return the servers that are not lost."""
        return [rank for rank in self.servers if rank not in self.mailbox.lost]

    @one_thread_at_a_time
    def ask(self, server: int, *message: Any) -> Any:
        """Send a question to a server, and return the answer.

        The server answers after it has made all updates that this rank sent before.
        """
        return self.mailbox.ask(server, message)

    @one_thread_at_a_time
    def post(self, server: int, *message: Any) -> None:
        """Send an update to a server; `flush` waits until the server has made it."""
        self.tell(server, *message)
        self._dirty[server] = None

    def tell(self, server: int, *message: Any) -> None:
        """Send an update to a server; `flush` need not wait for this update."""
        self.mailbox.send(server, message)
        self._sent[server] += 1

    def knows_rule(self, server: int, key: int, rule: Any) -> bool:
        """Return whether a server has this rule of an optimizer; record it as sent."""
        known = False
        with contextlib.suppress(Exception):
            # If the rule has options that cannot be compared, such as arrays, the
            # caller sends the rule again.
            known = bool(self._rules.get((server, key)) == rule)
        self._rules[server, key] = rule
        return known

    def done(self) -> None:
        """Wait for posted updates if ``flushes`` is true."""
        if self.flushes:
            self.flush()

    def _settle(self, server: int) -> None:
        """Wait until a server of this node has made all updates of this rank.

        Raises UnavailableError if the server is lost, because its memory may then lack
        some updates.
        """
        if server in self._dirty or server in self._unseen:
            applied = self._counts[server][0]
            sent, own = self._sent[server], self.mailbox.rank
            self._unseen.pop(server, None)
            lost, notice = self.mailbox.lost, self.mailbox.notice

            def ready() -> bool:
                return applied[own] >= sent or server in lost or notice()

            what = f"rank {server} to make {sent} updates"
            self.mailbox.wait(ready, lambda: what, warns=True)
        self._require(server)

    def _require(self, server: int) -> None:
        if server in self.mailbox.lost:
            raise UnavailableError(
                f"expected rank {server}, a parameter server, found that it was lost; "
                "restore the last checkpoint on the remaining ranks"
            )

    @one_thread_at_a_time
    def flush(self) -> None:
        """Wait until all updates of this rank are made, and raise their first error."""
        dirty, self._dirty = list(self._dirty), {}
        problem: Exception | None = None
        for server in dirty:
            self._dirty = {server: None}
            try:
                self._flush_one(server)
            except Exception as error:
                problem = problem or error
        self._dirty = {}
        if problem is not None:
            raise problem

    def pending(self) -> dict[int, int]:
        """Return how many updates this rank has sent to each server of this node.

        Servers that have made all of these updates may be left out. For servers on
        other nodes, the call waits until they have made all updates.
        """
        if not self._dirty:
            return {}
        remote = [server for server in self._dirty if server not in self._counts]
        for server in remote:
            del self._dirty[server]
            self._check_one(server, self._sent[server])
        wanted = {server: self._sent[server] for server in self._dirty}
        self._dirty = {}
        self._unseen.update(wanted)
        return wanted

    def is_made(self, wanted: dict[int, int]) -> bool:
        """Return whether each server in ``wanted`` has made its updates, or is lost."""
        own, lost = self.mailbox.rank, self.mailbox.lost
        return all(
            self._counts[server][0][own] >= count or server in lost
            for server, count in wanted.items()
        )

    def wait_for(self, wanted: dict[int, int]) -> None:
        """Wait until each server in ``wanted`` has made its updates, or is lost."""
        notice = self.mailbox.notice
        self.mailbox.wait(
            lambda: self.is_made(wanted) or notice(),
            lambda: f"ranks {list(wanted)} to make updates",
            warns=True,
        )

    def check(self, wanted: dict[int, int]) -> None:
        """Raise the first error of updates, or UnavailableError for a lost server.

        ``wanted`` is a result of `pending`, whose updates have been made. Check the
        results in the order in which `pending` returned them; otherwise one function
        gets the errors of another.
        """
        for server, last in wanted.items():
            self._check_one(server, last)

    def _flush_one(self, server: int) -> None:
        if server in self._counts:
            self._settle(server)
        self._check_one(server, self._sent[server])

    def _check_one(self, server: int, last: int) -> None:
        """Raise the first error of a server's updates, up to update number ``last``.

        If the server is on another node, wait for its reply.
        """
        self._require(server)
        counts = self._counts.get(server)
        if counts is None or counts[1][self.mailbox.rank] != self._failed[server]:
            count, errors = self.ask(server, "flush", last)
            self._failed[server] += count
            for error in errors:
                raise error_of(error)

    @one_thread_at_a_time
    def read(self, server: int, number: int, reader: Reader | None, out: Array) -> None:
        """Copy a shard's value into ``out``."""
        if reader is not None:
            self._settle(server)

            def copy(array: Array) -> bool:
                np.copyto(out, array)
                return True

            if reader.read(copy):
                return
        np.copyto(out, self.ask(server, "read", number))

    @one_thread_at_a_time
    def read_bytes(
        self, server: int, number: int, reader: Reader | None, start: int, stop: int
    ) -> Array:
        """Return bytes of a shard's value, as it was between two updates."""
        if reader is not None:
            self._settle(server)
            found = reader.read_bytes(start, stop)
            if found is not None:
                return np.asarray(found)
        answer = self.ask(server, "read_bytes", number, None, start, stop)
        return np.asarray(answer)

    @one_thread_at_a_time
    def read_rows(
        self, server: int, number: int, reader: Reader | None, indices: Array
    ) -> Array:
        """Return rows of a shard; a message contains each row only once."""
        if reader is not None:
            self._settle(server)
            rows = reader.read(lambda array: array[indices])
            if rows is not None:
                return np.asarray(rows)
        if indices.size == 0:
            return np.asarray(self.ask(server, "read_rows", number, indices))
        unique, places = np.unique(indices, return_inverse=True)
        return np.asarray(self.ask(server, "read_rows", number, unique))[places]
