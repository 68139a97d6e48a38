"""Enumerations and option records of the tf.distribute programming model."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self, cast

__all__ = [
    "AutoShardPolicy",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "ReduceOp",
    "RunOptions",
    "ValueContext",
    "VariableAggregation",
    "VariableOptions",
    "VariableSynchronization",
]


class _NamedEnum(enum.Enum):
    """An enumeration whose members are also accepted by name, in any case."""

    # Hash members, which are singletons, by identity: hashing names is slower.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Return ``value`` if it is a member, or the member of this name.

        Not collective.

        Parameters
        ----------
        value : member or str
            A member, or its name in upper or lower case.

        Returns
        -------
        member
            The member.

        Raises
        ------
        ValueError
            If there is no such member.
        """
        if type(value) is cls:
            return value
        if isinstance(value, str):
            # Faster than `__members__`, which makes a proxy object in each call.
            member = cls._member_map_.get(value.upper())
            if member is not None:
                return cast("Self", member)
        names = ", ".join(cls.__members__)
        raise ValueError(
            f"expected a {cls.__name__}, one of {names}, found {value!r}; pass the "
            f"member, such as {cls.__name__}.{next(iter(cls.__members__))}, or its name"
        )


class ReduceOp(_NamedEnum):
    """The operation that combines the values of several replicas into one value.

    ``MAX`` and ``MIN`` compare elements as IEEE 754-2019 does: the result is NaN (that
    of ``numpy.nan``) if one of the elements is NaN, and -0.0 is less than 0.0. ``ALL``
    and ``ANY`` are the logical "and" and "or" of booleans. tf.distribute has ``SUM``
    and ``MEAN`` only.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"
    ALL = "ALL"
    ANY = "ANY"

    @property
    def adds(self) -> bool:
        """True for ``SUM`` and ``MEAN``."""
        return self is ReduceOp.SUM or self is ReduceOp.MEAN

    @classmethod
    def parse(cls, value: Any) -> ReduceOp:
        """Return the operation for a member, a name or a variable aggregation.

        Not collective.

        Parameters
        ----------
        value : ReduceOp or str or VariableAggregation
            A member, its name in upper or lower case, or the aggregation ``SUM`` or
            ``MEAN``.

        Returns
        -------
        ReduceOp
            The operation.

        Raises
        ------
        ValueError
            If there is no such operation.
        """
        if isinstance(value, VariableAggregation):
            return cls.from_variable_aggregation(value)
        return super().parse(value)

    @staticmethod
    def from_variable_aggregation(aggregation: Any) -> ReduceOp:
        """Return the operation that corresponds to an aggregation.

        Not collective.

        Parameters
        ----------
        aggregation : VariableAggregation or str
            ``SUM`` or ``MEAN``.

        Returns
        -------
        ReduceOp
            The operation.

        Raises
        ------
        ValueError
            For ``NONE`` and ``ONLY_FIRST_REPLICA``, which are not reductions.
        """
        parsed = VariableAggregation.parse(aggregation)
        if parsed.name in ReduceOp.__members__:
            return ReduceOp[parsed.name]
        raise ValueError(
            f"expected the aggregation SUM or MEAN, found {parsed.name}, which cannot "
            "be converted to a ReduceOp; choose one of the two"
        )


class VariableSynchronization(_NamedEnum):
    """The moment at which the components of a distributed variable are combined."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(_NamedEnum):
    """The way in which a variable's values on all replicas are combined.

    `hpcstrat.variables.aggregation_rules` defines the rule of each member.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


@dataclass(frozen=True, slots=True)
class VariableOptions:
    """Arguments of a `Variable` by which a strategy chooses the variable's class."""

    synchronization: VariableSynchronization = VariableSynchronization.AUTO
    aggregation: VariableAggregation = VariableAggregation.NONE
    trainable: bool = True
    split: Any = None


class CommunicationImplementation(_NamedEnum):
    """The implementation of collective calls that a program requests."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of a collective call.

    Parameters
    ----------
    bytes_per_pack : int
        Size in bytes of the pieces in which a large buffer is reduced; 0 lets the
        library choose.
    timeout_seconds : float, optional
        How long a call may wait for late ranks before it raises an error; None for the
        limit of the job.
    implementation : CommunicationImplementation or str
        A hint, as in tf.distribute.
    wire_dtype : str, optional
        ``"float16"`` or ``"bfloat16"``: halves the bytes of float32 that are sent
        between workers, but loses digits. Each worker's sums are sent as numbers of
        this type with a common scale, are added in full precision, and are sent back in
        the same way. The error of every value ``x`` of a worker, and of every sum, is
        at most ``u |x| + 2**-39 M``, where ``u`` is 2**-11 for float16 and 2**-8 for
        bfloat16, and ``M`` is the largest absolute value in the same message. Integers,
        complex numbers, and sums inside a worker are not affected. None sends full
        precision.

    Raises
    ------
    ValueError
        If ``bytes_per_pack`` is negative, ``timeout_seconds`` is not positive, or
        ``implementation`` or ``wire_dtype`` is unknown.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.wire_dtype not in (None, "float16", "bfloat16"):
            raise ValueError(
                "expected wire_dtype 'float16', 'bfloat16' or None, found "
                f"{self.wire_dtype!r}; pass None for full precision"
            )
        # Check the package now: the first sum may be made much later.
        if self.wire_dtype == "bfloat16" and find_spec("ml_dtypes") is None:
            raise ValueError(
                "expected the package ml_dtypes for wire_dtype='bfloat16', found "
                "none; install it, or use float16"
            )
        if self.bytes_per_pack < 0:
            raise ValueError(
                "expected bytes_per_pack >= 0, found "
                f"{self.bytes_per_pack}; pass 0 to let the library choose"
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(
                "expected timeout_seconds > 0 or None, found "
                f"{self.timeout_seconds}; pass None to wait without a limit"
            )
        parsed = CommunicationImplementation.parse(self.implementation)
        object.__setattr__(self, "implementation", parsed)


def CollectiveHints(  # noqa: N802 - the older name of tf.distribute
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return `CommunicationOptions`; this is the older name of that class.

    Not collective.

    Parameters
    ----------
    bytes_per_pack : int
        As in `CommunicationOptions`.
    timeout_seconds : float, optional
        As in `CommunicationOptions`.

    Returns
    -------
    CommunicationOptions
        The options.
    """
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``Strategy.run``; accepted because tf.distribute has them.

    Parameters
    ----------
    experimental_enable_dynamic_batch_size : bool
        Ignored; it has an effect only on TPUs.
    experimental_bucketizing_dynamic_shape : bool
        Ignored; it has an effect only on TPUs.
    experimental_xla_options : object, optional
        Ignored; it has an effect only on TPUs.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


