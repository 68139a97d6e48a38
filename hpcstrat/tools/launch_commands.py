"""The commands ``hpcstrat torch`` and ``hpcstrat jax``, which run programs over MPI."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

import click

from hpcstrat.tools.program_files import find_program, require_statements

__all__ = ["jax", "torch"]


@click.command(
    # Options after PROGRAM belong to the program, even if this command has them, too.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--replace",
    multiple=True,
    type=click.Choice(["gloo", "mpi", "nccl", "ucc", "xccl"]),
    help="Use hpcstrat if the program requests this backend, or no backend. May be "
    "given several times.",
)
@click.option(
    "--make-group",
    is_flag=True,
    help="Make the process group before the program starts; the program's "
    "init_process_group then does nothing.",
)
@click.option(
    "--on-cpus",
    is_flag=True,
    help="Ignore device_ids, output_device and device_id of modules and groups on "
    "CPUs, and compute torch.nn.SyncBatchNorm on CPUs by hpcstrat's.",
)
@click.option(
    "--hide",
    multiple=True,
    type=click.Choice(["mpi", "slurm"]),
    help="Remove the variables of MPI's launchers, or of Slurm, from the environment.",
)
@click.option(
    "--set",
    multiple=True,
    type=click.Choice(["openmpi", "slurm", "torchrun"]),
    help="Set the variables that Open MPI's mpirun, srun or torchrun would set.",
)
@click.option(
    "--separate",
    is_flag=True,
    help="Let each rank train alone, such as with its own seed.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Print all variables that were set or removed, with their values.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module's name.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def torch(
    program: str, arguments: tuple[str, ...], *, module: bool, **options: Any
) -> None:
    """Run a program of torch.distributed under mpirun or srun, instead of torchrun.

    \b
        mpirun -n 8 hpcstrat torch --replace gloo train.py --epochs 3

    PROGRAM is a file, a command of this environment such as nequip-train, or a module.
    Arguments after PROGRAM are passed to it. The launcher determines the number of
    ranks; without a launcher there is one rank.

    The command sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and similar variables from MPI, if they are not set. The program can
    pass the backend "hpcstrat" to init_process_group. With --replace you need not
    change the program. For each replacement that takes place, rank 0 prints a line.
    """
    _become("torch", json.dumps(options), program, arguments, module=module)


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

    PROGRAM is a file, a command of this environment, or a module.

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
    _become("jax", str(ranks_per_replica or 0), program, arguments, module=module)


def _become(
    framework: str,
    options: str,
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
    try:
        place = program if module else find_program(program)
        require_statements(place, module=module)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    # Replace the process, so that the launcher's signals reach the program, and the
    # launcher gets the program's exit status.
    kind = "module" if module else "script"
    launcher = f"hpcstrat.integrations.{framework}.{framework}_launcher"
    words = [options, kind, place, *arguments]
    os.execv(sys.executable, [sys.executable, "-m", launcher, *words])
