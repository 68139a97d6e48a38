"""The steps of `bench_parameter_server.py`, by TensorFlow's ParameterServerStrategy.

That benchmark starts this program with its parameters in JSON. This program starts the
servers and workers, and prints the seconds per function of each round as the last line.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf


def _free_ports(count: int) -> list[int]:
    holders = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [int(holder.getsockname()[1]) for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def _serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job, index, protocol="grpc"
    )
    server.join()


def _functions(strategy: Any, sizes: list[int]) -> list[Callable[[], Any]]:
    rows, width, asked, vector_length = sizes
    with strategy.scope():
        count = tf.Variable(0.0)
        vector = tf.Variable(tf.zeros(vector_length))
        table = tf.Variable(tf.zeros((rows, width)))
    ids = tf.constant(np.random.default_rng(0).integers(0, rows, asked))

    @tf.function
    def empty() -> None:
        return

    @tf.function
    def add() -> None:
        count.assign_add(1.0)

    @tf.function
    def pull_and_push() -> None:
        vector.assign_add(vector * 0.5)

    @tf.function
    def some_rows() -> Any:
        return tf.nn.embedding_lookup(table, ids)[0, 0] * 0.5

    @tf.function
    def add_rows() -> None:
        found = tf.nn.embedding_lookup(table, ids) * 0.5
        table.scatter_add(tf.IndexedSlices(found, ids))

    return [empty, add, pull_and_push, some_rows, add_rows]


def _measure(wanted: dict[str, Any], cluster: dict[str, list[str]]) -> dict[str, Any]:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    functions = _functions(strategy, wanted["sizes"])
    found: dict[str, list[float]] = {}
    for (what, times), function in zip(wanted["times"].items(), functions, strict=True):
        for _ in range(1 + wanted["rounds"]):
            start = time.perf_counter()
            for _ in range(times):
                coordinator.schedule(function)
            coordinator.join()
            found.setdefault(what, []).append((time.perf_counter() - start) / times)
        del found[what][0]
    return found


def main() -> None:
    """Run a server or worker, or start all processes and measure."""
    wanted = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        _serve(json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    counts = {"worker": wanted["workers"], "ps": wanted["servers"]}
    ports = iter(_free_ports(sum(counts.values())))
    cluster = {
        job: [f"localhost:{next(ports)}" for _ in range(count)]
        for job, count in counts.items()
    }
    others = [
        subprocess.Popen(
            [sys.executable, *sys.argv, json.dumps(cluster), job, str(index)],
            stdout=subprocess.DEVNULL,
        )
        for job, count in counts.items()
        for index in range(count)
    ]
    try:
        print(json.dumps(_measure(wanted, cluster)), flush=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    # Exit at once, because the coordinator's threads would wait for ended workers.
    os._exit(0)


if __name__ == "__main__":
    main()
