"""Classes of ``tf.distribute.experimental.rpc``, which raise an error with advice."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Client", "Server"]


class _Absent:
    """Base of classes without instances: making an instance raises an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError."""
        self.create()

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError, with advice on what to use instead.

        Not collective.

        Parameters
        ----------
        *args : object
            Not used.
        **kwargs : object
            Not used.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(
            f"expected calls over MPI, found {cls.__name__} of "
            "tf.distribute.experimental.rpc, whose calls are those of gRPC; schedule "
            "functions with hs.coordinator.ClusterCoordinator, which sends them to "
            "workers over MPI, or send messages of your own over "
            "strategy.topology.replica_comm"
        )


class Server(_Absent):
    """Stand-in for TensorFlow's RPC server; raises an error with advice."""


class Client(_Absent):
    """Stand-in for TensorFlow's RPC client; raises an error with advice."""
