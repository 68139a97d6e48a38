"""The tasks of a cluster, with their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ClusterSpec"]


class ClusterSpec:
    """The jobs of a cluster, their tasks, and the tasks' addresses.

    Methods raise a ValueError if a job or a task does not exist.

    Parameters
    ----------
    cluster : ClusterSpec, or mapping of str to sequence or mapping
        Addresses of the tasks of each job: a sequence, or, if some task numbers are
        missing, a mapping from task numbers to addresses.

    Raises
    ------
    TypeError
        If ``cluster`` has another form.
    ValueError
        If a task number is negative.
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
            List of addresses of each job, or a dict by task number if some are missing.
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
            Name of the job.

        Returns
        -------
        int
            Number of tasks, without missing task numbers.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of a job's tasks.

        Not collective.

        Parameters
        ----------
        job_name : str
            Name of the job.

        Returns
        -------
        list of int
            Task numbers in increasing order.
        """
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task.

        Not collective.

        Parameters
        ----------
        job_name : str
            Name of the job.
        task_index : int
            Number of the task.

        Returns
        -------
        str
            Address, such as ``host:port``.
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
            Name of the job.

        Returns
        -------
        list of str or None
            Address of each task, in order of task numbers; None for missing numbers.
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
        # Hash only the names: the addresses are in dicts, which cannot be hashed.
        return hash(tuple(self.jobs))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"


def _tasks(job: str, tasks: Any) -> dict[int, str]:
    # Refuse a string, because it is a sequence: each letter would become a task.
    if isinstance(tasks, (str, bytes)) or not isinstance(tasks, (Sequence, Mapping)):
        raise TypeError(
            f"expected a list or mapping of addresses for job {job!r}, found "
            f"{tasks!r}; write ['host:port']"
        )
    items = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
    # Convert keys: those of JSON are strings, and "10" would be sorted before "2".
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
