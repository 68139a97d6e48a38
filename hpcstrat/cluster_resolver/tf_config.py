"""The cluster that ``TF_CONFIG`` describes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from hpcstrat.cluster_resolver.resolver import ClusterResolver
from hpcstrat.cluster_resolver.spec import ClusterSpec

__all__ = ["TFConfigClusterResolver"]


class TFConfigClusterResolver(ClusterResolver):
    """A resolver that reads ``TF_CONFIG``: JSON with ``cluster`` and ``task``.

    Each call reads the variable, and raises a ValueError if it is not a JSON object.
    Without the variable, there is no cluster. ``master()`` always returns the
    ``session_master`` of ``TF_CONFIG``, if set, or else an empty text for one task.

    Parameters
    ----------
    task_type : str, optional
        Default: the value in ``TF_CONFIG``.
    task_id : int, optional
        Default: the value in ``TF_CONFIG``.
    rpc_layer : str, optional
        Default: the value in ``TF_CONFIG``.
    environment : str, optional
        Default: the value in ``TF_CONFIG``.
    variables : mapping of str to str, optional
        Default: this process's environment.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._variables = os.environ if variables is None else variables
        self._environment = environment
        task = self._section("task")
        index = task.get("index") if task_id is None else task_id
        self.task_type = task.get("type") if task_type is None else task_type
        self.task_id = None if index is None else int(index)
        self.rpc_layer = rpc_layer or self._config().get("rpc_layer")

    def _config(self) -> dict[str, Any]:
        text = self._variables.get("TF_CONFIG", "") or "{}"
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"expected JSON in TF_CONFIG, found {text!r:.200}: {error}; correct it"
            ) from error
        if not isinstance(config, dict):
            raise ValueError(
                f"expected a JSON object in TF_CONFIG, found {text!r:.200}; write "
                '{"cluster": ..., "task": ...}'
            )
        return config

    def _section(self, name: str) -> dict[str, Any]:
        section = self._config().get(name, {})
        if not isinstance(section, dict):
            raise ValueError(
                f"expected a JSON object as {name!r} of TF_CONFIG, found {section!r}; "
                "correct it"
            )
        return section

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self._section("cluster"))

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        session = self._config().get("session_master")
        if session is not None:
            return str(session)
        spec = self.cluster_spec()
        # As in tf.distribute, a single task needs no address.
        if sum(spec.num_tasks(job) for job in spec.jobs) < 2:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    @property
    def environment(self) -> str:
        found = self._environment or self._config().get("environment", "")
        return str(found)
