"""Run PyTorch's own tests of torch.distributed: ``torch_suite.py RANKS [WORD ...]``.

They come with torch, are written for gloo, and take the backend in its place, or gloo
itself with ``--on gloo``. WORDs choose those with one of them in their names. Each is
run as torch runs it, by its own harness, in a group of its own; what fails on any rank
ends the job, of which another one runs the rest. Most tests of DDP ask for GPUs: with
``--gpus``, host memory passes for these.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpcstrat import testing

_MONITORED = "torch lets gloo alone have monitored barriers, by its name"
_OTHER_WORDS = "the error names the ranks that did not come, in other words than gloo's"
_GPU = "needs GPUs"
# Tests that do not work on this backend.
UNSUPPORTED = {
    "test_barrier_timeout_full_group": _OTHER_WORDS,
    "test_barrier_timeout_global": _OTHER_WORDS,
    "test_ddp_profiling_torch_profiler": (
        "events are not asynchronous: calls have ended when they return"
    ),
    "test_get_backend": "the backend says its own name",
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
}
# Failures that occur on gloo, too, by words of the errors.
ALSO_ON_GLOO = {
    "name 'torchvision' is not defined": "needs torchvision",
    "is out of range. Valid ranks are": "needs more ranks",
    "SyncBatchNorm layers only work with GPU modules": _GPU,
    "Distributed package doesn't have NCCL built in": _GPU,
    "Torch not compiled with CUDA enabled": _GPU,
    "Cannot access accelerator device when none is available": _GPU,
    "cpu backend doesn't support events": _GPU,
    # Errors of a build of torch with CUDA, on a machine without GPUs.
    "Found no NVIDIA driver on your system": _GPU,
    "The NVIDIA driver on your system is too old": _GPU,
    "No CUDA GPUs are available": _GPU,
    "no CUDA-capable device is detected": _GPU,
    "CUDA driver version is insufficient for CUDA runtime version": _GPU,
    "CUDA unknown error": _GPU,
    "ProcessGroupNCCL is only supported with GPUs": _GPU,
    "in test_ddp_device": _GPU,
    "in test_ddp_logging_data_gpu": _GPU,
}
LEFT_OUT = {
    "test_ddp_uneven_inputs": "takes minutes on CPUs",
    "test_post_localSGD_optimizer_step_reload": (
        "rank 0 removes the file that the other ranks may still have to read"
    ),
}
TEST_SECONDS = 60
_PATIENCE_SECONDS = 3.0


class Records:
    """A rank's record of the tests: a line when a test begins, another when it ends."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"{rank}.jsonl").open("a", buffering=1)

    def add(self, name: str, outcome: str, text: str = "", took: float = 0.0) -> None:
        """Write a line into the record."""
        print(json.dumps([name, outcome, text, took]), file=self._file)


