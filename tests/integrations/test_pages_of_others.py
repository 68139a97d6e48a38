"""Programs of DDP and Horovod in the guides, over MPI, with at most one change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat import testing
from tests.docs.page import blocks

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
DATASET = """
import torch
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(x, x.sum(1))
"""
pytestmark = pytest.mark.framework("torch")


def _program(page: str, word: str, folder: Path) -> Path:
    """Write the code block of a page that contains a word, with a dataset before it."""
    texts = [block.code for block in blocks((PAGES / page).read_text())]
    (code,) = [text for text in texts if word in text and text.startswith("# Not run")]
    program = folder / "program.py"
    program.write_text(DATASET + code)
    return program


def test_the_program_of_ddp_stays_as_it_is(tmp_path: Path) -> None:
    program = _program("torch-ddp.md", 'init_process_group("gloo")', tmp_path)
    cli = "from hpcstrat.cli import main; main()"
    words = ["-c", cli, "torch", "--replace", "gloo", str(program)]
    done = testing.launch(2, [sys.executable, *words], timeout=120)
    assert done.returncode == 0, done.stderr
    # Replica 0 prints the mean of each epoch's last losses.
    losses = [line.split() for line in done.stdout.splitlines()]
    assert [epoch for epoch, _ in losses] == [str(epoch) for epoch in range(10)]
    assert float(losses[-1][1]) < float(losses[0][1])


def test_the_program_of_horovod_changes_its_import(tmp_path: Path) -> None:
    program = _program("horovod.md", "import horovod.torch as hvd", tmp_path)
    code = program.read_text().replace(
        "import horovod.torch as hvd",
        "import hpcstrat.integrations.horovod.torch as hvd",
    )
    program.write_text(code.replace('"model.pt"', repr(str(tmp_path / "model.pt"))))
    done = testing.launch(2, [sys.executable, str(program)], timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.pt").exists()
