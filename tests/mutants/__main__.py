"""Plant faults in copies of the tree, and report the test that finds each fault.

``python -m tests.mutants --suite aimed`` runs the default tests that should find a
fault, which takes minutes at most. ``--suite default`` continues with all of
``pytest``, and ``--suite full`` also with all rank tests in all layouts, until a test
fails. ``--check`` only reports faults that no longer apply. With ``--out FILE``, an
interrupted run can be continued.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcstrat.testing import launch_command
from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
# Options of pytest for each suite. "full" has the default tests, and the rank tests at
# every size and in every layout instead of only those that can fail, but not all GPU
# tests.
SUITES = {
    "default": [],
    "full": [
        *("-m", "not slow"),
        "-k",
        "not where_they_can_fail and not test_all_",
    ],
}


def _places(mutant: Mutant) -> list[Path]:
    """Return the files with the mutant's source text, one entry per occurrence."""
    found = []
    for path in sorted((ROOT / "hpcstrat").rglob("*.py")):
        found += [path] * path.read_text().count(mutant.old)
    return found


def _copy(folder: Path) -> None:
    """Copy the files of a git clone, with uncommitted changes."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, names.decode().split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _commands(mutant: Mutant, suite: str) -> list[list[str]]:
    """Return the commands of a suite, first the tests that should find the fault."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--color=no"]
    short = [] if suite == "full" else ["--short"]
    commands = []
    for words in mutant.tests.split():
        n, _, name = words.partition(":")
        if n.isdigit():
            ranks = ["-m", "tests.mpi.ranks", "-x", "--color=no", *short]
            [path] = (ROOT / "tests/mpi/ranks").rglob(f"check_{name}.py")
            file = str(path.relative_to(ROOT))
            commands.append([*launch_command(int(n)), sys.executable, *ranks, file])
        else:
            commands.append([*pytest, words])
    if suite != "aimed":
        commands.append([*pytest, *SUITES[suite]])
    return commands


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job that runs in a separate session."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _run(command: list[str], folder: Path, limit: float) -> tuple[bool, str]:
    """Run a command in the copy; return whether it failed, and the failure's text."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    # Disable the compiled kernel, which would replace the changed Python code.
    env["HPCSTRAT_NATIVE"] = "0"
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            failed = job.wait(limit) != 0
        except subprocess.TimeoutExpired:
            _end(job)
            return True, f"no end within {limit:g} s"
        except BaseException:
            _end(job)
            raise
        output.seek(0)
        said = output.read()
    if not failed:
        return False, ""
    none = re.search(r"no tests ran|^\d+ deselected in", said, re.M)
    if none or "error: " in said.partition("\n")[0]:
        raise RuntimeError(f"expected tests in {command}, found: {said[-500:]}")
    # If a test runs a job of ranks, the failed test of the job is printed first.
    names = re.findall(r"^(?:E +)?(?:FAILED|ERROR) (\S+)", said, re.M)
    hung = re.findall(r"(\S+::\S+) failed here", said)
    return True, (names + hung + said.strip().splitlines()[-1:])[0]


def _find(mutant: Mutant, suite: str, limit: float) -> dict[str, object]:
    """Plant a fault in a copy, run the tests there, and return the outcome."""
    places = _places(mutant)
    if len(places) != 1:
        return {"outcome": f"does not apply: its words stand {len(places)} times"}
    with tempfile.TemporaryDirectory(prefix="hpcstrat-mutant-") as name:
        folder = Path(name)
        _copy(folder)
        target = folder / places[0].relative_to(ROOT)
        target.write_text(target.read_text().replace(mutant.old, mutant.new))
        began = time.monotonic()
        for command in _commands(mutant, suite):
            failed, by = _run(command, folder, limit)
            if failed:
                break
    seconds = round(time.monotonic() - began, 1)
    return {"outcome": "found" if failed else "MISSED", "by": by, "seconds": seconds}


def main() -> int:
    """Run the selected faults; return 1 if a fault was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--suite", choices=["aimed", *SUITES], default="aimed")
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each")
    parser.add_argument("--out", type=Path, help="results, one JSON object a line")
    parser.add_argument("--check", action="store_true", help="run no tests")
    options = parser.parse_args()
    done: dict[tuple[str, str], dict[str, object]] = {}
    if options.out and options.out.exists():
        for line in options.out.read_text().splitlines():
            result = json.loads(line)
            done[result["suite"], result["name"]] = result
    wanted = [m for m in MUTANTS if options.only in m.name]
    counts: dict[str, int] = {}
    for mutant in wanted:
        result = done.get((options.suite, mutant.name))
        if options.check:
            applies = len(_places(mutant)) == 1
            result = {"outcome": "applies" if applies else "DOES NOT APPLY"}
        elif result is None:
            result = _find(mutant, options.suite, options.limit)
            whole = {"suite": options.suite, "name": mutant.name, **result}
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(whole) + "\n")
        outcome = str(result["outcome"])
        counts[outcome] = counts.get(outcome, 0) + 1
        after = ""
        if outcome == "found":
            after = f" after {result['seconds']} s by {result['by']}"
        print(f"{outcome}{after}: {mutant.name}", flush=True)
    print(f"{len(wanted)} faults: {counts}")
    return int(set(counts) - {"found", "applies"} != set())


if __name__ == "__main__":
    sys.exit(main())
