"""Run programs of docs/examples, one after the other in one job, as their users would.

``hpcstrat torch --replace gloo examples.py FOLDER EPOCHS NAME...``: each program keeps
its checkpoints in a separate folder, and runs once for each number in EPOCHS, such as
``1,2``. Print the last output of each program, by its name.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
# Use a short text, so that training is fast.
OPTIONS = {"gpt_torch.py": ["--text", str(DOCS / "glossary.md")]}


def last_words(name: str, folder: str, epochs: str) -> Any:
    """Run a program; return the numbers of its last line, or None without output."""
    path = str(DOCS / "examples" / name)
    saved = ["--checkpoints", str(Path(folder, name))]
    sys.argv = [path, "--epochs", epochs, *saved, *OPTIONS.get(name, [])]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(path, run_name="__main__")
    lines = said.getvalue().splitlines()
    return json.loads(lines[-1]) if lines else None


if __name__ == "__main__":
    _, folder, epochs, *names = sys.argv
    found = {}
    for name in names:
        # Each run continues from the checkpoint of the run before.
        for number in epochs.split(","):
            found[name] = last_words(name, folder, number)
    if any(found.values()):
        print(json.dumps(found))
