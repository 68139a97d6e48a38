"""Lists of the files of a data set, which must be equal on all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from hpcstrat.engine.typing import Replicas
from hpcstrat.errors import CollectiveError

__all__ = ["digest_of", "in_list", "names_of", "require_same_files"]


def names_of(paths: Sequence[str]) -> list[str]:
    """Return paths relative to their common folder, which may differ between ranks."""
    folders = {os.path.dirname(os.path.abspath(path)) for path in paths}
    common = os.path.commonpath(folders) if folders else ""
    return [os.path.relpath(path, common) for path in paths]


def digest_of(files: Sequence[str]) -> int:
    """Return a hash (0 to 2**63 - 1) of texts in their order."""
    mark = 0
    for file in files:
        mark = xxh3_64_intdigest(file.encode(errors="surrogateescape"), mark)
    return mark >> 1


def require_same_files(strategy: Replicas, files: Sequence[str]) -> None:
    """Raise CollectiveError on all ranks if their lists of files differ.

    Collective over all ranks of the strategy. ``files`` are descriptions of files; the
    error has the first difference between two lists, and the ranks of each list.
    """
    what, ranks = "files of a data set", strategy.all_ranks
    marks = ranks.collectives.all_gather_object((digest_of(files), len(files)), what)
    if len(set(marks)) == 1:
        return
    # The list that most ranks have counts as right.
    first = max(set(marks), key=lambda mark: (marks.count(mark), -marks.index(mark)))
    other = next(mark for mark in marks if mark != first)
    senders = marks.index(first), marks.index(other)
    mine = files if ranks.rank in senders else []
    lists = ranks.collectives.all_gather_object(mine, what)
    one, two = (lists[sender] for sender in senders)
    index = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )
    told = " and ".join(
        f"{found[index] if index < len(found) else 'no file'} (of {len(found)} files) "
        f"on rank{'s' if marks.count(mark) > 1 else ''} "
        f"{in_list([rank for rank, each in enumerate(marks) if each == mark])}"
        for found, mark in ((one, first), (two, other))
    )
    raise CollectiveError(
        "expected the same files in the same order on all ranks, found as file "
        f"{index}, counted from 0, {told}; check that the pattern matches the same "
        "files on all hosts, or let each worker read its own files with "
        "distribute_datasets_from_function",
        [rank for rank, mark in enumerate(marks) if mark != first],
    )


def in_list(ranks: Sequence[int], most: int = 8) -> str:
    """Return some ranks as text, such as ``0, 3, 4``."""
    texts = [str(rank) for rank in ranks]
    return ", ".join(texts[:most] + ["..."] * (len(texts) > most))
