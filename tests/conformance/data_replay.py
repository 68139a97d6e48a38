"""Replay a file of tf.data programs, and return a verdict on each program."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.data_programs import (
    NotBuilt,
    build,
    distributed_program,
    outcome,
    plain,
    write_files,
)
from tests.conformance.judge import Verdict
from tests.conformance.launch import run_job
from tests.conformance.report import Result

__all__ = ["holds_data_programs", "replay_data"]

# Error classes of Python; for any other expected class, any error is right.
_PYTHON_ERRORS = ("IndexError", "KeyError", "RuntimeError", "TypeError", "ValueError")
_DRAWN = {"sample", "shuffle"}


def holds_data_programs(found: dict[str, Any]) -> bool:
    """Return whether a file has programs of tf.data."""
    return isinstance(found.get("cases"), dict)


def _is_drawn(program: Any) -> bool:
    """Return whether a program's order is random, so that orders may differ."""
    if not isinstance(program, list):
        return False
    if program and isinstance(program[0], str) and program[0] in _DRAWN:
        return program[1:2] != [1]
    return any(map(_is_drawn, program))


def _judge(_: str, case: dict[str, Any], folder: Path) -> Verdict:
    """Compare a program's results with TensorFlow's."""
    program = case["program"]
    seen = outcome(program, folder)
    if case.get("error") is not None:
        return _judge_error(case, seen)
    for key in ("cardinality", "element_spec", "truncated"):
        if case.get(key) != seen.get(key):
            text = f"{key}: expected {case.get(key)}, found {seen.get(key)}; {seen}"
            return Verdict("failed", text)
    if "output" not in case:
        return Verdict("passed")
    wanted, found = case["output"], seen["output"]
    if _is_drawn(program):
        wanted, found = len(wanted), len(found)
    if wanted != found:
        return Verdict("failed", f"expected {wanted}, found {seen['output']}")
    return Verdict("passed")


def _judge_error(case: dict[str, Any], seen: dict[str, Any]) -> Verdict:
    error = case["error"]
    if "error" not in seen:
        if "padding_values" in error:
            return Verdict("declared", rows=["data-padding-type"])
        return Verdict("failed", f"expected {error}, found no error: {seen}")
    wanted, kind = (text.partition(":")[0] for text in (error, seen["error"]))
    if wanted in _PYTHON_ERRORS and kind != wanted:
        return Verdict("failed", f"expected {error}, found {seen['error']}")
    before, after = case.get("output_before_error"), seen["output_before_error"]
    if before is not None and before != after:
        return Verdict("failed", f"before the error {before}, found {after}")
    return Verdict("passed")


def _epochs(program: list[Any], folder: Path, count: int) -> list[list[Any]]:
    dataset = build(program, folder)
    return [[plain(element) for element in dataset] for _ in range(count)]


