"""Warnings at the start about hosts on which a job would be slow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from tests.cluster.hosts import Hosts
from tests.docs.said import assert_said

PROGRAM = """
import numpy as np
import hpcstrat as hs
strategy = hs.MultiWorkerMirroredStrategy()
again = hs.MultiWorkerMirroredStrategy()
hs.print_once("sum", strategy.reduce("sum", np.ones(10**6), axis=None)[0])
"""


def test_a_small_dev_shm_is_told_once(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(1)
    words = ["mount", "-o", "remount,size=1m", "/dev/shm"]
    subprocess.run([f"{hosts.folder}/hx", "node1", *words], check=True, timeout=30)
    done = hosts.launch((2,), [sys.executable, "-c", PROGRAM], timeout=60)
    assert "sum 2.0" in done.stdout, done
    assert_said("small-shm", done.stderr)
    assert done.stderr.count("/dev/shm of host node1") == 1
