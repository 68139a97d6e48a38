"""Command line of the fuzzer: ``python -m tests.fuzz --seeds 1:500 --ranks 3``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.driver import LIMIT_SECONDS, run_programs
from tests.fuzz.features import GATES, features
from tests.fuzz.generate import KINDS, generate
from tests.fuzz.judge import judge
from tests.fuzz.losing import attempt
from tests.fuzz.program import Program, parse
from tests.fuzz.shrink import shrunk

__all__ = ["main"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="1:100", help="FIRST:LAST, or one")
    parser.add_argument("--kind", default="mirrored", choices=KINDS, help="of programs")
    parser.add_argument("--ranks", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--program", type=Path, help="run the program of a listing")
    parser.add_argument("--show", action="store_true", help="print programs, run none")
    parser.add_argument("--shrink", action="store_true", help="shorten what fails")
    parser.add_argument("--gated", action="store_true", help="leave out what is known")
    parser.add_argument(
        "--losses", action="store_true", help="programs of which a rank is killed"
    )
    parser.add_argument("--only", help="only programs with this feature")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_SECONDS,
        metavar="SECONDS",
        help=f"of one program (default: {LIMIT_SECONDS:.0f})",
    )
    return parser.parse_args(argv)


def _seeds(arguments: argparse.Namespace) -> range:
    first, _, last = arguments.seeds.partition(":")
    return range(int(first), int(last or first) + 1)


def _lose(seeds: range) -> int:
    """Run programs that lose a rank, each in a job; return the number of failures."""
    num_failed = 0
    for seed in seeds:
        if problem := attempt(seed):
            num_failed += 1
            print(f"seed {seed} fails: {problem}\n")
    print(f"{num_failed} of {len(seeds)} failed")
    return int(num_failed > 0)


def _programs(arguments: argparse.Namespace) -> list[Program]:
    if arguments.program is not None:
        return [parse(arguments.program.read_text(encoding="utf-8"))]
    made = (generate(seed, arguments.kind) for seed in _seeds(arguments))
    kept = (p for p in made if not (arguments.gated and features(p) & set(GATES)))
    return [p for p in kept if not arguments.only or arguments.only in features(p)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run programs, print failures, and return the exit status, 0 without failures."""
    arguments = _arguments(argv)
    # Raise KeyboardInterrupt on SIGTERM, so that a running job is ended, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.losses:
        return _lose(_seeds(arguments))
    programs, n = _programs(arguments), arguments.ranks
    if arguments.show:
        print(*programs, sep="\n\n")
        return 0
    begin = time.monotonic()
    outcomes = run_programs(programs, n, limit_seconds=arguments.limit)
    num_failed = 0
    for program, outcome in zip(programs, outcomes, strict=True):
        problem = judge(program, n, outcome)
        if not problem:
            continue
        num_failed += 1
        crossed = ", ".join(sorted(features(program)))
        print(f"{program.title} fails on {n} ranks ({crossed}): {problem}\n")
        if arguments.shrink:
            short, problem = shrunk(program, n, problem)
            print(f"{short}\n# {problem}\n")
    seconds = time.monotonic() - begin
    print(f"{num_failed} of {len(programs)} failed on {n} ranks in {seconds:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
