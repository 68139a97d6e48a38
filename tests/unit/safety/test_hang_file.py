"""Jobs keep their hang files in one folder, and remove old ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcstrat.safety import hang_file


def test_newest_files_stay_and_each_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a folder"
    monkeypatch.setattr(hang_file._Kept, "folder", str(folder))
    monkeypatch.setattr(hang_file._Kept, "states", None)
    made = []
    for number in range(14):
        monkeypatch.setenv("PMIX_NAMESPACE", f"job{number}")
        for text in ("first", "second"):
            hang_file.add_event("error", text=text)
        path = Path(hang_file.path_of(str(folder)))
        made.append(path)
        os.utime(path, (number, number))
        assert len(path.read_text().splitlines()) == 2
        said = capfd.readouterr().err
        assert said == f"hpcstrat: `hpcstrat hang '{path}'` explains what happened\n"
        if number == 3:
            (folder / "notes.jsonl").write_text("of the user")
    kept = made[-hang_file._MOST_FILES :]
    assert sorted(folder.iterdir()) == sorted([*kept, folder / "notes.jsonl"])
