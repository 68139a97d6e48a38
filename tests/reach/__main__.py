"""Run the tests that reach modules, or update the table of such tests.

``python -m tests.reach hpcstrat/PATH.py`` is ``pytest --for=hpcstrat/PATH.py``, see
selection.py. The table ``table.json`` has, for each module, the test files that call
its functions, starting with files that call many functions in little time. ``python -m
tests.reach --note`` updates the table, which takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcstrat.testing import launch_command
from tests.reach.noted import VARIABLE
from tests.reach.selection import TABLE, files_for, files_in_mirrors

__all__ = ["chosen", "main"]

_ROOT = Path(__file__).parents[2]
_MOST_SECONDS = 60.0
"""How long the tests of a module may take, by what they took when they were noted."""
_MOST_MORE = 5
_OWN_WEIGHT = 5

Noted = dict[str, tuple[float, set[str]]]


def chosen(module: str, noted: Noted) -> list[str]:
    """Return test files that call the functions of a module, within a limit of time.

    The next chosen file has the most functions per second that earlier files do not
    call; files in the folders that mirror the module's folder have a higher weight.
    After all functions are covered, a few more files follow, the fastest first.
    """
    mirrored = {*files_in_mirrors(Path(module).parent)}
    calls = {
        name: (seconds, {f for f in functions if f.startswith(f"{module}:")})
        for name, (seconds, functions) in noted.items()
    }
    calls = {name: found for name, found in calls.items() if found[1]}
    files: list[str] = []
    seen: set[str] = set()
    spent, more = 0.0, 0

    def worth(name: str) -> tuple[float, float]:
        seconds, functions = calls[name]
        weight = _OWN_WEIGHT if name in mirrored else 1
        return weight * len(functions - seen) / (0.5 + seconds), -seconds

    while calls:
        best = max(calls, key=worth)
        seconds, functions = calls.pop(best)
        more += not functions - seen
        if files and (spent + seconds > _MOST_SECONDS or more > _MOST_MORE):
            continue
        files.append(best)
        spent += seconds
        seen.update(functions)
    return files


def _command(files: Sequence[str], n: int) -> list[str]:
    """Return the command that records the calls of test files."""
    if not n:
        words = ["-m", "pytest", "-q", "-p", "tests.reach.plugin"]
        return [sys.executable, *words, *files]
    start = [*launch_command(n), sys.executable, "-m", "tests.mpi.ranks"]
    return [*start, "--short", "--color=no", *files]


def _noted_by(files: Sequence[str], n: int) -> Noted:
    """Run test files, on n ranks if n is not 0; return their calls and seconds.

    The seconds are those on two idle cores, which the ranks share.
    """
    command, cores = _command(files, n), min(n, 2) or 1
    with tempfile.TemporaryDirectory(prefix="hpcstrat-reach-") as folder:
        # Use one thread for XLA, as logical replicas require.
        env = {**os.environ, VARIABLE: folder, "NPROC": "1"}
        done = subprocess.run(
            command, cwd=_ROOT, env=env, check=False, capture_output=True, text=True
        )
        last = done.stdout.strip().rpartition("\n")[2] or done.stderr
        print(f"$ {shlex.join(command[:9])} ...: {last}", flush=True)
        found = sorted(Path(folder).glob("*.json"))
        if not found:
            raise RuntimeError(f"expected notes of {command[:9]}, found none: {last}")
        noted: Noted = {}
        for path in found:
            for name, (seconds, functions) in json.loads(path.read_text()).items():
                before = noted.get(name, (0.0, set()))
                noted[name] = seconds / cores + before[0], before[1] | {*functions}
        return noted


def _note() -> None:
    """Run all fast test files, and write the table."""
    tests = _ROOT / "tests"

    def named(pattern: str) -> list[str]:
        found = sorted(tests.glob(pattern))
        return [os.fspath(path.relative_to(_ROOT)) for path in found]

    parts = [
        (named("mpi/ranks/**/check_*.py"), 3),
        (named("unit/**/test_*.py"), 0),
        (named("integrations/ranks/check_*.py"), 2),
    ]
    # Run both at once, because the run without ranks leaves a core idle.
    with ThreadPoolExecutor(2) as pool:
        all_noted = list(pool.map(lambda part: _noted_by(*part), parts))
    noted = {name: found for some in all_noted for name, found in some.items()}
    modules = sorted({f.partition(":")[0] for _, fs in noted.values() for f in fs})
    table = {module: chosen(module, noted) for module in modules}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(table)} modules, {len(noted)} files of tests: {TABLE}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return an exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.reach", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="hpcstrat/PATH.py")
    parser.add_argument("--note", action="store_true", help="make the table anew")
    parser.add_argument("--show", action="store_true", help="print the test files only")
    arguments = parser.parse_args(argv)
    if arguments.note:
        _note()
        return 0
    try:
        files = files_for(arguments.modules)
    except ValueError as exc:
        parser.error(str(exc))
    if arguments.show:
        print(*files, sep="\n")
        return 0
    options = [f"--for={os.path.abspath(name)}" for name in arguments.modules]
    return subprocess.call([sys.executable, "-m", "pytest", *options], cwd=_ROOT)


if __name__ == "__main__":
    sys.exit(main())
