"""`PreemptionCheckpointHandler`, which saves before the scheduler ends a job."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcstrat.checkpoint import CheckpointManager
from hpcstrat.elastic.preemption.notices import (
    EXIT_STATUS,
    Notices,
    first_save_seconds,
    margin_seconds,
    requeue,
)
from hpcstrat.elastic.preemption.preemption_watch import PreemptionWatch
from hpcstrat.elastic.preemption.termination import TerminationConfig

__all__ = ["PreemptionCheckpointHandler"]

_NAME = "preemption"


class _Calls:
    """The number of steps, as an object with plain state that the manager saves."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"total_run_calls": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = int(state["total_run_calls"])


class PreemptionCheckpointHandler:
    """Saves and exits, at the same step on all ranks, before the job is ended.

    Collective over the strategy's replicas, as are the handler's methods. A new handler
    restores the newest checkpoint, if there is one, and listens for signals.

    A signal to one rank is enough: the header of that rank's next collective call
    notifies the other ranks, so that no extra messages are sent, except for one call of
    all ranks in each step if replicas have several ranks. All ranks finish the
    current step. The next `run` saves, and exits the program with status 42. The
    handler also saves and exits shortly before the job's time limit. When the job is
    started again, it continues from the checkpoint, on any number of ranks.

    Parameters
    ----------
    cluster_resolver : ClusterResolver or None
        Not used, because MPI knows the cluster. For programs of tf.distribute.
    checkpoint_or_checkpoint_manager : CheckpointManager, or mapping of str to object
        The objects to save: a manager, or a mapping of objects by name, which needs
        ``checkpoint_dir``. The handler adds the number of steps to these objects, by
        the name ``"preemption"``.
    checkpoint_dir : str or path, optional
        Folder of the checkpoints of a mapping; only the newest checkpoint is kept.
    termination_config : TerminationConfig, optional
        Which events are notices of the job's end, and what to do after a notice.

    Raises
    ------
    ValueError
        If a mapping is given without ``checkpoint_dir``, or a manager together with
        ``checkpoint_dir``; or if an object of the manager is named ``"preemption"``. If
        only some ranks have invalid arguments, the other ranks raise ReplicaError.
    CheckpointError
        On every rank, if the newest checkpoint does not fit the objects.
    RuntimeError
        If the handler listens for signals, but is not made in the main thread.

    Notes
    -----
    Like ``tf.distribute.experimental.PreemptionCheckpointHandler``, but with other
    signals, and also with the scheduler's time limit and requeueing.

    Examples
    --------
    >>> import tempfile
    >>> import hpcstrat as hs
    >>> strategy = hs.get_strategy()
    >>> total = hs.Variable(0.0, name="total")
    >>> folder = tempfile.mkdtemp()
    >>> manager = hs.CheckpointManager(folder, total=total, independent=True)
    >>> with hs.PreemptionCheckpointHandler(None, manager) as handler:
    ...     while handler.total_run_calls < 3:
    ...         _ = handler.run(strategy.run, lambda: total.assign_add(1.0))
    >>> float(total.numpy())
    3.0
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: CheckpointManager | Mapping[str, Any],
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        self._config = config = termination_config or TerminationConfig()
        self._calls = _Calls()
        # True if there was a notice at the end of the last step; equal on all ranks.
        self._due = False
        # True after the first save of a grace period, while the training continues.
        self._in_grace = False
        # Seconds of the longest save so far; ``_guess`` is used before the first save.
        self._longest_save = self._guess = 0.0
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        # Most calls of replicas of several ranks are calls of some ranks, whose headers
        # do not notify all ranks: one more call of all ranks in each step does.
        self._tells_all = self._manager._strategy.inside.size > 1
        who = "rank" if self._tells_all else "replica"
        self._notices = Notices(self._manager.collectives.channel, who)
        # Discard notices that all ranks received while an earlier handler existed.
        self._notices.forget()
        try:
            self._manager._add_optional(_NAME, self._calls)
            self._watch = PreemptionWatch(
                config,
                self._notices.tell,
                self._save_seconds,
                asks=self._notices.is_first,
            )
        except Exception as error:
            what = f"creation of a {type(self).__name__}"
            self._manager.collectives.fail(what, error)
            raise
        self._guess = first_save_seconds(self._manager._nbytes())
        try:
            self._manager.restore_or_initialize()
        except BaseException:
            self._watch.close()
            raise
        restored = self._manager.last_restore
        if restored is not None:
            self._guess = restored.seconds

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop listening, but not during an exit: a signal would end it too early."""
        if kind is None or not issubclass(kind, SystemExit):
            self.close()

    @property
    def total_run_calls(self) -> int:
        """Number of steps of this training, including the steps of earlier jobs.

        Not collective. The number is saved and restored with the checkpoint.
        """
        return self._calls.number

    def run(
        self,
        distributed_train_function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the next step; if there was a notice, save and exit instead.

        Collective over the strategy's replicas.

        Parameters
        ----------
        distributed_train_function : callable
            The step, called on every rank. It must sometimes make collective calls,
            because their headers notify the other ranks of a notice.
        *args, **kwargs : object
            Arguments of the function.

        Returns
        -------
        object
            The result of the function.

        Raises
        ------
        SystemExit
            On every rank, if there was a notice; everything is saved then.
        CheckpointError
            On every rank, if the save fails; older checkpoints are unchanged.
        """
        if self._due:
            self._act()
        result = distributed_train_function(*args, **kwargs)
        self._calls.number += 1
        self._learn()
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Count a step; if a notice had arrived by the step's start, save and exit.

        Collective over the strategy's replicas. For loops that do not use `run`: call
        this method after each step. Raises the errors of `run`.

        Parameters
        ----------
        *args, **kwargs : object
            Arguments of the manager's ``save``, or of ``save_fn``.
        """
        # Unlike tf.distribute, count the step before the save: a loop that starts at
        # the restored total_run_calls then repeats no step.
        self._calls.number += 1
        if self._due:
            self._act(*args, **kwargs)
        self._learn()

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Do nothing; this context exists for programs of tf.distribute.

        Not collective. In tf.distribute, training loops on TPUs need this context. This
        handler always listens for notices.

        Yields
        ------
        None
            Nothing.
        """
        yield

    def close(self) -> None:
        """Stop listening, and install the former signal handlers again.

        Not collective.
        """
        self._watch.close()

    def _learn(self) -> None:
        """Learn at the end of a step whether any rank has had a notice."""
        if self._tells_all:
            self._manager.collectives.barrier("PreemptionCheckpointHandler")
        self._due = bool(self._notices.told())

    def _save_seconds(self) -> float:
        """Return how many seconds before the job's end a save must begin."""
        last = self._manager.last_save
        if last is not None:
            self._longest_save = max(self._longest_save, last.total_seconds)
        return margin_seconds(self._longest_save or self._guess)

    def _act(self, *args: Any, **kwargs: Any) -> None:
        """Save, and then exit, or begin the grace period if there is one."""
        self._notices.log(self.total_run_calls)
        self._notices.forget()
        self._due = False
        began = time.monotonic()
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._manager.save(*args, **kwargs)
            # Wait for an asynchronous save, which must be on the disk before the exit.
            self._manager.wait()
        self._longest_save = max(self._longest_save, time.monotonic() - began)
        if self._config.grace_period and not self._in_grace:
            self._in_grace = True
            self._watch.be_done_in(self._config.grace_period)
            return
        if self._config.requeue and self._notices.is_first:
            requeue()
        if self._config.exit_fn is None:
            sys.exit(EXIT_STATUS)
        self._config.exit_fn()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} by {self._manager!r}>"


def _manager_of(given: Any, directory: Any) -> CheckpointManager:
    if isinstance(given, CheckpointManager) and directory is None:
        return given
    if isinstance(given, Mapping) and directory is not None:
        return CheckpointManager(directory, max_to_keep=1, **given)
    beside = "none" if directory is None else repr(directory)
    raise ValueError(
        "expected a CheckpointManager, or a mapping of objects and a checkpoint_dir, "
        f"found {type(given).__name__} and {beside}; pass one of the two"
    )
