"""Records of how data sets were made, to make them again from a part of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.data import stages, streams
from hpcstrat.data.rows import SourceRows, Stage
from hpcstrat.data.slabs import RowSplit
from hpcstrat.data.sources import Columns
from hpcstrat.engine.options import AutoShardPolicy
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Tree

__all__ = ["DatasetOptions", "Lineage", "rows_of_names", "stage_of"]


@dataclass
class DatasetOptions:
    """Options of a data set, for `Dataset.with_options`.

    Parameters
    ----------
    auto_shard_policy : AutoShardPolicy or str
        Rule that divides the data set between workers; AUTO and DATA keep random access
        (see `Dataset`) if the data set has it.
    """

    auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.AUTO


class Lineage:
    """A stage, and how it was made: by ``make``, from parents or from files.

    ``opens_files`` is False for a stage of file names, which does not open the files.
    """

    def __init__(
        self,
        stage: Stage,
        parents: Sequence[Lineage] = (),
        make: Callable[..., Stage] | None = None,
        *,
        files: Sequence[str] | None = None,
        opens_files: bool = False,
    ) -> None:
        self.stage = stage
        self.opens_files: bool = opens_files or any(p.opens_files for p in parents)
        self.options: DatasetOptions = (
            parents[0].options if parents else DatasetOptions()
        )
        # Number of batches to read ahead.
        self.ahead: int = max((parent.ahead for parent in parents), default=0)
        self.seed: int = parents[0].seed if parents else 0
        # True for ``shard(SHARD_HINT, SHARD_HINT)``, which a strategy replaces later.
        self.is_hint = False
        # A split, which a strategy replaces later by the slabs of this rank.
        self._split: RowSplit | None = None
        self._is_slabs = False
        self._parents = tuple(parents)
        self._make = make
        self._files = None if files is None else list(files)
        # The lineage over all files, if this lineage has only a part of the files.
        self._whole: Lineage | None = None

    @classmethod
    def of_files(
        cls,
        files: Sequence[str],
        make: Callable[[Sequence[str]], Stage],
        *,
        opens_files: bool = True,
    ) -> Lineage:
        """Call ``make`` with file names, and return the lineage of the new stage."""
        return cls(make(files), (), make, files=files, opens_files=opens_files)

    def then(self, make: Callable[..., Stage], *others: Lineage) -> Lineage:
        """Call ``make`` with the lineages' stages; return the new stage's lineage."""
        parents = (self, *others)
        return Lineage(make(*(parent.stage for parent in parents)), parents, make)

    def spec(self) -> Tree:
        """Return the specs of the elements of all files, even for a shard."""
        return self._whole.spec() if self._whole is not None else self.stage.spec()

    def files(self) -> list[str] | None:
        """Return the names of the files that the data set reads, or None."""
        if not self.opens_files and self._files is None:
            return None
        for origin in (self, *self._parents):
            if origin._files is not None:
                return origin._files
        names: list[str] = []
        for parent in self._parents:
            if parent.opens_files:
                return parent.files()
            if parent.gives_names():
                names += [str(name) for name in parent.stage.iterate(0)]
        return names

    def gives_names(self) -> bool:
        """Return whether each element is a single string, such as a file name."""
        spec = flatten(self.spec())[0]
        return len(spec) == 1 and spec[0].dtype.kind == "U"

    def opens_names(self, make: Callable[[Any], Lineage]) -> bool:
        """Return whether ``make`` opens the file that the first element names."""
        try:
            name = self.gives_names() and next(iter(self.stage.iterate(0)))
            return bool(name) and make(name).opens_files
        # Ignore the error, because an iteration will raise it again.
        except Exception:
            return False

    def policy(self) -> AutoShardPolicy:
        """Return the auto-shard policy; AUTO is replaced by FILE or DATA."""
        policy = AutoShardPolicy.parse(self.options.auto_shard_policy)
        if policy is AutoShardPolicy.AUTO:
            # Prefer FILE if the data set reads files, as tf.distribute does.
            has_files = self.files() is not None
            policy = AutoShardPolicy.FILE if has_files else AutoShardPolicy.DATA
        return policy

    def with_options(self, options: Any) -> Lineage:
        """Return a lineage of the same stage that has other options."""
        holder = getattr(options, "experimental_distribute", options)
        policy = getattr(holder.auto_shard_policy, "name", holder.auto_shard_policy)
        made = self.then(lambda stage: stage)
        made.options = DatasetOptions(AutoShardPolicy.parse(policy))
        return made

    def shard_files(self, num_shards: int, index: int) -> Lineage:
        """Return the lineage over a part of the files; ValueError without files."""
        made = self._over_files(num_shards, index)
        if made is None:
            raise ValueError(
                "expected a data set of files with auto-shard policy FILE, found "
                f"{self.stage.describe()}; use policy DATA"
            )
        return made

    def _over_files(self, num_shards: int, index: int) -> Lineage | None:
        if self._files is not None:
            assert self._make is not None
            part = self._files[index::num_shards]
            return self.of_files(part, self._make, opens_files=self.opens_files)
        if self._make is None:
            return None
        parts = [parent._over_files(num_shards, index) for parent in self._parents]
        if all(part is None for part in parts):
            if not self.opens_files:
                return None
            # The parents' elements are names of files, which this stage opens.
            parts = [parent.shard(num_shards, index) for parent in self._parents]
        own = zip(parts, self._parents, strict=True)
        return self._again([part or whole for part, whole in own])

    def shard(self, num_shards: int, index: int) -> Lineage:
        """Return the lineage of every ``num_shards``-th element."""
        return self.then(lambda stage: stages.shard(stage, num_shards, index))

    def shard_by_hint(self, num_shards: int, index: int) -> Lineage:
        """Replace each `hint` by the shard ``index``; ``self`` if there is no hint."""
        if self.is_hint:
            return self._parents[0].shard(num_shards, index)
        parts = [parent.shard_by_hint(num_shards, index) for parent in self._parents]
        if all(a is b for a, b in zip(parts, self._parents, strict=True)):
            return self
        return self._again(parts)

    def hint(self) -> Lineage:
        """Return the lineage of ``shard(SHARD_HINT, SHARD_HINT)``."""
        hinted = self.then(_hinted)
        hinted.is_hint = True
        return hinted

    def split(self, axis: int | Mapping[str | int, int], along: str | None) -> Lineage:
        """Return a lineage of the same stage, which a strategy splits later."""
        split = RowSplit(axis, along)
        split.check(self.stage)
        if earlier := [s for s in self.splits() if s.overlaps(split)]:
            raise ValueError(
                f"expected one split over the same ranks, found {split.words} after "
                f"{earlier[0].words}, so that some values would be on no rank; name "
                "all columns in one call, such as split({'a': 0, 'b': 1})"
            )
        made = self.then(lambda stage: stage)
        made._split = split
        return made

    def splits(self) -> list[RowSplit]:
        """Return the splits of this data set and of those that it is made of."""
        own = [] if self._split is None else [self._split]
        return own + [split for parent in self._parents for split in parent.splits()]

    def slabs(self, inside: Any) -> Lineage:
        """Replace each split by this rank's slabs; ``self`` if nothing is split."""
        if inside.size == 1 or not self.splits():
            return self
        first, *others = [parent.slabs(inside) for parent in self._parents]
        split = self._split
        if split is None:
            made = self._again([first, *others])
        else:
            made = first.then(lambda stage: split.apply(stage, inside))
            made._is_slabs = True
        made._whole = None if self._whole is None else self._whole.slabs(inside)
        return made

    def has_slabs(self) -> bool:
        """Return whether `slabs` has replaced a split."""
        return self._is_slabs or any(parent.has_slabs() for parent in self._parents)

    def _again(self, parents: Sequence[Lineage]) -> Lineage:
        assert self._make is not None
        first, *others = parents
        made = first.then(self._make, *others)
        made.options, made.ahead, made.seed = self.options, self.ahead, self.seed
        made.opens_files = self.opens_files
        made.is_hint, made._split = self.is_hint, self._split
        made._is_slabs = self._is_slabs
        made._whole = self
        return made


def rows_of_names(files: Sequence[str]) -> Stage:
    """Return a stage whose elements are these file names."""
    rows = SourceRows(Columns(*flatten(np.array(files, np.str_))))
    rows.paths = files
    return rows


def stage_of(value: Any) -> Stage:
    """Return the stage of a data set that a function of `interleave` returned."""
    lineage = getattr(value, "lineage", None)
    if lineage is None:
        raise TypeError(
            "expected a Dataset from the function of interleave or flat_map, found "
            f"{type(value).__name__}; return one"
        )
    if splits := lineage.splits():
        raise ValueError(
            "expected a data set that is not split from the function of interleave or "
            f"flat_map, found {splits[0].words}; call split() on the result of "
            "interleave or flat_map"
        )
    stage: Stage = lineage.stage
    return stage


def _hinted(parent: Stage) -> Stage:
    def start(_elements: Any, _: int) -> Any:
        raise ValueError(
            "expected a data set that is distributed with policy HINT, found "
            "shard(SHARD_HINT, SHARD_HINT) iterated otherwise; set "
            "DatasetOptions(auto_shard_policy='HINT')"
        )

    return streams.Stream.after(parent, "sharded by hint", start)
