"""Settings of the checks and records that are always on: by option, or by environment.

Values that a program gives as `Settings` come first, then the environment
(``HPCSTRAT_`` and the name in capitals) of replica 0, then the default. Replica 0's
settings hold for the whole job, as launchers often give other nodes another
environment.
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
"""The names of all variables of the environment begin with this."""

# Variables of our own test suite, of its stand-in for CuPy, and of hpcstrat.testing.
_NOT_SETTINGS = (f"{PREFIX}TEST", f"{PREFIX}STANDIN")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _setting(default: Any, *, choices: tuple[str, ...] = (), least: float = 0) -> Any:
    """Return a field that is None until `Settings.resolved` fills it."""
    metadata = {"default": default, "choices": choices, "least": least}
    return dataclasses.field(default=None, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a strategy: how it watches over its ranks.

    Parameters
    ----------
    watchdog : bool, optional
        Whether a thread of each rank reports which ranks are late, and what they do.
        Default: True.
    warn_seconds : float, optional
        Seconds of waiting until that report. Default: 60.
    limit_seconds : float, optional
        Seconds of waiting until the job ends. Default: 1800.
    stack_signal : int, optional
        Real-time signal, counted from SIGRTMIN, by which another rank of its machine
        makes a rank that is stuck in C code show its stack; 0 is none. Default: 9.
    divergence : str, optional
        How mirrored variables, whose copies must be equal, are compared at entries into
        ``run``: ``"rolling"``, a thousandth of the bytes each time; ``"full"``, also
        all bytes, every `divergence_interval` times; ``"off"``. Default: ``"rolling"``.
    divergence_interval : int, optional
        Number of entries into ``run`` from one full comparison to the next.
        Default: 1000.
    divergence_tolerance : float, optional
        Allowed difference of floating copies, relative to the largest absolute value of
        the variable. 0 compares bits; another value, which needs messages, turns the
        rolling comparison off, so that only full ones are left. Default: 0.
    non_finite : str, optional
        What optimizers do about combined gradients that are NaN or infinite: ``"off"``;
        ``"warn"``; ``"raise"`` a NonFiniteError on all replicas; ``"skip"`` the step on
        all of them, with a warning. Default: ``"off"``.
    summary : str, optional
        Whether replica 0 reports at the end who was late: ``"on"``; ``"auto"``, if more
        than a tenth of the time and more than 10 s were lost by waiting for late
        replicas; ``"off"``. Default: ``"auto"``.
    summary_signal : str, optional
        Signal on which each worker's first replica reports who was late so far:
        ``"usr1"``, ``"usr2"``, ``"none"``. A signal that the program uses itself is
        left alone. Default: ``"usr2"``.
    timeline : str, optional
        Folder for a timeline of the whole program; empty for none. Default: empty.
    timeline_megabytes : int, optional
        Size in MiB at which a rank's file of a timeline ends. Default: 256.
    direct_io : str, optional
        Whether checkpoints go past the page cache (O_DIRECT): ``"on"``; ``"off"``;
        ``"auto"`` does so on ext4 and XFS, not on parallel and network file systems.
        Default: ``"auto"``.
    nvtx : bool, optional
        Whether a timeline's ranges are shown to NVIDIA's profilers, where CuPy is
        installed; also without a timeline. Default: False.
    device : str, optional
        Where variables and batches are: ``"gpu"``, on the GPU of each rank; ``"cpu"``;
        ``"auto"`` leaves them in the library that they come in, and gives each rank its
        GPU if the program has imported CuPy. Default: ``"auto"``.
    share_gpus : bool, optional
        Whether several ranks may have the same GPU, which is an error otherwise.
        Default: False.
    mpi_reads_gpu : str, optional
        Whether the MPI library may be given the memory of GPUs: ``"auto"``, where a
        trial has shown that it can, see ``hpcstrat doctor``; ``"yes"``, which ends the
        job by a segmentation fault if it cannot; ``"no"``. Default: ``"auto"``.
    nccl : bool, optional
        Whether NCCL may carry arrays on GPUs. Default: True.
    native : bool, optional
        Whether the compiled kernel sums in the memory that the ranks of a machine
        share, where all of them have it; else NumPy does, with the same bits.
        ``HPCSTRAT_NATIVE=0`` leaves the update rules of optimizers to NumPy, too.
        Default: True.
    math_threads : int, optional
        With logical replicas, number of threads that BLAS, OpenMP, PyTorch and XLA have
        in each rank: it changes the bits of a matrix product. Default: 1.
    step_digests : str, optional
        Folder for a log of digests of the mirrored variables, one for each entry into
        ``run``, which ``hpcstrat verify-bits`` compares with that of another run; empty
        for none. Default: empty.
    hang_folder : str, optional
        Folder for the job's file ``hpcstrat-hang-*.jsonl``, written when ranks are late
        or an error ends the job, and explained by ``hpcstrat hang``; empty for none.
        Default: ``"."``.

    Raises
    ------
    ValueError
        If a value is out of its range, or unknown.
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
    hang_folder: str | None = _setting(".")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                checked = _checked(field, value, field.name)
                # Frozen to others: settings are agreed once, when a strategy is made.
                object.__setattr__(self, field.name, checked)

    def resolved(self, environment: Mapping[str, str] | None = None) -> Self:
        """Fill what is None from the environment, or by its default.

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
            # Otherwise nobody would notice that a misspelled name has no effect.
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
        """Whether a value that is given here differs from another's.

        Not collective. For the library's own modules.
        """
        names = (field.name for field in dataclasses.fields(self))
        return any(getattr(self, n) not in (None, getattr(others, n)) for n in names)


def _advice(name: str, known: list[str]) -> str:
    ends = [other.removeprefix(PREFIX) for other in known]
    # The prefix, which all names share, would make every name close.
    close = difflib.get_close_matches(name.removeprefix(PREFIX), ends, 1, 0.6)
    if close:
        return f"write {PREFIX}{close[0]}, or unset it"
    return f"unset it, or choose one of {', '.join(known)}"


def _parsed(field: Any, text: str, name: str) -> Any:
    """Return the value of a variable of the environment."""
    default, word = field.metadata["default"], text.strip()
    value: Any = word
    # Before numbers: True is an int, too.
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
    """Return the value as its setting's type, if it is in range."""
    default, choices = field.metadata["default"], field.metadata["choices"]
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    # Not isinstance, to which True would be a number.
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
