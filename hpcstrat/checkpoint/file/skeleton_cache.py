"""The skeletons of the last saves and snapshots, which later ones use again."""

from __future__ import annotations

from collections.abc import Mapping

from hpcstrat.checkpoint.file.schema import Header
from hpcstrat.checkpoint.file.skeleton import Skeleton

__all__ = ["SkeletonCache"]


class SkeletonCache:
    """Keeps two skeletons: those of saves with metrics and without may alternate."""

    def __init__(self) -> None:
        self._kept: list[Skeleton] = []

    def skeleton(self, header: Header, python: Mapping[str, bytes]) -> Skeleton:
        """Return a kept skeleton if it fits, or make a new one."""
        known = [each for each in self._kept if each.fits(header, python)]
        others = [each for each in self._kept if each not in known]
        for old in others[:-1]:
            self._kept.remove(old)
            old.close()
        if not known:
            known = [Skeleton(header, python)]
        self._kept = [*others[-1:], *known]
        return known[0]

    def close(self) -> None:
        while self._kept:
            self._kept.pop().close()
