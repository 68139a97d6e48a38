"""CUDA devices."""

from cupy import _queues
from cupy.cuda import runtime


class Device:
    """A CUDA device; a ``with`` statement makes it the thread's current device."""

    def __init__(self, device=None):
        if device is None:
            self.id = runtime.getDevice()
        else:
            self.id = int(device)
        self._before = []

    def __int__(self):
        return self.id

    def __enter__(self):
        self._before.append(runtime.getDevice())
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *args):
        runtime.setDevice(self._before.pop())

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def __eq__(self, other):
        if isinstance(other, Device):
            return self.id == other.id
        return NotImplemented

    def __lt__(self, other):
        if isinstance(other, Device):
            return self.id < other.id
        return NotImplemented

    # Like CuPy's class, which defines only comparisons.
    __hash__ = None

    @classmethod
    def from_pci_bus_id(cls, pci_bus_id):
        """Return the device with this PCI bus id."""
        return cls(runtime.deviceGetByPCIBusId(pci_bus_id))

    def use(self):
        """Make this device the thread's current device."""
        runtime.setDevice(self.id)

    def synchronize(self):
        """Wait for all streams of the device."""
        with self:
            runtime.deviceSynchronize()

    @property
    def compute_capability(self):
        """The digits of the major and minor version, such as "90"."""
        properties = runtime.getDeviceProperties(self.id)
        return f"{properties['major']}{properties['minor']}"

    @property
    def mem_info(self):
        """The free and total memory in bytes."""
        with self:
            return runtime.memGetInfo()

    @property
    def pci_bus_id(self):
        """The device's address on the PCI bus of the host."""
        return runtime.deviceGetPCIBusId(self.id)


def get_device_id():
    """Return the number of the thread's current device."""
    return _queues.current_device()
