"""Energy is the sum of a node's counters, read from files in the form of Linux's."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcstrat as hs
from hpcstrat.metrics.energy import NodeEnergy


@pytest.fixture
def root() -> Iterator[Path]:
    """Yield a folder that other users can read, too."""
    folder = Path(tempfile.mkdtemp(prefix="hpcstrat-sys-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def zone(root: Path, name: str, kind: str, energy: int, most: int = 1000) -> Path:
    """Make a zone of RAPL, which is a link in powercap, and return its counter."""
    real = root / "sys/devices/virtual/powercap/intel-rapl" / name
    real.mkdir(parents=True)
    links = root / "sys/class/powercap"
    links.mkdir(parents=True, exist_ok=True)
    (links / name).symlink_to(os.path.relpath(real, links))
    (real / "name").write_text(f"{kind}\n")
    (real / "max_energy_range_uj").write_text(f"{most * 1000000}\n")
    (real / "energy_uj").write_text(f"{energy * 1000000}\n")
    return real / "energy_uj"


def test_packages_and_memory_are_added_without_their_parts(root: Path) -> None:
    first = zone(root, "intel-rapl:0", "package-0", 100)
    second = zone(root, "intel-rapl:1", "package-1", 900)
    memory = zone(root, "intel-rapl:0:1", "dram", 5, 60)
    cores = zone(root, "intel-rapl:0:0", "core", 50)
    system = zone(root, "intel-rapl:2", "psys", 70)
    node = NodeEnergy(str(root))
    assert node.joules() == {"processors": 0.0, "memory": 0.0}
    first.write_text("130000000\n")
    second.write_text("20000000\n")  # began again at 0, after 1000
    memory.write_text("2500000\n")
    for other in (cores, system):
        other.write_text("999000000\n")
    found = node.joules()
    assert found == pytest.approx({"processors": 30 + 120, "memory": 57.5})
    second.write_text("10000000\n")
    assert node.joules()["processors"] == pytest.approx(150 + 990)


def test_cray_s_counter_of_the_node_replaces_the_others(root: Path) -> None:
    zone(root, "intel-rapl:0", "package-0", 100)
    folder = root / "sys/cray/pm_counters"
    folder.mkdir(parents=True)
    (folder / "energy").write_text("32421650 J 1669901421466012 us\n")
    node = NodeEnergy(str(root))
    (folder / "energy").write_text("32421850 J 1669901422466012 us\n")
    assert node.joules() == {"Cray": 200.0}
    # A controller that started again has no energy of the time before.
    (folder / "energy").write_text("7 J 1669901423466012 us\n")
    assert node.joules() == {"Cray": 200.0}


def test_slurm_s_counter_is_used_if_there_is_no_other(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words; cat {tmp_path}/said\n')
    command.chmod(0o755)
    said = "NodeName=node1\n   CurrentWatts=90 AveWatts=88\n   ConsumedJoules={}\n"
    (tmp_path / "said").write_text(said.format("5000"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    node = NodeEnergy(str(root))
    (tmp_path / "said").write_text(said.format("5100"))
    assert node.joules() == {"Slurm": 100.0}
    assert (tmp_path / "words").read_text() == "show node node1\n"
    (tmp_path / "said").write_text("   ConsumedJoules=n/s\n")
    node = NodeEnergy(str(root))
    assert not node.joules()
    assert "Slurm has no AcctGatherEnergyType" in node.reasons[-1]


def _as_another_user(root: str, found: Any) -> None:
    os.setgid(65534)
    os.setuid(65534)
    node = NodeEnergy(root)
    found.put((node.joules(), node.reasons))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_counters_of_root_only_have_a_reason(root: Path) -> None:
    zone(root, "intel-rapl:0", "package-0", 100).chmod(0o400)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=_as_another_user, args=(str(root), found))
    process.start()
    joules, reasons = found.get()
    process.join()
    assert joules == {}
    path = "sys/class/powercap/intel-rapl:0/energy_uj"
    assert f"only root may read {root}/{path}, as since 2020 by default" in reasons


def test_a_run_logs_its_energy_or_a_line_with_the_reason(
    root: Path, tmp_path: Path
) -> None:
    strategy = hs.MirroredStrategy()
    meter = hs.metrics.EnergyMeter(strategy, root=str(root))
    found = meter.result()
    assert found["joules"] is None
    assert "\n" not in found["text"]
    assert f"no counters of RAPL in {root}/sys/class/powercap" in found["text"]
    log = hs.metrics.Log(tmp_path / "without", strategy=strategy)
    meter.log(log, 0)
    meter.log(log, 1)
    (record,) = hs.metrics.read_log(tmp_path / "without")
    assert "energy: no figure, because on" in str(record)
    counter = zone(root, "intel-rapl:0", "package-0", 100)
    meter = hs.metrics.EnergyMeter(strategy, root=str(root))
    counter.write_text("136000000\n")
    log = hs.metrics.Log(tmp_path / "with", strategy=strategy)
    meter.log(log, 3)
    (record,) = hs.metrics.read_log(tmp_path / "with")
    assert record["scalars"] == {"energy_joules": pytest.approx(36)}
    assert "energy: 1e-05 kWh on 1 nodes (processors 36 J), " in meter.result()["text"]
    strategy.close()
