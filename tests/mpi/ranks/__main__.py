"""Run the rank tests in this MPI job: ``mpirun -n 3 python -m tests.mpi.ranks -k sum``.

The arguments are pytest's. With ``HPCSTRAT_TEST_ARRAYS=gpu`` in the environment the
tests get arrays on GPUs, as tests/gpu/ranks describes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

# pytest rewrites only the asserts of modules that it imports itself.
pytest.register_assert_rewrite("tests.mpi.ranks")

from mpi4py import MPI  # noqa: E402

from tests.mpi import outcome_lines  # noqa: E402
from tests.reach.noted import VARIABLE, Noted  # noqa: E402

OPTIONS = (
    "-p",
    "no:cacheprovider",
    # The failures must be the last lines.
    "-p",
    "no:durations",
    "-q",
    "-o",
    "python_files=check_*.py",
    "-o",
    "faulthandler_timeout=120",
    "-o",
    "faulthandler_exit_on_timeout=true",
)


class InStep:
    """A pytest plugin that registers the plugins of hpcstrat.

    A plugin's module must be registered for rewriting before it is imported.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keep the ranks in step; use arrays on GPUs if the environment says so."""
        from hpcstrat.testing.in_step import RanksInStep

        plugin = RanksInStep(self.comm, ["-m", "tests.mpi.ranks"])
        config.pluginmanager.register(plugin)
        if os.environ.get("HPCSTRAT_TEST_ARRAYS") == "gpu":
            from tests.gpu.ranks.plugin import ArraysOnGpu

            node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
            config.pluginmanager.register(ArraysOnGpu(node.rank))
            node.Free()


def main() -> int:
    """Run pytest on this rank; only rank 0 reports."""
    comm = MPI.COMM_WORLD.Dup()
    plugins: list[object] = [InStep(comm)]
    if os.environ.get(VARIABLE):
        plugins.append(Noted())
    if comm.rank == 0 and (path := os.environ.get(outcome_lines.VARIABLE)):
        plugins.append(outcome_lines.OutcomeLines(path))
    arguments = sys.argv[1:]
    if "--short" not in arguments:
        # Without ``-m``, leave out slow tests, as the default of pyproject.toml does.
        arguments = ["-m", "not slow", *arguments]
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        arguments.append(str(Path(__file__).parent))
    # Each rank has its own folder, so that no rank removes another rank's files.
    with tempfile.TemporaryDirectory(prefix="hpcstrat-ranks-") as folder:
        arguments.append(f"--basetemp={folder}/base")
        code = pytest.main([*OPTIONS, *arguments], plugins=plugins)
    comm.Free()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
