"""Sequences of random calls by several strategies of one program."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import hpcstrat as hs
from tests.fuzz.calls.domain import Domain, Failed
from tests.fuzz.calls.mistakes import Mistake
from tests.fuzz.calls.moves import MOVES
from tests.fuzz.calls.user_calls import USER_CALLS

__all__ = ["Session", "Stopped"]

_KEPT_RECIPES = 6
_MOST_CALLS_IN_STEP = 8
_MISTAKES = 0.06
_LATE, _LATE_SECONDS = 0.02, 0.003


class Stopped(AssertionError):
    """A call raised an error that it must not raise, so that no call can follow."""


def _random(*key: int) -> Random:
    return Random(hash(key))


class Session:
    """Random calls from a seed, by strategies that are made for this session.

    Collective over ``comm``, and over all ranks of the job. ``make_strategy`` makes a
    strategy of a layout; it takes the options of `hpcstrat.MirroredStrategy`.
    """

    def __init__(
        self,
        comm: Any,
        make_strategy: Callable[..., Any],
        seed: int,
        number: int,
    ) -> None:
        self.comm, self.seed, self.number = comm, seed, number
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._comms: list[Any] = []
        draw = _random(seed, number)
        kinds = ["job", "own", "numpy", "group"]
        self.domains = [
            self._domain(kind, make_strategy, draw)
            for kind in draw.sample(kinds, draw.choice((1, 2, 2, 3)))
        ]
        # This rank's own generator, for lateness.
        self._own = _random(seed, number, comm.rank, 1)

    def _domain(
        self, kind: str, make_strategy: Callable[..., Any], draw: Random
    ) -> Domain:
        color, size = 0, self.comm.size
        limit = draw.randrange(1, size) if size > 1 else 1
        by_turns = draw.random() < 0.5
        options: dict[str, Any] = {}
        comm = self.comm
        if kind == "group":
            rank = comm.rank
            color = rank % 2 if by_turns else int(rank >= limit)
            comm = self.comm.Split(color, rank)
            self._comms.append(comm)
        if kind != "job":
            options["comm"] = comm
        if kind == "numpy" or (kind == "group" and draw.random() < 0.3):
            options["settings"] = hs.Settings(native=False)
        strategy = make_strategy(**options)
        return Domain(kind, strategy, comm, color=color)

    def close(self) -> None:
        """Close the strategies."""
        for domain in self.domains:
            domain.strategy.close()
        for comm in self._comms:
            comm.Free()

    def run(self, num_calls: int) -> int:
        """Make calls; return how many this rank has made."""
        step, made = 0, 0
        # The ranks decide together, because groups make different numbers of calls.
        while not self.comm.allreduce(int(made >= num_calls)):
            for _ in range(max(num_calls // 40, 1)):
                self._step(step)
                step += 1
            made = sum(self.counts.values())
        return made

    def _step(self, step: int) -> None:
        draw = _random(self.seed, self.number, step)
        domain = draw.choice(self.domains)
        if domain.name == "group":
            draw = _random(self.seed, self.number, step, domain.color)
        domain.inside = draw.random() < 0.5
        recipes = self._recipes(domain, draw)
        seeds = [draw.getrandbits(40) for _ in recipes]

        def block() -> None:
            for number, recipe in enumerate(recipes):
                self._make(domain, recipe, (step, number, seeds[number]))
                if domain.pending and draw.random() < 0.4:
                    self._end(domain, step)
            self._end(domain, step)

        if domain.inside:
            domain.strategy.run(block)
        else:
            block()

    def _recipes(self, domain: Domain, draw: Random) -> Sequence[Any]:
        """Draw the calls of a step: new ones, or recent ones again, or two in turn."""
        count = draw.randrange(1, _MOST_CALLS_IN_STEP + 1)
        kind = draw.random()
        if kind < 0.15 and domain.recent:
            return [draw.choice(domain.recent)] * count
        if kind < 0.3 and domain.recent:
            return draw.choices(domain.recent, k=count)
        if kind < 0.5 and len(domain.recent) > 1:
            pair = draw.sample(domain.recent, 2)
            return [pair[number % 2] for number in range(count)]
        style = draw.getrandbits(40)
        recipes = []
        for _ in range(count):
            if kind < 0.75:
                style = draw.getrandbits(40)
            # With the same style only the lengths, roots and memory are others.
            recipes.append(self._recipe(domain, style, draw))
        kept = [one for one in recipes if not isinstance(one, Mistake)]
        domain.recent = [*domain.recent, *kept][-_KEPT_RECIPES:]
        return recipes

    def _recipe(self, domain: Domain, style: int, draw: Random) -> Any:
        styles, lengths = Random(style), Random(draw.getrandbits(40))
        kinds = MOVES if styles.random() < 0.6 else USER_CALLS
        kind: Any = styles.choice(kinds)
        if lengths.random() < _MISTAKES:
            kind = Mistake
        return kind(domain, styles, lengths)

    def _make(self, domain: Domain, recipe: Any, place: tuple[int, int, int]) -> None:
        if domain.pending and isinstance(recipe, Mistake):
            self._end(domain, place[0])
        if self._own.random() < _LATE:
            time.sleep(self._own.random() * _LATE_SECONDS)
        self.counts[f"{domain.name} {type(recipe).__name__}"] += 1
        self._attempt(domain, recipe, place, lambda: recipe.go((self.seed, *place)))

    def _end(self, domain: Domain, step: int) -> None:
        pending, domain.pending = domain.pending, []
        for wait in pending:
            self._attempt(domain, "a started call", (step, -1, 0), wait)

    def _attempt(
        self,
        domain: Domain,
        recipe: Any,
        place: tuple[int, int, int],
        call: Callable[[], None],
    ) -> None:
        where = (
            f"session {self.number}, step {place[0]}, call {place[1]}, rank "
            f"{self.comm.rank} ({domain.rank} of {domain.size} in {domain.name}, "
            f"{'inside' if domain.inside else 'outside'} of run): {recipe}"
        )
        try:
            call()
        except Failed as error:
            self.problems.append(f"{where}: {error}")
        except Exception as error:
            raise Stopped(f"{where}: raised {error!r}") from error
