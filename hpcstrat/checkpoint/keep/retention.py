"""Finding the newest and the best checkpoint, and removing what no rule keeps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from hpcstrat.checkpoint.disk import remove
from hpcstrat.checkpoint.file.reader import (
    CheckpointFile,
    check,
    is_passing,
    open_checkpoint,
    read_root,
)
from hpcstrat.checkpoint.file.schema import list_checkpoints, step_of
from hpcstrat.checkpoint.keep.folder import NO_FILE, Identity, identity_of
from hpcstrat.checkpoint.keep.keep_rules import Found, KeepBest, KeepRules, kept, ranked
from hpcstrat.engine.logs import get_logger
from hpcstrat.errors import CheckpointError, CorruptCheckpointError

__all__ = ["Retention", "best_path", "find_restorable", "newest_path", "warn"]


class Retention:
    """Removes the checkpoints of a folder that need not stay; on replica 0 only."""

    def __init__(self, directory: str, rules: KeepRules) -> None:
        self._directory = directory
        self._rules = rules
        # Contents that have been read, with the identity of the file of that name.
        self._known: dict[str, tuple[Identity | None, Found]] = {}
        self._distrusted: set[tuple[str, Identity | None]] = set()

    def distrust(self, paths: Sequence[str]) -> None:
        """Take note of files that a restore found damaged, also if in their data only.

        They are trusted again once they have been replaced.
        """
        for path in paths:
            # The other ranks do not wait for an error of this.
            with suppress(OSError):
                self._distrusted.add((path, identity_of(path)))

    def is_damaged(self, path: str) -> bool:
        """Whether there is a file that no restore would take, as far as is known.

        Data are not looked at. False where there is no such file; OSError if it cannot
        be looked at.
        """
        try:
            if (path, identity_of(path)) in self._distrusted:
                return True
            check(path)
        except FileNotFoundError:
            return False
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno not in (None, *NO_FILE):
                # The file may be whole: it could not be looked at now.
                raise cause from None
            # One of a newer library is not.
            return isinstance(error, CorruptCheckpointError)
        return False

    def apply(self, new: Found) -> None:
        """Remove what no rule keeps, after a new checkpoint is durable.

        Damaged files do not count, and stay. The new one need not be opened by HDF5
        then. OSError if the folder or a file cannot be looked at; nothing is removed.
        """
        if self._rules.max_to_keep is None:
            return
        self._known[new.path] = identity_of(new.path), new
        for path in self._superfluous():
            try:
                remove(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                get_logger("checkpoint").warning(
                    "the old checkpoint %s could not be removed: %s", path, error
                )

    def _superfluous(self) -> list[str]:
        """Return what may be removed, oldest first."""
        # Those for whose sake others go are looked at each time: files can rot.
        counting = KeepRules(self._rules.max_to_keep, keep_best=self._rules.keep_best)
        found = self._find()
        while True:
            keep = kept(found, self._rules, time.time_ns())
            going = [one.path for one in found if one.path not in keep]
            if not going:
                return []
            asked = kept(found, counting, 0).union(going)
            damaged = {path for path in asked if self.is_damaged(path)}
            if not damaged:
                return going
            found = [one for one in found if one.path not in damaged]

    def _find(self) -> list[Found]:
        """Return the whole checkpoints; those that others saved are read once."""
        known = {}
        for path in list_checkpoints(self._directory):
            identity = identity_of(path)
            before = self._known.get(path)
            if before is not None and before[0] == identity:
                known[path] = before
                continue
            try:
                known[path] = identity, _look(path)
            except (FileNotFoundError, CheckpointError) as error:
                if is_passing(error):
                    raise
                # Removed, damaged, or of a newer library: not for us to remove.
                continue
        self._known = known
        return [one for _, one in known.values()]


def _find_newest(directory: str, passed_over: list[str]) -> CheckpointFile | None:
    """Return the newest checkpoint that is whole, as far as its data are not read.

    Damaged ones are added to ``passed_over``, whose paths are not looked at, and warned
    of.
    """
    for path in reversed(list_checkpoints(directory)):
        if path in passed_over:
            continue
        try:
            return open_checkpoint(path)
        except CorruptCheckpointError as error:
            warn(error)
            passed_over.append(path)
        except FileNotFoundError:
            continue  # Removed since it was listed.
    return None


def newest_path(directory: str) -> str | None:
    """Return the path of the newest whole checkpoint; None where there is none."""
    found = _find_newest(directory, [])
    return None if found is None else found.path


def find_restorable(
    directory: str, path: str | None, passed_over: list[str]
) -> tuple[CheckpointFile | None, list[str]]:
    """Return the checkpoint to restore, if there is one, and paths of damaged ones.

    That at ``path``, else the newest but those of ``passed_over``. CheckpointError if
    there are some, and none of them can be read.
    """
    if path is not None:
        try:
            return open_checkpoint(path), passed_over
        except FileNotFoundError as error:
            raise CheckpointError(
                f"expected a checkpoint at {path}, found no such file; check the path, "
                "or leave it out to restore the newest"
            ) from error
    found = _find_newest(directory, passed_over)
    if found is None and passed_over:
        raise CheckpointError(
            f"expected a checkpoint in {directory} that can be read, found "
            f"{len(passed_over)} that cannot; move them away to start anew"
        )
    return found, passed_over


def warn(error: Exception) -> None:
    """Say why a checkpoint is passed over."""
    get_logger("checkpoint").warning("%s", error)


def best_path(directory: str, best: KeepBest) -> str | None:
    """Return the path of the best whole checkpoint; None where none has the metric."""
    found = []
    for path in list_checkpoints(directory):
        try:
            found.append(_look(path))
        except CheckpointError as error:
            if is_passing(error):
                raise
            warn(error)
        except FileNotFoundError:
            continue  # Removed since it was listed.
    return next((one.path for one in ranked(found, best)), None)


def _look(path: str) -> Found:
    header = read_root(path)
    return Found(path, step_of(path) or 0, header.created_unix_ns, header.metrics)
