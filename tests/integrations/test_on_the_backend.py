"""Libraries over the backend of torch.distributed, where they are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat import testing

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