class InputReplicationMode(_NamedEnum):
    """The number of input pipelines: one per worker, or one per replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(_NamedEnum):
    """The way in which a dataset is divided between workers."""

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options of a distributed dataset.

    Parameters
    ----------
    experimental_fetch_to_device : bool
        Whether batches are copied to the replica's GPU while it still computes with
        earlier batches; only with strategies that put variables on GPUs.
    experimental_replication_mode : InputReplicationMode or str
        One pipeline per worker, or one per replica.
    experimental_place_dataset_on_device : bool
        Whether the pipeline itself runs on the device; requires ``PER_REPLICA`` and
        ``experimental_fetch_to_device=False``.
    experimental_per_replica_buffer_size : int
        Number of batches that a replica holds at the same time: the program uses one,
        and threads read the others ahead. For a `Dataset` with random access.
    independent : bool
        Allow a strategy of one replica in a job of several ranks: each rank then reads
        the whole dataset.
    own_rows : bool
        Whether each replica gets the rows of a batch that are in its own part of the
        data, as far as possible; the parts are the same in all epochs, and each global
        batch has the same rows as without this option. After ``cache()`` each rank
        keeps its part, one N-th of the data, in memory and reads few other rows. For a
        `Dataset` with random access.
    single_pipeline : bool
        Whether only replica 0 runs the iterable or the input function, and sends each
        replica of all workers its part of a batch. For small or random data.
    compare_every : int
        The workers compare every ``compare_every``-th batch of an iterable, beginning
        with the first; 0 compares none. The hash of the batch is part of messages that
        the workers send in each step anyway. With 0, the arrays of a `Dataset` are not
        compared between ranks, either.

    Raises
    ------
    ValueError
        If ``single_pipeline`` is combined with ``PER_REPLICA``, or if ``compare_every``
        is negative.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode | str = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    independent: bool = False
    own_rows: bool = False
    single_pipeline: bool = False
    compare_every: int = 1

    def __post_init__(self) -> None:
        parsed = InputReplicationMode.parse(self.experimental_replication_mode)
        object.__setattr__(self, "experimental_replication_mode", parsed)
        if self.single_pipeline and parsed is InputReplicationMode.PER_REPLICA:
            raise ValueError(
                "expected one pipeline for all replicas or one for each, found "
                "single_pipeline with PER_REPLICA; leave one of them out"
            )
        if self.compare_every < 0:
            raise ValueError(
                f"expected compare_every >= 0, found {self.compare_every}; pass 0 to "
                "compare no batches"
            )


@dataclass(frozen=True, slots=True)
class InputContext:
    """Argument of an input function: the index of its pipeline among all pipelines.

    Parameters
    ----------
    num_input_pipelines : int
        Number of pipelines in the job.
    input_pipeline_id : int
        Index of this pipeline.
    num_replicas_in_sync : int
        Number of replicas of the strategy.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica.

        Not collective.

        Parameters
        ----------
        global_batch_size : int
            Examples in a batch over all replicas.

        Returns
        -------
        int
            Examples in a batch of one replica.

        Raises
        ------
        ValueError
            If the number of replicas does not divide the global batch size.
        """
        # Rounding, instead of raising, would silently change the global batch.
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"expected a global batch size that {self.num_replicas_in_sync} "
                f"replicas divide, found {global_batch_size}; choose a multiple"
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True, slots=True)
class ValueContext:
    """Argument of the functions that make distributed values.

    Parameters
    ----------
    replica_id_in_sync_group : int
        The replica for which the value is made.
    num_replicas_in_sync : int
        Number of replicas of the strategy.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def check_on_error(on_error: str) -> None:
    """Raise ValueError for an unknown ``on_error`` policy; see `Strategy`."""
    if on_error not in ("abort", "raise"):
        raise ValueError(
            f"expected on_error 'abort' or 'raise', found {on_error!r}; choose one"
        )
