"""A callback that saves before the job ends, at the same step on all ranks."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hpcstrat.elastic.preemption.notices import (
    EXIT_STATUS,
    Notices,
    first_save_seconds,
    margin_seconds,
    requeue,
)
from hpcstrat.elastic.preemption.preemption_watch import PreemptionWatch
from hpcstrat.elastic.preemption.termination import TerminationConfig
from hpcstrat.integrations.lightning.trainer_package import Callback
from hpcstrat.strategies import MultiWorkerMirroredStrategy, Strategy

__all__ = ["PreemptionCheckpoint"]

_WHAT = "step under PreemptionCheckpoint"


class PreemptionCheckpoint(Callback):
    """Saves a checkpoint of Lightning and exits, before the job is ended.

    Collective over all ranks of the job, as is `newest`; one callback at a time.

    A signal to one rank, or the near end of the job, is a notice, as of
    `hpcstrat.PreemptionCheckpointHandler`. At the end of each step of the optimizer,
    ranks tell each other of notices, in one small message. If there is a notice, all
    save this step by ``trainer.save_checkpoint``, and exit with status 42. Signal
    handlers only note the signal; while the Trainer trains, Lightning's own handlers of
    these signals are not called.

    A restarted job continues if `newest` is the Trainer's ``ckpt_path``, or, in jobs of
    Slurm, without ``ckpt_path``. It continues in the middle of the epoch, on any number
    of ranks, if the rows are from ``GlobalBatchSampler.loader()``.

    Parameters
    ----------
    directory : str or path
        Folder of the checkpoints, which have Lightning's names ``hpc_ckpt_1.ckpt`` and
        so on. The folder that Lightning looks at in jobs of Slurm is the Trainer's
        ``default_root_dir``, by default the current one. Only the newest is kept.
    termination_config : TerminationConfig, optional
        Which events are notices, whether to requeue the job, and how to exit.

    Raises
    ------
    ValueError
        For a config with ``grace_period`` or ``save_fn``.

    Notes
    -----
    The step at the end of an epoch, after which Lightning validates, is not saved: a
    notice is then noticed after the first step of the next epoch.

    Examples
    --------
    >>> import hpcstrat.integrations.lightning as hsl
    >>> saving = hsl.PreemptionCheckpoint("no_checkpoints_yet")
    >>> saving.newest is None
    True
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] = ".",
        termination_config: TerminationConfig | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._config = config = termination_config or TerminationConfig()
        if config.grace_period or config.save_fn is not None:
            raise ValueError(
                "expected no grace_period and no save_fn for a PreemptionCheckpoint, "
                f"which saves once, by the Trainer, found {config}; leave them out"
            )
        self._strategy: Strategy | None = None
        self._watch: PreemptionWatch | None = None
        self._save_seconds = 0.0
        # Number of steps of the optimizer before the current one.
        self._step = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {str(self._directory)!r}>"

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint of the folder, or None.

        The same on all ranks, as the first rank finds it.
        """
        calls, found = self._ranks().collectives, None
        with calls.all_raise("look for checkpoints"):
            if calls.rank == 0:
                found = self._found()
        path: Path | None = calls.broadcast_object(found, 0, "newest checkpoint")
        return None if path is None else str(path)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to listen for notices, in place of Lightning's signal handlers."""
        nbytes = sum(p.nbytes for p in pl_module.parameters())
        self._save_seconds = first_save_seconds(nbytes)
        self._step = trainer.global_step
        self._notices = Notices(self._ranks().collectives.channel)
        self._notices.forget()
        self._watch = PreemptionWatch(
            self._config,
            self._notices.tell,
            lambda: margin_seconds(self._save_seconds),
            asks=self._notices.is_first,
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Save and exit if any rank has a notice, after a step of the optimizer."""
        # The gradients that are accumulated between two steps are not saved.
        before, self._step = self._step, trainer.global_step
        if self._step == before or trainer.is_last_batch:
            return
        self._ranks().collectives.barrier(_WHAT)
        if self._notices.told():
            self._notices.log(self._step)
            self._notices.forget()
            self._save(trainer)
            if self._config.requeue and self._notices.is_first:
                requeue()
            if self._config.exit_fn is None:
                sys.exit(EXIT_STATUS)
            self._config.exit_fn()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop listening, and install the former signal handlers again."""
        if self._watch is not None:
            self._watch.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the communicator of the callback."""
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            strategy.close()

    def _ranks(self) -> Strategy:
        if self._strategy is None:
            self._strategy = MultiWorkerMirroredStrategy()
        return self._strategy

    def _found(self) -> Path | None:
        """Return the checkpoint with the greatest number in the folder."""
        paths = self._directory.glob("hpc_ckpt_*.ckpt")
        numbered = {_number(path): path for path in paths}
        numbered.pop(0, None)
        return numbered[max(numbered)] if numbered else None

    def _save(self, trainer: Any) -> None:
        # A name that Lightning does not read, in case that the job ends too early.
        temporary = self._directory / "incomplete.ckpt"
        trainer.save_checkpoint(temporary)
        with self._ranks().collectives.all_raise("save before the job ends"):
            if trainer.is_global_zero:
                before = self._found()
                number = 1 + (0 if before is None else _number(before))
                temporary.rename(self._directory / f"hpc_ckpt_{number}.ckpt")
                if before is not None and before.is_file():
                    before.unlink()


def _number(path: Path) -> int:
    """Return the number of a checkpoint's name; 0 for other names."""
    found = re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", path.name)
    return int(found[1]) if found else 0
