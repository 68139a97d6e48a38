"""Process groups whose ranks change: torch's ``enable_reconfigure``, from torch 2.14.

Torch makes such a group without ranks. ``torch.distributed._reconfigure`` then gives it
the ranks whose handles are passed, as often as the program calls it: fewer ranks after
a loss, or more, if ranks that were left out come in (pytorch#186298).
"""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from hpcstrat.elastic.changing_members import ChangingMembers
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.errors import CollectiveError
from hpcstrat.integrations.torch.process_group import HpcstratProcessGroup
from hpcstrat.integrations.torch.works import done
from hpcstrat.strategies import MultiWorkerMirroredStrategy

__all__ = ["ChangingProcessGroup"]

_WHAT = "init_process_group(enable_reconfigure=True)"
_PREFIX = "hpcstrat:"
_SET = ("collectives", "postponed", "strategy", "_messages", "_moves")

# MPI cannot make communicators of all ranks after a loss, so all groups share these.
_members = functools.cache(lambda: ChangingMembers(_WHAT))


class ChangingProcessGroup(HpcstratProcessGroup):
    """A process group without ranks, which `reconfigure` gives to it.

    Creation is collective over all ranks of the job, unless there was another such
    group.
    """

    supports_reconfigure = True

    def __init__(self, rank: int, size: int, name: str, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        self._rank, self._size, self._name = rank, size, name
        self._timeout, self._used = timeout, set[int]()
        self._members = _members()

    def __getattr__(self, name: str) -> Any:
        """Raise an error for an attribute that the group has only with ranks."""
        if name in _SET:
            raise RuntimeError(
                "expected a process group that has ranks, found one that was not given "
                "any since it was made or aborted; call torch.distributed._reconfigure"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def getRank(self) -> int:  # noqa: N802
        """Return this rank's number in the group."""
        return self._rank

    def get_reconfigure_handle(self) -> str:
        """Return the text by which `reconfigure` of other ranks knows this rank."""
        return f"{_PREFIX}{self._members.rank}"

    def get_error(self) -> Any:
        """Return SUCCESS, because the calls themselves raise their errors."""
        return ErrorType.SUCCESS

    def reconfigure(self, options: Any) -> Any:
        """Leave the present ranks, and form a group of the ranks of the handles.

        Collective over these ranks. The rank of a handle is its position in a list;
        handles of a set are in the order of the ranks in the job. Ranks that still use
        the present group raise RankLostError.
        """
        if options.uuid in self._used:
            raise RuntimeError(
                "expected another uuid in each call of _reconfigure, found "
                f"{options.uuid}, which was already used; pass a new one"
            )
        self._used.add(options.uuid)
        ranks = self._ranks_of(options.handles)
        self.abort()
        seconds = (options.timeout or self._timeout).total_seconds()
        meeting = options.uuid, seconds, f"_reconfigure(uuid={options.uuid})"
        comm = self._members.form(ranks, *meeting)
        limits = CommunicationOptions(timeout_seconds=self._timeout.total_seconds())
        strategy = MultiWorkerMirroredStrategy(
            comm=comm, on_lost_rank="raise", communication_options=limits
        )
        self._use(strategy, comm)
        self._members.confirm(ranks, *meeting)
        return done([])

    def _ranks_of(self, handles: Any) -> list[int]:
        numbers = [handle.removeprefix(_PREFIX) for handle in handles]
        known = [n.isdecimal() and int(n) < self._members.size for n in numbers]
        ranks = [int(n) for n in numbers] if all(known) else []
        if self._members.rank not in ranks or len(set(ranks)) < len(ranks):
            raise ValueError(
                "expected different handles of _get_reconfigure_handle, among them "
                f"{self.get_reconfigure_handle()} of this rank, found {handles}; "
                "gather the handles of all ranks of the new group"
            )
        return ranks if isinstance(handles, list) else sorted(ranks)

    def abort(self) -> None:
        """Leave the ranks without waiting for them; their calls raise errors."""
        strategy = self.__dict__.get("strategy")
        for name in _SET:
            self.__dict__.pop(name, None)
        if strategy is not None:
            ranks = strategy.topology.job_ranks
            self._members.dead.update(ranks[r] for r in strategy.lost_ranks or ())
            strategy.abandon()

    def shutdown(self) -> None:
        """Leave the ranks when all have come, which may still receive messages."""
        strategy = self.__dict__.get("strategy")
        if strategy is not None and strategy.lost_ranks is None:
            with contextlib.suppress(CollectiveError):
                self.collectives.barrier("destroy_process_group")
        self.abort()