def gathered(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Return the last lines of all ranks, by test and rank."""
    found: dict[str, dict[str, list[Any]]] = collections.defaultdict(dict)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            name, *rest = json.loads(line)
            found[name][path.stem] = rest
    return found


def run_job(folder: Path, on: str, words: list[str], pretend: bool) -> None:
    """Run on this rank the tests that no job has begun yet."""
    from mpi4py import MPI

    from hpcstrat.integrations.torch.environment import init_env
    from hpcstrat.integrations.torch.program_groups import replace_backends

    init_env()
    if on != "gloo":
        replace_backends(["gloo"])
    comm = MPI.COMM_WORLD.Dup()
    os.environ["BACKEND"] = "gloo"
    # Set this before torch's tests look for GPUs.
    from tests.integrations.programs.pretended_gpus import pretended_gpus

    os.environ["TEMP_DIR"] = str(folder)
    import torch
    from torch.testing._internal.distributed import distributed_test

    class Tests(  # type: ignore[misc]
        distributed_test.TestDistBackend,
        distributed_test.DistributedTest._DistTestBase,
    ):
        pass

    torch.set_num_threads(1)
    records, begun = Records(folder, comm.rank), gathered(folder)
    names = [
        name
        for name in sorted(dir(Tests))
        if name.startswith("test_") and name not in begun
        if not words or any(word in name for word in words)
    ]
    comm.Barrier()
    for name in names:
        if comm.rank == 0:
            distributed_test.Barrier.init()
        distributed_test.Barrier.barrier_id = 0
        meet(comm)
        records.add(name, "begun")
        started = time.monotonic()
        gpus = contextlib.nullcontext()
        if pretend:
            gpus = pretended_gpus(comm.rank, comm.size)
        outcome, text = run_one(Tests, name, comm.rank, folder, gpus)
        records.add(name, outcome, text, time.monotonic() - started)
        if outcome == "failed" and not also_on_gloo(text):
            time.sleep(_PATIENCE_SECONDS)  # Let other ranks write their records.
            MPI.COMM_WORLD.Abort(1)
        # After an expected failure on some ranks, other ranks may still wait.
        if not meet(comm, 5 if outcome == "failed" else TEST_SECONDS):
            MPI.COMM_WORLD.Abort(1)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    comm.Free()


def meet(comm: Any, seconds: float = TEST_SECONDS) -> bool:
    """Wait for the other ranks with little CPU time; return whether they arrived."""
    request, end = comm.Ibarrier(), time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def also_on_gloo(text: str) -> str:
    """Return the reason to expect this error on every backend, or ""."""
    return next((why for words, why in ALSO_ON_GLOO.items() if words in text), "")


def run_one(
    tests: Any, name: str, rank: int, folder: Path, gpus: Any
) -> tuple[str, str]:
    """Run a test on this rank like torch does; return its outcome and the reason."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    test = getattr(tests, name)
    why = getattr(test, "__unittest_skip_why__", "")
    why = LEFT_OUT.get(name, why)
    if why and not why.startswith("Only MPI supports"):
        return "skipped", why
    ours, its = multiprocessing.Pipe()
    stacks = folder / f"{name}.{rank}.stacks"
    with stacks.open("w") as file:
        faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=file)
        code: Any = 0
        try:
            with gpus:
                tests._run(rank, name, str(folder / f"{name}.store"), its)
        except SystemExit as ended:
            code = ended.code
        except Exception as error:
            code = repr(error)
        faulthandler.cancel_dump_traceback_later()
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    if not code:
        return "passed", ""
    if code in skips:
        return "skipped", skips[code]
    return "failed", ours.recv() if ours.poll() else f"ended with {code}"


def outcome_of(name: str, ranks: dict[str, list[Any]], folder: Path) -> tuple[str, str]:
    """Return the outcome of a test on all ranks, and the reason."""
    for wanted in ("failed", "begun", "skipped"):
        for rank, (outcome, text, _) in ranks.items():
            if outcome != wanted:
                continue
            if wanted == "skipped":
                return wanted, text
            if wanted == "begun":
                stacks = (folder / f"{name}.{rank}.stacks").read_text()
                return "failed", f"rank {rank} stood still, or died\n{stacks}"
            return wanted, f"rank {rank}: {text}"
    return "passed", ""


def main() -> int:
    """Start jobs until each test has run; print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--on", default="hpcstrat", choices=["hpcstrat", "gloo"])
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        run_job(options.folder, options.on, options.words, options.gpus)
        return 0
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as name:
        folder, program = Path(name), [sys.executable, "-m", __spec__.name]
        (folder / "barrier").mkdir()
        (folder / "test_dir").mkdir()
        words = [*map(str, sys.argv[1:]), "--folder", name]
        while True:
            before = len(gathered(folder))
            finished = testing.launch(options.ranks, [*program, *words], timeout=1500)
            if not finished.returncode:
                break
            if len(gathered(folder)) == before:
                print(finished.stdout, finished.stderr)
                return 1
        return report(gathered(folder), folder)


def report(found: dict[str, dict[str, list[Any]]], folder: Path) -> int:
    """Print how many tests passed, were skipped and failed; return 1 for news."""
    counts: collections.Counter[str] = collections.Counter()
    missing = set(UNSUPPORTED)
    for name, ranks in sorted(found.items()):
        outcome, why = outcome_of(name, ranks, folder)
        if outcome != "passed":
            missing.discard(name)
        known = also_on_gloo(why)
        if outcome == "failed" and (known or name in UNSUPPORTED):
            outcome = "on no backend" if known else "unsupported"
            why = known or UNSUPPORTED[name]
        elif outcome == "failed":
            print(f"\n=== {name}\n{why}")
            why = ""
        counts[f"{outcome}: {why}" if why else outcome] += 1
        took = max(line[2] for line in ranks.values())
        print(f"{outcome:14}{took:6.1f} s  {name}")
    for name in sorted(missing & found.keys()):
        print(f"expected to fail, but did not: {name}")
    for what, number in sorted(counts.items()):
        print(f"{number:5}  {what}")
    return 1 if missing & found.keys() or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
