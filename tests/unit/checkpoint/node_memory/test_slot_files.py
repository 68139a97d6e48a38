"""Records of snapshots: each change is noticed."""

from __future__ import annotations

import numpy as np

from hpcstrat.checkpoint.node_memory.slot_files import Record, pack, unpack


def test_changed_and_short_records_are_refused() -> None:
    hashes = np.arange(11, dtype=np.uint64) << np.uint64(50)
    held = np.arange(11) % 3 == 0
    packed = pack(Record(b"common", hashes, held))
    found = unpack(packed)
    assert found is not None
    assert found.common == b"common"
    np.testing.assert_array_equal(found.hashes, hashes)
    np.testing.assert_array_equal(found.held, held)
    for length in range(len(packed)):
        assert unpack(packed[:length]) is None
    for place in range(len(packed)):
        for bit in range(8):
            changed = bytearray(packed)
            changed[place] ^= 1 << bit
            assert unpack(bytes(changed)) is None
