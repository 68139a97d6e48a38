"""The programs of the gallery and of the tutorials: the same on two ranks as on one."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcstrat import testing
from hpcstrat.testing.launcher import clean_environment
from tests.docs.page import numbers_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LARGEST_BYTES = 300_000
# By page: the framework, the program, and options with which it takes few seconds.
SMALL = {
    "digits": ("torch", "digits_torch.py --epochs 1"),
    "gpt": ("torch", f"gpt_torch.py --epochs 1 --text {DOCS / 'glossary.md'}"),
    "pinn": ("jax", "pinn_jax.py --steps 16"),
    "ising": ("", "ising.py --sweeps 104 --side 6 --every 52"),
    "scaling": ("", "scaling_step.py"),
}
# By program: the framework, and the program that prints the same.
TUTORIALS = {
    "rod.py 3000": ("", "rod_mpi4py.py 3000"),
    "loop.py": ("", "loop.py"),
    "spirals.py": ("torch", "spirals.py"),
    "spirals_saved.py 30": ("torch", "spirals.py"),
    "fit.py": ("keras", "fit.py"),
}


def _gallery() -> Any:
    """Return the module that makes what the pages show."""
    path = DOCS / "gallery" / "make.py"
    spec = importlib.util.spec_from_file_location("make", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make"] = module
    spec.loader.exec_module(module)
    return module


def _said(n: int, command: str, folder: Path) -> str:
    """Run a program of docs on n ranks; return what it prints."""
    folder.mkdir(exist_ok=True)
    program, *options = command.split()
    words = [sys.executable, str(DOCS / program), *options]
    changes = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env = clean_environment(changes | {"KERAS_BACKEND": "torch"})
    words = testing.launch_command(n) + words if n > 1 else words
    done = subprocess.run(
        words,
        check=False,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _marked(table: dict[str, tuple[str, str]]) -> list[Any]:
    """Return a parameter for each row, with the framework that it needs."""
    return [
        pytest.param(*row, marks=[pytest.mark.framework(kind)] if kind else [], id=name)
        for name, (kind, command) in table.items()
        for row in [(name, command)]
    ]


@pytest.mark.parametrize(("page", "command"), _marked(SMALL))
def test_programs_of_the_gallery_compute_the_same(
    page: str, command: str, tmp_path: Path
) -> None:
    found = []
    for n in (1, 2):
        said = _said(n, f"examples/{command}", tmp_path / str(n))
        values = json.loads(said.splitlines()[-1])
        # What is not a number is text that a model has written.
        found.append([x for v in values.values() if v != str(v) for x in numbers_of(v)])
    assert found[0]
    np.testing.assert_allclose(found[1], found[0], rtol=2e-3, atol=1e-4)


def test_the_simulation_of_the_gallery_goes_on_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    small = f"examples/ising.py --side 6 --every 51 --checkpoints {tmp_path / 'saved'}"
    _said(2, f"{small} --sweeps 102", tmp_path / "first")
    second = _said(1, f"{small} --sweeps 204", tmp_path / "second")
    assert "from sweep 102 to 204" in second
    alone = _said(1, "examples/ising.py --side 6 --sweeps 204", tmp_path / "alone")
    assert second.splitlines()[-1] == alone.splitlines()[-1]


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that says what a program prints alone, and runs it once."""

    @functools.cache
    def said(program: str) -> str:
        return _said(1, f"tutorials/{program}", tmp_path_factory.mktemp("one"))

    return said


@pytest.mark.parametrize(("program", "like"), _marked(TUTORIALS))
def test_programs_of_tutorials_print_the_same(
    program: str, like: str, of_one_process: Callable[[str], str], tmp_path: Path
) -> None:
    one = of_one_process(like)
    two = _said(2, f"tutorials/{program}", tmp_path / "two")
    assert len(one.splitlines()) >= 5
    for of_one, of_two in zip(one.splitlines(), two.splitlines(), strict=True):
        label, _, loss = of_one.rpartition(" ")
        assert of_two.startswith(label)
        assert float(of_two.split()[-1]) == pytest.approx(float(loss), abs=5e-3)


def test_a_simulation_of_a_tutorial_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole = _said(2, "tutorials/rod.py 3000", tmp_path / "run")
    saved = (tmp_path / "run" / "rod").glob("ckpt-*.h5")
    max(saved, key=lambda path: int(path.stem.partition("-")[2])).unlink()
    rest = _said(1, "tutorials/rod.py 3000", tmp_path / "run")
    assert rest.splitlines() == whole.splitlines()[-1:]


def test_pages_show_what_the_commands_printed() -> None:
    pages = {p.stem for p in (DOCS / "gallery").glob("*.md")} - {"index"}
    examples = _gallery().EXAMPLES_OF_PAGES
    assert pages == set(examples) == {*SMALL, "embeddings"}
    for name, example in examples.items():
        text = (DOCS / "gallery" / f"{name}.txt").read_text()
        shown = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        assert shown == list(example.commands), f"run docs/gallery/make.py {name}"
        for kind in ("txt", "png"):
            size = (DOCS / "gallery" / f"{name}.{kind}").stat().st_size
            assert 100 < size < LARGEST_BYTES, f"{name}.{kind}"
