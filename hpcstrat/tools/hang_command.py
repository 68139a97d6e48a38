"""The command ``hpcstrat hang``, which explains why a job hung or ended."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import click

from hpcstrat.safety.watchdog.late_ranks import LateRank, LateReport, some_ranks
from hpcstrat.safety.watchdog.stacks import HELD, Stacks
from hpcstrat.tools.terminal import add_row, new_console, new_table

__all__ = ["explain", "hang"]

# Pairs: a phrase in the description of a late rank, and advice if it occurs.
_ADVICE = (
    (
        "whose process has ended",
        "it was killed: look for the kernel's OOM killer (dmesg), and at the batch "
        "system's record of the step (sacct -j JOB -o JobID,State,ExitCode,MaxRSS)",
    ),
    (
        "which is stopped",
        "somebody, or a debugger, has stopped it; continue it with kill -CONT, or ask "
        "your site who suspends jobs",
    ),
    (
        "(state D)",
        "it waits for a disk or a file server: look at its stack for the file, and at "
        "the file system's state",
    ),
    (
        HELD,
        "C code, named by the innermost line of its stack, does not return: a deadlock "
        "of threads, or of another library's communication",
    ),
    (
        "which does not answer",
        "its host may be down or unreachable: look at the host's log, and whether a "
        "firewall lets UDP through between the hosts",
    ),
    (
        "expected to be slow",
        "it took longer than announced with strategy.expect_slow: pass more seconds",
    ),
    (
        "expects to be slow",
        "the program announced this with strategy.expect_slow; nothing is wrong yet",
    ),
)
_EVENTS = ("late", "end", "error")
# Errors of reading a damaged event.
_DAMAGES = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_ELSEWHERE = (
    "it is not in a collective call: either its work takes long (use "
    "strategy.expect_slow, or raise warn_seconds), or it never makes the call in which "
    "the others wait: look for a branch that not all ranks execute, and for unequal "
    "numbers of batches"
)
_MOVING = (
    "all ranks have reached the call, but the data do not arrive: look at the network, "
    "and run hpcstrat doctor on these hosts"
)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--stacks", is_flag=True, help="Also show the stacks and tracebacks of the ranks."
)
def hang(file: str, *, stacks: bool) -> None:
    """Explain why a job hung or ended, from its FILE hpcstrat-hang-*.jsonl."""
    events, num_damaged = _read(file)
    console = new_console()
    if num_damaged:
        click.echo(f"{file}: {num_damaged} damaged lines are left out", err=True)
    first, last = (_at(events[i]["time"]) for i in (0, -1))
    console.print(f"{events[0]['size']} ranks, {len(events)} events, {first} to {last}")
    for event in events:
        console.print(f"\n{_at(event['time'])} {event['place']}: {_headline(event)}")
        if event.get("ranks"):
            table = new_table("calls", "state", "longest s", "ranks")
            for group in event["ranks"]:
                words = [group["calls"], group["state"], group["seconds"]]
                add_row(table, *words, some_ranks(group["ranks"]))
            console.print(table)
        if stacks:
            for line in _stacks(event):
                console.print(line)
    console.print("\nWhat to look at:")
    for line in explain(events):
        console.print(f"- {line}")
    if not stacks:
        console.print("\nStacks and tracebacks: --stacks")


def _read(path: str) -> tuple[list[dict[str, Any]], int]:
    """Return a file's events in the order of their times, and the number of bad lines.

    File systems may mix up lines of several hosts, and a killed rank may leave a part.
    """
    found, num_damaged = [], 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line)
                    _require_whole(event)
                except _DAMAGES:
                    num_damaged += 1
                else:
                    found.append((event["time"], event["event"], event["place"], event))
    except OSError as error:
        raise click.ClickException(
            f"expected to read {path}, found {error.strerror}; give a file "
            "hpcstrat-hang-*.jsonl"
        ) from error
    if not found:
        raise click.ClickException(
            f"expected events of a job, found none in {path}; give a file "
            "hpcstrat-hang-*.jsonl"
        )
    events = [event for *_, event in sorted(found, key=lambda row: row[:3])]
    return events, num_damaged


def _require_whole(event: dict[str, Any]) -> None:
    """Raise an error if an event lacks a field that the command shows."""
    _at(event["time"])
    if not isinstance(event["place"], str) or event["event"] not in _EVENTS:
        raise ValueError(f"expected an event of a rank, found {event}; leave it out")
    _ = event["size"], event["rank"], _headline(event), list(_stacks(event))
    for group in event.get("ranks") or ():
        _ = group["calls"], group["state"], group["seconds"]
        some_ranks(group["ranks"])
    explain([event])


def _at(seconds: float) -> str:
    try:
        return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError) as error:
        raise ValueError(f"expected a time, found {seconds}; correct it") from error


def _report(event: dict[str, Any]) -> LateReport:
    """Return the report of late ranks in an event."""
    about = dict(event["report"])
    late = [
        LateRank(**{**one, "stacks": Stacks(**one["stacks"])}) for one in about["late"]
    ]
    return LateReport(**{**about, "late": late})


def _headline(event: dict[str, Any]) -> str:
    if event["event"] == "late":
        return str(_report(event)).partition("\n")[0]
    if event["event"] == "end":
        return f"ends the job: {event['reason']}"
    where = f" at {event['site']}" if event["site"] else ""
    caused = ", because of another rank" if event["caused"] else ""
    return f"{event['kind']}{where}{caused}: {event['text']}"


def _stacks(event: dict[str, Any]) -> Iterator[str]:
    if event["event"] == "late":
        yield from str(_report(event)).splitlines()[1:]
    elif event.get("traceback"):
        yield event["traceback"].rstrip()


def explain(events: list[dict[str, Any]]) -> list[str]:
    """Return advice on what to look at, with the most likely cause first."""
    found = []
    errors = [e for e in events if e["event"] == "error" and not e["caused"]]
    late = [e for e in events if e["event"] == "late"]
    if errors and (not late or errors[0]["time"] < late[0]["time"]):
        first = errors[0]
        where = f" at {first['site']}" if first["site"] else ""
        found.append(
            f"rank {first['rank']} was the first to fail, with {first['kind']}{where}; "
            "the others ended because of it"
        )
    for event in late[-1:]:
        report = _report(event)
        waiting = some_ranks(report.waiting)
        found += [
            f"rank {one.rank} on {one.host}, for which {waiting} waited "
            f"{report.place}: {_advice(one)}"
            for one in report.late
        ]
        if not report.late:
            found.append(_MOVING)
    return found or ["no rank was late, and no error is recorded: see the job's output"]


def _advice(one: LateRank) -> str:
    text = str(one)
    for words, advice in _ADVICE:
        if words in text:
            return advice
    where = f"it is in {one.stacks.where}; " if one.stacks.where else ""
    return where + _ELSEWHERE
