"""Every code block of the documentation runs, and claims of the pages are true."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import testing
from hpcstrat.testing.launcher import clean_environment
from tests.docs.one_process import ONE_PROCESS
from tests.docs.page import EXTRAS, ULFM_SIZE, WORDS, blocks, runnable
from tests.docs.public import public_definitions
from tests.mpi.programs.started import IS_OPEN_MPI, ulfm

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": ROOT / "README.md",
    **{
        path.relative_to(DOCS).as_posix(): path
        for path in sorted(DOCS.rglob("*.md"))
        if "_build" not in path.parts
    },
}
WITH_CODE = [name for name, path in PAGES.items() if runnable(path, 2)]
WITH_RANKS = [
    name
    for name in WITH_CODE
    if any(
        maker in block.code
        for maker in ("MirroredStrategy(", "CentralStorageStrategy(", "SyncGroups(")
        for block in runnable(PAGES[name], 2)
    )
]
WITH_EXTRAS = [
    (name, extra)
    for name in WITH_RANKS
    for extra in EXTRAS
    if len(runnable(PAGES[name], 2, extra)) > len(runnable(PAGES[name], 2))
]
WITH_LOSSES = [
    name
    for name, path in PAGES.items()
    if any(block.where == "ulfm" for block in blocks(path.read_text()))
]
RECIPES = [
    (name, extra)
    for name, extra in [*[(name, "") for name in WITH_RANKS], *WITH_EXTRAS]
    if any(b.compared and b.where == extra for b in runnable(PAGES[name], 2, extra))
]
EXAMPLES = DOCS / "examples"


def _param(*key: Any, marks: Any = ()) -> Any:
    """Return a pytest parameter; the last word of the key is its required framework."""
    framework = pytest.mark.framework(key[-1])
    needs = [ulfm if key[-1] == "ulfm" else framework] if key[-1] else []
    return pytest.param(*key, marks=[*needs, *marks])


# Run several jobs at once, because jobs mostly wait.
SIMULTANEOUS = 4
MOST_PAGES = 8


class Done(NamedTuple):
    """The result of a job, and the page's compared numbers."""

    returncode: int
    stderr: str
    stdout: str = ""
    numbers: dict[str, list[float]] | None = None


def _run_pages(names: list[str], size: int, extra: str) -> dict[str, Done]:
    """Run pages in one job; if the job fails, run each page in a separate job."""
    with tempfile.TemporaryDirectory(prefix="hpcstrat-") as folder:
        words = ["-m", "tests.docs.page", folder, str(size), extra]
        pages = [PAGES[name] for name in names]
        done = _launch(size, [*words, *pages], fault_tolerant=extra == "ulfm")
        if done.returncode and len(names) > 1:
            return {name: _run_pages([name], size, extra)[name] for name in names}
        ended = {}
        for number, name in enumerate(names):
            found = Path(folder, str(number), "compared.json")
            numbers = json.loads(found.read_text()) if found.exists() else None
            ended[name] = Done(done.returncode, done.stderr, done.stdout, numbers)
        return ended


def _run_example(names: list[str], size: int, extra: str) -> dict[str, Done]:
    assert not extra
    done = _launch(size, [EXAMPLES / names[0]])
    return {names[0]: Done(done.returncode, done.stderr, done.stdout)}


def _launch(
    size: int, words: list[str | Path], *, fault_tolerant: bool = False
) -> testing.Finished:
    command = [sys.executable, *(os.fspath(word) for word in words)]
    if size > 1:
        return testing.launch(size, command, timeout=150, fault_tolerant=fault_tolerant)
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
    )
    return testing.Finished(done.returncode, done.stdout, done.stderr)


Key = tuple[str, int, str]
PAGE_JOBS: list[Key] = [
    *[(name, 1, "") for name in WITH_CODE],
    *[(name, 2, "") for name in WITH_RANKS],
    *[(name, 3, "") for name, extra in RECIPES if not extra],
    # Framework recipes are slow, so that they run once, with ragged batches if
    # possible.
    *[
        (name, 3 if (name, extra) in RECIPES else 2, extra)
        for name, extra in WITH_EXTRAS
    ],
    *[(name, ULFM_SIZE, "ulfm") for name in WITH_LOSSES],
]
SLOW_JOBS: list[Key] = [
    (name, size, extra)
    for name, extra in [*[(name, "") for name in WITH_RANKS], *WITH_EXTRAS]
    for size in (1, 2, 3)
]


