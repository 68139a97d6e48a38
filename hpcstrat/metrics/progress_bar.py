"""Progress of a training on rank 0: a bar on a terminal, or lines of text."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from hpcstrat.engine.logs import is_first_rank


class Progress:
    """A progress bar on a terminal; lines of text if there is no terminal.

    Not collective: rank 0 shows the progress on standard error, other ranks do nothing.

    Parameters
    ----------
    total : int
        Number of all steps.
    title : str
        Text at the beginning of the bar or of each line.
    start : int
        Number of steps that are already done, for example after a restore.
    show : bool, optional
        True: show a bar even without a terminal, such as under mpirun. False: show
        nothing.
    every_seconds : float
        The least time between two lines.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> with hs.metrics.Progress(3, "training", show=False) as progress:
    ...     for step in range(3):
    ...         progress.advance(loss=0.5)
    """

    def __init__(
        self,
        total: int,
        title: str = "",
        *,
        start: int = 0,
        show: bool | None = None,
        every_seconds: float = 30.0,
    ) -> None:
        self.total, self.title, self.done = total, title, start
        self._start, self._every = start, every_seconds
        self._words = ""
        self._began = self._said = time.monotonic()
        is_shown = show is not False and is_first_rank()
        self._bar: Any = None
        if is_shown and (show or sys.stderr.isatty()):
            self._bar = _rich_bar(forced=bool(show))
            self._task = self._bar.add_task(
                title, total=total, completed=start, words=""
            )
        self._has_lines = is_shown and self._bar is None

    def __repr__(self) -> str:
        return f"Progress({self.title!r}, {self.done} of {self.total})"

    @property
    def has_bar(self) -> bool:
        """True if this process shows a progress bar."""
        return self._bar is not None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._has_lines and kind is None and self.done > self._start:
            self._say()

    def advance(self, steps: int = 1, **values: float) -> None:
        """Add to the number of steps that are done.

        Not collective.

        Parameters
        ----------
        steps : int
            Number of steps since the last call.
        **values : float
            Numbers to show at the end, such as the loss.
        """
        self.done += steps
        if values:
            self._words = ", ".join(
                f"{name} {value:.4g}" for name, value in values.items()
            )
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, words=self._words)
        elif self._has_lines and time.monotonic() > self._said + self._every:
            self._say()

    def _say(self) -> None:
        self._said = now = time.monotonic()
        rate = (self.done - self._start) / max(now - self._began, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        share = self.done / self.total if self.total else 1.0
        words = [
            f"{self.title}: {self.done} of {self.total} ({share:.0%})",
            f"{rate:.3g} per second",
            f"{left:.0f} s left",
            *filter(None, [self._words]),
        ]
        sys.stderr.write(", ".join(words) + "\n")
        sys.stderr.flush()


def _rich_bar(*, forced: bool) -> Any:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn

    console = Console(stderr=True, force_terminal=forced or None)
    columns = [*Bar.get_default_columns(), TextColumn("{task.fields[words]}")]
    return Bar(*columns, console=console)
