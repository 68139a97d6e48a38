"""`OneDeviceStrategy`: one replica on a named device."""

from __future__ import annotations

from hpcstrat.strategies.default import SingleReplicaStrategy
from hpcstrat.strategies.devices import gpu_numbers, parse_device, use_gpu


class OneDeviceStrategy(SingleReplicaStrategy):
    """One replica on one device; the ranks of a job run independent programs.

    Not collective.

    Parameters
    ----------
    device : str
        A name such as ``"CPU:0"`` or ``"GPU:1"``, the second GPU that this process
        sees. A GPU becomes this process's current GPU, on which variables are put.

    Raises
    ------
    ValueError
        If the name is not a device name, or for a GPU that this process does not see.
    TopologyError
        For a GPU, if CuPy is missing or finds no usable GPU.
    """

    def __init__(self, device: str = "CPU:0") -> None:
        name = parse_device(device)
        numbers = gpu_numbers([name])
        if numbers is not None:
            use_gpu(numbers[0])
        super().__init__(device=name)
        self.puts_on_gpu = numbers is not None
