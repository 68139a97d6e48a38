"""The size of headers between workers, and sums in the messages of the kernel."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from hpcstrat.engine import native
from hpcstrat.engine.channel import wire_headers
from hpcstrat.engine.channel.wire_headers import (
    HEADER_BYTES,
    WorkerValues,
    carried_bytes,
    room_bytes,
)
from tests.unit.kernel_sums import DONE, HEADER_SENT

DIGEST, RUN = 11, 5


class _Exchange:
    """The sum of one of two workers; the other worker's message comes at a test."""

    def __init__(
        self, worker: int, own: Any, tests_until_message: int, continues: bool = False
    ) -> None:
        if native.load() is None:
            pytest.skip("the package was built without its kernel")
        self.values = WorkerValues(worker, 2, 1024)
        self.worker, self.num_tests, self.left = worker, tests_until_message, []
        self.calls: list[str] = []
        self.waited: list[Any] = []
        self.error: BaseException | None = None
        kernel = self.values.kernel
        kernel.attention, kernel.run_fingerprint = False, RUN
        fixed = native.type_codes([own.dtype], "SUM"), [own], [own.copy()]
        rest = self.values.place_bytes, 0, False, "call", DIGEST, None
        self.sum = native.load().Sum(kernel, *fixed, *rest)
        self.repeat, nbytes = kernel.repeater(), carried_bytes(own.nbytes)
        names = "send", "receive", "test receive", "test send"
        last = (nbytes << 24 | nbytes) << 8
        exchange = *(self._function(name) for name in names), last
        kept = self._wait, lambda *left: self.left.append(left), exchange
        self.sum.keep(self.repeat, "reduce", ("sum",), False, *kept, continues)
        self.message = struct.pack("=4q", 1, RUN, DIGEST, last) + bytes(nbytes)

    def _function(self, name: str) -> Any:
        def called() -> bool | None:
            self.calls.append(name)
            if self.error is not None and name == "test receive":
                raise self.error
            if name == "test receive":
                self.num_tests -= 1
                if self.num_tests > 0:
                    return False
                message = np.frombuffer(self.message, np.uint8)
                self.values.messages[1 - self.worker, : len(message)] = message
            return None if name in ("send", "receive") else True

        return called

    def _wait(self, *arguments: Any) -> Any:
        self.waited.append(arguments[1:])
        if len(arguments) > 2:
            raise arguments[2]
        return "waited"


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 200])
def test_the_values_of_two_workers_are_added_in_order(worker: int, size: int) -> None:
    rng = np.random.default_rng(size)
    own, other = rng.normal(size=(2, size)).astype(np.float32)
    two = _Exchange(worker, own, 3)
    header = two.message[:HEADER_BYTES]
    two.message = header + other.tobytes()
    for out in (None, np.empty(size, np.float32), own.copy()):
        found = two.repeat("reduce", "sum", own, out)
        expected = own + other if worker == 0 else other + own
        np.testing.assert_array_equal(found, expected)
        # Each header has the number of its call.
        number = two.values.kernel.num_calls
        sent = two.values.messages[worker, :HEADER_BYTES].tobytes()
        assert sent == struct.pack("=q", number) + header[8:]
        header = struct.pack("=q", number + 1) + header[8:]
        two.message = header + other.tobytes()
    tests = ["test receive"] * 3 + ["test send"]
    assert two.calls[:6] == ["send", "receive", *tests]
    assert two.values.kernel.last_call == "call"
    assert not two.waited


def test_python_continues_a_call_whose_values_come_later() -> None:
    own = np.ones(3, np.float32)
    two = _Exchange(0, own, 1, continues=True)
    assert two.repeat("reduce", "sum", own, None) == "waited"
    assert two.waited == [(DONE,)]
    held, result = two.sum.held()
    assert held is own
    result[...] = 0
    assert two.sum.go_on(0) == DONE
    np.testing.assert_array_equal(two.sum.take_results(), own)
    with pytest.raises(RuntimeError, match="no call"):
        two.sum.held()


@pytest.mark.parametrize("field", range(4))
def test_python_compares_headers_that_differ(field: int) -> None:
    two = _Exchange(0, np.ones(3), 1)
    numbers = list(struct.unpack("=4q", two.message[:HEADER_BYTES]))
    numbers[field] += 1
    two.message = struct.pack("=4q", *numbers) + two.message[HEADER_BYTES:]
    assert two.repeat("reduce", "sum", np.ones(3), None) == "waited"
    assert two.waited == [(HEADER_SENT,)]
    assert two.values.kernel.thread == 0


def test_python_waits_for_a_message_that_is_late() -> None:
    two = _Exchange(1, np.ones(3), 1 << 30)
    assert two.repeat("reduce", "sum", np.ones(3), None) == "waited"
    assert two.waited == [(HEADER_SENT,)]
    # The kernel's wait is bounded.
    assert two.calls.count("test receive") < 1000


def test_an_error_of_a_message_leaves_the_call() -> None:
    two = _Exchange(0, np.ones(3), 1)
    two.error = OSError("planted")
    with pytest.raises(OSError, match="planted"):
        two.repeat("reduce", "sum", np.ones(3), None)
    assert two.waited == [(HEADER_SENT, two.error)]
    assert two.left == [("reduce", two.error, 0)]
    assert two.values.kernel.thread == 0


def test_sizes_of_values_in_headers_are_few_and_hardly_larger() -> None:
    sizes = range(1, (256 << 10) + 1)
    found = [carried_bytes(nbytes) for nbytes in sizes]
    assert len(set(found)) < 128
    assert all(size <= most for size, most in zip(sizes, found, strict=True))
    assert all(m <= max(s + 16, s * 1.125) for s, m in zip(sizes, found, strict=True))
    assert carried_bytes(256 << 10) == 256 << 10
    assert all(most % 16 == 0 for most in found)


@pytest.mark.parametrize("narrows", [False, True])
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 16, 1000])
def test_the_header_carries_what_takes_no_longer_than_by_parts(
    workers: int, narrows: bool
) -> None:
    def later(nbytes: int) -> float:
        """Return the extra bytes of a header over parts, minus those of two delays."""
        parts = 2 * (workers - 1) / workers * nbytes / (1 + narrows)
        return (workers - 1) * nbytes - parts - 2 * wire_headers._DELAY_BYTES

    room = room_bytes(workers, narrows=narrows)
    assert later(room) <= 0
    # Between two workers, parts save bytes only if they are narrowed.
    assert later(room + wire_headers._ALIGNMENT_BYTES) > 0 or (workers, narrows) == (
        2,
        False,
    )
