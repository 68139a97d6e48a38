"""Selection of the tests of a library module: test files, and pytest arguments.

The tests are the files with the module's name in the folders that mirror the module's
folder (``tests/unit/FOLDER`` and ``tests/mpi/ranks/FOLDER``;
``tests/integrations/ranks``, ``tests/gpu``), and the table's files for the module. If
there are none, the tests are the jobs of `JOBS`, the files that import or name the
module, or the files in mirrors of its folder or of a parent folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = [
    "JOBS",
    "TABLE",
    "arguments_for",
    "files_for",
    "files_in_mirrors",
    "files_of",
    "jobs_of",
    "mirrors",
    "path_of",
    "unwanted",
    "with_name_of",
]

_ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "table.json"
# For each folder of rank tests, the pytest files that run these tests.
RUNNERS = {
    "tests/mpi/ranks": ("tests/mpi/test_ranks.py",),
    "tests/gpu": ("tests/gpu/test_ranks_on_gpu.py",),
    "tests/integrations/ranks": tuple(
        f"tests/integrations/test_{name}.py" for name in ("torch", "jax", "keras")
    ),
}
# Tests of whole jobs, which take minutes, by prefix of the modules' paths.
JOBS = {
    "hpcstrat/checkpoint/bench.py": ("tests/mpi/test_ckpt_bench.py",),
    "hpcstrat/checkpoint/node_memory/": ("tests/mpi/test_snapshots.py",),
    "hpcstrat/checkpoint/save/": (
        "tests/mpi/test_checkpoint_faults.py",
        "tests/mpi/test_failing_disk.py",
    ),
    "hpcstrat/tools/staging/": ("tests/cluster/test_stage.py",),
    "hpcstrat/tools/start_times.py": ("tests/mpi/test_start_times.py",),
    "hpcstrat/elastic/": ("tests/mpi/test_elastic.py",),
    "hpcstrat/engine/gpu/probe/": ("tests/gpu/test_probe.py",),
    "hpcstrat/engine/topology/start_warnings.py": ("tests/mpi/test_start_warnings.py",),
    "hpcstrat/integrations/horovod/": ("tests/integrations/test_horovod.py",),
    "hpcstrat/integrations/jax/jax_launcher.py": ("tests/integrations/test_jax.py",),
    "hpcstrat/integrations/torch/torch_launcher.py": (
        "tests/integrations/test_process_group.py",
    ),
    "hpcstrat/parameter_server/": ("tests/mpi/test_serving.py",),
    "hpcstrat/safety/exits.py": ("tests/mpi/test_exits.py",),
    "hpcstrat/safety/hang_file.py": ("tests/mpi/test_hang_file.py",),
    "hpcstrat/safety/lateness.py": ("tests/mpi/test_lateness.py",),
    "hpcstrat/safety/newest_checkpoint.py": ("tests/mpi/test_newest_checkpoint.py",),
    "hpcstrat/safety/start/": ("tests/mpi/test_starting.py",),
    "hpcstrat/safety/uncaught.py": ("tests/mpi/test_exits.py",),
    "hpcstrat/safety/watchdog/": ("tests/mpi/test_watchdog.py",),
    "hpcstrat/testing/": (
        "tests/mpi/test_testing.py",
        "tests/mpi/test_marked_tests.py",
    ),
    "hpcstrat/tools/bench/": ("tests/mpi/test_bench_scaling.py",),
    "hpcstrat/tools/chaos/": ("tests/mpi/test_chaos.py",),
    "hpcstrat/tools/checkpoints/bench_command.py": ("tests/mpi/test_ckpt_bench.py",),
    "hpcstrat/tools/doctor/": ("tests/cluster/test_doctor.py",),
    "hpcstrat/tools/hang_command.py": ("tests/mpi/test_hang_file.py",),
    "hpcstrat/tools/launch_commands.py": ("tests/integrations/test_process_group.py",),
}
# Use first, last and middle ranks, or the smallest number on which a file runs.
_NUM_RANKS = 3
_MOST_BY_CHANCE = 6


def files_for(modules: Sequence[str]) -> list[str]:
    """Return the test files of the modules with these paths."""
    table = json.loads(TABLE.read_text())
    files: list[str] = []
    for name in map(path_of, modules):
        files += [file for file in files_of(name, table) if file not in files]
    return files


def path_of(given: str) -> str:
    """Return the path of a module from the root of the repository."""
    name = os.path.relpath(Path(given).resolve(), _ROOT)
    if not name.startswith("hpcstrat/") or not (_ROOT / name).is_file():
        message = f"expected a module of hpcstrat, found {given}; give its path"
        raise ValueError(message)
    return name


def files_of(module: str, table: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the test files of a module, by its path from the root of the repository.

    Files with the module's name come first.
    """
    folder = Path(module).parent
    files = [*with_name_of(module), *table.get(module, ())]
    files = files or jobs_of(module) or _that_name(module)
    while not files and folder.name:
        files = files_in_mirrors(folder)
        folder = folder.parent
    return list(dict.fromkeys(files))