def _halves(epoch: list[Any]) -> tuple[list[Any], list[Any]]:
    return epoch[: len(epoch) // 2], epoch[len(epoch) // 2 :]


def _all_differ(epochs: Sequence[Any]) -> bool:
    return all(first != second for first, second in itertools.pairwise(epochs))


def _is_permutation(half: list[Any]) -> bool:
    return sorted(half) == list(range(len(half)))


_PROPERTIES: dict[str, Callable[[list[list[Any]], list[list[Any]]], Any]] = {
    "epochs_differ": lambda found, again: _all_differ(found),
    "differ": lambda found, again: _all_differ(found),
    "all_equal": lambda found, again: all(epoch == found[0] for epoch in found),
    "new_object_same_first": lambda found, again: found[0] == again[0],
    "new_object_same_all": lambda found, again: found == again,
    "each_half_is_a_permutation": lambda found, again: all(
        _is_permutation(half) for epoch in found for half in _halves(epoch)
    ),
    "halves_differ": lambda found, again: all(
        first != second for first, second in map(_halves, found)
    ),
    "halves_equal": lambda found, again: all(
        first == second for first, second in map(_halves, found)
    ),
    "first_half_is_permutation": lambda found, again: _is_permutation(
        _halves(found[0])[0]
    ),
}


def _told(passed: bool, text: str) -> Verdict:
    return Verdict("passed" if passed else "failed", text)


def _global_seeds(case: dict[str, Any], folder: Path) -> Verdict:
    return Verdict("declared", rows=["data-seeds"])


def _split(case: dict[str, Any], folder: Path) -> Verdict:
    dataset = build([["range", 6], ["shuffle", 6, {"seed": 7}]], folder)
    first, rest = dataset.take(3), dataset.skip(3)
    unions = [sorted([*map(int, first), *map(int, rest)]) for _ in range(3)]
    if unions != [list(range(6))] * 3:
        return Verdict("failed", f"expected parts of one order, found {unions}")
    return Verdict("declared", rows=["data-split"])


def _two_iterators(case: dict[str, Any], folder: Path) -> Verdict:
    dataset = build([["range", 6], ["shuffle", 6, {"seed": 7}]], folder)
    one = iter(dataset)
    found = [int(next(one))]
    second = [int(element) for element in dataset]
    found += [int(element) for element in one]
    return _told((found != second) == case["differ"], f"{found} and {second}")


def _sample(case: dict[str, Any], folder: Path) -> Verdict:
    sources = [[["range", 100]], [["range", 100, 200]]]
    weights = {"weights": [0.9, 0.1], "seed": 3}
    found = _epochs([["sample", sources, weights], ["take", 50]], folder, 2)
    parts = [([v for v in e if v < 100], [v for v in e if v >= 100]) for e in found]
    in_order = all(part == sorted(part) for pair in parts for part in pair)
    near = all(38 <= len(pair[0]) < 50 for pair in parts)
    return _told(in_order and near, f"{found}")


_NAMED_PROPERTIES = {
    "global_seed_only": _global_seeds,
    "op_seed_depends_on_global_seed": _global_seeds,
    "take_skip_split_of_reshuffled_overlaps": _split,
    "two_live_iterators_of_one_shuffle": _two_iterators,
    "sample_from_datasets": _sample,
}


def _places_early(case: dict[str, Any], folder: Path) -> Verdict:
    """Compare the largest number of places by which an element comes early."""
    *before, shuffle = case["program"]
    most = -1
    for seed in range(200):
        (epoch,) = _epochs([*before, [*shuffle, {"seed": seed}]], folder, 1)
        most = max(most, *(value - place for place, value in enumerate(epoch)))
    wanted = case["max_value_minus_position"]
    return _told(most == wanted, f"expected at most {wanted} early, found {most}")


def _judge_property(name: str, case: dict[str, Any], folder: Path) -> Verdict:
    """Compare the properties that a random order must have."""
    program = case["program"]
    if name in _NAMED_PROPERTIES:
        return _NAMED_PROPERTIES[name](case, folder)
    if "max_value_minus_position" in case:
        return _places_early(case, folder)
    known = set(case) - {"program", "tf_epochs"}
    unknown = known - set(_PROPERTIES)
    if unknown or not isinstance(program, list):
        raise NotBuilt(f"the property {name} {sorted(unknown)}")
    expected = case["tf_epochs"]
    found, again = (_epochs(program, folder, len(expected)) for _ in range(2))
    if [len(epoch) for epoch in found] != [len(epoch) for epoch in expected]:
        return Verdict("failed", f"other numbers of elements: {found}")
    for key in sorted(known):
        if _PROPERTIES[key](found, again) != case[key]:
            return Verdict("failed", f"expected {key} {case[key]}, found {found}")
    return Verdict("passed")


def _distribute(texts: list[str], folder: Path, one_each: bool) -> list[Any]:
    """Return this replica's batches of each dataset; this runs on every rank."""
    import hpcstrat as hs

    found: list[Any] = []
    options = {"replicas_per_worker": 1} if one_each else {}
    with hs.MultiWorkerMirroredStrategy(**options) as strategy:  # type: ignore[arg-type]
        for text in texts:
            try:
                dataset = distributed_program(text, folder)
                parts = [
                    plain(strategy.local_value(batch))
                    for batch in strategy.experimental_distribute_dataset(dataset)
                ]
                found.append(parts)
            except NotBuilt as error:
                found.append({"not_built": str(error)})
            except Exception as error:
                found.append({"error": f"{type(error).__name__}: {error}"})
    return found


def _run_ranks(path: str) -> None:
    """Run one rank's part: the body of ``python -m tests.conformance.data_replay``."""
    from mpi4py import MPI

    job = json.loads(Path(path).read_text(encoding="utf-8"))
    found = _distribute(job["texts"], Path(job["folder"]), job["one_each"])
    parts = MPI.COMM_WORLD.gather(found)
    if parts is not None:
        Path(job["result"]).write_text(json.dumps(parts), encoding="utf-8")


def _ranks(texts: list[str], size: int, folder: Path, one_each: bool) -> list[Any]:
    """Return the batches of every replica, for each dataset."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        result = Path(name) / "result.json"
        job = {
            "texts": texts,
            "folder": str(folder),
            "one_each": one_each,
            "result": str(result),
        }
        path = Path(name) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        words = ["tests.conformance.data_replay", str(path)]
        done = run_job(size, *words, folder=name, limit_seconds=120)
        if not result.exists():
            raise RuntimeError(f"{size} ranks failed: {done.stdout}{done.stderr}")
        parts = json.loads(result.read_text(encoding="utf-8"))
    return [list(column) for column in zip(*parts, strict=True)]


def _verdict_of_parts(expected: Any, parts: list[Any], by_worker: bool) -> Verdict:
    first = parts[0]
    if isinstance(first, dict) and "not_built" in first:
        return Verdict("not built", first["not_built"])
    if isinstance(expected, str):
        failed = all(isinstance(part, dict) for part in parts)
        if failed and all(part["error"].startswith("ValueError") for part in parts):
            return Verdict("declared", rows=["data-unbatched"])
        return Verdict("failed", f"expected {expected}, found {parts}")
    if any(isinstance(part, dict) for part in parts):
        return Verdict("failed", f"expected {expected}, found {parts}")
    found = parts if by_worker else [list(step) for step in zip(*parts, strict=True)]
    if found != expected:
        return Verdict("failed", f"expected {expected}, found {found}")
    return Verdict("passed")


def _distributed(found: dict[str, Any], folder: Path) -> list[Result]:
    """Replay the programs of strategies with several replicas."""
    results: list[Result] = []
    by_size: dict[int, list[str]] = {}
    for text in found.get("distributed", {}):
        count, _, rest = text.partition(" ")
        by_size.setdefault(int(count.removeprefix("replicas=")), []).append(rest)
    for size, texts in sorted(by_size.items()):
        for text, parts in zip(texts, _ranks(texts, size, folder, False), strict=True):
            name = f"replicas={size} {text}"
            expected = found["distributed"][name]
            case = {"id": name, "topic": "data on replicas"}
            results.append((case, _verdict_of_parts(expected, parts, False)))
    texts = list(found.get("multiworker_2x1", {}))
    if texts:
        for text, parts in zip(texts, _ranks(texts, 2, folder, True), strict=True):
            expected = found["multiworker_2x1"][text]
            case = {"id": f"2 workers {text}", "topic": "data on workers"}
            results.append((case, _verdict_of_parts(expected, parts, True)))
    return results


def replay_data(found: dict[str, Any]) -> list[Result]:
    """Replay all programs of a file; return each program with its verdict."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="conformance-") as where:
        folder = Path(where)
        write_files(found.get("files", {}), folder)
        for topic, key, judge in (
            ("data chains", "cases", _judge),
            ("data orders", "properties", _judge_property),
        ):
            for name, given in found.get(key, {}).items():
                try:
                    verdict = judge(name, given, folder)
                except NotBuilt as error:
                    verdict = Verdict("not built", str(error))
                except Exception as error:
                    verdict = Verdict("failed", f"{type(error).__name__}: {error}")
                results.append(({"id": name, "topic": topic}, verdict))
        results += _distributed(found, folder)
    return results


if __name__ == "__main__":
    _run_ranks(sys.argv[1])
