"""Stacks of a process's threads, even if its Python threads cannot run.

A process reads its own stacks by ``sys._current_frames``. If a process cannot do this,
because C code holds the interpreter lock, another rank of the same host sends it a
real-time signal. In every process, `faulthandler` handles this signal, and writes the
stacks to a file in memory. The other rank reads this file through ``/proc``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hpcstrat.engine.call_sites import is_of_program
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.topology.process_stat import START, STATE, process_stat

__all__ = ["HELD", "Process", "Stacks", "look_at", "own_stacks", "prepare", "site_of"]

_SAFETY = str(Path(__file__).absolute().parents[1])
_MAIN_FRAMES = 30
_OTHER_FRAMES = 8
_OTHER_THREADS = 4
_MOST_BYTES = 4500
_MOST_CHARACTERS = 200
_DUMP_SECONDS = 0.5
_NAP_SECONDS = 0.005
# The output of faulthandler counts as complete if it has not grown for this time.
_SETTLED_SECONDS = 0.03
_LARGEST_DUMP = 1 << 20

_ENDED = "whose process has ended"
_SILENT = "which does not answer"
_WORDS = {
    "T": "which is stopped (by SIGSTOP, or with its job)",
    "t": "which is stopped by a debugger",
    "D": "which waits in the kernel, as for a disk or a file server (state D)",
}
HELD = "whose threads cannot run (C code holds the interpreter lock)"
"""Description of a process that shows its stacks only after a signal."""

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) .*")
_FRAME = re.compile(r' +File "(.*)", line (\d+) in (.*)')

# A frame: file, line, function.
_Frame = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of a process, as text for reports."""

    # A relative clause about the process, such as "which is stopped"; may be empty.
    words: str = ""
    # The main thread's innermost frame outside of the library, such as ``evaluate
    # (train.py:52)``; empty if unknown.
    where: str = ""
    # The stacks of all threads, the main thread first; may be empty.
    text: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine, with the signal and file for its stacks."""

    pid: int
    # Start time in clock ticks, to detect that another process has this ``pid`` now.
    start: int
    main: int
    # Signal that makes the process write its stacks; 0 if there is none.
    signal: int
    # The process's file descriptor for the file to which it writes its stacks.
    handle: int


class _OwnProcess:
    """The result of the last `prepare`, and its ``offset``."""

    process: Process | None = None
    offset: int | None = None


def prepare(offset: int, *, quiet: bool = False) -> Process:
    """Let other ranks of this host read this process's stacks, from now on.

    ``offset`` is the signal's number minus SIGRTMIN; 0 means no signal. A second call
    with the same offset has no effect. If the program uses the signal, this call logs a
    warning and uses no signal; a ``quiet`` call leaves the warning to the next call.
    Raises ValueError if there is no signal with this number.
    """
    number = signal.SIGRTMIN + offset
    if number > signal.SIGRTMAX:
        raise ValueError(
            f"expected stack_signal <= {signal.SIGRTMAX - signal.SIGRTMIN}, found "
            f"{offset}; choose another real-time signal"
        )
    own, pid = _OwnProcess.process, os.getpid()
    if own is not None and own.pid == pid and _OwnProcess.offset == offset:
        return own
    handle = -1 if own is None or own.pid != pid else own.handle
    taken = number if own is not None and own.signal == number else 0
    if offset and not taken:
        taken, handle = _register(number, handle, quiet)
    if not quiet or taken or not offset:
        _OwnProcess.offset = offset
    main = threading.main_thread().ident or 0
    _OwnProcess.process = Process(
        pid, _stat(pid)[1], main, taken if offset else 0, handle
    )
    return _OwnProcess.process


def _register(number: int, handle: int, quiet: bool) -> tuple[int, int]:
    """Register faulthandler for a signal; return the signal and the file.

    Returns 0 and -1 on failure. The file is a descriptor, new if ``handle`` is -1.
    """
    if _is_caught(os.getpid(), number):
        if not quiet:
            get_logger().warning(
                "signal %d is in use, so that this rank cannot show its stack while it "
                "is in C code; choose another by HPCSTRAT_STACK_SIGNAL",
                number,
            )
        return 0, -1
    if handle < 0:
        try:
            handle = os.memfd_create("hpcstrat-stacks")
        except (AttributeError, OSError):
            return 0, -1
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_APPEND)
    # Never unregister the handler: after that, a late signal would end the process.
    faulthandler.register(number, file=handle, all_threads=True, chain=False)
    return number, handle


def _is_caught(pid: int, number: int) -> bool:
    """Return whether a process handles or ignores a signal."""
    masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", _proc(pid, "status"), re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int]:
    """Return the state letter and start time of a process; ``"X"`` if it has ended."""
    try:
        _, fields = process_stat(pid)
    except OSError:
        return "X", 0
    return fields[STATE], int(fields[START])


def site_of(thread: int) -> str:
    """Return ``file:line`` of a thread's innermost frame in the user's code."""
    where = _where(_frames(sys._current_frames().get(thread)))
    return where.rpartition("(")[2].rstrip(")")


def own_stacks() -> Stacks:
    """Return the stacks of this process's threads, but not of the watchdog's thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    threads = {
        ident: _frames(frame)
        for ident, frame in sys._current_frames().items()
        # Leave out the calling thread (the watchdog's), unless it is the main thread.
        if ident == main or ident != threading.get_ident()
    }
    others = [
        (f"thread {names.get(ident, ident)}", frames)
        for ident, frames in threads.items()
        if ident != main and not _is_watching(frames)
    ]
    return _composed("", threads.get(main or 0, []), others)


