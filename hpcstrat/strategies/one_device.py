"""One replica on a named device."""

from __future__ import annotations

from hpcstrat.strategies.default import SingleReplicaStrategy
from hpcstrat.strategies.devices import gpu_numbers, parse_device, use_gpu


class OneDeviceStrategy(SingleReplicaStrategy):
    """One replica, on one device; in a job of several ranks, N independent programs.

    Not collective.

    Parameters
    ----------
    device : str
        Such as ``"CPU:0"``, or ``"GPU:1"``, the second GPU that this process sees, on
        which it computes from then on; variables are put there.

    Raises
    ------
    ValueError
        For a name that is no device's, or a GPU that this process does not see.
    TopologyError
        For a GPU, if there is no CuPy or none that it can use.
    """

    def __init__(self, device: str = "CPU:0") -> None:
        name = parse_device(device)
        numbers = gpu_numbers([name])
        if numbers is not None:
            use_gpu(numbers[0])
        super().__init__(device=name)
        self.puts_on_gpu = numbers is not None
