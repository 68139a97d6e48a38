"""The replay of the captured programs, and tests that the replay can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.__main__ import main, replay_cases
from tests.conformance.compare import difference, error_matches, join, local
from tests.conformance.divergences import check_rows
from tests.conformance.observe import own

CASES = (
    "tf_distribute_cases.json",
    "neighbour_cases.json",
    "tf_data_cases.json",
)
ROOT = Path(__file__).parents[2]


def tensor(value: Any, dtype: str = "float32", shape: list[int] | None = None) -> Any:
    return {"tensor": value, "dtype": dtype, "shape": shape or []}


def case(name: str, program: list[Any], expected: list[Any], **more: Any) -> Any:
    return {
        "id": name,
        "topic": "self-test",
        "replicas": 2,
        "strategy": "mirrored",
        "program": program,
        "expected": expected,
        **more,
    }


def reduction(*values: Any, op: str = "SUM") -> Any:
    value = {"per_replica": list(values)}
    return {"op": "reduce", "reduce_op": op, "value": value, "axis": None}


RUN_RETURNS = {"op": "run", "return": {"per_replica": [1.0, 2.0]}}
RUN_RAISES = {"op": "run", "body": [{"do": "raise", "error": "ValueError"}]}


@pytest.mark.parametrize(
    ("cases", "options"),
    [
        *((cases, []) for cases in CASES),
        # Replay the programs of one process again, with all replicas on one rank.
        ("tf_distribute_cases.json", ["--ranks", "1"]),
    ],
)
def test_the_captured_programs_replay_without_a_failure(
    cases: str, options: list[str]
) -> None:
    command = [sys.executable, "-m", "tests.conformance"]
    done = subprocess.run(
        [*command, f"tests/conformance/{cases}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    last = done.stdout.splitlines()[-1]
    assert " 0 failed, " in last, done.stdout + done.stderr
    assert done.returncode == 0


def test_every_declared_rule_is_documented() -> None:
    check_rows()


def test_wrong_expectations_are_reported_as_failed() -> None:
    error = {"error": "ValueError"}
    parts = {"per_replica": [tensor(1.0), tensor(2.0)]}
    cases = [
        case("right", [reduction(1.0, 2.0)], [tensor(3.0)]),
        case("wrong value", [reduction(1.0, 2.0)], [tensor(4.0)]),
        case("wrong dtype", [reduction(1.0, 2.0)], [tensor(3.0, "float64")]),
        case("no error", [reduction(1.0, 2.0)], [error]),
        case("an error", [RUN_RAISES], [{"py": None}]),
        case("the error", [RUN_RAISES], [error]),
        case("another class of error", [RUN_RAISES], [{"error": "TypeError"}]),
        case("a wrong result", [RUN_RETURNS], [{"per_replica": [tensor(1.0)] * 2}]),
        case("a wrong structure", [RUN_RETURNS], [{"list": [parts]}]),
        case("the result", [RUN_RETURNS], [parts]),
        case("steps after an error", [RUN_RAISES], [error, {"py": None}]),
    ]
    results = replay_cases(cases, 20.0)
    assert {c["id"]: verdict.status for c, verdict in results} == {
        "right": "passed",
        "wrong value": "failed",
        "wrong dtype": "failed",
        "no error": "failed",
        "an error": "failed",
        "the error": "passed",
        "another class of error": "failed",
        "a wrong result": "failed",
        "a wrong structure": "failed",
        "the result": "passed",
        "steps after an error": "passed",
    }


@pytest.mark.slow
def test_one_hanging_and_one_dying_case_do_not_stop_the_others() -> None:
    dies = {"op": "run", "body": [{"do": "raise", "error": "SystemExit"}]}
    cases = [
        case("hangs", [{"op": "sleep", "seconds": 60}], [None]),
        case("works", [reduction(1.0, 2.0)], [tensor(3.0)]),
        case("dies", [dies], [{"py": None}]),
        case("works too", [reduction(1.0, 3.0)], [tensor(4.0)]),
    ]
    results = replay_cases(cases, 2.0)
    statuses = [verdict.status for _, verdict in results]
    assert statuses == ["failed", "passed", "failed", "passed"]
    assert "hangs: rank" in results[0][1].detail
    assert "exit code" in results[2][1].detail


def test_a_divergence_that_is_not_the_promised_one_fails() -> None:
    # TensorFlow truncates the shares of 7; the documented shares are 4 and 3.
    variable = {
        "op": "variable",
        "name": "v",
        "init": 0,
        "sync": "ON_READ",
        "aggregation": "SUM",
        "dtype": "int32",
    }
    described = {
        "class": "sync_on_read",
        "synchronization": "ON_READ",
        "aggregation": "SUM",
        "trainable": False,
        "dtype": "int32",
        "shape": [],
    }
    assign = {
        "op": "assign",
        "var": "v",
        "value": {"const": 7, "dtype": "int32"},
        "observe": False,
    }
    components = {"op": "components", "var": "v"}
    parts = {"list": [tensor(3, "int32"), tensor(3, "int32")]}
    # No rule covers shares of an assignment in replica context, so none is declared.
    body = [{"do": "assign", "var": "v", "value": {"per_replica": [4, 3]}}]
    body[0]["value"]["dtype"] = "int32"  # type: ignore[index]
    run = {"op": "run", "body": body}
    cases = [
        case("declared", [variable, assign, components], [described, None, parts]),
        case("failed", [variable, run, components], [described, {"py": None}, parts]),
    ]
    results = replay_cases(cases, 20.0)
    assert [verdict.status for _, verdict in results] == ["declared", "failed"]
    assert results[0][1].rows == ["int-sum-shares"]


def test_exit_status_and_last_line_tell_of_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = tmp_path / "cases.json", tmp_path / "report.json"
    cases = [case("wrong", [reduction(1.0, 2.0)], [tensor(4.0)])]
    cases.append(case("server", [], [], strategy="tpu"))
    path.write_text(json.dumps({"cases": cases}), encoding="utf-8")
    assert main([str(path), "--report", str(report)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "0 passed, 1 failed, 0 declared, 1 not built"
    assert json.loads(report.read_text(encoding="utf-8"))["summary"] == last


def test_floats_agree_within_the_tolerance_and_all_else_exactly() -> None:
    assert difference(tensor(1.0), tensor(1.0 + 5e-7)) is None
    assert difference(tensor(1.0), tensor(1.0 + 5e-6)) is not None
    assert difference(tensor(1.0, "float64"), tensor(1.0 + 5e-7, "float64"))
    assert difference(tensor([1], "int32", [1]), tensor([2], "int32", [1]))
    assert difference({"py": 1}, {"py": True}) is not None
    assert difference({"list": []}, {"tuple": []}) is not None
    assert difference(tensor(float("nan")), tensor(float("nan"))) is None


def test_own_entries_join_in_rank_order_and_conflicts_show() -> None:
    parts = [{"per_replica": [own(tensor(float(rank)))]} for rank in range(3)]
    joined = join(parts)
    assert joined == {"per_replica": [tensor(0.0), tensor(1.0), tensor(2.0)]}
    assert local(parts[1]) == tensor(1.0)
    conflict = join([{"py": 1}, {"py": 2}])
    assert difference({"py": 1}, conflict) is not None


def test_only_portable_error_classes_are_compared() -> None:
    seen = {"error": "CollectiveError", "classes": ["CollectiveError", "RuntimeError"]}
    assert error_matches("RuntimeError", seen, [])
    assert error_matches("InvalidArgumentError", seen, [])
    assert not error_matches("ValueError", seen, [])
    assert error_matches("ValueError", seen, ["error_class"])
    assert not error_matches("RuntimeError", {**seen, "interpreter": "bug"}, [])
    assert not error_matches("RuntimeError", {"py": None}, [])


def test_wrong_expectations_of_data_programs_are_reported_as_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {
        "program": [["range", 3], ["batch", 2]],
        "cardinality": 2,
        "element_spec": "TensorSpec(shape=(None,), dtype=tf.int64, name=None)",
        "output": [[0, 1], [2]],
    }
    error = {"program": [["range", 3], ["map", "raise_at_3"]], "error": "ValueError: "}
    cases = {
        "right": right,
        "output": {**right, "output": [[0, 1]]},
        "cardinality": {**right, "cardinality": 3},
        "spec": {**right, "element_spec": "TensorSpec(shape=(2,), dtype=tf.int64)"},
        "no error": error,
        "error": {**error, "program": [["range", 4], ["map", "raise_at_3"]]},
        "class": {
            "program": [["range", 4], ["map", "raise_at_3"]],
            "error": "TypeError: ",
        },
        "unknown": {**right, "program": [["range", 3], ["snapshot", "x"]]},
    }
    orders = {
        "same": {
            "program": [["range", 9], ["shuffle", 9]],
            "tf_epochs": [[*range(9)]] * 2,
            "all_equal": True,
        }
    }
    wrong = {"range(4).batch(2)": [[[0]], [[1]]]}
    found = {"cases": cases, "properties": orders, "multiworker_2x1": wrong}
    path, report = tmp_path / "cases.json", tmp_path / "report.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    assert main([str(path), "--report", str(report)]) == 1
    verdicts = json.loads(report.read_text(encoding="utf-8"))["cases"]
    passed = [verdict["id"] for verdict in verdicts if verdict["status"] == "passed"]
    assert passed == ["right", "error"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "2 passed, 7 failed, 0 declared, 1 not built"
