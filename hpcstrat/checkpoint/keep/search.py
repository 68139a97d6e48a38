"""Finding the newest checkpoint that is whole."""

from __future__ import annotations

from hpcstrat.checkpoint.file.reader import CheckpointFile, open_checkpoint
from hpcstrat.checkpoint.file.schema import list_checkpoints
from hpcstrat.engine.logs import get_logger
from hpcstrat.errors import CheckpointError, CorruptCheckpointError

__all__ = ["find_newest", "find_restorable", "newest_path", "warn"]


def find_newest(directory: str, passed_over: list[str]) -> CheckpointFile | None:
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
    found = find_newest(directory, [])
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
    found = find_newest(directory, passed_over)
    if found is None and passed_over:
        raise CheckpointError(
            f"expected a checkpoint in {directory} that can be read, found "
            f"{len(passed_over)} that cannot; move them away to start anew"
        )
    return found, passed_over


def warn(error: Exception) -> None:
    """Say why a checkpoint is passed over."""
    get_logger("checkpoint").warning("%s", error)