def jobs_of(module: str) -> list[str]:
    """Return the test files that start whole jobs for a module, or for its folder."""
    return [
        name
        for start, names in JOBS.items()
        if module.startswith(start)
        for name in names
    ]


def mirrors(folder: Path) -> list[str]:
    """Return patterns of the test files in the mirrors of a folder of the library."""
    inside = folder.relative_to("hpcstrat")
    found = [f"tests/unit/{inside}/test_*.py", f"tests/mpi/ranks/{inside}/check_*.py"]
    match inside.parts:
        case "engine", "gpu", *_:
            found.append("tests/gpu/check_*.py")
        case "integrations", _, *_:
            found.append("tests/integrations/ranks/check_*.py")
    return found


def files_in_mirrors(folder: Path) -> list[str]:
    """Return the test files in the mirrors of a folder of the library."""
    found = [path for name in mirrors(folder) for path in sorted(_ROOT.glob(name))]
    return [os.fspath(path.relative_to(_ROOT)) for path in found]


def with_name_of(module: str) -> list[str]:
    """Return the test files in the mirrored folders that have the name of a module.

    The file's name may continue after the module's name with ``_``.
    """
    path = Path(module)
    rooms = "".join(rf"(?:{re.escape(part)}_)?" for part in path.parts[-3:-1])
    own = []
    for file in files_in_mirrors(path.parent):
        name = re.sub(rf"^(?:test|check)_{rooms}", "", Path(file).stem)
        if f"{name}_".startswith(f"{path.stem}_") or path.stem.startswith(f"{name}_"):
            own.append(file)
    return own


@functools.cache
def _all_tests() -> dict[Path, str]:
    """Return the contents of all test files."""
    found: list[Path] = []
    for pattern in ("test_*.py", "check_*.py"):
        found += sorted((_ROOT / "tests").rglob(pattern))
    return {path: path.read_text() for path in found}


def _that_name(module: str) -> list[str]:
    """Return test files that import a module, or contain its path or file name."""
    path = Path(module)
    dotted = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    parent, _, stem = dotted.rpartition(".")
    imported = rf"from {re.escape(parent)} import \(?[^)]*?\b{re.escape(stem)}\b"
    words = re.compile(rf"{re.escape(dotted)}\b|\b{re.escape(path.name)}|{imported}")
    # Search for the name first, because that is fast.
    texts = {path: text for path, text in _all_tests().items() if stem in text}
    found = [path for path, text in texts.items() if words.search(text)]
    return [os.fspath(path.relative_to(_ROOT)) for path in found[:_MOST_BY_CHANCE]]


def _runners(file: str) -> tuple[str, ...]:
    """Return the pytest files that run a file of rank tests; empty for other files."""
    if not Path(file).name.startswith("check_"):
        return ()
    return next(
        runners for folder, runners in RUNNERS.items() if file.startswith(folder)
    )


def arguments_for(files: Sequence[str]) -> list[str]:
    """Return the arguments of pytest that collect test files, including rank tests."""
    found = [name for file in files for name in _runners(file) or (file,)]
    return [str(_ROOT / name) for name in dict.fromkeys(found)]


def unwanted(items: Sequence[pytest.Item], files: Sequence[str]) -> set[pytest.Item]:
    """Return the items of unselected rank test files, or of extra numbers of ranks."""
    left_out: set[pytest.Item] = set()
    sizes: dict[tuple[str, str], dict[int, list[pytest.Item]]] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        runner = os.path.relpath(item.path, _ROOT)
        folders = [folder for folder, names in RUNNERS.items() if runner in names]
        if not folders:
            continue
        if f"{folders[0]}/{params.get('file')}.py" not in files:
            left_out.add(item)
            continue
        key = item.nodeid.partition("[")[0], params["file"]
        sizes.setdefault(key, {}).setdefault(params["n"], []).append(item)
    for by_size in sizes.values():
        best = _NUM_RANKS if _NUM_RANKS in by_size else min(by_size)
        left_out.update(
            item for n, found in by_size.items() if n != best for item in found
        )
    return left_out
