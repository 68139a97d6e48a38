"""The tasks of a cluster, with their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ClusterSpec"]


class ClusterSpec:
    """Jobs, their tasks, and the tasks' addresses.

    Methods raise a ValueError for a job or a task that does not exist.

    Parameters
    ----------
    cluster : ClusterSpec, or mapping of str to sequence or mapping
        For each job its tasks' addresses: a sequence, or a mapping of task numbers
        where some are missing.

    Raises
    ------
    TypeError
        If it is of another form.
    ValueError
        For a negative task number.
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Sequence[str] | Mapping[int, str]],
    ) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "expected a mapping of jobs to addresses, found "
                f"{type(cluster).__name__}; write {{'worker': ['host:port']}}"
            )
        self._jobs = {str(job): _tasks(job, tasks) for job, tasks in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in alphabetical order."""
        return sorted(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the addresses of all tasks.

        Not collective.

        Returns
        -------
        dict of str to list or dict
            For each job a list; a dict by number where tasks are missing.
        """
        return {
            job: dict(tasks)
            if len(tasks) <= max(tasks, default=-1)
            else list(tasks.values())
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job.

        Not collective.

        Parameters
        ----------
        job_name : str
            The job.

        Returns
        -------
        int
            Missing numbers do not count.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of a job's tasks.

        Not collective.

        Parameters
        ----------
        job_name : str
            The job.

        Returns
        -------
        list of int
            In order.
        """
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return where a task is.

        Not collective.

        Parameters
        ----------
        job_name : str
            The job.
        task_index : int
            The task.

        Returns
        -------
        str
            Its address.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"expected a task of job {job_name!r}, found {task_index!r}; it has "
                f"the tasks {list(tasks)}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job's tasks.

        Not collective.

        Parameters
        ----------
        job_name : str
            The job.

        Returns
        -------
        list of str or None
            By number; None for those that are missing.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(
                f"expected a job of the cluster, found {job_name!r}; it has {self.jobs}"
            )
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterSpec):
            return NotImplemented
        return self._jobs == other._jobs

    def __hash__(self) -> int:
        # Equal specs have equal names; addresses are in mappings, without a hash.
        return hash(tuple(self.jobs))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"


def _tasks(job: str, tasks: Any) -> dict[int, str]:
    # A text is a sequence, too: each letter would be a task.
    if isinstance(tasks, (str, bytes)) or not isinstance(tasks, (Sequence, Mapping)):
        raise TypeError(
            f"expected a list or mapping of addresses for job {job!r}, found "
            f"{tasks!r}; write ['host:port']"
        )
    items = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
    # Keys of JSON are texts: "10" would come before "2".
    numbered = sorted((int(index), address) for index, address in items)
    for index, address in numbered:
        if index < 0:
            raise ValueError(
                f"expected task numbers >= 0 for job {job!r}, found {index}; change it"
            )
        if not isinstance(address, str):
            raise TypeError(
                f"expected text as the address of task {index} of job {job!r}, found "
                f"{address!r}; write 'host:port'"
            )
    return dict(numbered)
