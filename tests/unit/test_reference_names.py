"""Names of tf.distribute that need no ranks: functions, servers, clouds."""

from __future__ import annotations

import logging

import pytest

import hpcstrat as hs


def test_function_returns_its_function(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: int) -> int:
        return x + 1

    caplog.set_level(logging.DEBUG, "hpcstrat")
    assert hs.function(step) is step
    assert hs.function()(step) is step
    assert not caplog.records
    assert hs.function(step, [3], jit_compile=False, experimental_compile=True) is step
    assert hs.function(reduce_retracing=True, autograph=False)(step) is step
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("ignores ")[2] for line in lines] == [
        "input_signature, jit_compile, experimental_compile",
        "autograph, reduce_retracing",
    ]


def test_function_refuses_what_the_reference_refuses() -> None:
    with pytest.raises(TypeError, match="found experimental_speed; leave"):
        hs.function(print, experimental_speed=9)
    with pytest.raises(TypeError, match="expected a function to decorate, found 3"):
        hs.function(3)  # type: ignore[type-var]


CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:2"], "ps": ["d:3"]}


def test_servers_take_the_arguments_of_the_reference() -> None:
    spec = hs.cluster_resolver.ClusterSpec(CLUSTER)
    server = hs.Server(spec, "worker", 1, "grpc", config=None, start=False)
    server.start()
    assert server.target == "grpc://c:2"
    task = server.server_def
    assert task.cluster == spec
    assert (task.job_name, task.task_index, task.protocol) == ("worker", 1, "grpc")
    assert hs.Server(task).target == "grpc://c:2"
    # If a job has one task, its number may be omitted.
    assert hs.Server(CLUSTER, job_name="ps").server_def.task_index == 0
    assert hs.Server({"worker": ["b:1"]}).target == "b:1"


def test_servers_refuse_tasks_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="job_name and task_index of one task"):
        hs.Server(CLUSTER)
    with pytest.raises(ValueError, match="expected a task of job 'worker', found 2"):
        hs.Server(CLUSTER, "worker", 2)
    with pytest.raises(ValueError, match="pass a ClusterSpec with job_name"):
        hs.Server().server_def  # noqa: B018
    assert hs.Server().target == ""


def test_experimental_has_the_names_of_the_library() -> None:
    space = hs.experimental
    assert space.partitioners is hs.partitioners
    assert space.coordinator is hs.coordinator
    assert space.CentralStorageStrategy is hs.CentralStorageStrategy
    assert space.CollectiveCommunication is hs.CommunicationImplementation
