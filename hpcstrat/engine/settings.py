"""Settings of a strategy, given by the program or by environment variables.

A value that the program passes as `Settings` has priority. If there is none, the
environment variable of replica 0 is used (``HPCSTRAT_`` and the name in capitals), and
then the default. The settings of replica 0 are used for the whole job, because
launchers often give the nodes different environments.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["PREFIX", "Settings"]

PREFIX = "HPCSTRAT_"
"""Prefix of the names of all environment variables of the library."""

# Beginnings of the names of variables that are not settings: variables of the test
# suite, of its stand-in for CuPy, of hpcstrat.testing, and of hpcstrat watch.
_NOT_SETTINGS = (f"{PREFIX}TEST", f"{PREFIX}STANDIN", f"{PREFIX}WATCH_")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _setting(default: Any, *, choices: tuple[str, ...] = (), least: float = 0) -> Any:
    """Return a field that is None until `Settings.resolved` fills it."""
    metadata = {"default": default, "choices": choices, "least": least}
    return dataclasses.field(default=None, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a strategy: checks, reports, devices and native code.

    Parameters
    ----------
    watchdog : bool, optional
        Whether a thread of each rank reports which ranks are late, and what they do.
        Default: True.
    warn_seconds : float, optional
        Seconds of waiting until the watchdog's report. Default: 60.
    limit_seconds : float, optional
        Seconds of waiting until the job ends. Default: 1800.
    stack_signal : int, optional
        Number of a real-time signal, counted from SIGRTMIN. By this signal, another
        rank on the same machine makes a rank that is stuck in C code print its stack. 0
        uses no signal. Default: 9.
    divergence : str, optional
        How the copies of mirrored variables, which must be equal, are compared at each
        entry into ``run``: ``"rolling"`` compares a thousandth of the bytes each time;
        ``"full"`` also compares all bytes every `divergence_interval` calls;
        ``"off"`` compares nothing. Default: ``"rolling"``.
    divergence_interval : int, optional
        Number of calls of ``run`` from one full comparison to the next.
        Default: 1000.
    divergence_tolerance : float, optional
        Allowed difference of floating-point copies, relative to the largest absolute
        value of the variable. 0 compares bits. Any other value requires messages, so
        that only full comparisons are made, no rolling comparisons. Default: 0.
    non_finite : str, optional
        Reaction of optimizers to combined gradients that are NaN or infinite:
        ``"off"`` does nothing; ``"warn"`` warns; ``"raise"`` raises a NonFiniteError on
        all replicas; ``"skip"`` skips the step on all replicas, with a warning.
        Default: ``"off"``.
    summary : str, optional
        Whether replica 0 reports the late replicas when the program ends: ``"on"``;
        ``"auto"``, only if waiting for late replicas took more than a tenth of the time
        and more than 10 s; ``"off"``. Default: ``"auto"``.
    summary_signal : str, optional
        Signal on which each worker's first replica reports the late replicas so far:
        ``"usr1"``, ``"usr2"``, ``"none"``. Not used if the program handles the signal
        itself. Default: ``"usr2"``.
    timeline : str, optional
        Folder for a timeline of the whole program; empty for no timeline. Default:
        empty.
    timeline_megabytes : int, optional
        Size in MiB at which a rank's file of a timeline ends. Default: 256.
    direct_io : str, optional
        Whether checkpoints bypass the page cache (O_DIRECT): ``"on"``; ``"off"``;
        ``"auto"``, only on ext4 and XFS, not on parallel and network file systems.
        Default: ``"auto"``.
    nvtx : bool, optional
        Whether a timeline's ranges are shown in NVIDIA's profilers, if CuPy is
        installed; works without a timeline, too. Default: False.
    device : str, optional
        The memory of variables and batches: ``"gpu"``, the GPU of each rank; ``"cpu"``;
        ``"auto"`` keeps arrays in the library from which they come, and assigns a GPU
        to each rank if the program has imported CuPy. Default: ``"auto"``.
    share_gpus : bool, optional
        Whether several ranks may use the same GPU; if not, a shared GPU raises an error
        on every rank. Default: False.
    mpi_reads_gpu : str, optional
        Whether GPU memory may be passed to the MPI library: ``"auto"``, only if a test
        has shown that this works, see ``hpcstrat doctor``; ``"yes"``, which ends the
        job by a segmentation fault if it does not work; ``"no"``. Default: ``"auto"``.
    nccl : bool, optional
        Whether NCCL may send arrays on GPUs. Default: True.
    native : bool, optional
        Whether the compiled kernel sums in the memory that the ranks of a machine
        share, if all of them have the kernel. If not, NumPy sums, with the same bits.
        With ``HPCSTRAT_NATIVE=0`` NumPy also computes the update rules of optimizers.
        Default: True.
    math_threads : int, optional
        With logical replicas, the number of threads of BLAS, OpenMP, PyTorch and XLA in
        each rank. This number changes the bits of a matrix product. Default: 1.
    step_digests : str, optional
        Folder for a log of hashes of the mirrored variables, one hash for each call
        of ``run``. ``hpcstrat verify-bits`` compares the logs of two runs. Empty for
        no log. Default: empty.
    hang_folder : str, optional
        Folder for the job's file ``hpcstrat-hang-*.jsonl``, which is written when ranks
        are late or an error ends the job. ``hpcstrat hang`` explains the file. The
        first file makes the folder; the newest ten files are kept. Empty for no file.
        Default: ``"hpcstrat-hang"``, in the working folder.

    Raises
    ------
    ValueError
        If a value is unknown or out of its range.
    """

    watchdog: bool | None = _setting(True)
    warn_seconds: float | None = _setting(60.0, least=0.01)
    limit_seconds: float | None = _setting(1800.0, least=0.01)
    stack_signal: int | None = _setting(9)
    divergence: str | None = _setting("rolling", choices=("rolling", "full", "off"))
    divergence_interval: int | None = _setting(1000, least=1)
    divergence_tolerance: float | None = _setting(0.0)
    non_finite: str | None = _setting("off", choices=("off", "warn", "raise", "skip"))
    summary: str | None = _setting("auto", choices=("auto", "on", "off"))
    summary_signal: str | None = _setting("usr2", choices=("usr1", "usr2", "none"))
    timeline: str | None = _setting("")
    timeline_megabytes: int | None = _setting(256, least=1)
    direct_io: str | None = _setting("auto", choices=("auto", "on", "off"))
    nvtx: bool | None = _setting(False)
    device: str | None = _setting("auto", choices=("auto", "cpu", "gpu"))
    share_gpus: bool | None = _setting(False)
    mpi_reads_gpu: str | None = _setting("auto", choices=("auto", "yes", "no"))
    nccl: bool | None = _setting(True)
    native: bool | None = _setting(True)
    math_threads: int | None = _setting(1, least=1)
    step_digests: str | None = _setting("")
    hang_folder: str | None = _setting("hpcstrat-hang")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                checked = _checked(field, value, field.name)
                # The ranks agree on the settings only once, so the class is frozen.
                object.__setattr__(self, field.name, checked)

    def resolved(self, environment: Mapping[str, str] | None = None) -> Self:
        """Return a copy in which the environment or defaults replace each None.

        Not collective. For the library's own modules.
        """
        environment = os.environ if environment is None else environment
        fields = {PREFIX + f.name.upper(): f for f in dataclasses.fields(self)}
        given = {
            name: text
            for name, text in environment.items()
            if name.startswith(PREFIX) and not name.startswith(_NOT_SETTINGS)
        }
        for name in given:
            # Raise, because a misspelled name would silently have no effect.
            if name not in fields:
                raise ValueError(
                    f"expected {PREFIX}* to name a setting, found {name}; "
                    f"{_advice(name, list(fields))}"
                )
        values = {
            field.name: _parsed(field, given[name], name)
            if name in given
            else field.metadata["default"]
            for name, field in fields.items()
            if getattr(self, field.name) is None
        }
        return dataclasses.replace(self, **values)

    def differ_from(self, others: Self) -> bool:
        """Return whether a value that is not None here has another value in ``others``.

        Not collective. For the library's own modules.
        """
        names = (field.name for field in dataclasses.fields(self))
        return any(getattr(self, n) not in (None, getattr(others, n)) for n in names)