class Jobs:
    """The jobs of this file, which run concurrently with its other tests.

    Several pages share a job, because the start is most of a short job's time.
    """

    def __init__(self, pool: ThreadPoolExecutor, wanted: list[Key]) -> None:
        self._pool = pool
        self._futures: dict[Key, Future[dict[str, Done]]] = {}
        alike: dict[tuple[int, str], list[str]] = {}
        for name, size, extra in wanted:
            if name.endswith(".py"):
                self._start([name], size, extra)
            else:
                alike.setdefault((size, extra), []).append(name)
        for (size, extra), names in alike.items():
            for pages in batched(names, MOST_PAGES):
                self._start(pages, size, extra)

    def _start(self, names: list[str], size: int, extra: str) -> None:
        run = _run_example if names[0].endswith(".py") else _run_pages
        future = self._pool.submit(run, names, size, extra)
        self._futures.update({(name, size, extra): future for name in names})

    def __call__(self, name: str, size: int, extra: str = "") -> Done:
        key = (name, size, extra)
        if key not in self._futures:
            self._start([name], size, extra)
        return self._futures[key].result()[name]


def batched(names: list[str], most: int) -> list[list[str]]:
    """Return parts of a list, with about equal lengths."""
    count = -(-len(names) // most)
    return [names[first::count] for first in range(count)]


def _is_there(extra: str) -> bool:
    if extra == "ulfm":
        return IS_OPEN_MPI
    return not extra or importlib.util.find_spec(extra) is not None


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Start the jobs of the selected tests."""
    parameters = [
        item.callspec.params
        for item in request.session.items
        if item.getparent(pytest.Module) is request.node and hasattr(item, "callspec")
    ]
    wanted = {
        (p["name"], p["size"], p["extra"]): None
        for p in parameters
        if "size" in p and _is_there(p["extra"])
    }
    with ThreadPoolExecutor(SIMULTANEOUS) as pool:
        yield Jobs(pool, list(wanted))


def test_words_after_the_fence_are_known() -> None:
    assert [
        f"{name}:{block.line}: {block.where}"
        for name, path in PAGES.items()
        for block in blocks(path.read_text())
        if block.language == "python" and block.where not in WORDS
    ] == []


@pytest.mark.parametrize(
    ("name", "size", "extra"),
    [
        *[_param(*key) for key in PAGE_JOBS],
        *[
            _param(*key, marks=[pytest.mark.slow])
            for key in SLOW_JOBS
            if key not in PAGE_JOBS
        ],
    ],
)
def test_blocks_run(jobs: Jobs, name: str, size: int, extra: str) -> None:
    done = jobs(name, size, extra)
    assert done.returncode == 0, done.stderr


def test_every_recipe_has_a_program_of_one_process() -> None:
    assert set(ONE_PROCESS) == set(RECIPES)
    pages = {name for name, _ in RECIPES}
    assert pages >= {name for name in WITH_RANKS if name.startswith("coming-from/")}


@pytest.mark.parametrize(
    ("sizes", "name", "extra"),
    [
        *[_param((3,) if key[-1] else (1, 2, 3), *key) for key in RECIPES],
        *[_param((1, 2), *key, marks=[pytest.mark.slow]) for key in RECIPES if key[-1]],
    ],
)
def test_recipes_compute_the_same_on_any_number_of_ranks(
    jobs: Jobs, sizes: tuple[int, ...], name: str, extra: str
) -> None:
    """All recipes have an incomplete last batch, whose parts have unequal sizes."""
    one_process = ONE_PROCESS[name, extra]()
    # Allow larger errors for PyTorch, JAX and Keras, which compute in float32.
    rtol, atol = (1e-5, 1e-6) if extra else (1e-12, 1e-15)
    for size in sizes:
        found = jobs(name, size, extra).numbers or {}
        for what, expected in one_process.items():
            assert expected, what
            np.testing.assert_allclose(
                *(found[what], expected, rtol, atol),
                err_msg=f"{what} on {size} ranks",
            )


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_program_of_replicas_of_several_ranks_prints_the_same(
    tmp_path: Path, ranks: int
) -> None:
    page = PAGES["user-guide/replicas-of-several-ranks.md"]
    (tmp_path / "fit_conductivity.py").write_text(runnable(page, 1)[0].code)
    done = testing.launch(
        ranks,
        [sys.executable, str(tmp_path / "fit_conductivity.py")],
        timeout=100,
        env={"RANKS_PER_REPLICA": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in page.read_text()
    assert "largest error" in done.stdout


def test_blocks_for_ranks_say_so_to_readers() -> None:
    assert [
        f"{name}:{block.line}"
        for name, path in PAGES.items()
        for block in blocks(path.read_text())
        if block.where == "ranks" and not block.code.startswith("# On two ranks:\n")
    ] == []


def test_blocks_that_do_not_run_say_why_to_readers_and_are_python() -> None:
    without = []
    for name, path in PAGES.items():
        for block in blocks(path.read_text()):
            if block.where == "no-run":
                ast.parse(block.code, f"{path}:{block.line}")
                if not block.code.startswith("# Not run by the tests: "):
                    without.append(f"{name}:{block.line}")
    assert without == []


def _changed_lines() -> tuple[str, list[str]]:
    """Return the diff of the two programs, and the lines only in the new program."""
    serial, distributed = (
        (EXAMPLES / name).read_text().splitlines()
        for name in ("serial.py", "distributed.py")
    )
    diff = list(
        difflib.unified_diff(
            serial, distributed, "serial.py", "distributed.py", n=1, lineterm=""
        )
    )
    new = [line for line in diff if re.match(r"\+(?!\+)", line)]
    return "\n".join(diff) + "\n", new


def test_the_diff_of_the_page_is_that_of_the_programs() -> None:
    diff, new = _changed_lines()
    page = PAGES["minimal-diff.md"].read_text()
    assert diff in [block.code for block in blocks(page) if block.language == "diff"]
    assert 0 < len(new) <= 5
    serial = (EXAMPLES / "serial.py").read_text()
    assert blocks(page)[0].code in serial


@pytest.mark.parametrize(
    ("name", "size", "extra"), [("distributed.py", n, "") for n in (1, 2, 3)]
)
def test_the_distributed_program_computes_the_same(
    jobs: Jobs, name: str, size: int, extra: str
) -> None:
    serial, distributed = jobs("serial.py", 1), jobs(name, size, extra)
    assert (serial.returncode, distributed.returncode) == (0, 0), distributed.stderr
    expected, found = (json.loads(done.stdout) for done in (serial, distributed))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


def test_pages_can_be_read_where_they_are_not_built() -> None:
    """On the repository's pages, links without a text are invisible."""
    texts = {name: path.read_text() for name, path in PAGES.items()}
    assert [name for name, text in texts.items() if "[](" in text] == []
    targets = [
        (path.parent / target.partition("#")[0], name)
        for name, path in PAGES.items()
        for target in re.findall(r"\]\(([^)\s]+)\)", texts[name])
        if not target.startswith(("#", "http"))
    ]
    assert len(targets) > 50
    assert [f"{name}: {path}" for path, name in targets if not path.exists()] == []


def _listed(page: Path) -> list[tuple[str, Path]]:
    """Return titles and pages in a page's lists, which the menus show."""
    found = re.findall(r"^- \[(.+)\]\((\S+\.md)\)$", page.read_text(), re.M)
    return [(title, (page.parent / target).resolve()) for title, target in found]


def test_every_page_is_in_one_list_with_its_title() -> None:
    """Built pages show these titles, and the repository's page shows the lists."""
    sections = _listed(PAGES["index.md"])
    listed = [*sections, *(row for _, page in sections for row in _listed(page))]
    assert [
        (title, path)
        for title, path in listed
        if path.read_text().partition("\n")[0] != f"# {title}"
    ] == []
    pages = {path.resolve() for path in PAGES.values()}
    assert sorted(path for _, path in listed) == sorted(
        pages - {PAGES[name].resolve() for name in ("README.md", "index.md")}
    )


def test_nobody_is_told_to_install_what_is_not_published() -> None:
    files = [
        *PAGES.values(),
        *[path for top in ("hpcstrat", "jobs") for path in (ROOT / top).rglob("*.py")],
    ]
    said = re.compile(r"pip install[^\n]*['\" ]hpcstrat\b|(?<!/)hpcstrat\[")
    assert [str(path) for path in files if said.search(path.read_text())] == []


def test_the_first_page_begins_with_a_command_the_version_and_a_speed() -> None:
    first = PAGES["index.md"].read_text().partition("![")[0]
    assert "pip install './hpcstrat[" in first
    assert f"Version {hs.__version__}, " in first
    (results,) = re.findall(r"`(benchmarks/.*)`", first)
    tables = (ROOT / results).read_text()
    figures = re.findall(r"(\d+) ms", first)
    # The second of the columns is ResNet-18; the last of the tables is the newest.
    assert list(map(float, figures)) == [
        round(float(re.findall(rf"^[|] {row} [|][^|]+[|] ([\d.]+)", tables, re.M)[-1]))
        for row in (
            "a step without communication",
            "hpcstrat, `replicate`",
            "torch DDP on gloo",
        )
    ]


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("max", "user-guide/reductions.md"),
        ("min", "user-guide/reductions.md"),
        ("deadlock", "user-guide/errors.md"),
        ("hang", "user-guide/errors.md"),
        ("early stopping", "faq.md"),
        ("dropout", "user-guide/training.md"),
        ("torchrun", "user-guide/torch-jax.md"),
        ("CUDA", "gpu.md"),
    ],
)
def test_a_search_shows_the_page_of_a_word_first(word: str, page: str) -> None:
    conf = _conf()
    found = []
    for name, path in PAGES.items():
        source = [path.read_text()]
        conf._make_index_entries(None, name, source)
        for entries in re.findall(r"^```{index} (.+)\n```$", source[0], re.M):
            found += [name for entry in entries.split(", ") if entry == f"! {word}"]
    assert found == [page]


