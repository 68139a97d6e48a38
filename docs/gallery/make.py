"""Run the programs of the gallery, and keep what they print and draw.

    python docs/gallery/make.py             # all of them, some minutes on two cores
    python docs/gallery/make.py ising gpt

For each page NAME.md it writes NAME.png, and NAME.txt: the commands with their output.
Needs hpcstrat with its extras torch, jax, keras and plot, and mpirun. Programs of
others need environments of their own, which docs/gallery/third_party.py makes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcstrat.testing import launch_command

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "docs" / "examples"
SCALING = (
    "mpirun -n N hpcstrat bench scaling --step scaling_step:make_step --parts step "
    "--batch-size 256 -o scaling-{n}.json"
)
LOSS = re.compile(r"^(?:epoch|step) (\d+): loss (\S+)$", re.M)
# For each program of others: the axes of its picture.
THIRD_PARTY = {
    "nequip": ("epoch", "validation error"),
    "mace": ("epoch", "error of the forces (eV/Å)"),
    "netket": ("step", "energy"),
}
VALUE = re.compile(r"^(.+), (?:epoch|step) (\d+): (?:error|energy) (\S+)$", re.M)


@dataclass(frozen=True)
class Example:
    """The commands that are run for a page, and the way in which its picture is made.

    Parameters
    ----------
    commands : tuple of str
        Run one after the other in one folder; a program is found in docs/examples.
    picture : str or callable
        The file that the commands leave; or draws into a file what they printed.
    """

    commands: tuple[str, ...]
    picture: str | Callable[[dict[str, str], Path], None]


def draw_losses(said: dict[str, str], path: Path) -> None:
    """Draw the losses that each command printed, as a curve of its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for number, (command, text) in enumerate(said.items()):
        steps, losses = zip(*LOSS.findall(text), strict=True)
        name = re.sub(r"\s*(--\w+ \S+|\w+=\S+)\s*", " ", command).strip()
        # Equal curves lie below one another: the first ones are wider.
        width = 1.5 + 3 * (len(said) - 1 - number)
        axes.plot(
            [*map(int, steps)], [*map(float, losses)], label=name, linewidth=width
        )
    unit = "epoch" if "epoch" in text else "step"
    axes.set(xlabel=unit, ylabel="loss", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


EXAMPLES_OF_PAGES = {
    "digits": Example(
        (
            "python digits_torch.py --epochs 10",
            "mpirun -n 2 python digits_torch.py --epochs 10",
            "mpirun -n 3 python digits_torch.py --epochs 10",
        ),
        draw_losses,
    ),
    "gpt": Example(("mpirun -n 2 python gpt_torch.py --epochs 8",), draw_losses),
    "pinn": Example(
        ("mpirun -n 2 python pinn_jax.py --steps 2000 --picture burgers.png",),
        "burgers.png",
    ),
    "heat": Example(
        (
            "RANKS_PER_REPLICA=1 mpirun -n 2 python heat_fit.py",
            "RANKS_PER_REPLICA=2 mpirun -n 4 python heat_fit.py --picture heat.png",
        ),
        "heat.png",
    ),
    "ising": Example(
        (
            "mpirun -n 2 python ising.py --sweeps 500 --checkpoints ising",
            "mpirun -n 3 python ising.py --sweeps 1000 --checkpoints ising "
            "--picture ising.png",
        ),
        "ising.png",
    ),
    "embeddings": Example(
        ("mpirun -n 4 python embeddings_served.py --servers 1 --steps 100",),
        draw_losses,
    ),
    "scaling": Example(
        (
            SCALING.replace("N", "1", 1),
            SCALING.replace("N", "2", 1),
            "hpcstrat bench report scaling-1.json scaling-2.json",
        ),
        "report-scaling.png",
    ),
}


def run_page(name: str, folder: Path) -> str:
    """Run the commands of a page about a program of others; return what they print.

    The program is that of the environment of this Python.
    """
    page = (HERE / f"{name}.md").read_text()
    for program in re.findall(r"\(\.\./examples/(\w+\.py)\)", page):
        shutil.copy(EXAMPLES / program, folder)
    _, commands = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    env = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    words = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(
        words, check=False, cwd=folder, env=env, capture_output=True, text=True
    )
    if done.returncode:
        logs = "".join(path.read_text()[-4000:] for path in folder.glob("*.log"))
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr}{logs}")
    return done.stdout


def values_of(text: str) -> dict[str, dict[int, float]]:
    """Return for each run that a page's commands print: the value of each step."""
    found = dict[str, dict[int, float]]()
    for run, step, value in VALUE.findall(text):
        found.setdefault(run, {})[int(step)] = float(value)
    return found


def draw_values(name: str, text: str, path: Path) -> None:
    """Draw the values of one process as a line, and of two ranks as points on it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    one, two = values_of(text).values()
    axes.plot([*one], [*one.values()], label="one process")
    axes.plot([*two], [*two.values()], "o", label="two ranks", fillstyle="none")
    xlabel, ylabel = THIRD_PARTY[name]
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def run(command: str, folder: Path) -> str:
    """Run a command, as a reader would type it; return what it prints."""
    words = shlex.split(command)
    given = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        given[name] = value
    launcher: list[str] = []
    if words[:2] == ["mpirun", "-n"]:
        launcher, words = launch_command(int(words[2])), words[3:]
    if words[0] == "python":
        program = [sys.executable, str(EXAMPLES / words[1])]
        words = [*launcher, *program, *words[2:]]
    else:
        program = [sys.executable, "-c", "from hpcstrat.cli import main; main()"]
        words = [*launcher, *program, *words[1:]]
    path = os.pathsep.join((str(EXAMPLES), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **given}
    done = subprocess.run(
        words, check=False, cwd=folder, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stderr}")
    # The commands of hpcstrat report on standard error, those of programs only warn.
    return done.stdout + done.stderr * ("hpcstrat" in command)


def make(name: str) -> None:
    """Write what a page shows."""
    picture = HERE / f"{name}.png"
    if name in THIRD_PARTY:
        with tempfile.TemporaryDirectory(prefix="hpcstrat-") as folder:
            text = run_page(name, Path(folder))
        (HERE / f"{name}.txt").write_text(text)
        draw_values(name, text, picture)
        return
    example = EXAMPLES_OF_PAGES[name]
    with tempfile.TemporaryDirectory(prefix="hpcstrat-") as folder:
        said = {command: run(command, Path(folder)) for command in example.commands}
        if isinstance(example.picture, str):
            shutil.copy(Path(folder, example.picture), picture)
        else:
            example.picture(said, picture)
    texts = [f"$ {command}\n{text}" for command, text in said.items()]
    (HERE / f"{name}.txt").write_text("\n".join(texts))
    print(f"{name}: {picture.stat().st_size} bytes of picture")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or EXAMPLES_OF_PAGES:
        make(chosen)
