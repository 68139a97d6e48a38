"""The error of the CUDA runtime, with CUDA's numbers and names."""

NAMES = {
    0: ("cudaSuccess", "no error"),
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    35: (
        "cudaErrorInsufficientDriver",
        "CUDA driver version is insufficient for CUDA runtime version",
    ),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    201: ("cudaErrorDeviceUninitialized", "invalid device context"),
    208: (
        "cudaErrorAlreadyMapped",
        "resource already mapped",
    ),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: (
        "cudaErrorIllegalAddress",
        "an illegal memory access was encountered",
    ),
    704: (
        "cudaErrorPeerAccessAlreadyEnabled",
        "peer access is already enabled",
    ),
    712: (
        "cudaErrorHostMemoryAlreadyRegistered",
        "part or all of the requested memory range is already mapped",
    ),
    713: (
        "cudaErrorHostMemoryNotRegistered",
        "pointer does not correspond to a registered memory region",
    ),
    716: ("cudaErrorMisalignedAddress", "misaligned address"),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
    801: ("cudaErrorNotSupported", "operation not supported"),
}

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INSUFFICIENT_DRIVER = 35
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_HANDLE = 400
NOT_READY = 600
PEER_ALREADY = 704
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
ILLEGAL_ADDRESS = 700
MISALIGNED_ADDRESS = 716
LAUNCH_FAILURE = 719
INVALID_CONTEXT = 201


class CUDARuntimeError(RuntimeError):
    """A call of the CUDA runtime that failed."""

    def __init__(self, status):
        self.status = status
        self._infos = []
        name, text = NAMES.get(status, (f"cudaError{status}", "unknown error"))
        super().__init__(f"{name}: {text}")

    def _add_info(self, info):
        """Append a line to the message."""
        self._infos.append(info)

    def __str__(self):
        return "\n".join([super().__str__(), *self._infos])

    def __reduce__(self):
        return type(self), (self.status,)
