"""Reports of scaling benchmarks, compared with figures calculated by hand."""

from __future__ import annotations

import copy
import errno
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hpcstrat.cli.main import main
from hpcstrat.tools.bench.analysis import analyze, interval, read_runs
from hpcstrat.tools.bench.expectation import read_expected
from hpcstrat.tools.bench.measuring import worker_shares
from hpcstrat.tools.bench.pictures import draw
from hpcstrat.tools.bench.run_file import BenchError, MeasuredRun, read_run, write_run
from hpcstrat.tools.bench.shapes import (
    gradient_bytes,
    resnet50_shapes,
    transformer_shapes,
)

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
Content = dict[str, Any]
LATENCY, BANDWIDTH = 1e-6, 8e9


def _part(name: str, scaling: str, seconds: list[float], **more: Any) -> Content:
    return {
        "name": name,
        "scaling": scaling,
        "parameters": {},
        "session": 0,
        "seconds": seconds,
        **more,
    }


def _step(scaling: str, seconds: list[float], late: list[float]) -> Content:
    """Return a step; ``late`` has the waiting time of each replica in each repeat."""
    count, mean = len(seconds), statistics.fmean(late)
    parameters = {"batch_size": 8, "nbytes": 800, "compute_seconds": 0.06}
    return _part(
        *("step", scaling, seconds),
        parameters=parameters,
        own_seconds=[0.9 * value for value in seconds],
        late_seconds=[mean] * count,
        communication_seconds=[0.01 * (len(late) > 1)] * count,
        input_seconds=[0.005] * count,
        replicas={"own_seconds": [1.0] * len(late), "late_seconds": [*late]},
    )


def _content(workers: list[int], parts: list[Content], cores: int = 8) -> Content:
    """Return a file's content; replicas are placed on the workers in turn."""
    turns = range(max(workers))
    places = [w for turn in turns for w, each in enumerate(workers) if turn < each]
    link = {"latency_seconds": LATENCY, "bytes_per_second": BANDWIDTH}
    return {
        "format": "hpcstrat scaling",
        "format_version": 1,
        "topology": {
            "num_replicas": sum(workers),
            "replicas_per_worker": workers,
            "cores_per_worker": [cores] * len(workers),
            "worker_of_replica": places,
            "device": "CPU",
        },
        "reduction": {},
        "sessions": [
            {
                "started": "2026-11-23T10:00:00+00:00",
                "command": "hpcstrat bench scaling",
                "hosts": [f"node{number}" for number in range(len(workers))],
                "versions": {"hpcstrat": "1"},
                "environment": {},
            }
        ],
        "links": {
            "inside": link if max(workers) > 1 else None,
            "between": link if len(workers) > 1 else None,
        },
        "parts": parts,
        "expected": None,
    }


WEAK = {1: [0.10, 0.11, 0.10, 0.13], 2: [0.12, 0.13, 0.12], 4: [0.20, 0.16, 0.16, 0.17]}
STRONG = {1: [0.10, 0.10, 0.11], 2: [0.07, 0.06, 0.08], 4: [0.05, 0.04, 0.045, 0.06]}
# Replica 1, on the second worker, waits least because the others wait for it.
LATE = {1: [0.0], 2: [0.02, 0.03], 4: [0.05, 0.01, 0.05, 0.05]}
WORKERS = {1: [1], 2: [2], 4: [2, 2]}


