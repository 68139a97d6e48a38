"""PyTorch's own tests of torch.distributed, which torch contains."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.framework("torch", "expecttest")]


@pytest.mark.parametrize("n", [2, 3])
def test_what_gloo_passes_passes(n: int) -> None:
    program = "tests.integrations.programs.torch_suite"
    words = [sys.executable, "-m", program, str(n), "--gpus"]
    finished = subprocess.run(
        words, check=False, stdout=subprocess.PIPE, text=True, timeout=1800
    )
    print(finished.stdout)
    assert finished.returncode == 0
