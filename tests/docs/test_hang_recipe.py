"""The page about a hang has the output of its own program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hpcstrat import testing
from tests.docs.page import blocks

PAGE = Path(__file__).parents[2] / "docs" / "user-guide" / "recipes" / "hang.md"
HANG = "from hpcstrat.cli import main; main()"


def plain(text: str) -> str:
    """Return a text in one line, without folders, hosts, and numbers of seconds."""
    host = re.escape(os.uname().nodename)
    text = re.sub(r'File "[^"]*/', 'File "', text)
    text = re.sub(rf"\b{host}\b|\bvm\b", "HOST", text)
    text = re.sub(r"\d+ s\b", "N s", text)
    return " ".join(text.split())


def test_the_output_of_the_page_is_that_of_its_program(tmp_path: Path) -> None:
    page = PAGE.read_text()
    (program,) = [one.code for one in blocks(page) if "wait_for(path)" in one.code]
    code = "\n".join(program.strip().splitlines())
    # The page's first line, a comment, is no line of the program.
    lines = code.splitlines()
    assert lines[0].startswith("# Not run")
    (tmp_path / "train.py").write_text("\n".join(lines[1:]) + "\n")
    limits = {"HPCSTRAT_WARN_SECONDS": "1", "HPCSTRAT_LIMIT_SECONDS": "2"}
    done = testing.launch(
        3,
        [sys.executable, str(tmp_path / "train.py")],
        timeout=60,
        env={**os.environ, **limits, "HPCSTRAT_HANG_FOLDER": str(tmp_path / "hang")},
    )
    assert done.returncode != 0
    said = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    for part in said[0].split("..."):
        for sentence in plain(part).split(" stack of "):
            assert sentence.strip("; ") in plain(done.stdout + " " + done.stderr)
    files = list((tmp_path / "hang").glob("*.jsonl"))
    if files:
        told = subprocess.run(
            [sys.executable, "-c", HANG, "hang", *map(str, files)],
            check=True,
            capture_output=True,
            text=True,
        )
        assert plain(said[1].split(", ...")[0]) in plain(told.stdout)
