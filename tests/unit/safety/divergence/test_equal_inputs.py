"""Records of inputs in the shared memory of a rank's status."""

from __future__ import annotations

from hpcstrat.engine.observe.arrival_report import ROW_BYTES
from hpcstrat.safety.divergence import equal_inputs
from hpcstrat.safety.watchdog.pages import STATUS_START


def test_records_of_inputs_lie_beside_the_other_records_of_a_rank() -> None:
    end = equal_inputs._START + 2 * equal_inputs._RECORD.size
    assert ROW_BYTES <= equal_inputs._START < end <= STATUS_START
