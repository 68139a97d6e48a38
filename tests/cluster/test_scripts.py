"""The pretend hosts themselves: their isolation, and their removal."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcstrat.testing.job import wait_until
from tests.cluster.hosts import SCRIPTS, Hosts


def _on(hosts: Hosts, host: str, *command: str) -> str:
    """Return the output of a command on a host; empty if the command fails."""
    return subprocess.run(
        [str(hosts.folder / "hx"), host, *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout.strip()


def test_hosts_share_files_and_nothing_else(hosts: Hosts, tmp_path: Path) -> None:
    mark = f"/dev/shm/hosts-{os.getpid()}"
    assert _on(hosts, "node1", "hostname") == "node1"
    assert _on(hosts, "node2", "hostname") == "node2"
    _on(hosts, "node1", "touch", str(tmp_path / "file"), mark)
    assert _on(hosts, "node2", "ls", str(tmp_path)) == "file"
    assert _on(hosts, "node1", "ls", mark) == mark
    assert _on(hosts, "node2", "ls", mark) == ""
    assert not Path(mark).exists()
    for space in ("net", "uts", "ipc", "mnt"):
        link = f"/proc/self/ns/{space}"
        links = {_on(hosts, host, "readlink", link) for host in ("node1", "node2")}
        assert len(links | {os.readlink(link)}) == 3


def test_end_of_one_use_leaves_another_alone(
    hosts: Hosts, make_hosts: Callable[..., Hosts]
) -> None:
    with Hosts(1, "10mbit") as others:
        assert "tbf" in _on(others, "node1", "tc", "qdisc")
        assert "tbf" not in _on(hosts, "node1", "tc", "qdisc")
        folder = others.folder
    assert not folder.exists()
    assert _on(hosts, "node1", "hostname") == "node1"


def _down(hosts: Hosts, *words: str) -> None:
    env = {**os.environ, "HPCHOSTS_RUN": str(hosts.folder)}
    subprocess.run([str(SCRIPTS / "hosts_down.sh"), *words], check=True, env=env)


def test_host_can_be_frozen_and_switched_off(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hx = str(hosts.folder / "hx")
    with subprocess.Popen([hx, "node2", "sleep", "60"]) as process:
        wait_until(lambda: any("sleep 60" in t for t in hosts.processes().values()), 5)
        events = hosts.folder / "groups/node2/cgroup.events"
        _down(hosts, "node2", "freeze")
        assert wait_until(lambda: "frozen 1" in events.read_text(), 5)
        _down(hosts, "node2", "thaw")
        assert wait_until(lambda: "frozen 0" in events.read_text(), 5)
        assert process.poll() is None
        _down(hosts, "node2")
        assert process.wait(5) == -signal.SIGKILL
    assert _on(hosts, "node2", "hostname") == ""
    assert _on(hosts, "node1", "hostname") == "node1"
    hosts.close()
    hosts.close()


@pytest.mark.parametrize("way", ["by itself", "by the next use"])
def test_hosts_of_a_dead_owner_go_down(
    make_hosts: Callable[..., Hosts], way: str
) -> None:
    folder = Path(f"/run/hpchosts-{os.getpid()}-owner")
    env = {**os.environ, "HPCHOSTS_RUN": str(folder)}
    make_hosts(1).close()  # Skips the test if there can be no hosts.
    with subprocess.Popen(["sleep", "60"]) as owner:
        words = [str(SCRIPTS / "hosts_up.sh"), "-o", str(owner.pid), "1"]
        subprocess.run(words, check=True, env=env, stdout=subprocess.DEVNULL)
        first = int((folder / "node1.pid").read_text())
        owner.kill()
    if way == "by the next use":
        Hosts(1).close()
        assert not folder.exists()
    assert wait_until(lambda: not folder.exists(), 10)
    assert not list(Path("/proc").glob(f"{first}/exe"))
