"""The backend ``hpcstrat`` of torch.distributed: a process group over MPI.

Every call of the group is a call of hpcstrat, in which the ranks first compare their
headers. A call is complete when it returns, except send, recv, and an all_reduce in a
hook of a backward pass, which is complete when that pass ends.

Tensors on GPUs stay there in all_reduce (of sums and means), broadcast, all_gather and
reduce_scatter, see `hpcstrat.integrations.torch.device_tensors`; all other calls copy
them to the host. In a hook of a backward pass torch's current stream is the stream in
which the bucket of gradients was filled. The sum that the hook starts waits only for
kernels of this stream, so NCCL sums while the backward pass continues. At the end of
the pass, torch makes the caller's stream wait for all other streams, and makes it the
current stream (``GraphTask::exec_post_processing``). Then torch runs the queued
callbacks, which make this stream wait for the sums. DDP keeps the bucket until then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hpcstrat.engine.algorithms.mapped_memory import MappedMemory
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CollectiveError
from hpcstrat.integrations.torch import device_tensors
from hpcstrat.integrations.torch.device_tensors import DeviceTensors
from hpcstrat.integrations.torch.host_tensors import HostTensors
from hpcstrat.integrations.torch.messages import Messages
from hpcstrat.integrations.torch.reduction_kinds import Reduction
from hpcstrat.integrations.torch.shared_storages import share_storage
from hpcstrat.integrations.torch.tensors import torchs_stream
from hpcstrat.integrations.torch.works import Postponed, done

__all__ = ["BACKEND", "HpcstratProcessGroup"]

BACKEND = "hpcstrat"
_logger = logging.getLogger("hpcstrat")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _operation(what: str, *, postponed: bool = False) -> Callable[[_Method], _Method]:
    """Make a method a collective call, so that one rank's error is raised on all."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(method, self, *args, **kwargs)

            def make() -> Any:
                with torch.no_grad(), _recorded(what), torchs_stream():
                    return self.collectives.call(what, bound)

            if postponed and Postponed.possible():
                self.share_storage(*args, **kwargs)
                start = None
                if self.starts(*args):
                    start = functools.partial(self.start_sum, *args, **kwargs)
                return self.postponed.add(make, start)
            self.postponed.give_way()
            return make()

        # Without this, torch.compile would split its graph at each line of `operation`.
        return torch.compiler.disable(operation)

    return decorate


def _recorded(what: str) -> Any:
    """Show a call in torch's profiler, like the calls of torch's own backends."""
    if not torch._C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"{BACKEND}:{what}")


