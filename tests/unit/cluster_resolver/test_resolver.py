"""Cluster resolvers read the environment variables of launchers, without MPI."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.cluster_resolver import (
    ClusterSpec,
    Launch,
    MPICHClusterResolver,
    OpenMPIClusterResolver,
    PMIxClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
    compress_node_list,
    expand_node_list,
    expand_tasks_per_node,
    launch_from_environment,
)

# Variables that the launchers set for rank 1 (Slurm 22.05: rank 3), shortened.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-17719@1",
    "PMIX_RANK": "1",
}
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


# Tests of Slurm's node lists


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", []),
        ("login", ["login"]),
        ("node[1-2]", ["node1", "node2"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[3,1,1]", ["n3", "n1", "n1"]),
        ("a,b[2,04-05].x,c-d7", ["a", "b2.x", "b04.x", "b05.x", "c-d7"]),
        (
            "n[01-03,7]-ib[0-1]",
            [f"n{n}-ib{i}" for n in ("01", "02", "03", "7") for i in (0, 1)],
        ),
        (
            "r[0-1]c[0-1]n[9-10]",
            [f"r{r}c{c}n{n}" for r in (0, 1) for c in (0, 1) for n in (9, 10)],
        ),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_expands_what_slurm_writes(text: str, nodes: list[str]) -> None:
    assert expand_node_list(text) == nodes


@pytest.mark.parametrize(
    "text",
    [
        *("n[1-2", "n1-2]", "n[]", "n[2-1]", "n[1-]", "n[a-b]", "n[1-2[3]]", "a,,b"),
        *(",", "a,", " a", "a b", "n[1 - 2]", "n[-1]", "n[0-99999999]", "n[²]"),
        "n[0-9999]m[0-9999]",
    ],
)
def test_refuses_other_lists(text: str) -> None:
    with pytest.raises(ValueError, match="expected a list in Slurm's form"):
        expand_node_list(text)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n9", "n010"], "n[9,010]"),
        (["n2", "n1"], "n[2,1]"),
        (["a", "a", "a1-ib", "a2-ib", "b"], "a,a,a[1-2]-ib,b"),
    ],
)
def test_compresses(nodes: list[str], text: str) -> None:
    assert compress_node_list(nodes) == text
    assert expand_node_list(text) == nodes


NUMBERED = st.builds(
    "{}{:0{}d}{}".format,
    st.sampled_from(["n", "rack1-n", "", "x0y"]),
    st.integers(0, 120),
    st.integers(1, 4),
    st.sampled_from(["", "-ib", ".cluster"]),
)
ANY_NAME = st.text(
    st.characters(codec="utf-8", exclude_characters=",[]"), min_size=1, max_size=8
).filter(lambda name: not any(character.isspace() for character in name))


@settings(deadline=None)
@given(st.lists(NUMBERED | ANY_NAME, max_size=30))
def test_expanding_undoes_compressing(nodes: list[str]) -> None:
    assert expand_node_list(compress_node_list(nodes)) == nodes


@settings(deadline=None)
@given(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 6))
def test_runs_of_numbers_become_one_range(first: int, more: int, width: int) -> None:
    nodes = [f"n{number:0{width}d}" for number in range(first, first + more + 1)]
    text = compress_node_list(nodes)
    assert expand_node_list(text) == nodes
    assert text.count("-") == (more > 0)


@settings(deadline=None)
@given(st.text("n019[]-, ", max_size=12))
def test_expanding_gives_names_or_a_clear_error(text: str) -> None:
    try:
        nodes = expand_node_list(text)
    except ValueError as error:
        assert "expected a list in Slurm's form" in str(error)  # noqa: PT017
    else:
        assert expand_node_list(compress_node_list(nodes)) == nodes


@pytest.mark.parametrize("name", ["", "a,b", "n[1]", "a b", "n\n"])
def test_compressing_refuses_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="expected names of nodes"):
        compress_node_list(["n1", name])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1))
def test_expands_tasks_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{n}(x{k})" if k > 1 else f"{n}" for n, k in runs)
    assert expand_tasks_per_node(text) == [n for n, k in runs for _ in range(k)]


@pytest.mark.parametrize("text", ["", "2(x", "(x3)", "2x3", "a", "-1", "2(x3)1"])
def test_refuses_other_tasks_per_node(text: str) -> None:
    with pytest.raises(ValueError, match="expected a list in Slurm's form"):
        expand_tasks_per_node(text)


# ClusterSpec


def test_a_cluster_spec_answers() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:2"], "ps": {2: "d:4", 0: "c:3"}})
    assert spec.jobs == ["ps", "worker"]
    assert spec.num_tasks("worker") == spec.num_tasks("ps") == 2
    assert spec.task_indices("ps") == [0, 2]
    assert spec.task_address("ps", 2) == "d:4"
    assert spec.job_tasks("ps") == ["c:3", None, "d:4"]
    assert spec.job_tasks("worker") == ["a:1", "b:2"]
    assert spec.as_dict() == {"worker": ["a:1", "b:2"], "ps": {0: "c:3", 2: "d:4"}}
    assert ClusterSpec(spec) == spec
    assert ClusterSpec(spec.as_dict()) == spec != ClusterSpec({})
    assert hash(ClusterSpec(spec)) == hash(spec)
    assert spec
    assert not ClusterSpec({})
    assert spec != "spec"
    assert "d:4" in repr(spec)
    # JSON has texts as keys.
    assert ClusterSpec({"worker": {"0": "a:1"}}).as_dict() == {"worker": ["a:1"]}  # type: ignore[dict-item]
    assert ClusterSpec({"worker": []}).as_dict() == {"worker": []}


def test_a_cluster_spec_names_what_there_is() -> None:
    spec = ClusterSpec({"worker": ["a:1"]})
    for call in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match=r"'ps'; it has \['worker'\]"):
            call("ps")
    with pytest.raises(ValueError, match=r"found 1; it has the tasks \[0\]"):
        spec.task_address("worker", 1)


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        (["a:1"], TypeError),
        ({"worker": "a:1"}, TypeError),
        ({"worker": [1]}, TypeError),
        ({"worker": None}, TypeError),
        ({"worker": {-1: "a:1"}}, ValueError),
    ],
)
def test_a_cluster_spec_refuses_other_forms(cluster: Any, kind: Any) -> None:
    with pytest.raises(kind, match="expected"):
        ClusterSpec(cluster)


# Simple, union, TF_CONFIG


def test_the_module_is_public() -> None:
    assert hs.cluster_resolver.SimpleClusterResolver is SimpleClusterResolver


def test_simple() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:2"]})
    resolver = SimpleClusterResolver(
        spec, "m:0", "worker", 1, "lab", num_accelerators={"GPU": 4}, rpc_layer="grpc"
    )
    assert resolver.cluster_spec() == spec
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.environment == "lab"
    assert resolver.num_accelerators() == {"GPU": 4}
    assert resolver.master() == "m:0"
    assert resolver.master("worker", 0) == "grpc://a:1"
    assert resolver.master("worker", 0, "mpi") == "mpi://a:1"
    assert SimpleClusterResolver(spec).master() == ""
    assert SimpleClusterResolver(spec).num_accelerators() == {}
    with pytest.raises(TypeError, match="expected a ClusterSpec"):
        SimpleClusterResolver({"worker": []})  # type: ignore[arg-type]


def _simple(cluster: Any, **options: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **options)


def test_union_merges_and_the_first_says_who_i_am() -> None:
    first = _simple({"worker": ["a:1"]}, task_type="worker", task_id=0)
    second = _simple(
        {"worker": ["b:2"], "ps": ["c:3"]}, master="m:0", task_type="ps", task_id=0
    )
    union = UnionResolver(first, second)
    assert union.cluster_spec() == ClusterSpec(
        {"worker": ["a:1", "b:2"], "ps": ["c:3"]}
    )
    assert (union.task_type, union.task_id) == ("worker", 0)
    assert union.master() == "m:0"
    assert union.master("worker", 1) == "b:2"
    assert union.environment == ""
    assert union.num_accelerators() == {}


def test_union_keeps_numbers_and_refuses_twins() -> None:
    part = _simple({"worker": {1: "a:1"}})
    assert UnionResolver(part, _simple({"worker": ["b:2"]})).cluster_spec() == (
        ClusterSpec({"worker": ["b:2", "a:1"]})
    )
    with pytest.raises(KeyError, match=r"tasks \[1\] from two"):
        UnionResolver(part, part).cluster_spec()


def test_union_needs_resolvers() -> None:
    with pytest.raises(ValueError, match="at least one resolver"):
        UnionResolver()
    with pytest.raises(TypeError, match="expected ClusterResolvers"):
        UnionResolver(ClusterSpec({}))  # type: ignore[arg-type]


def _tf_config(**config: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps(config)}


def test_tf_config() -> None:
    env = _tf_config(
        cluster={"worker": ["a:1", "b:2"], "chief": ["c:3"]},
        task={"type": "worker", "index": "1"},
        rpc_layer="grpc",
        environment="cloud",
    )
    resolver = TFConfigClusterResolver(variables=env)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["a:1", "b:2"],
        "chief": ["c:3"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.environment == "cloud"
    assert resolver.master() == "grpc://b:2"
    assert resolver.master("chief", 0, "mpi") == "mpi://c:3"
    other = TFConfigClusterResolver("chief", 0, "rdma", "lab", variables=env)
    assert (other.task_type, other.task_id) == ("chief", 0)
    assert (other.master(), other.environment) == ("rdma://c:3", "lab")


def test_tf_config_unset_is_an_empty_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.environment == ""


def test_tf_config_of_one_task_is_local() -> None:
    env = _tf_config(cluster={"worker": ["a:1"]}, task={"type": "worker", "index": 0})
    assert TFConfigClusterResolver(variables=env).master() == ""
    env = _tf_config(cluster={"worker": ["a:1"]}, session_master="s:1")
    assert TFConfigClusterResolver(variables=env).master() == "s:1"


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"task": []}'])
def test_a_bad_tf_config_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="TF_CONFIG"):
        TFConfigClusterResolver(variables={"TF_CONFIG": text})


# Slurm


def _slurm(changes: Mapping[str, str | None] | None = None, **options: Any) -> Any:
    env = {**SLURM, **(changes or {})}
    env = {name: value for name, value in env.items() if value is not None}
    return SlurmClusterResolver(variables=env, **options), env


def test_slurm_places_tasks_node_by_node() -> None:
    resolver, _ = _slurm()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["node1:8888", "node1:8889", "node2:8888", "node2:8889"]
    }
    assert resolver.get_task_info() == ("worker", 3)
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.master() == "grpc://node2:8889"
    assert resolver.master("worker", 0, "mpi") == "mpi://node1:8888"
    assert resolver.num_accelerators() == {}


def test_slurm_with_unequal_nodes_and_jobs() -> None:
    """Nodes may have unequal numbers of tasks, and a job may begin within a node."""
    env = {
        "SLURM_STEP_NODELIST": "n[01-02,7]-ib[0-1]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1,3,1",
        "SLURM_STEP_NUM_TASKS": "11",
        "SLURM_NODEID": None,
    }
    nodes = ["n01-ib0", "n01-ib1", "n02-ib0", "n02-ib1", "n7-ib0", "n7-ib1"]
    counts = [2, 2, 2, 1, 3, 1]
    expected = [
        f"{n}:{100 + i}" for n, k in zip(nodes, counts, strict=True) for i in range(k)
    ]
    jobs = {"chief": 1, "worker": 7, "ps": 3}
    seen = []
    for rank in range(11):
        resolver, _ = _slurm(
            {**env, "SLURM_PROCID": str(rank)}, jobs=jobs, port_base=100
        )
        spec = resolver.cluster_spec()
        assert spec.job_tasks("chief") == expected[:1]
        assert spec.job_tasks("worker") == expected[1:8]
        assert spec.job_tasks("ps") == expected[8:]
        assert resolver.master() == f"grpc://{expected[rank]}"
        seen.append(resolver.get_task_info())
    assert seen == [(job, i) for job, count in jobs.items() for i in range(count)]


@pytest.mark.parametrize("tasks", [2, [2, 2], "2(x2)", (2, 2)])
def test_slurm_takes_tasks_per_node_in_any_form(tasks: Any) -> None:
    resolver, _ = _slurm({"SLURM_STEP_TASKS_PER_NODE": None}, tasks_per_node=tasks)
    assert resolver.cluster_spec().num_tasks("worker") == 4


def test_slurm_deals_tasks_cyclically_where_srun_did() -> None:
    resolver, _ = _slurm(
        {
            "SLURM_DISTRIBUTION": "cyclic:block",
            "SLURM_STEP_TASKS_PER_NODE": "1,3",
        }
    )
    assert resolver.cluster_spec().job_tasks("worker") == [
        *("node1:8888", "node2:8888", "node2:8889", "node2:8890")
    ]


@pytest.mark.parametrize(
    ("distribution", "places"),
    [
        # Node and local rank of each rank, as recorded from srun -N3 -n5 of Slurm
        # 22.05.
        (None, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]),
        ("cyclic", [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]),
    ],
)
def test_slurm_ranks_are_where_srun_put_them(
    distribution: str | None, places: list[tuple[int, int]]
) -> None:
    for rank, (node, local) in enumerate(places):
        resolver, _ = _slurm(
            {
                "SLURM_DISTRIBUTION": distribution,
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
                "SLURM_PROCID": str(rank),
                "SLURM_STEP_NODELIST": "node[1-3]",
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
            }
        )
        assert resolver.master() == f"grpc://node{node + 1}:{8888 + local}"


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", ["plane", "arbitrary"])
def test_slurm_in_another_order_is_refused_on_every_rank(name: str, rank: int) -> None:
    # Ranks 0 and 3 would have the same places in a block distribution.
    with pytest.raises(RuntimeError, match=f"by block or cyclic, found {name}"):
        _slurm(
            {
                "SLURM_DISTRIBUTION": name,
                "SLURM_PROCID": str(rank),
                "SLURM_NODEID": str(rank // 2),
            }
        )


@pytest.mark.parametrize(
    "name", [name for name in SLURM if "STEP" in name or "PROC" in name]
)
def test_slurm_needs_its_variables(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"found no {name}.*srun"):
        _slurm({name: None})


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"jobs": {"worker": 3}}, "as many tasks in jobs"),
        ({}, {"jobs": {}}, "as many tasks in jobs"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, {}, "tasks on the nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, {}, "tasks on the nodes"),
        ({"SLURM_PROCID": "4"}, {}, "SLURM_PROCID below 4"),
        ({"SLURM_NODEID": "0"}, {}, "found it on node 0"),
        ({}, {"gpus_per_node": 3, "gpus_per_task": 2}, "at most 3 GPUs"),
    ],
)
def test_slurm_numbers_must_fit(changes: Any, options: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _slurm(changes, **options)


def test_slurm_values_must_be_numbers() -> None:
    with pytest.raises(ValueError, match="number as SLURM_PROCID, found '3x'"):
        _slurm({"SLURM_PROCID": "3x"})


@pytest.mark.parametrize(
    ("changes", "options", "visible", "count"),
    [
        ({}, {}, None, 0),
        ({}, {"gpus_per_node": 4}, "2,3", 2),
        ({}, {"gpus_per_node": 4, "gpus_per_task": 1}, "1", 1),
        ({}, {"gpus_per_node": 4, "auto_set_gpu": False}, None, 2),
        ({}, {"gpus_per_node": 1}, None, 0),
        ({"SLURM_GPUS_ON_NODE": "2"}, {}, "1", 1),
        # With srun --gpus-per-node, every task sees all GPUs of the node.
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "5,7"}, {}, "7", 1),
        # With srun --gpus-per-task, Slurm has already chosen a GPU.
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "1"}, {}, "1", 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}, "0,1", 0),
    ],
)
def test_slurm_chooses_gpus(
    changes: Any, options: Any, visible: str | None, count: int
) -> None:
    resolver, env = _slurm(changes, **options)
    assert resolver.num_accelerators() == ({"GPU": count} if count else {})
    before = env.get("CUDA_VISIBLE_DEVICES")
    assert before == changes.get("CUDA_VISIBLE_DEVICES")
    for _ in range(2):
        resolver.cluster_spec()
        assert env.get("CUDA_VISIBLE_DEVICES") == visible
    # Another resolver in the same process finds and keeps this choice.
    SlurmClusterResolver(variables=env, **options).cluster_spec()
    assert env.get("CUDA_VISIBLE_DEVICES") == visible


def test_gpus_of_a_node_are_dealt_without_overlap() -> None:
    seen = []
    for rank in range(4):
        resolver, env = _slurm(
            {"SLURM_PROCID": str(rank), "SLURM_NODEID": None}, gpus_per_node=5
        )
        resolver.cluster_spec()
        seen.append(env["CUDA_VISIBLE_DEVICES"])
    assert seen == ["0,1", "2,3", "0,1", "2,3"]


# MPI launchers


@pytest.mark.parametrize(
    ("kind", "env"),
    [
        (OpenMPIClusterResolver, OPEN_MPI),
        (MPICHClusterResolver, MPICH),
        (PMIxClusterResolver, OPEN_MPI),
    ],
)
def test_ranks_of_one_host(kind: Any, env: dict[str, str]) -> None:
    resolver = kind(variables=env, rpc_layer="grpc")
    host = platform.node()
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.num_tasks, resolver.local_rank) == (2, 1)
    assert resolver.num_local_tasks == 2
    assert resolver.cluster_spec().as_dict() == {
        "worker": [f"{host}:8888", f"{host}:8889"]
    }
    assert resolver.master() == f"grpc://{host}:8889"
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {}


def test_hosts_of_several_must_be_given() -> None:
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "3"}
    resolver = OpenMPIClusterResolver(variables=env)
    assert resolver.num_tasks == 3
    with pytest.raises(RuntimeError, match=r"hosts=comm\.allgather"):
        resolver.cluster_spec()
    resolver = OpenMPIClusterResolver("job", 100, hosts=["a", "b", "a"], variables=env)
    assert resolver.cluster_spec().job_tasks("job") == ["a:100", "b:100", "a:101"]
    with pytest.raises(RuntimeError, match="found 2 hosts"):
        OpenMPIClusterResolver(hosts=["a", "b"], variables=env)


def test_pmix_under_srun_asks_slurm_for_the_size() -> None:
    env = {**SLURM, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.17.0"}
    resolver = PMIxClusterResolver(variables=env)
    assert (resolver.task_id, resolver.num_tasks, resolver.local_rank) == (3, 4, 1)
    # pmi2 sets such variables, too.
    env = {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}
    assert MPICHClusterResolver(variables=env).local_rank == 1


@pytest.mark.parametrize(
    ("kind", "env", "missing"),
    [
        (OpenMPIClusterResolver, {}, "OMPI_COMM_WORLD_RANK"),
        (OpenMPIClusterResolver, MPICH, "OMPI_COMM_WORLD_RANK"),
        (MPICHClusterResolver, OPEN_MPI, "PMI_RANK"),
        (PMIxClusterResolver, {"PMIX_RANK": "0"}, "OMPI_COMM_WORLD_SIZE or SLURM_STEP"),
        (PMIxClusterResolver, {"PMIX_RANK": "x"}, "PMIX_RANK"),
    ],
)
def test_another_launcher_is_noticed(kind: Any, env: Any, missing: str) -> None:
    with pytest.raises(RuntimeError, match=f"found no {missing}"):
        kind(variables=env)


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, Launch()),
        (OPEN_MPI, Launch("mpirun of Open MPI", 1, 2, 1, 2)),
        (MPICH, Launch("mpiexec of MPICH", 1, 2, 1, 2)),
        (SLURM, Launch("srun", 3, 4, 1, 2)),
        # Nodes have unequal numbers of tasks; the number of this node counts, if known.
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1"},
            Launch("srun", 3, 4, 1, 1),
        ),
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_NODEID"}
            | {"SLURM_STEP_TASKS_PER_NODE": "3,1"},
            Launch("srun", 3, 4, 1),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("mpiexec of MPICH", 1, 2)),
        # srun --mpi=pmi2.
        (
            {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"},
            Launch("srun", 3, 4, 1, 2),
        ),
        # mpiexec inside of a batch job.
        (
            {**SLURM, **MPICH, "SLURM_PROCID": "1"},
            Launch("mpiexec of MPICH", 1, 2, 1, 2),
        ),
        # mpirun inside of a batch job.
        ({**SLURM, **OPEN_MPI}, Launch("mpirun of Open MPI", 1, 2, 1, 2)),
    ],
)
def test_the_launch_is_that_of_the_innermost_launcher(env: Any, launch: Launch) -> None:
    assert launch_from_environment(env) == launch
