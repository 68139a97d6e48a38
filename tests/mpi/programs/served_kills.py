"""Kill random workers and servers of ``served_work.py``, and check the result.

``python -m tests.mpi.programs.served_kills COUNT SEED`` prints how many were right.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.mpi.programs.killing import Trial, attempt, kill_rank, local

_ROUNDS, _FUNCTIONS, _SECONDS = 3, 60, 0.004
# Seconds from the first functions to about the end of the last functions.
_SPAN_SECONDS = 0.6


def judge(trial: Trial) -> Trial:
    """Record the problems of a trial."""
    found = [trial.problem] if trial.problem else []
    if trial.returncode:
        found.append(f"returncode {trial.returncode}")
    if len(trial.results) != 1:
        found.append("there is no result")
    for result in trial.results:
        counts, again = result["counts"], Counter(result["again"])
        wrong = {
            number: count
            for number, count in enumerate(counts)
            if not 1 <= count <= 1 + again[number]
        }
        if wrong:
            found.append(f"functions have counted, by number: {wrong}")
        most = len(counts) + again.total()
        for values in result["whole"]:
            if len(values) != 1 or not len(counts) <= values[0] <= most:
                found.append(
                    f"a shard has {values}, not one of {len(counts)} to {most}"
                )
        if not len(counts) <= result["iterations"] <= most:
            found.append(f"iterations are {result['iterations']}")
    trial.problem = "; ".join(found)
    return trial


def killing(kills: list[tuple[int, float]]) -> Callable[[Path], float | None]:
    """Return a function that kills ranks, each some seconds after the previous kill."""

    def disturb(folder: Path) -> float | None:
        moment = None
        for rank, delay in kills:
            moment = kill_rank(folder, rank, delay)
        return moment

    return disturb


def one_trial(
    servers: int,
    workers: int,
    kills: list[tuple[int, float]],
    make_launch: Callable[[int], Sequence[str]] = local,
    *,
    losses: int = 0,
    spares: int = 0,
) -> Trial:
    """Run the program once; each of ``kills`` is a rank and a delay in seconds.

    The program does not end before it has noticed ``losses`` losses.
    """
    options = {
        "servers": servers,
        "spares": spares,
        "rounds": _ROUNDS,
        "functions": _FUNCTIONS,
        "seconds": _SECONDS,
        "losses": losses,
    }
    launch = make_launch(1 + servers + workers + spares)
    trial = attempt(launch, options, name="served_work.py", disturb=killing(kills))
    trial.title = f"{trial.title}, killed {kills}"
    return judge(trial)


def campaign(
    count: int, seed: int, make_launch: Callable[[int], Sequence[str]] = local
) -> list[Trial]:
    """Run many jobs, and kill random workers, servers or spare ranks of each."""
    chance = random.Random(seed)
    trials = []
    for number in range(count):
        servers, workers = chance.choice((1, 2)), chance.choice((2, 3))
        spares = chance.choice((0, 0, 1, 2))
        kills = _kills(chance, servers, workers, spares)
        delays = [chance.uniform(0, _SPAN_SECONDS / len(kills)) for _ in kills]
        pairs = list(zip(kills, delays, strict=True))
        trial = one_trial(servers, workers, pairs, make_launch, spares=spares)
        trial.title = f"seed {seed}, trial {number}: {trial.title}"
        trials.append(trial)
    return trials


def _kills(chance: random.Random, servers: int, workers: int, spares: int) -> list[int]:
    """Choose ranks to kill; without spare ranks, keep one server and one worker."""
    kills = []
    if spares:
        others = range(1, 1 + servers + workers + spares)
        return chance.sample(others, chance.randint(1, spares))
    if servers == 1 or chance.random() < 0.6:
        kills.append(1 + servers + chance.randrange(workers))
    if servers == 2 and (not kills or chance.random() < 0.5):
        kills.append(1 + chance.randrange(servers))
    chance.shuffle(kills)
    return kills


def figures(trials: list[Trial]) -> str:
    """Return how many trials were right, with their losses and repeated functions."""
    right = sum(not trial.problem for trial in trials)
    results = [result for trial in trials for result in trial.results]
    losses = sum(result["losses"] for result in results)
    again = sum(len(result["again"]) for result in results)
    left = sum(result["vacant"] for result in results)
    twice = sum(n > 1 for result in results for n in result["counts"])
    return (
        f"{right} of {len(trials)} right; {losses} losses noticed, {again} functions "
        f"run again, of which {twice} counted twice; {left} places stayed empty"
    )


if __name__ == "__main__":
    began = time.monotonic()
    done = campaign(int(sys.argv[1]), int(sys.argv[2]))
    for one in done:
        if one.problem:
            print(one)
    print(f"{figures(done)}; {time.monotonic() - began:.0f} s")
