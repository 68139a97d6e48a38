"""Libraries over the backend of torch.distributed, if they are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcstrat import testing
from hpcstrat.testing.launcher import clean_environment

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "on_the_backend.py"


def _alone(ranks: int) -> list[float]:
    """Train in one process, on the rows of all ranks in each step."""
    import torch

    from tests.integrations.programs.on_the_backend import EPOCHS, data, line, loss_of

    net, rows = line(), data()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(EPOCHS):
        for x, y in torch.utils.data.DataLoader(rows, 16 * ranks):
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
    return [*net.weight.flatten().tolist(), *net.bias.tolist()]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.framework("torch", how.partition("_")[0]))
        for how in (
            "lightning_trainer",
            "lightning_fabric",
            "accelerate",
            "transformers",
        )
    ],
)
def test_it_trains_as_one_process(how: str, tmp_path: Path) -> None:
    told = tmp_path / "weights"
    finished = testing.launch(
        2, [sys.executable, str(PROGRAM), how, str(told)], timeout=180
    )
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0
    weights = [float(word) for word in told.read_text().split()]
    assert weights == pytest.approx(_alone(2), rel=1e-5, abs=1e-6)


@pytest.mark.framework("torch", "lightning")
def test_lightning_takes_devices_at_their_word(tmp_path: Path) -> None:
    """As Lightning's page says, ``devices`` is not compared with MPI's number."""
    told = tmp_path / "weights"
    words = [sys.executable, str(PROGRAM), "lightning_trainer", str(told)]
    alone = subprocess.run(
        words,
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env=clean_environment({"PYTHONPATH": str(ROOT), "DEVICES": "2"}),
    )
    assert alone.returncode == 0, alone.stderr
    weights = [float(word) for word in told.read_text().split()]
    assert weights == pytest.approx(_alone(1), rel=1e-5, abs=1e-6)
    three = testing.launch(3, words, timeout=180, env={"DEVICES": "2"})
    assert three.returncode
    assert "IndexError" in three.stderr