def test_every_word_of_the_glossary_stands_there_once() -> None:
    text = PAGES["glossary.md"].read_text()
    terms = re.findall(r"^([a-zA-Z][^\n]*)\n: ", text, re.M)
    assert len(terms) == len(set(terms)) > 10
    assert {"replica", "worker", "host", "sync group", "Topology"} <= set(terms)


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    lines = re.findall(r"^```{public-names} (.*)$", text, re.M)
    keys = [key for line in lines for key in line.split()]
    assert len(keys) == len(set(keys))
    # The page "others" shows the keys without a separate page.
    assert set(keys) - {"others"} <= set(hs._NAMES) | set(hs._MODULES)
    assert "others" in keys


def _conf() -> Any:
    """Return the module docs/conf.py."""
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


def test_the_reference_shows_base_classes_first_and_inherited_methods_once() -> None:
    conf = _conf()
    names = conf._in_order(conf._names("strategies", hs._NAMES))
    assert names[0] == "hpcstrat.Strategy"
    assert names.index("hpcstrat.get_strategy") > names.index(
        "hpcstrat.OneDeviceStrategy"
    )
    assert conf._options(hs.Strategy) == []
    inheritance, left_out = conf._options(hs.MultiWorkerMirroredStrategy)
    assert inheritance.strip() == ":show-inheritance:"
    assert {"run,", "reduce,", "close,"} <= set(left_out.split())
    # The class has its own docstring for this member, so that it is shown.
    assert "cluster_resolver," not in left_out.split()


def test_the_reference_leaves_out_what_is_for_the_library_alone() -> None:
    shown = {name for _, name in public_definitions()}
    assert {"Strategy.run", "Optimizer.apply_gradients"} <= shown
    assert (
        shown
        & {
            "Strategy.all_or_none",
            "Strategy.register",
            "MpiStrategy.abandon",
            "ParameterServerStrategy.move_from_lost",
            "Optimizer.from_rule",
        }
        == set()
    )
