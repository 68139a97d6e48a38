"""Trains with DDP while ranks die, come late, or are left out; prints what it sees.

    mpirun --with-ft ulfm -n 4 python changing_group.py lose 1 0

Ranks 1 and 0 die, one after the other, and the others go on. Each living rank prints
whether its weights are those of one process.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hpcstrat as hs
from hpcstrat.engine.topology.survival import lost_ranks
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.integrations.torch.changing_groups import ChangingProcessGroup

STEPS = 3


def rows(members: Sequence[int], step: int) -> torch.Tensor:
    """Return a step's rows, two of each member."""
    draw = torch.Generator().manual_seed(step)
    every = torch.rand(16, 5, generator=draw, dtype=torch.float64)
    return torch.cat([every[2 * rank : 2 * rank + 2] for rank in members])


def trained(model: Any, members: Sequence[int], numbers: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in numbers:
        optimizer.zero_grad()
        model(rows(members, step)).square().mean().backward()
        optimizer.step()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fresh() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    return torch.nn.Sequential(*layers).double()


def made() -> Any:
    """Return a group without ranks, of torch's interface if there is one."""
    try:
        dist.init_process_group("hpcstrat", enable_reconfigure=True)
    except TypeError:
        # Torch before 2.14 knows no such groups.
        world = Topology.world()
        return ChangingProcessGroup(world.rank, world.size, "0", timedelta(minutes=1))
    return dist.distributed_c10d._get_default_group()


def join(group: Any, uuid: int, handles: Any, seconds: float = 30) -> None:
    timeout = timedelta(seconds=seconds)
    if dist.is_initialized():
        dist._reconfigure(uuid, handles, timeout=timeout).wait()
    else:
        given = SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout)
        group.reconfigure(given).wait()


def lose(group: Any, handles: list[str], dying: list[int]) -> None:
    """Let ranks die in a backward pass, one after the other, and go on without them."""
    here, model, oracle = group.rank(), fresh(), fresh()
    members = list(range(len(handles)))
    join(group, 0, handles)
    for epoch, dead in enumerate([*dying, None]):
        numbers = range(epoch * STEPS, (epoch + 1) * STEPS)
        wrapped = DistributedDataParallel(model, process_group=group)
        trained(wrapped, [here], numbers)
        trained(oracle, members, numbers)
        if dead is None:
            break
        if here == dead:
            model[0].weight.register_hook(die)
        try:
            wrapped(rows([here], 0)).sum().backward()
        except hs.RankLostError as error:
            print(f"rank {here} lost {[members[place] for place in error.ranks]}")
            for place in sorted(error.ranks, reverse=True):
                del members[place]
        join(group, epoch + 1, [handles[rank] for rank in members])
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    close = all(torch.allclose(one, other, atol=1e-14) for one, other in pairs)
    print(f"rank {here} is {group.rank()} of {group.size()}: {close}")


def refused(who: str, error: type[Exception], call: Callable[[], Any]) -> None:
    try:
        call()
    except error as found:
        print(f"{who}: {found}")


def meet(group: Any, handles: list[str], _: Any) -> None:
    """Try groups that cannot be formed, then one that can."""
    here, size = group.rank(), group.size()
    who, ones = f"rank {here} ", [torch.ones(1)]
    refused(who + "alone", RuntimeError, lambda: group.allreduce(ones))
    join(group, 0, [handles[here]])
    refused(who + "again", RuntimeError, lambda: join(group, 0, handles))
    for number, given in enumerate((["other"], handles[:1] * 2, [])):
        call = functools.partial(join, group, 100 + number, given)
        refused(who + "wrong", ValueError, call)
    late = functools.partial(join, group, 1, handles, 1)
    if here < size - 1:
        refused(who + "late", hs.CollectiveError, late)
    given = handles if here else [handles[0], *reversed(handles[1:])]
    different = functools.partial(join, group, 2, given)
    refused(who + "different", hs.CollectiveError, different)
    join(group, 3, set(handles))
    total = torch.ones(3) * here
    group.allreduce([total]).wait()
    print(f"rank {here} of {size} together: {total.tolist()}")


def left_out(group: Any, handles: list[str], _: Any) -> None:
    """Divide the ranks in two groups; lose a rank, and leave out one that lives."""
    here, half = group.rank(), len(handles) // 2
    join(group, 0, handles)
    join(group, 1, handles[:half] if here < half else handles[half:])
    total = torch.ones(1)
    group.allreduce([total]).wait()
    print(f"rank {here} is {group.rank()} of {int(total)}")
    join(group, 2, handles)
    if here == 1:
        die()
    refused(f"rank {here} lost", hs.RankLostError, group.barrier)
    # If the program imported it before hpcstrat, mpi4py would finalize MPI at the end,
    # and wait for the dead rank.
    from mpi4py import MPI

    # hpcstrat may notice the death before MPI does.
    while not lost_ranks(Topology.world()):
        MPI.COMM_SELF.Iprobe()
    living = [handles[0], *handles[2:]]
    if here < len(handles) - 1:
        call = functools.partial(join, group, 3, living[:-1])
        refused(f"rank {here} left out", hs.CollectiveError, call)
    join(group, 4, living)
    print(f"rank {here} together: {group.rank()} of {group.size()}")


if __name__ == "__main__":
    group = made()
    handles = Topology.world().allgather(group.get_reconfigure_handle())
    dying = [int(word) for word in sys.argv[2:]]
    {"lose": lose, "meet": meet, "left_out": left_out}[sys.argv[1]](
        group, handles, dying
    )
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        group.shutdown()
