"""Run Horovod's own tests of PyTorch here: ``horovod_suite.py CHECKOUT [options]``.

Under ``mpirun``, with pytest's options. Left out are tests of what is not served, of
process sets and ``join``; one that compares times taken on two ranks; and, on more than
two ranks, three that expect of sums in float16 that they are not rounded.
"""

from __future__ import annotations

import sys
import types
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch

import hpcstrat.integrations.horovod.torch as hvd
from hpcstrat.cluster_resolver import launch_from_environment


def main() -> int:
    """Put the integration in Horovod's place, and run its tests."""
    packages: list[Any] = []
    for name in ("horovod", "horovod.runner", "horovod.runner.util"):
        packages.append(types.ModuleType(name))
        sys.modules[name] = packages[-1]
    # What its helpers import, and these tests do not use.
    threads: Any = types.ModuleType("threads")
    threads.in_thread = None
    sys.modules["horovod.runner.util.threads"] = threads
    sys.modules.setdefault("mock", unittest.mock)
    sys.modules["horovod.torch"] = packages[0].torch = hvd
    # It tries every optimizer that torch has, on parameters that newer ones refuse.
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "newer than Horovod's tests"
    torch.set_num_threads(1)
    without = ["process_set", "join", "global_barrier"]
    if (launch_from_environment().size or 1) > 2:
        without += ["allreduce_prescale", "reducescatter_prescale"]
    chosen = " and ".join(f"not {word}" for word in without)
    file = Path(sys.argv[1]) / "test" / "parallel" / "test_torch.py"
    words = [str(file), "-p", "no:cacheprovider", "-q", "-rs", "-k", chosen]
    return int(pytest.main([*words, "--rootdir", sys.argv[1], *sys.argv[2:]]))


if __name__ == "__main__":
    sys.exit(main())
