"""Settings are read from the program, then the environment, and validated."""

from __future__ import annotations

import pytest

from hpcstrat.engine.settings import Settings


def test_program_comes_before_environment_and_default() -> None:
    environment = {
        "HPCSTRAT_WARN_SECONDS": "7",
        "HPCSTRAT_LIMIT_SECONDS": "90",
        "HPCSTRAT_WATCHDOG": "off",
        "HPCSTRAT_TEST_MARK": "of the tests",
        "HPCSTRAT_WATCH_FOLDER": "of hpcstrat watch",
        "OTHER": "1",
    }
    settings = Settings(warn_seconds=2).resolved(environment)
    assert (settings.warn_seconds, settings.limit_seconds) == (2.0, 90.0)
    assert settings.watchdog is False
    assert Settings().resolved({}).warn_seconds == 60.0


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("HPCSTRAT_WARN_SECOND", "5", "write HPCSTRAT_WARN_SECONDS, or unset it"),
        ("HPCSTRAT_XYZ", "5", "choose one of HPCSTRAT_WATCHDOG"),
        ("HPCSTRAT_WARN_SECONDS", "soon", "to be a number, found 'soon'"),
        ("HPCSTRAT_WARN_SECONDS", "nan", "HPCSTRAT_WARN_SECONDS >= .* and finite"),
        ("HPCSTRAT_WARN_SECONDS", "-1", "found -1"),
        ("HPCSTRAT_WATCHDOG", "maybe", "to be 1 or 0, found 'maybe'"),
    ],
)
def test_wrong_environment_is_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings().resolved({name: text})


def test_wrong_option_is_refused() -> None:
    with pytest.raises(TypeError, match="expected warn_seconds of type float"):
        Settings(warn_seconds="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"limit_seconds >= 0\.01"):
        Settings(limit_seconds=0)


def test_given_values_are_compared() -> None:
    settings = Settings(warn_seconds=5).resolved({})
    assert not Settings(warn_seconds=5).differ_from(settings)
    assert Settings(warn_seconds=6).differ_from(settings)
