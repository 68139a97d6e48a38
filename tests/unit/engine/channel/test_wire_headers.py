"""The size of the header of a call between workers."""

from __future__ import annotations

import pytest

from hpcstrat.engine.channel import wire_headers
from hpcstrat.engine.channel.wire_headers import room_bytes


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
