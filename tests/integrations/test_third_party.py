"""Programs of others, installed in environments of their own, on two ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from hpcstrat import testing

HERE = Path(__file__).parent
CLI = "from hpcstrat.cli import main; main()"


@pytest.mark.framework("jax")
@pytest.mark.skipif(
    importlib.util.find_spec("netket") is None, reason="netket is not installed"
)
def test_netket_finds_the_energy_of_one_process() -> None:
    program = str(HERE / "programs" / "netket_ising.py")
    energies = []
    for words in ([program], ["-c", CLI, "jax", program]):
        n = 2 if CLI in words else 1
        finished = testing.launch(n, [sys.executable, *words], timeout=400)
        assert finished.returncode == 0, finished.stderr
        # Gloo prints lines of its own.
        lines = finished.stdout.splitlines()
        (line,) = [line for line in lines if not line.startswith("[Gloo]")]
        processes, devices, energy = line.split()
        assert (int(processes), int(devices)) == (n, n)
        energies.append(float(energy))
    # Sums over samples have another order.
    assert energies[0] == pytest.approx(energies[1], rel=1e-6)
