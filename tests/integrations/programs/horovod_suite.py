"""Run Horovod's own tests of PyTorch here: ``horovod_suite.py CHECKOUT [options]``.

The program runs under ``mpirun``, with pytest's options. It leaves out tests of
unsupported features, of process sets and of ``join``; one test that compares times
measured on two ranks; and, on more than two ranks, three tests that expect float16 sums
without rounding.
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
    """Install the integration under Horovod's name, and run Horovod's tests."""
    packages: list[Any] = []
    for name in ("horovod", "horovod.runner", "horovod.runner.util"):
        packages.append(types.ModuleType(name))
        sys.modules[name] = packages[-1]
    # The tests' helpers import this module, but these tests do not use it.
    threads: Any = types.ModuleType("threads")
    threads.in_thread = None
    sys.modules["horovod.runner.util.threads"] = threads
    sys.modules.setdefault("mock", unittest.mock)
    sys.modules["horovod.torch"] = packages[0].torch = hvd
    # The suite tries every optimizer in torch, but newer ones refuse its parameters.
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
