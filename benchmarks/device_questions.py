"""Checks of GPU behavior that need real hardware, each in a separate job.

``python benchmarks/device_questions.py`` runs all checks (questions) on some ranks,
each with a timeout, and prints the results; ``device.sh`` runs it before the
measurements. A rank of such a job runs this program with the name of a question.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

import hpcstrat as hs
from hpcstrat import testing

LIMIT_SECONDS = 90.0
_NEW_NAMESPACE = 0x20000
_SIZES = (4, 1 << 20, 64 << 20)


def _strategy() -> Any:
    return hs.MultiWorkerMirroredStrategy()


def _sum(strategy: Any, nbytes: int = 4) -> float:
    """Sum integers, check every element, and return the seconds of the sum."""
    import cupy

    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    numbers = cupy.arange(nbytes // 4, dtype=cupy.float32) % 251
    own = numbers + rank
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    start = time.perf_counter()
    total = strategy.reduce("sum", own, axis=None)
    stream.synchronize()
    seconds = time.perf_counter() - start
    wanted = cupy.asnumpy(numbers) * size + size * (size - 1) // 2
    np.testing.assert_array_equal(cupy.asnumpy(total), wanted)
    return seconds


def _reason(strategy: Any) -> str:
    return str(strategy.collectives.channel.device_group.reason)


def connect() -> None:
    """NCCL connects the ranks, its trial succeeds, and sums by hpcstrat are right."""
    strategy = _strategy()
    first = _sum(strategy)
    later = [_sum(strategy, nbytes) for nbytes in _SIZES for _ in range(2)]
    if strategy.replica_id == 0:
        print(f"by {_reason(strategy)}")
        print(f"first sum, with all that comes before it: {first:.3f} s")
        for nbytes, cold, warm in zip(_SIZES, later[::2], later[1::2], strict=True):
            print(f"{nbytes} bytes: {cold:.6f} s, then {warm:.6f} s")


def small_shm() -> None:
    """If /dev/shm is too small for NCCL, no rank uses NCCL, and a message says why."""
    strategy = _strategy()
    if "HPCSTRAT_STANDIN_NCCL_FAULT" not in os.environ:
        # The mount hides /dev/shm from new files; memory mapped before stays valid.
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.unshare(_NEW_NAMESPACE) or libc.mount(
            b"none", b"/", None, ctypes.c_ulong(0x44000), None
        )
        failed = failed or libc.mount(
            b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=64k"
        )
        if any(strategy.topology.replica_comm.allgather(failed)):
            hs.print_once("left out: only root may mount a small /dev/shm")
            return
    _sum(strategy)
    if strategy.replica_id == 0:
        print(f"by {_reason(strategy)}")


def plain_end() -> None:
    """A program that exits without ``close()`` while its GPU is busy succeeds."""
    import cupy

    strategy = _strategy()
    # Use fewer numbers on the tests' stand-in, which is much slower than a GPU.
    own = cupy.ones(4096 if hasattr(cupy, "_standin") else 16 << 20, cupy.float32)
    for _ in range(20):
        own = strategy.reduce("mean", own, axis=None)


def stopped() -> None:
    """If a rank is stopped, the other ranks name it, and the job ends."""
    strategy = _strategy()
    _sum(strategy)
    if strategy.replica_id == strategy.num_replicas_in_sync - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _sum(strategy)


def killed() -> None:
    """If a rank is killed before its kernel starts, the job ends."""
    import cupy

    strategy = _strategy()
    _sum(strategy)
    if strategy.replica_id == strategy.num_replicas_in_sync - 1:
        # Kill this process right after it has sent the header.
        for transport in strategy.collectives.channel.device_group._transports.values():
            type(transport).reduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    total = strategy.reduce("sum", cupy.ones(1 << 20), axis=None)
    cupy.cuda.get_current_stream().synchronize()
    print(f"expected to end before {float(total[0])}")


def ddp() -> None:
    """A step of torch's DDP works on NCCL, and with gradients summed by hpcstrat."""
    try:
        import torch
        from torch import distributed
    except ImportError:
        hs.print_once("left out: torch is not installed")
        return
    import cupy

    strategy = _strategy()
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    able = torch.cuda.is_available() and strategy.topology.gpu is not None
    if not able or strategy.topology.shares_gpu:
        hs.print_once("left out: torch needs CUDA, and NCCL a GPU for each rank")
        return
    torch.cuda.set_device(cupy.cuda.runtime.getDevice())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    distributed.init_process_group("nccl")
    layers = [torch.nn.Linear(2048, 2048) for _ in range(8)]
    model = torch.nn.Sequential(*layers).cuda()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    batch = torch.ones(64, 2048, device="cuda")

    def by_ddp() -> None:
        model.zero_grad()
        wrapped(batch).sum().backward()

    def by_us() -> None:
        model.zero_grad()
        model(batch).sum().backward()
        gradients = [p.grad.detach() for p in model.parameters()]
        out = [cupy.from_dlpack(gradient) for gradient in gradients]
        strategy.reduce("mean", gradients, axis=None, out=out)

    for name, step in (("DDP on NCCL", by_ddp), ("hpcstrat", by_us)) * 2:
        for count in (3, 20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                step()
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 20
        hs.print_once(f"step with 128 MiB of gradients, {name}: {seconds:.6f} s")
    distributed.destroy_process_group()


# For each question: its function, whether the job must exit with status 0, and a
# pattern that the output must match.
QUESTIONS: dict[str, tuple[Callable[[], None], bool, str]] = {
    "connect": (connect, True, r"^by "),
    "small_shm": (small_shm, True, r"^by (?!nccl)|^left out"),
    "plain_end": (plain_end, True, r""),
    "stopped": (stopped, False, r"waited.*rank \d|rank \d.*did not come|ends the job"),
    "killed": (killed, False, r""),
    "ddp": (ddp, True, r"hpcstrat: |^left out"),
}
_ENVIRONMENT = {
    "HPCSTRAT_DEVICE": "gpu",
    "HPCSTRAT_WARN_SECONDS": "5",
}
# Short timeout for questions in which a rank or a sum of NCCL never arrives. For the
# other questions it would be too short, because NCCL's trial may use only a quarter of
# it.
_SHORT_LIMIT = {"HPCSTRAT_LIMIT_SECONDS": "20"}
# NCCL uses /dev/shm only if its preferred transports are disabled.
_BY_SHM = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}


