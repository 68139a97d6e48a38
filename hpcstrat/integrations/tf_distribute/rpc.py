"""Names of ``tf.distribute.experimental.rpc``: errors that say what to use."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Client", "Server"]


class _Absent:
    """A class that cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to be made."""
        self.create()

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be made.

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
    """Functions that clients call: an error that says what to use instead."""


class Client(_Absent):
    """Refuses to call functions of a server, and says what to use instead."""
