"""Run the tests that reach modules, or find out anew which these are.

``python -m tests.reach hpcstrat/PATH.py`` is ``pytest --for=hpcstrat/PATH.py``, see
selection.py. The table, ``table.json``, has for each module the test files that call
its functions, those first that call many in little time. ``python -m tests.reach
--note`` makes it anew, which takes about ten minutes.
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

    The next one is that which calls most functions a second that no other one calls;
    those in the folders that mirror the module's count for more. Where all are called,
    a few more follow, the quickest first.
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


def _is_of_ranks(name: str) -> bool:
    return Path(name).name.startswith("check_")


def _commands(files: Sequence[str], n: int) -> list[list[str]]:
    """Return the commands that note what test files call."""
    alone = [name for name in files if not _is_of_ranks(name)]
    ranks = [name for name in files if _is_of_ranks(name)]
    found = []
    if alone:
        words = ["-m", "pytest", "-q", "-p", "tests.reach.plugin"]
        found.append([sys.executable, *words, *alone])
    if ranks:
        start = [*launch_command(n), sys.executable, "-m", "tests.mpi.ranks"]
        found.append([*start, "--short", *ranks])
    return found


def _run(commands: list[list[str]], env: dict[str, str] | None = None) -> int:
    codes = []
    for command in commands:
        print(f"$ {shlex.join(command)}", flush=True)
        done = subprocess.run(command, cwd=_ROOT, env=env, check=False)
        codes.append(done.returncode)
    return max(codes, default=0)


def _note() -> None:
    """Run all files of quick tests, and write the table."""
    tests = _ROOT / "tests"

    def named(*patterns: str) -> list[str]:
        found = [path for p in patterns for path in sorted(tests.glob(p))]
        return [os.fspath(path.relative_to(_ROOT)) for path in found]

    ranks = named("mpi/ranks/**/check_*.py")
    parts = [
        (named("unit/**/test_*.py"), 1),
        *[(ranks, n) for n in (2, 3)],
        (named("integrations/ranks/check_*.py"), 2),
    ]
    with tempfile.TemporaryDirectory(prefix="hpcstrat-reach-") as folder:
        # One thread for XLA, as logical replicas want it.
        env = {**os.environ, VARIABLE: folder, "NPROC": "1"}
        commands = [c for names, n in parts for c in _commands(names, n)]
        _run(commands, env)
        noted: Noted = {}
        for path in Path(folder).glob("*.json"):
            for name, (seconds, functions) in json.loads(path.read_text()).items():
                before = noted.get(name, (0.0, set()))
                noted[name] = max(seconds, before[0]), before[1] | {*functions}
    modules = sorted({f.partition(":")[0] for _, fs in noted.values() for f in fs})
    table = {module: chosen(module, noted) for module in modules}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run tests; returns an exit status."""
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
    return _run([[sys.executable, "-m", "pytest", *options]])


if __name__ == "__main__":
    sys.exit(main())
