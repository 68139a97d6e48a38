"""Runs a program of torch.distributed over MPI, for ``hpcstrat torch``.

Usage: ``python -m hpcstrat.integrations.torch.torch_launcher NAME KIND PROGRAM
[ARGS]``. ``NAME`` is the backend to replace, or empty; ``KIND`` is ``script`` or
``module``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from hpcstrat.integrations.frameworks import run_program
from hpcstrat.integrations.torch.environment import init_env
from hpcstrat.integrations.torch.process_group import BACKEND

__all__ = ["replace_backend"]


def replace_backend(name: str) -> None:
    """Replace the backend ``name`` by ``hpcstrat`` in all groups that are made later.

    ``hpcstrat`` is also used if the program names no backend, and if it names a list
    that contains ``name``, such as ``cpu:gloo,cuda:nccl``.
    """
    from torch.distributed import distributed_c10d

    # Every function of torch that makes a group calls this helper.
    found = getattr(distributed_c10d, "_new_process_group_helper", None)
    if found is None:
        import torch

        raise ImportError(
            "expected a torch whose groups are made by _new_process_group_helper, "
            f"found {torch.__version__}; name the backend {BACKEND!r} in the program"
        )

    @functools.wraps(found)
    def helper(
        size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        words = [word.rpartition(":")[2] for word in str(backend).lower().split(",")]
        if name in words or "undefined" in words:
            backend = BACKEND
        return found(size, rank, ranks, backend, *args, **kwargs)

    distributed_c10d._new_process_group_helper = helper


def _main() -> None:
    replaced, kind, program, *words = sys.argv[1:]
    init_env()
    if replaced:
        replace_backend(replaced)
    run_program(kind, program, words)


if __name__ == "__main__":
    _main()
