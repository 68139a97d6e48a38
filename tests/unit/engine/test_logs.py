"""The path of log records from the library's loggers to handlers."""

from __future__ import annotations

import contextlib
import importlib.resources
import io
import logging
import subprocess
import sys

import pytest

import hpcstrat
from hpcstrat.engine.logs import get_logger

_PROGRAM = """
import logging, logging.config, sys
from hpcstrat.engine.logs import get_logger

def configure(when):
    if sys.argv[1:] == ["root", when]:
        logging.basicConfig(format="mine %(rank)d %(message)s", stream=sys.stdout)
    elif sys.argv[1:] == ["dict", when]:
        logging.config.dictConfig({
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"f": {"format": "mine %(rank)d %(message)s"}},
            "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f",
                               "stream": "ext://sys.stdout"}},
            "root": {"handlers": ["h"]},
        })
    elif len(sys.argv) == 3 and sys.argv[2] == when:
        logger = logging.getLogger(sys.argv[1])
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("mine %(rank)d %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False

configure("before")
get_logger()
get_logger("data")
configure("after")
get_logger("data").warning("careful")
get_logger("data").warning("again")
"""


@pytest.mark.parametrize(
    "how",
    [
        "root before",
        "root after",
        "dict after",
        "hpcstrat before",
        "hpcstrat after",
        "hpcstrat.data before",
        "hpcstrat.data after",
        "",
    ],
)
def test_each_record_is_shown_once(how: str) -> None:
    out, err = (2, 0) if how else (0, 2)
    command = [sys.executable, "-c", _PROGRAM, *how.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("mine 0 ") == out
    assert done.stderr.count("hpcstrat.data 0/1") == err


def test_records_reach_handlers_of_the_root(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("data").warning("careful")
    (record,) = caplog.records
    assert record.getMessage() == "careful"
    assert (record.name, record.__dict__["rank"]) == ("hpcstrat.data", 0)
    assert logging.getLogger("hpcstrat").propagate


def test_records_without_a_handler_go_to_the_stream_of_today(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with contextlib.redirect_stderr(io.StringIO()) as earlier:
        get_logger("data").warning("careful")
    assert "] WARNING: careful" in earlier.getvalue()
    earlier.close()
    get_logger("data").warning("again")
    get_logger("data").info("not asked for")
    said = capsys.readouterr().err
    assert said.count("again") == said.count("\n") == 1


def test_caplog_sees_lower_levels_where_a_test_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="hpcstrat"):
        get_logger("data").info("%d rows", 3)
    assert caplog.messages == ["3 rows"]


def test_package_says_that_it_is_typed() -> None:
    assert importlib.resources.files(hpcstrat).joinpath("py.typed").is_file()
