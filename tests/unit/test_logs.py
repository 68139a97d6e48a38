"""The way of log records from the library's loggers to handlers."""

from __future__ import annotations

import importlib.resources
import logging
import subprocess
import sys

import pytest

import hpcstrat
from hpcstrat.engine.logs import get_logger

_PROGRAM = """
import logging, sys
from hpcstrat.engine.logs import get_logger
if sys.argv[1] == "root":
    logging.basicConfig(format="mine %(rank)d %(message)s", stream=sys.stdout)
get_logger("data").warning("careful")
get_logger("data").warning("again")
"""


@pytest.mark.parametrize(("how", "out", "err"), [("root", 2, 0), ("none", 0, 2)])
def test_each_record_is_shown_once(how: str, out: int, err: int) -> None:
    command = [sys.executable, "-c", _PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("mine 0 ") == out
    assert done.stderr.count("hpcstrat.data 0/1") == err


def test_records_reach_handlers_of_the_root(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("data").warning("careful")
    (record,) = caplog.records
    assert record.getMessage() == "careful"
    assert (record.name, record.__dict__["rank"]) == ("hpcstrat.data", 0)
    assert logging.getLogger("hpcstrat").propagate


def test_package_says_that_it_is_typed() -> None:
    assert importlib.resources.files(hpcstrat).joinpath("py.typed").is_file()