def _frames(frame: FrameType | None) -> list[_Frame]:
    """Return the frames of a thread, the innermost first."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return frames


def look_at(process: Process) -> Stacks:
    """Return the stacks of another process of this user on this machine.

    Takes up to half a second. If the process does not answer, the result says why.
    """
    state, start = _stat(process.pid)
    if start != process.start or state in "ZX":
        return Stacks(_ENDED)
    if state in "Tt":
        return Stacks(_WORDS[state])
    dump = _dump(process) if process.signal else ""
    found: list[tuple[int, list[_Frame]]] = []
    for line in dump.splitlines():
        if thread := _THREAD.match(line):
            found.append((int(thread[1], 16), []))
        elif found and (frame := _FRAME.match(line)):
            found[-1][1].append((frame[1], int(frame[2]), frame[3]))
    if not found:
        return Stacks(_WORDS.get(_stat(process.pid)[0], _SILENT))
    main = next((frames for ident, frames in found if ident == process.main), [])
    others = [
        (f"thread {ident:#x}", frames)
        for ident, frames in found
        if ident != process.main and not _is_watching(frames)
    ]
    return _composed(HELD, main, others)


def _is_watching(frames: Sequence[_Frame]) -> bool:
    """Return whether frames are of a watching thread of the library."""
    return any(
        file.startswith(_SAFETY) and name in ("_loop", "_watch")
        for file, _, name in frames
    )


def _dump(process: Process) -> str:
    """Send a process its signal, and return the stacks that it writes, or nothing."""
    pid = process.pid
    try:
        own = os.open(f"/proc/{pid}/fd/{process.handle}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if os.fstat(own).st_size > _LARGEST_DUMP:
            os.ftruncate(own, 0)
        start = os.fstat(own).st_size
        # After a call of exec, the process has no handler: the signal would kill it.
        if not _is_caught(pid, process.signal) or not _send(process):
            return ""
        size, deadline, settled = start, time.monotonic() + _DUMP_SECONDS, 0.0
        while time.monotonic() < deadline:
            time.sleep(_NAP_SECONDS)
            grown = os.fstat(own).st_size
            if grown != size:
                size, settled = grown, time.monotonic() + _SETTLED_SECONDS
            elif settled and time.monotonic() > settled:
                break
        return os.pread(own, size - start, start).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(own)


def _send(process: Process) -> bool:
    """Send a process its signal, unless its pid was reused; return True if sent."""
    handle = -1
    with contextlib.suppress(AttributeError, OSError):
        handle = os.pidfd_open(process.pid)
    try:
        if _stat(process.pid)[1] != process.start:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, process.signal)
        else:
            # Linux kernels before 5.3 have no pidfd_open.
            os.kill(process.pid, process.signal)
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def _where(frames: Iterable[_Frame]) -> str:
    for file, line, function in frames:
        if is_of_program(file):
            return f"{function} ({os.path.basename(file)}:{line})"
    return ""


def _composed(
    words: str, main: list[_Frame], others: Sequence[tuple[str, list[_Frame]]]
) -> Stacks:
    """Return a `Stacks` with text of limited size, the main thread first."""
    lines = _lines("main thread", main, _MAIN_FRAMES)
    for title, frames in others[:_OTHER_THREADS]:
        lines += _lines(title, frames, _OTHER_FRAMES)
    if len(others) > _OTHER_THREADS:
        lines.append(f"  and {len(others) - _OTHER_THREADS} more threads")
    data = "\n".join(lines).encode(errors="replace")
    text = data[:_MOST_BYTES].decode(errors="ignore")
    if len(data) > _MOST_BYTES:
        text += " ..."
    return Stacks(words, _where(main)[:_MOST_CHARACTERS], text)


def _lines(title: str, frames: list[_Frame], most: int) -> list[str]:
    shown = [f'    File "{f}", line {n} in {name}' for f, n, name in frames]
    if len(shown) > most:
        left = len(shown) - most
        shown[most // 2 : most // 2 + left] = [f"    ... {left} more frames ..."]
    return [f"  {title} (most recent call first):", *shown]