def _contents() -> dict[int, Content]:
    found = {}
    for n, workers in WORKERS.items():
        sums = [_part("all_reduce", "same", [n * 1e-4], parameters={"nbytes": 4096})]
        steps = [_step("weak", WEAK[n], LATE[n]), _step("strong", STRONG[n], LATE[n])]
        found[n] = _content(workers, [*sums, *steps])
    return found


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that writes contents to files, and returns their paths."""

    def _save(*contents: Content) -> list[str]:
        paths = []
        for number, content in enumerate(contents):
            path = tmp_path / f"run-{number}.json"
            path.write_text(json.dumps(content))
            paths.append(str(path))
        return paths

    return _save


def _report(*words: object) -> Result:
    return CliRunner().invoke(main, ["bench", "report", *map(str, words)])


def test_shapes_are_those_of_the_networks() -> None:
    """The parameter counts equal those of torchvision and Hugging Face."""
    assert len(resnet50_shapes()) == 161
    assert sum(map(math.prod, resnet50_shapes())) == 25_557_032
    assert len(transformer_shapes()) == 199
    assert sum(map(math.prod, transformer_shapes())) == 109_482_240
    assert gradient_bytes("transformer") == 4 * 109_482_240


def test_figures_are_those_calculated_by_hand(save: Callable[..., list[str]]) -> None:
    contents = _contents()
    # The order of the files does not matter.
    report = analyze(read_runs(save(contents[4], contents[1], contents[2])))
    weak, strong = report.of("step")
    assert [p.run.num_replicas for p in weak.points] == [1, 2, 4]
    assert [p.run.layout for p in weak.points] == ["1", "2", "4 (2 x 2)"]
    # The medians are 0.105, 0.12, 0.165 (weak), and 0.10, 0.07, 0.0475 (strong).
    assert [p.median for p in weak.points] == pytest.approx([0.105, 0.12, 0.165])
    assert [p.speed_up for p in weak.points] == pytest.approx([1, 1.75, 0.42 / 0.165])
    assert [p.efficiency for p in weak.points] == pytest.approx(
        [1, 0.875, 0.105 / 0.165]
    )
    assert [p.speed_up for p in strong.points] == pytest.approx(
        [1, 0.1 / 0.07, 0.1 / 0.0475]
    )
    assert [p.efficiency for p in strong.points] == pytest.approx(
        [1, 0.05 / 0.07, 0.025 / 0.0475]
    )
    last = weak.points[-1]
    own = 0.9 * (0.20 + 0.16 + 0.16 + 0.17)
    assert last.late == pytest.approx(4 * 0.04 / own)
    assert last.communication == pytest.approx(4 * 0.01 / own)
    assert last.input == pytest.approx(4 * 0.005 / own)
    # Replicas 0 and 2 are on the first worker.
    assert last.slowest_host == "node1 (replica 1)"
    assert weak.points[0].slowest_host == ""


def test_verdicts_say_how_many_replicas_to_use(
    save: Callable[..., list[str]],
) -> None:
    contents = _contents()
    weak, strong = analyze(read_runs(save(*contents.values()))).verdicts
    # The efficiencies are 0.875, 0.636 (weak), and 0.714 (strong).
    share = 4 * 0.04 / (0.9 * (0.20 + 0.16 + 0.16 + 0.17))
    assert weak == (
        "Weak scaling: use 2 replicas on 1 node. With 4 replicas on 2 nodes the "
        f"efficiency is 64%, below 80%, as {share:.0%} of a step is spent waiting for "
        "late replicas on node1 (replica 1)."
    )
    assert strong.startswith("Strong scaling: use 1 replica on 1 node. With 2 replicas")
    report = analyze(read_runs(save(contents[1], contents[2])))
    assert report.verdicts[0] == (
        "Weak scaling: use 2 replicas on 1 node, or more: the efficiency of the "
        "largest run is still 88%."
    )
    # A single run gives no verdict, and neither do replicas that share cores.
    assert not analyze(read_runs(save(contents[2]))).verdicts
    shared = _contents()
    for content in shared.values():
        content["topology"]["cores_per_worker"] = [1] * len(
            content["topology"]["cores_per_worker"]
        )
    assert not analyze(read_runs(save(shared[2], shared[4]))).verdicts


def test_what_takes_several_times_as_long_as_expected_is_flagged(
    save: Callable[..., list[str]],
) -> None:
    contents = _contents()
    for n, content in contents.items():
        seconds = 0.07 if n > 1 else 1e-4
        content["parts"].append(
            _part("all_reduce", "same", [seconds], parameters={"nbytes": 64 << 20})
        )
    report = analyze(read_runs(save(*contents.values())))
    [small, large] = report.of("all_reduce")
    [worst] = [note for note in report.notes if "all-reduce of 64 MiB" in note]
    assert not any("all-reduce of 4 KiB" in note for note in report.notes)
    ratios = [p.median / (p.expected_seconds or math.inf) for p in large.points]
    assert max(ratios) > 4
    assert f"took {max(ratios):.1f} times as long as" in worst
    assert small.points


def test_expectations_are_those_calculated_by_hand(
    save: Callable[..., list[str]],
) -> None:
    contents = _contents()
    report = analyze(read_runs(save(*contents.values())))
    # The smallest sum on two replicas took 2e-4 s; the remainder is the cost of a call.
    cost = 2e-4 - (2 * LATENCY + 2 * 4096 / BANDWIDTH)
    inside = cost + 2 * LATENCY + 2 * 800 / BANDWIDTH
    between = 2 * math.log2(2) * LATENCY + 2 * 1 / 2 * 800 / BANDWIDTH
    # The step of one replica excludes waiting.
    weak, strong = report.of("step")
    alone = 0.9 * 0.105
    found = [p.expected_seconds for p in weak.points]
    assert found == [
        None,
        pytest.approx(alone + inside),
        pytest.approx(alone + inside + between),
    ]
    assert weak.points[2].expected_efficiency == pytest.approx(
        0.105 / (alone + inside + between)
    )
    # Of 0.09 s, 0.06 s are computation, which is divided among replicas.
    fixed = 0.9 * 0.10 - 0.06
    assert strong.points[1].expected_seconds == pytest.approx(fixed + 0.03 + inside)
    assert strong.points[2].expected_seconds == pytest.approx(
        fixed + 0.015 + inside + between
    )
    [sums] = report.of("all_reduce")
    assert sums.points[1].expected_seconds == pytest.approx(2e-4)
    across = 2 * LATENCY + 4096 / BANDWIDTH
    assert sums.points[2].expected_seconds == pytest.approx(2e-4 + across)


def test_share_of_other_programs_is_what_replicas_leave() -> None:
    # Columns: worker, cores, CPU seconds of host and replica, clock seconds.
    rows = [[0, 4, 30.0, 9.0, 10.0], [1, 4, 20.0, 20.5, 10.0], [0, 4, 30.0, 5.0, 9.9]]
    assert worker_shares(np.array(rows)) == pytest.approx([16 / 40, 0.0])
    assert worker_shares(np.array([[0, 4, math.nan, 1.0, 1.0]])) == []


def test_replicas_that_share_cores_are_said_and_expected_to_be_slow(
    save: Callable[..., list[str]],
) -> None:
    contents = _contents()
    contents[2]["topology"]["cores_per_worker"] = [1]
    report = analyze(read_runs(save(*contents.values())))
    assert "Cores per rank < 1 (down to 0.5) with 2 replicas" in report.notes[0]
    weak, _ = report.of("step")
    # The time of two replicas, corrected for the number of bytes.
    fewer = 2 * 2 * (800 - 4096) / BANDWIDTH
    assert weak.points[1].expected_seconds == pytest.approx(
        2 * 0.9 * 0.105 + 2e-4 + fewer
    )


def test_others_expectations_take_the_place_of_the_model(
    save: Callable[..., list[str]], tmp_path: Path
) -> None:
    contents = _contents()
    point = {"part": "step", "scaling": "weak", "num_replicas": 2, "seconds": 0.2}
    told = {"format": "hpcstrat expected", "format_version": 1, "source": "an oracle"}
    contents[1]["expected"] = {**told, "points": [point]}
    paths = save(*contents.values())
    weak, _ = analyze(read_runs(paths)).of("step")
    assert weak.points[1].expected_efficiency == pytest.approx(0.105 / 0.2)
    assert weak.points[1].expected_by == "an oracle"
    given = tmp_path / "expected.json"
    other = {**point, "seconds": 0.3}
    given.write_text(json.dumps({**told, "points": [other]}))
    weak, _ = analyze(read_runs(paths), [read_expected(str(given))]).of("step")
    assert weak.points[1].expected_seconds == 0.3
    far = {**told, "source": "another", "points": [{**point, "num_replicas": 64}]}
    given.write_text(json.dumps(far))
    notes = analyze(read_runs(paths), [read_expected(str(given))]).notes
    text = "The expected times of another belong to no part of these runs: they are"
    assert any(note.startswith(text) for note in notes)
    given.write_text(json.dumps({**told, "points": [{**point, "seconds": -1}]}))
    with pytest.raises(BenchError, match=r"found in .*expected\.json"):
        read_expected(str(given))


def _all_medians(values: list[float]) -> list[float]:
    """Return the medians of all samples of this size, with multiplicity."""
    return [statistics.median(s) for s in itertools.product(values, repeat=len(values))]


def test_intervals_are_those_of_all_samples() -> None:
    """Random samples are compared with all samples, which are few here."""
    reference, seconds = [1.0, 1.3, 1.1, 1.2], [2.0, 2.6, 2.3, 2.9]
    ratios = sorted(
        one / other
        for one in _all_medians(reference)
        for other in _all_medians(seconds)
    )
    found = interval(reference, seconds)
    assert found == interval(reference, seconds)
    for value, share in zip(found, (0.025, 0.975), strict=True):
        below = sum(ratio < value - 1e-9 for ratio in ratios) / len(ratios)
        upto = sum(ratio <= value + 1e-9 for ratio in ratios) / len(ratios)
        assert below - 0.01 <= share <= upto + 0.01


class _Page(HTMLParser):
    """An HTML parser that collects rows of tables, and fetched addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.sources: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("br", "small"):
            self.rows[-1][-1] += " " * (tag == "br")
            return
        self._cell = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        if self._cell:
            self.rows[-1].append("")
        assert tag not in ("script", "link", "iframe")
        self.sources += [v or "" for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag == "small"

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


@needs_matplotlib
def test_page_has_the_figures_and_fetches_nothing(
    save: Callable[..., list[str]], tmp_path: Path
) -> None:
    contents = _contents()
    contents[4]["parts"][1]["others_share"] = [0.02, 0.3]
    contents[4]["sessions"][0]["command"] = "hpcstrat <script>alert(1)</script>"
    output = tmp_path / "out.html"
    done = _report(*save(*contents.values()), "-o", output)
    assert done.exit_code == 0, done.output
    text = output.read_text()
    page = _Page(text)
    assert page.sources
    assert all(s.startswith("data:image/svg+xml;base64,") for s in page.sources)
    # The page contains no network address, apart from names of formats.
    assert not re.search(r"url\(|@import|https?://", text)
    rows = [row for row in page.rows if row and row[0] == "4 (2 x 2)"]
    weak = rows[0]
    assert weak[3] == "165 ms 160 ms to 177.5 ms"
    assert weak[4] == f"{0.42 / 0.165:.2f}"
    assert weak[5].startswith(f"{100 * 0.105 / 0.165:.1f}% ")
    waits = f"{100 * 0.16 / 0.621:.1f}%"
    assert weak[-3:] == [waits, "node1 (replica 1)", "30.0%"]
    for name in ("scaling", "shares", "all_reduce"):
        picture = tmp_path / f"out-{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert "<script>" not in text


@needs_matplotlib
def test_picture_of_sums_shows_every_run(save: Callable[..., list[str]]) -> None:
    """There are more runs than colors; runs with unequal workers have full names."""
    layouts = [[2], [2, 1], [2, 2], [2, 2, 1], [2] * 3, [2] * 4, [2] * 5, [2] * 6]
    sums = [_part("all_reduce", "same", [1e-3] * 5, parameters={"nbytes": 4})]
    found = analyze(read_runs(save(*(_content(each, sums) for each in layouts))))
    (axes,) = draw(found)["all_reduce"].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [*(f"{run.layout} replicas" for run in found.runs), "expected"]
    assert labels[1::2][:2] == ["3 (2 + 1) replicas", "5 (2 + 2 + 1) replicas"]


def _without(content: Content, *names: str) -> Content:
    inner = content
    for name in names[:-1]:
        inner = inner[name]
    del inner[names[-1]]
    return content


def _laid_out(content: Content, **changes: Any) -> Content:
    content["topology"].update(changes)
    return content


def _bad(content: Content, **changes: Any) -> Content:
    content["parts"][1].update(changes)
    return content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: json.dumps(c)[:-40], "is not JSON"),
        (lambda c: "[1, 2]", "another JSON"),
        (lambda c: json.dumps({"rows": []}), "JSON; omit it"),
        (lambda c: {**c, "format_version": 2}, "found 2 in"),
        (lambda c: {**c, "format": "other"}, "the format 'other'"),
        (lambda c: _without(c, "links"), "none with the name 'links'"),
        (lambda c: _without(c, "topology", "device"), "the name 'device'"),
        (lambda c: _laid_out(c, replicas_per_worker=[0, 2]), "numbers per worker"),
        (lambda c: _laid_out(c, cores_per_worker=[0]), "a worker without cores"),
        (lambda c: _laid_out(c, worker_of_replica=[0, 7]), "of other workers"),
        (lambda c: _without(c, "parts", 1, "seconds"), "seconds"),
        (lambda c: _bad(c, seconds=[0.1, -1.0]), "none above 0"),
        (lambda c: _bad(c, seconds=[0.1, float("nan")]), "or none above 0, in"),
        (lambda c: _bad(c, late_seconds=[0.1]), "another number of late_seconds"),
        (lambda c: _bad(c, session=1), "a session that is none"),
        (lambda c: _bad(c, scaling="odd"), "an unknown scaling"),
        (lambda c: {**c, "parts": 3}, "found in"),
        (lambda c: {**c, "parts": []}, "before the first part"),
    ],
)
def test_bad_file_is_named(
    save: Callable[..., list[str]], change: Callable[[Content], Any], said: str
) -> None:
    contents = _contents()
    paths = save(*contents.values())
    changed = change(contents[2])
    text = changed if isinstance(changed, str) else json.dumps(changed)
    Path(paths[1]).write_text(text)
    with pytest.raises(BenchError, match=r"^expected .*; .+") as raised:
        read_runs(paths)
    assert said in str(raised.value)
    assert paths[1] in str(raised.value)


