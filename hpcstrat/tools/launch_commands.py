"""The commands ``hpcstrat torch`` and ``hpcstrat jax``, which run programs over MPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

import click

__all__ = ["jax", "torch"]


@click.command(
    # Options after PROGRAM belong to the program, even if this command has them, too.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--replace",
    type=click.Choice(["gloo", "nccl"]),
    help="Use hpcstrat if the program requests this backend, or no backend.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module's name.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def torch(
    program: str, arguments: tuple[str, ...], replace: str | None, *, module: bool
) -> None:
    """Run a program of torch.distributed under mpirun or srun, instead of torchrun.

    \b
        mpirun -n 8 hpcstrat torch --replace gloo train.py --epochs 3

    The command sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and similar variables from MPI, if they are not set. The program can
    pass the backend "hpcstrat" to init_process_group. With --replace you need not
    change the program. The launcher determines the number of ranks; without a launcher
    there is one rank. Arguments after PROGRAM are passed to the program.
    """
    _become("torch", [replace or ""], program, arguments, module=module)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--ranks-per-replica",
    type=click.IntRange(1),
    metavar="M",
    help="Make each M ranks the processes of a separate jax.distributed.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module's name.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def jax(
    program: str,
    arguments: tuple[str, ...],
    ranks_per_replica: int | None,
    *,
    module: bool,
) -> None:
    """Run a program of several processes of JAX under mpirun or srun.

    \b
        mpirun -n 8 hpcstrat jax train.py --epochs 3

    Each rank is a process of jax.distributed. Before the program begins, the command
    initializes jax.distributed with the rank and the number of ranks from MPI, the
    address of rank 0, and one GPU for each rank, if there are GPUs. Therefore
    jax.devices() lists the devices of all ranks. If the program itself calls
    jax.distributed.initialize(), that call has no effect. Arguments after PROGRAM are
    passed to the program.

    With --ranks-per-replica, jax.devices() lists only the devices of the ranks of a
    replica, as in a strategy with ranks_per_replica=M. So shard_map divides arrays
    inside of a replica, and hpcstrat averages gradients over the replicas.
    """
    _become("jax", [str(ranks_per_replica or 0)], program, arguments, module=module)


def _become(
    framework: str,
    options: Sequence[str],
    program: str,
    arguments: Sequence[str],
    *,
    module: bool,
) -> NoReturn:
    """Replace this process by one that sets up the framework and runs the program."""
    # Only look for the framework: the program that replaces this one imports it.
    if find_spec(framework) is None:
        raise click.ClickException(
            f"expected {framework}, found none; install it: pip install {framework}"
        )
    if not module and not os.path.exists(program):
        raise click.ClickException(
            f"expected a program, found no file {program!r}; give its path, or a "
            "module's name with -m"
        )
    # Replace the process, so that the launcher's signals reach the program, and the
    # launcher gets the program's exit status.
    kind = "module" if module else "script"
    launcher = f"hpcstrat.integrations.{framework}.{framework}_launcher"
    words = [*options, kind, program, *arguments]
    os.execv(sys.executable, [sys.executable, "-m", launcher, *words])