def _advice(name: str, known: list[str]) -> str:
    ends = [other.removeprefix(PREFIX) for other in known]
    # The common prefix would make all names similar.
    close = difflib.get_close_matches(name.removeprefix(PREFIX), ends, 1, 0.6)
    if close:
        return f"write {PREFIX}{close[0]}, or unset it"
    return f"unset it, or choose one of {', '.join(known)}"


def _parsed(field: Any, text: str, name: str) -> Any:
    """Return the value of a setting from the text of an environment variable."""
    default, word = field.metadata["default"], text.strip()
    value: Any = word
    # Test for bool before int, because True is an int, too.
    if isinstance(default, bool):
        if word.lower() not in _TRUE + _FALSE:
            raise ValueError(
                f"expected {name} to be 1 or 0, found {text!r}; choose one"
            )
        value = word.lower() in _TRUE
    elif isinstance(default, (int, float)):
        try:
            value = type(default)(word)
        except ValueError:
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise ValueError(
                f"expected {name} to be {kind}, found {text!r}; change or unset it"
            ) from None
    return _checked(field, value, name)


def _checked(field: Any, value: Any, name: str) -> Any:
    """Return the value in its setting's type, or raise if it is not allowed."""
    default, choices = field.metadata["default"], field.metadata["choices"]
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    # Do not use isinstance, because True is an instance of int.
    if type(value) is not kind:
        raise TypeError(
            f"expected {name} of type {kind.__name__}, found {value!r}; change it"
        )
    if choices:
        value = value.lower()
        if value not in choices:
            words = ", ".join(repr(choice) for choice in choices)
            raise ValueError(
                f"expected {name} to be one of {words}, found {value!r}; choose one"
            )
    least = field.metadata["least"]
    if kind in (int, float) and (not math.isfinite(value) or value < least):
        raise ValueError(
            f"expected {name} >= {least:g} and finite, found {value}; change it"
        )
    return value
