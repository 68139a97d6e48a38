"""Slurm's short notations of lists: see ``scontrol show hostnames``, and srun(1)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import product

__all__ = ["compress_node_list", "expand_node_list", "expand_tasks_per_node"]

_NAME = re.compile(r"[^\s,\[\]]*")
_ITEM = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_LAST_NUMBER = re.compile(r"(.*?)(\d+)(\D*)", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
# Maximum number of names: a damaged list, such as n[1-99999999999], could otherwise
# need more memory than there is.
_MOST_NODES = 1 << 24


def expand_node_list(node_list: str) -> list[str]:
    """Return the names in a list of nodes.

    Not collective.

    Parameters
    ----------
    node_list : str
        List as in ``SLURM_STEP_NODELIST``, such as ``login,n[01-03,7]-ib[0-1]``. In a
        name with several brackets, the numbers of the last bracket vary fastest.

    Returns
    -------
    list of str
        Names in the order of the list; leading zeros are kept.

    Raises
    ------
    ValueError
        If the text has another form.
    """
    if not node_list:
        return []
    nodes: list[str] = []
    for text in _split(node_list):
        pieces = re.split(r"[\[\]]", text)
        choices = [
            _numbers(piece, node_list) if index % 2 else [piece]
            for index, piece in enumerate(pieces)
        ]
        count = math.prod(len(choice) for choice in choices)
        if not text or len(nodes) + count > _MOST_NODES:
            raise _malformed(node_list)
        nodes += map("".join, product(*choices))
    return nodes


def _split(node_list: str) -> Iterator[str]:
    """Split a list at the commas outside of brackets."""
    depth, start = 0, 0
    for place, character in enumerate(node_list):
        depth += (character == "[") - (character == "]")
        if not 0 <= depth <= 1 or character.isspace():
            raise _malformed(node_list)
        if character == "," and not depth:
            yield node_list[start:place]
            start = place + 1
    if depth:
        raise _malformed(node_list)
    yield node_list[start:]


def _numbers(text: str, node_list: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise _malformed(node_list)
        first, last = match.group(1), match.group(2) or match.group(1)
        if not 0 <= int(last) - int(first) < _MOST_NODES:
            raise _malformed(node_list)
        # Leading zeros are part of the names: n01 is not n1.
        width = len(first)
        numbers += [f"{n:0{width}d}" for n in range(int(first), int(last) + 1)]
    return numbers


def _malformed(text: str) -> ValueError:
    return ValueError(
        "expected a list in Slurm's form, such as n[01-03,7]-ib[0-1] or 2(x3),1, found "
        f"{text!r:.200}; check the environment of the job step"
    )


def compress_node_list(nodes: Sequence[str]) -> str:
    """Return the short notation of a list of nodes.

    Not collective.

    Parameters
    ----------
    nodes : sequence of str
        Names of the nodes.

    Returns
    -------
    str
        List that `expand_node_list` expands to the same names in the same order.

    Raises
    ------
    ValueError
        If a name is empty, or has commas, brackets or blanks.
    """
    # For each group of names: texts before and after the number, and number ranges.
    groups: list[tuple[str, str, list[list[str]]]] = []
    for node in nodes:
        if not node or not _NAME.fullmatch(node):
            raise ValueError(
                "expected names of nodes without commas, brackets and blanks, found "
                f"{node!r}; correct it"
            )
        match = _LAST_NUMBER.fullmatch(node)
        before, number, after = match.groups() if match else (node, "", "")
        # Join only adjacent names, because the order of nodes is the order of ranks.
        last_group = groups[-1] if groups else ("", "", [])
        if not number or last_group[:2] != (before, after) or not last_group[2]:
            groups.append((before, after, [[number, number]] if number else []))
            continue
        ranges = last_group[2]
        first, last = ranges[-1]
        # Compare with leading zeros: n10 follows n9, but n010 does not follow n09.
        if number == f"{int(last) + 1:0{len(first)}d}":
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(_short(*group) for group in groups)


def _short(before: str, after: str, ranges: list[list[str]]) -> str:
    if len(ranges) < 2 and (not ranges or ranges[0][0] == ranges[0][1]):
        return before + (ranges[0][0] if ranges else "") + after
    items = (first if first == last else f"{first}-{last}" for first, last in ranges)
    return f"{before}[{','.join(items)}]{after}"


def expand_tasks_per_node(tasks: str) -> list[int]:
    """Return the number of tasks of each node.

    Not collective.

    Parameters
    ----------
    tasks : str
        Numbers as in ``SLURM_STEP_TASKS_PER_NODE``, such as ``2(x3),1``.

    Returns
    -------
    list of int
        One number for each node.

    Raises
    ------
    ValueError
        If the text has another form.
    """
    counts: list[int] = []
    for item in tasks.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None or int(match.group(2) or 1) > _MOST_NODES:
            raise _malformed(tasks)
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts
