"""Pretended GPUs in host memory, for PyTorch's tests that ask for GPUs without need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

__all__ = ["pretended_gpus"]

_CPU = torch.device("cpu")


def _is_gpu(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class _OnHost(TorchFunctionMode):
    """Make tensors on the host when a test asks for a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0].clone()
        if function is torch.device:
            return function(*args, **kwargs)
        if function in (torch.Tensor.to, torch._C._nn._parse_to):
            args = tuple(_CPU if type(value) is int else value for value in args)
        if type(kwargs.get("device")) is int or _is_gpu(kwargs.get("device")):
            kwargs["device"] = _CPU
        args = tuple(_CPU if _is_gpu(value) else value for value in args)
        return function(*args, **kwargs)


def _without_devices(function: Any) -> Any:
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        function(self, module, *args[2:], **kwargs)

    return init


@contextlib.contextmanager
def pretended_gpus(rank: int, size: int) -> Iterator[None]:
    """Pretend on this rank that there is a GPU for each rank."""
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: size,
        "current_device": lambda: rank,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "_lazy_init": lambda: None,
        "Stream": mock.MagicMock,
        "Event": mock.MagicMock,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": mock.MagicMock(),
    }
    init = _without_devices(DistributedDataParallel.__init__)
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(common_distributed, "TEST_CUDA", True))
        stack.enter_context(
            mock.patch.object(DistributedDataParallel, "__init__", init)
        )
        stack.enter_context(_OnHost())
        yield
