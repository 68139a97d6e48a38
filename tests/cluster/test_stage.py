"""``hpcstrat stage`` reads an environment once, and all nodes have it or none has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcstrat import testing
from tests.cluster.hosts import Hosts

# Each rank appends the files of the source that it opens, and the bytes that it reads
# by system calls, to a file of its own.
COUNTED = """
import os, sys
log, limited, *words = sys.argv[1:]
opened = []
source = os.path.abspath(words[1])
def note(event, args):
    path = str(args[0]) if event == "open" else ""
    if path.startswith(source) and not os.path.isdir(path):
        opened.append(os.path.basename(path))
sys.addaudithook(note)
host = os.uname().nodename
if limited == host:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, 10 << 20))
sys.argv = ["hpcstrat", *words]
from hpcstrat.cli import main
try:
    main()
finally:
    read = open("/proc/self/io").read().split()[1]
    with open(f"{log}/{host}-{os.getpid()}", "w") as file:
        file.write(f"{read} {sorted(opened)}")
"""
SIZE = 64 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of 64 MiB and a few small ones."""
    folder = tmp_path_factory.mktemp("shared") / "env"
    folder.mkdir()
    (folder / "large").write_bytes(os.urandom(1 << 20) * (SIZE >> 20))
    for number in range(3):
        (folder / f"small{number}").write_text(f"{number}")
    return folder


def stage(
    hosts: Hosts, log: Path, *words: str, limited: str = "none"
) -> testing.Finished:
    """Run the command on two ranks of each host."""
    program = [sys.executable, "-c", COUNTED, str(log), limited, "stage", *words]
    return hosts.launch((2, 2), program, timeout=60)


def on(hosts: Hosts, host: str, *words: str) -> str:
    command = [f"{hosts.folder}/hx", host, *words]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30
    ).stdout


def test_one_rank_reads_the_source_and_every_node_has_it(
    hosts: Hosts, source: Path, tmp_path: Path
) -> None:
    place = "/dev/shm/copies/env"
    done = stage(hosts, tmp_path, str(source), "--to", place)
    assert done.returncode == 0, done
    assert f"{place} on 2 nodes has {source} (4 files, 67.1 MB)" in done.stdout
    assert "read 67.1 MB once, wrote 134.2 MB on 2 of them" in done.stdout
    assert "saved: if each node reads all files, that is 67.1 MB more" in done.stdout
    for host in ("node1", "node2"):
        assert on(hosts, host, "ls", "/dev/shm/copies") == "env\n"
        on(hosts, host, "cmp", f"{source}/large", f"{place}/large")
    logs = [path.read_text().split(" ", 1) for path in tmp_path.iterdir()]
    opened = [names for _, names in logs if names != "[]"]
    names = ["large"] * 4 + ["small0", "small1", "small2"]
    # The file is opened once for each piece of 16 MiB, by one thread of one rank.
    assert opened in ([str(sorted(names))], [str(sorted([*names, "large"]))])
    # A rank that writes reads the source, or the network, once, and then its own copy
    # to compare it; the other ranks read neither.
    reads = sorted(int(read) for read, _ in logs)
    assert reads[3] - reads[0] == pytest.approx(2 * SIZE, rel=0.05)
    assert reads[2] - reads[0] == pytest.approx(2 * SIZE, rel=0.05)
    assert reads[1] - reads[0] < SIZE / 20
    again = stage(hosts, tmp_path, str(source), "--to", place)
    assert "all nodes had this copy" in again.stdout, again
    # A node that has lost its copy gets another one.
    on(hosts, "node2", "rm", "-r", place)
    third = stage(hosts, tmp_path, str(source), "--to", place)
    assert "read 0.0 MB once, wrote 67.1 MB on 1 of them" in third.stdout, third
    on(hosts, "node2", "cmp", f"{source}/large", f"{place}/large")


def test_an_error_on_one_node_leaves_no_copy_on_any(
    hosts: Hosts, source: Path, tmp_path: Path
) -> None:
    place = "/dev/shm/broken/env"
    done = stage(hosts, tmp_path, str(source), "--to", place, limited="node2")
    assert done.returncode == 2, done
    assert "File too large" in done.stderr
    assert len(list(tmp_path.iterdir())) == 4
    for host in ("node1", "node2"):
        assert on(hosts, host, "ls", "-A", "/dev/shm/broken") == ""


def test_a_node_with_too_little_memory_is_named(
    hosts: Hosts, source: Path, tmp_path: Path
) -> None:
    on(hosts, "node2", "rm", "-rf", "/dev/shm/copies")
    on(hosts, "node2", "mount", "-o", "remount,size=50m", "/dev/shm")
    try:
        place = "/dev/shm/none/env"
        done = stage(hosts, tmp_path, str(source), "--to", place)
        assert done.returncode == 2, done
        assert "expected room for 67,121,152 bytes and 5 files" in done.stderr
        assert "free on node2" in done.stderr
        # Each of the four ranks ended by itself.
        assert len(list(tmp_path.iterdir())) == 4
        for host in ("node1", "node2"):
            assert on(hosts, host, "ls", "-A", "/dev/shm/none") == ""
    finally:
        on(hosts, "node2", "mount", "-o", "remount,size=4g", "/dev/shm")
