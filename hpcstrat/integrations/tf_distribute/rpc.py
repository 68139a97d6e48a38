"""Calls between processes as in ``tf.distribute.experimental.rpc``: errors that say
what to use instead."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Client", "Server"]

_ADVICE = (
    "schedule functions with hs.coordinator.ClusterCoordinator, which sends them to "
    "workers over MPI, or send messages of your own over strategy.topology.replica_comm"
)


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"expected calls over MPI, found {what} of tf.distribute.experimental.rpc, "
        f"whose calls are those of gRPC; {_ADVICE}"
    )


class Server:
    """Functions that clients call: an error that says what to use instead."""

    def __init__(self) -> None:
        """Refuse to be made."""
        _refuse("Server")

    @staticmethod
    def create(rpc_layer: str, address: str) -> NoReturn:
        """Refuse to be made.

        Not collective.

        Parameters
        ----------
        rpc_layer : str
            Not used.
        address : str
            Not used.

        Raises
        ------
        NotImplementedError
            Always.
        """
        _refuse("Server")


class Client:
    """Calls functions of a server: an error that says what to use instead."""

    def __init__(self) -> None:
        """Refuse to be made."""
        _refuse("Client")

    @staticmethod
    def create(
        rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0
    ) -> NoReturn:
        """Refuse to be made.

        Not collective.

        Parameters
        ----------
        rpc_layer : str
            Not used.
        address : str
            Not used.
        name : str
            Not used.
        timeout_in_ms : int
            Not used.

        Raises
        ------
        NotImplementedError
            Always.
        """
        _refuse("Client")