def test_runs_that_do_not_fit_together_are_refused(
    save: Callable[..., list[str]],
) -> None:
    contents = _contents()
    twice = save(contents[1], contents[2], copy.deepcopy(contents[2]))
    with pytest.raises(BenchError, match=r"found two of 2 replicas, .*run-1.*run-2"):
        read_runs(twice)
    # A file given twice counts once.
    assert len(read_runs([twice[0], twice[1], twice[0]])) == 2
    for part in contents[4]["parts"][1:]:
        part["parameters"]["compute_seconds"] = 0.5
    said = r"for step \(weak\) compute_seconds 0.06 in .* compute_seconds 0.5 in"
    with pytest.raises(BenchError, match=said):
        read_runs(save(*contents.values()))


def test_what_is_missing_or_differs_is_noted(save: Callable[..., list[str]]) -> None:
    contents = _contents()
    del contents[4]["parts"][2]
    contents[2]["sessions"][0]["versions"]["hpcstrat"] = "2"
    contents[2]["sessions"].append(copy.deepcopy(contents[2]["sessions"][0]))
    contents[2]["sessions"][1]["hosts"] = ["node7"]
    slow = {"hosts": ["a", "b"], "latency_ratio": 1.5, "bandwidth_ratio": 8.0}
    contents[4]["links"]["slow"] = [slow]
    contents[4]["parts"][1]["others_share"] = [0.02, 0.3]
    notes = "\n".join(analyze(read_runs(save(*contents.values()))).notes)
    assert re.search(r"step \(strong, .* was not measured with 4 \(2 x 2\)", notes)
    assert "the same hpcstrat: 1 (1), 2 (2)." in notes
    assert "run of 2 replicas was restarted on other hosts" in notes
    said = "other programs used up to 30% of node1, in step (weak)"
    assert said in notes
    assert "Fewer than 5 repeats" in notes
    assert "the link between a and b had 1.5 times the latency" in notes


def test_report_says_errors_in_a_sentence(
    save: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = _report(tmp_path / "none.json")
    assert missing.exit_code == 1
    none = importlib.util.find_spec("no_such_module")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: none)
    done = _report(*save(*_contents().values()))
    assert done.exit_code == 1
    assert "expected matplotlib, which draws pictures" in done.output


def test_full_disk_leaves_the_file_as_it_was(
    save: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = save(_contents()[2])
    before = Path(path).read_text()
    run = read_run(path)
    run.parts.clear()

    def _fail(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _fail)
        with pytest.raises(OSError, match="No space"):
            write_run(run, path)
    assert Path(path).read_text() == before
    assert os.listdir(tmp_path) == ["run-0.json"]
    write_run(run, path)
    assert read_run(path).parts == []
    assert isinstance(read_run(path), MeasuredRun)