class HpcstratProcessGroup(dist.ProcessGroup):
    """A strategy's ranks as a process group; creation is collective over the ranks.

    The group's calls are collective, too, except messages between two ranks. Names of
    calls differ between versions of torch, so each method has the names of all
    versions.
    """

    def __init__(self, strategy: Any, group_name: str, comm: Any = None) -> None:
        super().__init__(strategy.replica_id, strategy.num_replicas_in_sync)
        # FSDP2, DTensor and functional collectives find groups by their names.
        self._name = group_name
        self._use(strategy, comm)

    def _use(self, strategy: Any, comm: Any) -> None:
        """Let calls go to a strategy's ranks; collective over them."""
        self.strategy = strategy
        self.collectives = strategy.collectives
        self._rank, self._size = strategy.replica_id, strategy.num_replicas_in_sync
        self._moves = self.collectives.moves
        self._messages = Messages(self.collectives)
        self.postponed = Postponed()
        # Memory of DDP's buckets, which all ranks of the node map. Not used if there
        # are several workers, because these must send messages.
        self._areas = MappedMemory()
        if self._size > 1 and strategy.topology.num_workers == 1:
            self.collectives.use_mapped_memory(self._areas)
        else:
            self._areas.off = True
        self._told_of_host = False
        # A communicator that was made for this group, and is freed with it.
        self._comm = comm

    # Properties and methods that torch reads.

    @property
    def group_name(self) -> str:
        """The name by which torch finds the group."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which torch finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name by which torch finds the group."""
        self._name = name

    _set_group_name = setGroupName

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return BACKEND

    name = getBackendName

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return self._size

    # Torch reads these two properties of the result of `_get_backend`.
    supports_coalescing = False
    supports_splitting = False

    def _get_backend(self, device: Any) -> HpcstratProcessGroup:
        """Return the group itself, which is its own backend for every device."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group's calls accept."""
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _start_coalescing(self, device: Any = None) -> None:
        """Do nothing: calls are not coalesced, each is made immediately."""

    def _end_coalescing(self, device: Any = None) -> Any:
        return done([])

    # Choice between GPU and host.

    def _stay_on_gpu(self, tensors: Sequence[Any]) -> bool:
        """Return whether all tensors are on GPUs and the strategy has a GPU."""
        if not tensors or not all(map(device_tensors.is_on_gpu, tensors)):
            return False
        if self.strategy.topology.gpu is not None:
            return True
        if not self._told_of_host and self._rank == 0:
            _logger.warning(
                "tensors on GPUs go through the host: import cupy before "
                "init_process_group, or set HPCSTRAT_DEVICE=gpu, to sum them where "
                "they are"
            )
        self._told_of_host = True
        return False

    def _arrays_of(
        self, tensors: Sequence[Any], reduction: Reduction | None = None
    ) -> HostTensors | DeviceTensors:
        """Return an object that converts these tensors to arrays, on GPU or host."""
        stays = reduction is None or reduction.stays
        if stays and self._stay_on_gpu(tensors):
            return DeviceTensors()
        return HostTensors()

    def starts(self, tensors: Any, *_: Any) -> bool:
        """Return whether a started sum of tensors continues while the program computes.

        Not collective; the same on every rank.
        """
        if not self._stay_on_gpu(_listed(tensors)):
            return self.collectives.overlaps
        group = getattr(self.collectives.channel, "device_group", None)
        return group is not None and bool(group.capabilities.nccl)

    # Reductions.

    def _sum_of(
        self, tensors: Any, reduction: Reduction
    ) -> tuple[HostTensors | DeviceTensors, list[Array], ReduceOp | None]:
        """Return a converter, its arrays to reduce in place, and `Reduction.op`."""
        held = self._arrays_of(tensors, reduction)
        return held, [held.write(tensor) for tensor in tensors], reduction.op

    @_operation("all_reduce", postponed=True)
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce tensors in place on all ranks; if possible, all in one call."""
        tensors = _listed(tensors)
        if any(tensor.is_sparse for tensor in tensors):
            for tensor in tensors:
                self._reduce_sparse(tensor, opts)
            return done(tensors)
        reduction = Reduction(opts, tensors[0], self._size)
        held, arrays, op = self._sum_of(tensors, reduction)
        if op is not None:
            given = _alone_or_all(arrays)
            self.collectives.batch_reduce(op, given, "all_reduce", out=given)
        else:
            for array in arrays:
                what = f"all_reduce({reduction.name})"
                self.collectives.parts.combine(reduction.function, array, what)
        for array in arrays:
            reduction.conclude(array)
        held.written()
        return done(tensors)

    allreduce_coalesced = allreduce

    def share_storage(self, tensors: Any, *_: Any, **__: Any) -> None:
        """Let the other ranks of the node map DDP's bucket; not collective."""
        tensors = _listed(tensors)
        if not self._areas.off and len(tensors) == 1 and not tensors[0].is_sparse:
            share_storage(tensors[0], self._areas, self._size)

    def start_sum(
        self, tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Callable[[], Any] | None:
        """Start an `allreduce`, and return a function that completes it.

        Returns None, on all ranks alike, for a reduction that cannot be started early.
        """
        tensors = _listed(tensors)
        if any(tensor.is_sparse for tensor in tensors):
            return None
        reduction = Reduction(opts, tensors[0], self._size)
        if reduction.function is not np.add:
            return None

        def begin() -> Any:
            held, arrays, op = self._sum_of(tensors, reduction)
            given, start = _alone_or_all(arrays), self.collectives.start_in_call
            return held, arrays, start(op, given, "all_reduce", out=given, in_pass=True)

        with torch.no_grad(), _recorded("all_reduce"), torchs_stream():
            held, arrays, started = self.collectives.call("all_reduce", begin)

        def end() -> Any:
            with torch.no_grad(), torchs_stream():
                started.wait()
                for array in arrays:
                    reduction.conclude(array)
                held.written()
            return done(tensors)

        return end

    def _reduce_sparse(self, tensor: Any, opts: Any) -> None:
        """Sum or average a sparse tensor: gather all ranks' values and add them up."""
        reduction = Reduction(opts, tensor, self._size)
        if not tensor.is_sparse or reduction.name not in ("SUM", "AVG"):
            raise NotImplementedError(
                f"expected SUM or AVG of sparse tensors alone, found {reduction.name} "
                f"with layout {tensor.layout}; call to_dense() first"
            )
        own, host = tensor.detach().coalesce(), HostTensors()
        what = f"all_reduce({reduction.name}) of a sparse tensor of {list(own.shape)}"
        indices, values = self.collectives.all_gather(
            [host.read(own.indices().t()), host.read(own.values())], 0, what
        )
        # Convert the gathered values back to the original type.
        whole = torch.empty((len(values), *own.values().shape[1:]), dtype=own.dtype)
        into = host.write(whole)
        into[...] = values
        host.written()
        places = torch.from_numpy(indices).t()
        total = torch.sparse_coo_tensor(places, whole, own.shape).coalesce()
        if reduction.averages:
            total = total / self._size
        tensor.copy_(total.to(tensor.device))

    @_operation("reduce")
    def reduce(
        self, tensors: Any, opts: Any = 0, op: Any = None, timeout: Any = None
    ) -> Any:
        """Reduce tensors in place on one rank, the root."""
        tensors, host, root = _listed(tensors), HostTensors(), _root(opts)
        for tensor in tensors:
            given = opts if hasattr(opts, "reduceOp") else op
            reduction = Reduction(given, tensor, self._size)
            array, what = host.write(tensor), f"reduce({reduction.name})"
            function, divisor = reduction.function, reduction.divisor
            self.collectives.parts.reduce_to(
                function, array, root, what, divisor=divisor
            )
            if self._rank == root:
                reduction.conclude(array)
        host.written()
        return done(tensors)

    @_operation("reduce_scatter")
    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """Reduce lists of one tensor per rank; rank i gets the i-th reduced tensor."""
        for out, parts in zip(_listed(outs), ins, strict=True):
            self._scatter_sums(out, parts, opts)
        return done(outs)

    @_operation("reduce_scatter_tensor")
    def reduce_scatter_single(self, out: Any, whole: Any, opts: Any = None) -> Any:
        """Reduce a tensor; rank i gets the i-th part of the result."""
        self.reduce_scatter_single_coalesced([out], [whole], opts)
        return done([out])

    _reduce_scatter_base = reduce_scatter_single

    @_operation("reduce_scatter_tensor")
    def reduce_scatter_single_coalesced(
        self, outs: Any, ins: Any, opts: Any = None
    ) -> Any:
        """Reduce several tensors; rank i gets the i-th part of each result."""
        for out, whole in zip(outs, ins, strict=True):
            self._scatter_sums(out, [whole], opts)
        return done(outs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sums(self, out: Any, parts: Sequence[Any], opts: Any) -> None:
        """Reduce ``parts``, one per rank or one to split, and keep this rank's part."""
        reduction = Reduction(opts, out, self._size)
        held = self._arrays_of([out, *parts], reduction)
        arrays, array = [held.read(part) for part in parts], held.write(out)
        if len(arrays) == 1:
            arrays = self._rows(arrays[0], "reduce_scatter")
        function, divisor = reduction.function, reduction.divisor
        if is_device(array) and reduction.op is not None:
            rank, calls = self._rank, self.collectives
            device_tensors.reduce_scatter(calls, reduction.op, arrays, array, rank)
        else:
            what = f"reduce_scatter({reduction.name})"
            scatter = self.collectives.parts.reduce_scatter
            scatter(function, arrays, array, what, divisor=divisor)
            reduction.conclude(array)
        held.written()

    # Operations that move tensors without a reduction.

    @_operation("broadcast")
    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> Any:
        """Copy one rank's tensors to all ranks."""
        tensors, root = _listed(tensors), _root(opts)
        held = self._arrays_of(tensors)
        arrays = [held.write(tensor) for tensor in tensors]
        if isinstance(held, DeviceTensors):
            device_tensors.broadcast(self.collectives, arrays, root)
        else:
            for array in arrays:
                self._moves.broadcast_into(array, root, "broadcast")
        held.written()
        return done(tensors)

    @_operation("all_gather")
    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """Copy the tensors of all ranks to all ranks, as a list by rank."""
        if isinstance(ins, torch.Tensor):
            outs, ins = [outs], [ins]
        for out, own in zip(outs, ins, strict=True):
            held, what = self._arrays_of([own, *out]), "all_gather"
            parts, array = [held.write(part) for part in out], held.read(own)
            if is_device(array):
                device_tensors.all_gather(self.collectives, array, parts, what)
            else:
                self._moves.all_gather_into(array, parts, what)
            held.written()
        return done(outs)

    @_operation("all_gather")
    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """Copy several tensors of each rank to all ranks, as one list per rank."""
        for index, own in enumerate(ins):
            self.allgather([[out[index] for out in outs]], [own])
        return done(outs)

    @_operation("all_gather_into_tensor")
    def all_gather_single(self, out: Any, own: Any, opts: Any = None) -> Any:
        """Copy the tensors of all ranks to all ranks, concatenated in one tensor."""
        self.all_gather_single_coalesced([out], [own])
        return done([out])

    _allgather_base = all_gather_single

    @_operation("all_gather_into_tensor")
    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """Do `all_gather_single` for several tensors."""
        what = "all_gather_into_tensor"
        for out, own in zip(outs, ins, strict=True):
            held = self._arrays_of([out, own])
            whole, array = held.write(out), held.read(own)
            if is_device(whole):
                device_tensors.all_gather(self.collectives, array, [whole], what)
            else:
                rows = self._rows(whole, what)
                self._moves.all_gather_into(array, rows, what)
            held.written()
        return done(outs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_operation("gather")
    def gather(self, outs: Any, ins: Any, opts: Any = 0, timeout: Any = None) -> Any:
        """Copy the tensors of all ranks to one rank, as a list."""
        if isinstance(ins, torch.Tensor):
            outs, ins = [outs], [ins]
        host, root = HostTensors(), _root(opts)
        for index, own in enumerate(ins):
            here = self._rank == root
            parts = [host.write(part) for part in outs[index]] if here else None
            self._moves.gather_into(host.read(own), parts, root, "gather")
        host.written()
        return done(outs)

    @_operation("scatter")
    def scatter(self, outs: Any, ins: Any, opts: Any = 0, timeout: Any = None) -> Any:
        """Send each rank its tensor from a list on the root rank."""
        if isinstance(outs, torch.Tensor):
            outs, ins = [outs], [ins]
        host, root = HostTensors(), _root(opts)
        for index, out in enumerate(outs):
            here = self._rank == root
            parts = [host.read(part) for part in ins[index]] if here else None
            self._moves.scatter_into(parts, host.write(out), root, "scatter")
        host.written()
        return done(outs)

    @_operation("all_to_all")
    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """Send a tensor to each rank, and receive a tensor from each rank."""
        host = HostTensors()
        sends = [host.read(tensor) for tensor in ins]
        receives = [host.write(tensor) for tensor in outs]
        self._moves.all_to_all(sends, receives, "all_to_all")
        host.written()
        return done(outs)

    @_operation("all_to_all_single")
    def all_to_all_single(  # noqa: PLR0917 - torch's order
        self,
        out: Any,
        whole: Any,
        out_sizes: Any = (),
        in_sizes: Any = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Send rows of a tensor to each rank, and receive rows from each rank."""
        host, what = HostTensors(), "all_to_all_single"
        sends = self._cut(host.read(whole), in_sizes, what)
        receives = self._cut(host.write(out), out_sizes, what)
        self._moves.all_to_all(sends, receives, what)
        host.written()
        return done([out])

    alltoall_base = all_to_all_single

    def _rows(self, whole: Array, what: str) -> list[Array]:
        """Split an array into flat parts of equal size, one for each rank."""
        if whole.size % self._size:
            raise ValueError(
                f"expected a number of elements that {self._size} ranks divide for "
                f"{what}, found shape {list(whole.shape)}; pad it"
            )
        return list(whole.reshape(self._size, -1))

    def _cut(self, whole: Array, sizes: Any, what: str) -> list[Array]:
        """Split an array along its first axis, into equal parts without ``sizes``."""
        length = len(whole) if whole.ndim else 0
        if not sizes:
            if length % self._size:
                raise ValueError(
                    f"expected a first dimension that {self._size} ranks divide for "
                    f"{what}, found {length}; give split sizes"
                )
            sizes = [length // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != length:
            raise ValueError(
                f"expected {self._size} split sizes that add up to {length} for "
                f"{what}, found {list(sizes)}; change them"
            )
        ends = np.cumsum(sizes)
        return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    @_operation("barrier")
    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait until all ranks have called this method."""
        self.collectives.barrier("barrier")
        return done([])

    # Messages between two ranks.

    @torch.compiler.disable
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Start sending a tensor to a rank."""
        (tensor,) = _listed(tensors)
        return self._messages.send(tensor, dst, tag)

    @torch.compiler.disable
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Start receiving a tensor from a rank."""
        (tensor,) = _listed(tensors)
        return self._messages.receive(tensor, src, tag)

    @torch.compiler.disable
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from any rank."""
        (tensor,) = _listed(tensors)
        return self._messages.receive_any(tensor, tag)

    # The end of a group.

    def shutdown(self) -> None:
        """Close the group; collective over its ranks.

        If a rank has already exited, log a warning instead of raising an error.
        """
        strategy, self.strategy = self.strategy, None
        if strategy is None:
            return
        try:
            self.collectives.barrier("destroy_process_group")
            self._messages.close()
            strategy.close()
            if self._comm is not None:
                self._comm.Free()
        except CollectiveError as error:
            # Do not raise this error: it could hide the one that ends the program.
            _logger.warning("the process group was not closed: %s", error)

    def abort(self) -> None:
        """Interrupt all calls of the group's ranks, without waiting for the ranks."""
        if self.strategy is not None and self.collectives.channel is not None:
            error = RuntimeError("the program called abort")
            self.collectives.channel.failures.interrupted("the process group", error)


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _alone_or_all(arrays: list[Array]) -> Any:
    return arrays[0] if len(arrays) == 1 else arrays


def _root(options: Any) -> int:
    return int(getattr(options, "rootRank", options))
