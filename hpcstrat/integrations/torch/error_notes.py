"""Notes for errors of programs that an option of ``hpcstrat torch`` can prevent."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpcstrat._launchers import SCHEDULERS, is_of_launcher

__all__ = ["notes"]

# Parts of torch's messages, what was expected of the program, what it did, and what
# helps.
_KNOWN = (
    (
        ("Default process group has not been initialized",),
        "a program that makes its process group",
        "that it made none, as programs do that make one for GPUs only",
        "add --make-group",
    ),
    (
        ("device_ids and output_device arguments only work with",),
        "no device_ids for a module on CPUs",
        "a program that passes them",
        "add --on-cpus",
    ),
    (
        ("SyncBatchNorm expected input tensor to be on", "SyncBatchNorm layers only"),
        "no torch.nn.SyncBatchNorm on CPUs",
        "a program that uses it",
        "add --on-cpus",
    ),
    (
        ("device_id is an int, but no", "device_id cuda", "use a device_id with index"),
        "no device_id for a group on CPUs",
        "a program that passes it",
        "add --on-cpus",
    ),
    (
        ("NCCL built in", "ProcessGroupNCCL is only supported with GPUs"),
        "a process group for CPUs",
        "a program that asks for the backend nccl",
        "add --replace nccl",
    ),
    (
        ("MPI built in",),
        "a process group that this torch has",
        "a program that asks for the backend mpi",
        "add --replace mpi",
    ),
    (
        ("trying to initialize the default process group twice",),
        "one default process group",
        "a program that makes a second one",
        "let it call destroy_process_group first, or leave out --make-group",
    ),
)
_VARIABLES = (("SLURM", "slurm"), ("OMPI_", "openmpi"), ("TORCHELASTIC_", "torchrun"))


def notes(error: BaseException) -> Iterator[str]:
    """Yield a sentence if an option helps against an error; at most one."""
    text = str(error)
    if isinstance(error, KeyError):
        for beginning, name in _VARIABLES:
            if text.strip("'\"").startswith(beginning):
                yield (
                    f"hpcstrat torch: expected a program that needs no variable {text},"
                    f" found one that reads it; add --set {name}"
                )
        return
    for parts, expected, found, advice in _KNOWN:
        if any(part in text for part in parts):
            yield f"hpcstrat torch: expected {expected}, found {found}; {advice}"
            return
    for variable, name in _variables_in_code_that_raised(error):
        yield (
            f"hpcstrat torch: expected a program that runs under every launcher, found "
            f"{type(error).__name__} in code that looks for {variable}; add --hide "
            f"{name} if it need not see this variable"
        )
        return


def _variables_in_code_that_raised(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield launchers' variables that are set and named in the code that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    for constant in trace.tb_frame.f_code.co_consts if trace else ():
        if isinstance(constant, str) and constant in os.environ:
            if is_of_launcher(constant):
                yield constant, "mpi"
            elif constant.startswith(SCHEDULERS["Slurm"].prefixes):
                yield constant, "slurm"
