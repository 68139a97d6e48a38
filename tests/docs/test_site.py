"""The site of the pages: several versions, and every page in a browser."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.look import CHROMIUM, look, pages_of

DOCS = Path(__file__).parents[2] / "docs"


def _publish() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "publish.py"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a site of three versions, with one page each."""
    for name in ("0.9.0", "0.10.0", "dev", "drafts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    return tmp_path


def test_versions_are_listed_newest_release_first(site: Path) -> None:
    publish = _publish()
    assert publish["versions"](site) == ["dev", "0.10.0", "0.9.0"]
    publish["list_versions"](site, "/hpcstrat")
    listed = json.loads((site / "switcher.json").read_text())
    assert [entry["url"] for entry in listed] == [
        "/hpcstrat/dev/",
        "/hpcstrat/0.10.0/",
        "/hpcstrat/0.9.0/",
    ]
    assert [e["version"] for e in listed if e["preferred"]] == ["0.10.0"]
    assert "url=0.10.0/index.html" in (site / "index.html").read_text()


def test_a_site_without_a_release_begins_with_the_development(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "index.html").touch()
    _publish()["list_versions"](tmp_path, "/")
    assert "url=dev/index.html" in (tmp_path / "index.html").read_text()


def test_a_name_that_is_no_version_is_refused(tmp_path: Path) -> None:
    words = [sys.executable, str(DOCS / "publish.py"), str(tmp_path), "v0.2.0"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected dev or a release such as 0.2.0, found v0.2.0" in done.stderr


@pytest.mark.framework("torch")
@pytest.mark.framework("keras")
def test_the_reference_is_built_where_the_frameworks_are_installed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("pydata_sphinx_theme", reason="needs the extra docs")
    page = (DOCS / "api/integrations.md").read_text()
    (tmp_path / "index.md").write_text("# The first page has no table of contents.\n")
    (tmp_path / "page.md").write_text(f"{page}\n<!-- index: ! CUDA, ! max -->\n")
    words = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-c", str(DOCS)]
    done = subprocess.run(
        [*words, str(tmp_path), str(tmp_path / "built")],
        check=False,
        capture_output=True,
        text=True,
        env={key: os.environ[key] for key in os.environ if key != "KERAS_BACKEND"},
    )
    assert done.returncode == 0, done.stderr
    assert "docstring of" not in done.stderr  # The frameworks' own are not for Sphinx.
    built = (tmp_path / "built/page.html").read_text()
    shown = set(re.findall(r'id="([^"]+)"', built))
    assert "hpcstrat.integrations.torch.SyncBatchNorm.convert" in shown
    assert "hpcstrat.integrations.keras.Checkpoint.on_epoch_end" in shown
    inherited = {"torch.SyncBatchNorm.apply", "keras.Checkpoint.on_train_batch_end"}
    assert shown.isdisjoint(f"hpcstrat.integrations.{name}" for name in inherited)
    # In the table of contents, names have no class, and may break after a _.
    assert ">on_\N{ZERO WIDTH SPACE}epoch_\N{ZERO WIDTH SPACE}end()<" in built
    search = (tmp_path / "built/searchindex.js").read_text()
    assert re.search(r'"max":\[\[\d+,"index-0",true\]\]', search)


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None
    or not all(map(importlib.util.find_spec, ("playwright", "pydata_sphinx_theme"))),
    reason="needs Chromium, playwright, and the extra docs",
)
def test_every_page_fits_a_phone_and_a_desktop(tmp_path: Path) -> None:
    _publish()["build"](tmp_path, "dev")
    assert len(pages_of(tmp_path / "dev")) > 70
    assert look(tmp_path / "dev") == []
