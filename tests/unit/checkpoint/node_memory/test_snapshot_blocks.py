"""The copy and the hash of blocks, and their division between nodes."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import xxhash

from hpcstrat.checkpoint.file.division import of_rows
from hpcstrat.checkpoint.file.extents import Extent, FileLayout
from hpcstrat.checkpoint.file.image import fill
from hpcstrat.checkpoint.node_memory import snapshot_blocks
from hpcstrat.checkpoint.node_memory.snapshot_blocks import (
    SnapshotDivision,
    copy_block,
)
from hpcstrat.engine.native import load_hashed_copy

_BLOCK = 1 << 20


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_and_hashes_equal_those_of_saves(
    native: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native:
        assert load_hashed_copy() is not None
    else:
        monkeypatch.setattr(snapshot_blocks, "load_hashed_copy", lambda: None)
    random = np.random.default_rng(seed)
    extents, values, place = [], {}, 4096
    while place < 3 * _BLOCK:
        path, nbytes = f"v{len(extents)}", int(random.choice([3, 70, 5000, 400_000]))
        place += int(random.choice([0, 5, 4096 - place % 4096]))
        extents.append(Extent(path, place, nbytes))
        values[path] = random.integers(0, 256, nbytes, dtype=np.uint8)
        place += nbytes
    end = -(-place // 4096) * 4096
    plan = FileLayout(1, 4096, end, _BLOCK, tuple(extents))
    for block in range(plan.num_blocks):
        start, stop = plan.span(block)
        wanted = np.full(stop - start, 255, np.uint8)
        assert not fill(wanted, plan, block, values)
        # Memory at a page's start, and memory that is not aligned.
        for offset in (0, 1):
            target = np.frombuffer(mmap.mmap(-1, _BLOCK + 1), np.uint8)
            target = target[offset : offset + stop - start]
            target[...] = 255
            found = copy_block(target, plan, block, values)
            np.testing.assert_array_equal(target, wanted)
            assert found == xxhash.xxh3_64_intdigest(wanted.data)


def test_wrong_lengths_are_refused() -> None:
    module = load_hashed_copy()
    assert module is not None
    for nbytes, other in ((1000, 1000), (1024, 2048), (0, 0)):
        with pytest.raises(ValueError, match="a multiple of 1024"):
            module.copy(module.start(), bytearray(nbytes), bytes(other), 1024)


@pytest.mark.parametrize("seed", range(20))
def test_each_block_is_on_all_nodes_or_on_two(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 9))
    nodes = sorted(random.integers(0, random.integers(1, size + 1), size))
    names = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    nodes = [names[node] for node in nodes]
    row = int(random.choice([8, _BLOCK // 2, 3 * _BLOCK]))
    rows = of_rows((size, row // 8), 8, range(size))
    mirrored = int(random.integers(1, 5)) * _BLOCK
    extents = (
        Extent("mirrored", 4096, mirrored),
        Extent("rows", 4096 + mirrored, row * size, rows),
    )
    end = 4096 + mirrored + -(-row * size // 4096) * 4096
    division = SnapshotDivision(FileLayout(1, 4096, end, _BLOCK, extents), tuple(nodes))
    count, num_nodes = division.plan.num_blocks, len(names)
    held = [division.held(node) for node in range(num_nodes)]
    copies = [sum(block in one for one in held) for block in range(count)]
    assert set(copies) <= {min(2, num_nodes), num_nodes}
    own = [block for part in division.own for block in part]
    assert len(own) == len(set(own))
    for node in range(num_nodes):
        parts = [division.common[rank] for rank in division.ranks_of(node)]
        found = sorted([block for part in parts for block in part] + own)
        assert found == list(range(count))
