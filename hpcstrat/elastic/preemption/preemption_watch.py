"""Watch of one rank, without MPI calls, for notices that the job will end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcstrat.cluster_resolver import BatchJob, batch_job_from_environment
from hpcstrat.elastic.preemption.termination import TerminationConfig
from hpcstrat.engine.logs import get_logger

__all__ = ["PreemptionWatch"]

_POLL_SECONDS = 1.0


class PreemptionWatch:
    """Reports notices: a signal, a true result of a function, or the job's near end.

    A signal handler or a thread calls ``tell`` with the reason of a notice.
    ``save_seconds`` returns how many seconds before the job's end a save must begin. If
    ``asks``, this rank asks the scheduler when the job will end.
    """

    def __init__(
        self,
        config: TerminationConfig,
        tell: Callable[[str], None],
        save_seconds: Callable[[], float],
        *,
        asks: bool = False,
    ) -> None:
        self._tell, self._save_seconds = tell, save_seconds
        self._function = config.termination_watcher_fn
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends_at: float | None = None
        # The job whose end the thread requests, because the answer may take a while.
        self._job: BatchJob | None = None
        if not isinstance(config.job_end, str):
            self._ends_at = config.job_end
        elif asks:
            self._job = batch_job_from_environment()
        if self._function is None:
            self._listen(config)
        if self._function is not None or self._ends_at is not None or self._job:
            self._start()

    def be_done_in(self, seconds: float) -> None:
        """From now on, report only one notice: that ``seconds`` are nearly over."""
        self._function = None
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._ends_at = time.time() + seconds
        self._start()

    def close(self) -> None:
        """Stop listening, and install the former signal handlers again."""
        self._end.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _listen(self, config: TerminationConfig) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "expected the main thread, which alone may listen for signals, found "
                f"{threading.current_thread().name!r}; make the handler there, or pass "
                "termination_watcher_fn"
            )
        for number in config.signals or ():
            before = signal.signal(number, self._on_signal)
            # None is a handler of C code, which `close` cannot install again.
            self._before[int(number)] = signal.SIG_DFL if before is None else before

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            # End this process, a forked child such as a data loader's worker.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._tell(signal.Signals(number).name)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look, name="hpcstrat preemption", daemon=True
            )
            self._thread.start()

    def _look(self) -> None:
        if self._job:
            self._ends_at = self._ends_at or self._job.end()
        while not self._end.wait(_POLL_SECONDS):
            try:
                self._look_once()
            except Exception as error:
                # An error of the program's function must not end this thread.
                get_logger("preemption").warning(
                    "the termination_watcher_fn raised %s: %s; this does not count as "
                    "a notice",
                    type(error).__name__,
                    error,
                )

    def _look_once(self) -> None:
        end = self._ends_at
        if end is not None and time.time() + self._save_seconds() >= end:
            self._ends_at = None
            self._tell(f"the job ends in {max(0.0, end - time.time()):.0f} s")
        function = self._function
        if function is not None and function():
            self._function = None
            self._tell("termination_watcher_fn")
