"""Resolvers of tf.distribute for clouds, which hpcstrat does not support.

The classes exist so that programs can use them in ``isinstance``. Their constructors
raise NotImplementedError, because MPI's launcher, not a resolver, finds the machines.
"""

from __future__ import annotations

import enum
from typing import Any

from hpcstrat.cluster_resolver.resolver import ClusterResolver
from hpcstrat.cluster_resolver.spec import ClusterSpec

__all__ = [
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "TPUClusterResolver",
]


class _Cloud(ClusterResolver):
    """A resolver whose constructor raises an error with ``found`` and ``advice``."""

    found = ""
    advice = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"expected machines that a launcher of MPI has started, found "
            f"{type(self).__name__}, {self.found}; {self.advice}"
        )

    def cluster_spec(self) -> ClusterSpec:
        raise NotImplementedError


class GCEClusterResolver(_Cloud):
    """Google Compute Engine is not supported; the error names an alternative."""

    found = "which asks Google for the machines of an instance group"
    advice = (
        "start the program on them with mpirun --hostfile, where it needs no resolver, "
        "or write them down in a SimpleClusterResolver"
    )


class KubernetesClusterResolver(_Cloud):
    """Pods of Kubernetes are not supported; the error names an alternative."""

    found = "which asks Kubernetes for its pods"
    advice = (
        "let the MPI Operator of Kubeflow start the program, where it needs no "
        "resolver, or write the pods down in a SimpleClusterResolver"
    )


class TPUClusterResolver(_Cloud):
    """TPUs are not supported; the error names an alternative."""

    found = "and no TPU is supported"
    advice = "use MultiWorkerMirroredStrategy, which needs no resolver, on CPUs or GPUs"


class KubernetesExecutableLocation(enum.Enum):
    """Place where a program runs, as an argument of `KubernetesClusterResolver`."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1