def _ask(name: str, ranks: int, more: dict[str, str]) -> bool:
    """Run the job of a question, print its output, and return whether it passed."""
    _, ends_well, pattern = QUESTIONS[name]
    environment = {**os.environ, **_ENVIRONMENT, **more}
    if name == "small_shm":
        environment |= _BY_SHM
    if name == "small_shm" or not ends_well:
        environment |= _SHORT_LIMIT
    start = time.monotonic()
    command = [sys.executable, __file__, name]
    try:
        ended = testing.launch(ranks, command, timeout=LIMIT_SECONDS, env=environment)
    except Exception as error:
        print(f"NOT SETTLED {name}: {error}", flush=True)
        return False
    said = ended.stdout + ended.stderr
    settled = (ended.returncode == 0) == ends_well
    settled = settled and re.search(pattern, said, re.MULTILINE | re.DOTALL) is not None
    word = "SETTLED" if settled else "NOT SETTLED"
    seconds = time.monotonic() - start
    print(f"{word} {name}: status {ended.returncode} after {seconds:.0f} s")
    print("".join(f"    {line}\n" for line in said.splitlines()[-40:]), flush=True)
    return settled


@click.command()
@click.argument("name", required=False, type=click.Choice(list(QUESTIONS)))
@click.option("--ranks", default=0, help="Ask all questions on so many ranks.")
@click.option("--only", multiple=True, help="With --ranks: some of the questions.")
@click.option("--smoke", is_flag=True, help="With --ranks: on the tests' stand-in.")
def main(name: str | None, ranks: int, only: tuple[str, ...], smoke: bool) -> None:
    """Ask what only hardware answers; status 1 where something is not as it must be."""
    if name is not None:
        QUESTIONS[name][0]()
        return
    faults = {"small_shm": {"HPCSTRAT_STANDIN_NCCL_FAULT": "ring error 0"}}
    settled = [
        _ask(each, ranks, faults.get(each, {}) if smoke else {})
        for each in only or QUESTIONS
    ]
    print(f"{sum(settled)} of {len(settled)} questions settled")
    sys.exit(not all(settled))


if __name__ == "__main__":
    main()
