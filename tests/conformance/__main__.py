"""Replay captured programs of TensorFlow: ``python -m tests.conformance FILE``."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conformance.data_replay import holds_data_programs, replay_data
from tests.conformance.divergences import check_rows
from tests.conformance.judge import Verdict, judge, missing_part
from tests.conformance.launch import Outcome, replay
from tests.conformance.preempted import replay_jobs
from tests.conformance.report import Result, print_report, write_report
from tests.conformance.served import replay_served

__all__ = ["main", "replay_cases"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Replay captured tf.distribute and tf.data programs on hpcstrat.",
    )
    parser.add_argument("cases", type=Path, help="the file of programs and results")
    parser.add_argument("--topic", nargs="+", action="extend", help="only these topics")
    parser.add_argument("--id", nargs="+", action="extend", help="only these cases")
    parser.add_argument("--report", type=Path, help="write every verdict to this file")
    parser.add_argument(
        "--limit",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time limit of one case (default: 20)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="most ranks of a case of one process: more replicas share a rank",
    )
    return parser.parse_args(argv)


def _judged(case: dict[str, Any], outcome: Outcome) -> Verdict:
    """Return the verdict on a case; a case that cannot be compared has failed."""
    try:
        return judge(case, outcome)
    except Exception:
        return Verdict("failed", f"no verdict: {traceback.format_exc()}")


def replay_cases(cases: Sequence[dict[str, Any]], limit_seconds: float) -> list[Result]:
    """Replay the cases; return each case with its verdict."""
    indices = [i for i, case in enumerate(cases) if missing_part(case) is None]
    ending = [i for i in indices if cases[i]["strategy"] == "preemption"]
    served = [i for i in indices if cases[i]["strategy"] == "parameter_server"]
    rest = [i for i in indices if i not in {*ending, *served}]
    outcomes = replay(cases, rest, limit_seconds)
    outcomes.update(replay_served(cases, served, limit_seconds))
    for index in ending:
        outcomes[index] = replay_jobs(cases[index], limit_seconds)
    results: list[Result] = []
    for index, case in enumerate(cases):
        part = missing_part(case)
        if part is not None:
            verdict = Verdict("not built", part)
        else:
            verdict = _judged(case, outcomes[index])
        results.append((case, verdict))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the cases, print a report, and return 0 if nothing failed."""
    arguments = _arguments(argv)
    check_rows()
    found = json.loads(arguments.cases.read_text(encoding="utf-8"))
    if holds_data_programs(found):
        results = [
            result
            for result in replay_data(found)
            if (not arguments.topic or result[0]["topic"] in arguments.topic)
            and (not arguments.id or result[0]["id"] in arguments.id)
        ]
        return _reported(results, arguments.report)
    cases = found["cases"]
    if arguments.topic:
        cases = [case for case in cases if case.get("topic") in arguments.topic]
    if arguments.id:
        cases = [case for case in cases if case["id"] in arguments.id]
    if arguments.ranks:
        # The other cases have a result for each of several processes, so leave them
        # out.
        cases = [
            {**case, "ranks": arguments.ranks}
            for case in cases
            if case["strategy"] == "mirrored"
        ]
    if not cases:
        print("expected at least one case, found none; check --topic and --id")
        return 2
    return _reported(replay_cases(cases, arguments.limit), arguments.report)


def _reported(results: Sequence[Result], report: Path | None) -> int:
    if report is not None:
        write_report(results, report)
    print_report(results)
    return int(any(verdict.status == "failed" for _, verdict in results))


if __name__ == "__main__":
    sys.exit(main())
