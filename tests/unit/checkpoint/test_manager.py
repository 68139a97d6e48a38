"""The options of a manager, and the names that they leave to objects."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpcstrat as hs


def test_options_do_what_the_arguments_do(tmp_path: Path) -> None:
    weights, kept = hs.Variable(1.0), []
    rules = {"max_to_keep": 2, "keep_every": 3}
    for name, options in (
        ("options", {"options": hs.CheckpointOptions(**rules)}),
        ("arguments", rules),
    ):
        with hs.CheckpointManager(tmp_path / name, weights=weights, **options) as made:
            for step in range(1, 8):
                made.save(step)
            kept.append([Path(path).name for path in made.checkpoints])
    assert kept[0] == kept[1]
    assert len(kept[0]) == 3


def test_an_object_may_be_called_options(tmp_path: Path) -> None:
    with hs.CheckpointManager(tmp_path, options=hs.Variable(3.0)) as manager:
        manager.save(1)
    fresh = hs.Variable(0.0)
    with hs.CheckpointManager(tmp_path, options=fresh) as manager:
        manager.restore()
    assert float(fresh) == 3


def test_options_in_both_places_are_refused(tmp_path: Path) -> None:
    options = hs.CheckpointOptions(keep_every=3)
    with pytest.raises(ValueError, match="expected all options in options="):
        hs.CheckpointManager(tmp_path, options=options, max_to_keep=2, w=hs.Variable(1))
    with pytest.raises(ValueError, match="expected max_write_bandwidth"):
        hs.CheckpointOptions(max_write_bandwidth=-1)
    with pytest.raises(ValueError, match="expected max_to_keep"):
        hs.CheckpointOptions(max_to_keep=0)
