"""The tasks of a job, parsed from the environment without MPI."""

from hpcstrat.cluster_resolver.batch_job import BatchJob, batch_job_from_environment
from hpcstrat.cluster_resolver.clouds import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    TPUClusterResolver,
)
from hpcstrat.cluster_resolver.flux import FluxClusterResolver
from hpcstrat.cluster_resolver.host_lists import (
    LSFClusterResolver,
    PBSClusterResolver,
    SGEClusterResolver,
)
from hpcstrat.cluster_resolver.launch import Launch, launch_from_environment
from hpcstrat.cluster_resolver.mpi_job import (
    MPICHClusterResolver,
    OpenMPIClusterResolver,
    PMIxClusterResolver,
)
from hpcstrat.cluster_resolver.node_list import (
    compress_node_list,
    expand_node_list,
    expand_tasks_per_node,
)
from hpcstrat.cluster_resolver.resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionResolver,
)
from hpcstrat.cluster_resolver.slurm import SlurmClusterResolver
from hpcstrat.cluster_resolver.spec import ClusterSpec
from hpcstrat.cluster_resolver.tf_config import TFConfigClusterResolver

__all__ = [
    "BatchJob",
    "ClusterResolver",
    "ClusterSpec",
    "FluxClusterResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "LSFClusterResolver",
    "Launch",
    "MPICHClusterResolver",
    "OpenMPIClusterResolver",
    "PBSClusterResolver",
    "PMIxClusterResolver",
    "SGEClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
    "batch_job_from_environment",
    "compress_node_list",
    "expand_node_list",
    "expand_tasks_per_node",
    "launch_from_environment",
]
