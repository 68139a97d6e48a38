"""Changes in torch that let programs that were written for GPUs run on CPUs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from hpcstrat.engine.call_sites import call_site
from hpcstrat.integrations.torch.batch_norm import normalize
from hpcstrat.integrations.torch.process_group import HpcstratProcessGroup
from hpcstrat.integrations.torch.program_groups import replace_function
from hpcstrat.integrations.torch.replacements import tell

__all__ = ["explain_cuda", "ignore_devices", "synchronize_norms"]

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"


def ignore_devices() -> None:
    """Ignore arguments that name GPUs, of groups, and of modules on CPUs.

    These are ``device_ids`` and ``output_device`` of DistributedDataParallel, and
    ``device_id`` of FullyShardedDataParallel, `init_process_group` and `new_group`.
    """
    names = "device_ids", "output_device"
    _drop_for_modules(torch.nn.parallel.DistributedDataParallel, names)
    # Its import takes seconds, which programs without FSDP need not wait.
    sys.meta_path.insert(0, _AfterImport(_FSDP, _change_fsdp))
    for name in ("init_process_group", "new_group"):
        replace_function(name, functools.partial(_drop_for_group, name))


def _change_fsdp(module: Any) -> None:
    _drop_for_modules(module.FullyShardedDataParallel, ("device_id",))


def _drop_for_modules(kind: Any, names: Sequence[str]) -> None:
    """Make the constructor of a wrapper of modules drop arguments on CPUs."""
    found = kind.__init__
    signature = inspect.signature(found)

    @functools.wraps(found)
    def construct(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        module = bound.arguments.get("module")
        if isinstance(module, torch.nn.Module) and _is_on_cpu(module):
            _drop(bound.arguments, names, kind.__name__)
        found(*bound.args, **bound.kwargs)

    kind.__init__ = construct


def _drop_for_group(function: str, given: dict[str, Any]) -> None:
    if not torch.accelerator.is_available():
        _drop(given, ("device_id",), function)


def _drop(given: dict[str, Any], names: Sequence[str], owner: str) -> None:
    for name in names:
        if given.get(name) is not None:
            tell(f"ignored {name}={given[name]} of {owner}, because it is on CPUs")
            given[name] = None


def _is_on_cpu(module: torch.nn.Module) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    return all(tensor.device.type in ("cpu", "meta") for tensor in tensors)


class _AfterImport(MetaPathFinder):
    """Calls a function with a module after its import."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self._name, self._function = name, function

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return the specification of the module, with a loader that calls us."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                self._function(module)

            loader.exec_module = execute_and_call
        return spec


def synchronize_norms() -> None:
    """Let ``torch.nn.SyncBatchNorm`` normalize values on CPUs, as ours does."""
    kind: Any = torch.nn.SyncBatchNorm
    found = kind.forward

    @functools.wraps(found)
    def forward(self: Any, values: Any) -> Any:
        if not (self.training and values.device.type == "cpu" and _is_initialized()):
            return found(self, values)
        group = self.process_group or dist.group.WORLD
        if not isinstance(group, HpcstratProcessGroup):
            raise ValueError(
                "expected a process group of hpcstrat for SyncBatchNorm on CPUs, found "
                f"the backend {dist.get_backend(group)}; add --replace "
                f"{dist.get_backend(group)} to hpcstrat torch"
            )
        tell("computed torch.nn.SyncBatchNorm on CPUs by hpcstrat's SyncBatchNorm")
        return normalize(self, values, group.strategy)

    kind.forward = forward
    _let_ddp_accept_norms()


def _let_ddp_accept_norms() -> None:
    """Let DistributedDataParallel accept ``torch.nn.SyncBatchNorm`` on CPUs."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    check = "_passing_sync_batchnorm_handle"
    found = getattr(ddp, check, None)
    if found is not None:

        def accept(self: Any, module: Any) -> None:
            if self.device_type != "cpu":
                found(self, module)

        setattr(ddp, check, accept)


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def explain_cuda() -> None:
    """Add to torch's error, if a program asks for CUDA in vain, its line and advice."""
    for name in ("_lazy_init", "set_device"):
        setattr(torch.cuda, name, _explained(getattr(torch.cuda, name)))


def _explained(found: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(found)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except (AssertionError, AttributeError, RuntimeError) as error:
            if torch.cuda.is_available():
                raise
            raise type(error)(
                "expected a program that computes on CPUs, because torch finds no GPU "
                f"here, found that it asks for CUDA at {call_site()} ({error}); pass "
                "the program's own option for CPUs, such as --device cpu, or start it "
                "on nodes with GPUs"
            ) from error

    return function
