"""Messages between two replicas: their data, and the errors if the two sides differ."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import hpcstrat as hs
from hpcstrat.integrations.torch.messages import Messages, TransferWork
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.algorithm

# Sizes around those at which data are cut: after 32 KiB, after 64 KiB more, and so on.
NUM_BYTES = (0, 8, 96, 32_760, 32_768, 32_776, 98_304, 98_312, 1_200_000, 3_500_000)
DTYPES = ("u1", "f2", "f4", "i8")
GUARD = 3.0
# Bytes on each side of a receive buffer that must stay unchanged.
GUARD_BYTES = 1 << 22


def test_messages_go_round_a_ring(strategy: Any, job: Any) -> None:
    messages = Messages(strategy.collectives)
    after, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    for length in (0, 3, 400_000):
        received = torch.zeros((2, length), dtype=torch.float64)
        sent = [
            messages.send(_full(length, 10.0 * job.rank + n), after, n)
            for n in range(2)
        ]
        came = [messages.receive(received[n], before, n) for n in range(2)]
        for one in (*reversed(came), *sent):
            one.wait()
            assert one.is_completed()
        assert (received == 10.0 * before + torch.tensor([[0.0], [1.0]])).all()
    messages.close()


def test_a_message_from_anybody_says_who_sent_it(strategy: Any, job: Any) -> None:
    messages = Messages(strategy.collectives)
    if job.rank:
        messages.send(torch.full((3,), job.rank), 0, 0).wait()
    else:
        found = set()
        for _ in range(job.size - 1):
            buffer = torch.zeros(3, dtype=torch.int64)
            source = messages.receive_any(buffer, 0)._source_rank()
            assert (buffer == source).all()
            found.add(source)
        assert found == set(range(1, job.size))
    messages.close()


class _Guarded:
    """A receive buffer inside of memory that must stay unchanged."""

    def __init__(self, size: int, dtype: str) -> None:
        guard = GUARD_BYTES // np.dtype(dtype).itemsize
        self._whole = np.full(size + 2 * guard, GUARD, dtype)
        self.values = self._whole[guard : guard + size]
        self._outside = self._whole[:guard], self._whole[guard + size :]

    def assert_bounded(self) -> None:
        """Assert that the memory around the buffer is unchanged."""
        assert all((part == GUARD).all() for part in self._outside)


@dataclass
class _Case:
    """A series of messages, one of which does not fit; equal on all ranks."""

    # Size and type of each message that is sent, and of each that is received.
    sent: list[tuple[int, str]]
    received: list[tuple[int, str]]
    # The index of the message that does not fit; whether the receiver waits for this
    # message first; whether the receiver polls.
    wrong: int
    in_order: bool
    polls: bool
    tag: int

    @classmethod
    def drawn(cls, rng: random.Random) -> _Case:
        def kind() -> tuple[int, str]:
            dtype = rng.choice(DTYPES)
            return rng.choice(NUM_BYTES) // np.dtype(dtype).itemsize, dtype

        before = [kind() for _ in range(rng.randrange(3))]
        after = [kind() for _ in range(rng.randrange(3))]
        one = other = kind()
        while one == other:
            # The message has another size, another type, or both.
            other = rng.choice([kind(), (one[0], kind()[1])])
        return cls(
            [*before, one, *after],
            [*before, other, *after],
            len(before),
            in_order=rng.random() < 0.5,
            polls=rng.random() < 0.5,
            tag=rng.randrange(3),
        )

    def send(self, messages: Messages, dest: int) -> Any:
        """Send all messages, and return the first error."""
        values = [np.full(size, 7).astype(dtype) for size, dtype in self.sent]
        tensors = map(torch.from_numpy, values)
        transfers = [messages.send(one, dest, self.tag) for one in tensors]
        errors = [outcome(one.wait) for one in transfers]
        return next(filter(None, errors), None)

    def receive(self, messages: Messages, source: int) -> Any:
        """Receive all messages, and return the error of the first that is awaited."""
        guarded = [_Guarded(*kind) for kind in self.received]
        transfers = [
            messages.receive(torch.from_numpy(one.values), source, self.tag)
            for one in guarded
        ]
        for one, transfer in zip(guarded[: self.wrong], transfers, strict=False):
            transfer.wait()
            assert (one.values == 7).all()
        # A wait for the last message may receive data of the wrong message before it.
        first = transfers[self.wrong if self.in_order else -1]
        error = outcome(_poll if self.polls else TransferWork.wait, first)
        for transfer in transfers[self.wrong :]:
            assert isinstance(outcome(transfer.wait), hs.CollectiveError)
        # At this barrier the sender has received the error, or has sent all messages.
        messages.collectives.channel.topology.replica_comm.Barrier()
        for one in guarded:
            one.assert_bounded()
        return error

    def assert_named(self, error: Any) -> None:
        """Assert that an error names both the message sent and the one expected."""
        assert isinstance(error, hs.CollectiveError), repr(error)
        for size, dtype in self.sent[self.wrong], self.received[self.wrong]:
            assert f"{size} elements of {np.dtype(dtype)}" in str(error)
        assert "make the two equal" in str(error)


def _full(length: int, value: float) -> torch.Tensor:
    return torch.full((length,), value, dtype=torch.float64)


def _poll(transfer: TransferWork) -> None:
    while not transfer.is_completed():
        pass


@pytest.mark.parametrize("seed", range(10))
def test_a_message_that_does_not_fit_is_an_error_on_all_and_bounded(
    job: Any, seed: int
) -> None:
    if job.size == 1:
        pytest.skip("one rank has nobody to send to")
    rng = random.Random(seed)
    case, (dest, source) = _Case.drawn(rng), rng.sample(range(job.size), 2)
    strategy = hs.MultiWorkerMirroredStrategy(comm=job)
    messages, error = Messages(strategy.collectives), None
    if job.rank == dest:
        error = case.receive(messages, source)
        assert f"from rank {source} in recv" in str(error)
    else:
        if job.rank == source:
            error = case.send(messages, dest)
        strategy.topology.replica_comm.Barrier()
        # A rank that has not noticed the error yet notices it in its next call.
        error = error or outcome(strategy.reduce, "sum", 1.0, axis=None)
    case.assert_named(error)
    again = outcome(messages.send, torch.zeros(3), job.rank, 0)
    assert isinstance(again, hs.CollectiveError), repr(again)
    assert "end the program on every rank" in str(again)
    job.Barrier()
    strategy.abandon()


def test_messages_that_the_program_drops_keep_their_memory(
    strategy: Any, job: Any
) -> None:
    messages = Messages(strategy.collectives)
    after, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    length = 700_000
    if job.size > 1:
        messages.receive(_full(length, 0), before, 0)
        messages.receive(_full(3, 0), before, 0)
        gc.collect()
        strategy.collectives.barrier()
        # New arrays of this process may reuse the dropped message's memory.
        others = [np.full(length, GUARD) for _ in range(4)]
        messages.send(_full(length, 9.0), after, 0)
        messages.send(_full(3, 9.0), after, 0)
        gc.collect()
        noise = [np.full(length, 5.0) for _ in range(4)]
    last = _full(length, 1.0 + job.rank)
    sent = messages.send(last, after, 0)
    received = _full(length, 0)
    messages.receive(received, before, 0).wait()
    sent.wait()
    assert (received == 1.0 + before).all()
    strategy.collectives.barrier()
    if job.size > 1:
        assert all((one == GUARD).all() for one in others)
        assert all((one == 5.0).all() for one in noise)
        # No rank sends a message for this receive.
        messages.receive(_full(length, 0), before, 0)
    messages.close()
    assert_usable(strategy, job)


def test_errors_name_the_rank_of_the_job(job: Any) -> None:
    if job.size == 1:
        pytest.skip("one rank has nobody to send to")
    reverse = job.Split(0, -job.rank)
    strategy = hs.MultiWorkerMirroredStrategy(comm=reverse)
    messages = Messages(strategy.collectives)
    # The strategy's rank 0 is the last rank of the job.
    if reverse.rank == 0:
        outcome(messages.send(_full(3, 1), 1, 0).wait)
    elif reverse.rank == 1:
        error = outcome(messages.receive(torch.ones(3), 0, 0).wait)
        assert f"from rank {job.size - 1} in recv" in str(error)
    job.Barrier()
    strategy.abandon()
    reverse.Free()


def test_tags_that_mpi_does_not_have_are_refused(strategy: Any, job: Any) -> None:
    messages = Messages(strategy.collectives)
    for tag in (-1, 2**31):
        error = outcome(messages.send, _full(3, 1), 0, tag)
        assert isinstance(error, ValueError), repr(error)
        assert f"found {tag}" in str(error)
    assert_usable(strategy, job)
    messages.close()


def test_a_message_to_this_rank_itself_is_compared(strategy: Any, job: Any) -> None:
    messages = Messages(strategy.collectives)
    if job.size == 1:
        messages.send(_full(3, 1), 0, 0).wait()
        error = outcome(messages.receive, torch.ones(4), 0, 0)
        assert isinstance(error, hs.CollectiveError)
        assert "expected 4 elements of float32 from rank 0" in str(error)
        assert "found 3 elements of float64 sent at check_torch_messages.py:" in str(
            error
        )
    messages.close()
