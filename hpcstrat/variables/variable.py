"""The plain variable of one process, and the interface that all variables share."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from hpcstrat.engine.arrays.casting import call_without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import (
    array_module,
    as_array,
    device_of,
    is_device,
    to_device,
    to_host,
)
from hpcstrat.engine.arrays.row_updates import apply_at, replace_at
from hpcstrat.engine.context import AnnouncesInitErrors, current
from hpcstrat.engine.html import table
from hpcstrat.engine.options import (
    VariableAggregation,
    VariableOptions,
    VariableSynchronization,
)
from hpcstrat.engine.typing import Array
from hpcstrat.engine.values import (
    Adopted,
    ArrayOperators,
    HostValue,
    Mirrored,
    PerReplica,
)

_OPERATIONS = {"assign_add": np.add, "assign_sub": np.subtract}
# Arrays of any library have one of these attributes; Python numbers have none.
_MARKS = ("dtype", "__dlpack__", "__array__", "__cuda_array_interface__")
_SCATTER = {
    "scatter_add": "add",
    "scatter_sub": "subtract",
    "scatter_mul": "multiply",
    "scatter_div": "divide",
    "scatter_min": "minimum",
    "scatter_max": "maximum",
}
# Methods whose updates cannot be summed or averaged over replicas.
NOT_SUMMABLE = ("scatter_min", "scatter_max", "scatter_update")


class Variable(AnnouncesInitErrors, ArrayOperators):
    """A named array that a program updates in place.

    In the scope of a strategy that distributes variables, the constructor makes a
    `MirroredVariable` (synchronization ``AUTO`` or ``ON_WRITE``) or a
    `SyncOnReadVariable` (``ON_READ``). All components start with replica 0's initial
    value, so the constructor is collective over the strategy's replicas. In the scope
    of a `CentralStorageStrategy` the constructor makes a `CentralVariable`. Outside of
    the scopes of these strategies, it makes a plain variable.

    Parameters
    ----------
    initial_value : array_like of any shape, or callable
        The first value; a callable is called once. Arrays keep their dtype; Python
        floats become float32, Python integers int32. If the value is on a GPU, or with
        the setting ``device="gpu"``, the variable is on the program's current GPU.
    trainable : bool, optional
        Whether optimizers may update the variable; default: not with ``ON_READ``.
    name : str, optional
        Name in messages. Checkpoints save the variable's optimizer state by this name.
    dtype : dtype, optional
        The dtype of the variable, which must be able to represent the initial value.
    synchronization : VariableSynchronization or str
        ``AUTO``, ``ON_WRITE`` or ``ON_READ``; plain variables ignore this option.
    aggregation : VariableAggregation or str
        The operation that combines the replicas' values.
    split : int or dict of str to int, optional
        With replicas of several ranks: the axis along which these ranks divide the
        value, or an axis for each of several axes of ``replica_shape``. Each rank gives
        its own part as ``initial_value``, with the rows of ``strategy.inside.part``.
        Where a replica is one rank, its part is the whole value.
    on : int, optional
        With replicas of several ranks: the position of the rank that keeps the value,
        as a layer of a pipeline needs it. All ranks give the whole ``initial_value``,
        of at least one dimension; the variables of other ranks have zero rows, and so
        must their gradients. A replica of one rank keeps all variables.

    Attributes
    ----------
    is_remote : bool
        Whether the value is stored on other ranks, so that ``component`` is a copy.
    is_sharded : bool
        Whether each rank stores only its part of the elements, as ``component``.

    Raises
    ------
    RuntimeError
        If the constructor is called inside ``run``, with logical replicas.
    ValueError
        If the value is not an array; in a scope, if ``synchronization`` is ``NONE``, or
        if ``aggregation`` is ``MEAN`` and the dtype is not floating.
    """

    is_remote = False
    is_sharded = False
    split: Any = None
    _is_distributed = False
    _strategy: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Variable:
        """Return an object of the current strategy's variable class."""
        entry = current()
        kind, strategy = cls, None
        if entry is not None and (cls is Variable or cls._is_distributed):
            strategy = entry.strategy
        if cls is Variable and strategy is not None:
            # `__init__` parses the options again, and raises errors on all replicas.
            options = VariableOptions()
            with contextlib.suppress(ValueError, TypeError):
                options = _options(*args[1:2], **kwargs)
            kind = strategy.variable_class(options)
        self = object.__new__(kind)
        self._strategy = None if kind is Variable else strategy
        return self

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        split: int | Mapping[str, int] | None = None,
        on: int | None = None,
    ) -> None:
        self.name = name or "Variable"
        options = _options(trainable, synchronization, aggregation, split, on)
        self.aggregation = options.aggregation
        self.synchronization = options.synchronization
        self.trainable = options.trainable
        distributed = self._strategy is not None
        if distributed:
            self._require_place()
        if distributed and self.synchronization is VariableSynchronization.NONE:
            raise ValueError(
                f"expected synchronization AUTO, ON_WRITE or ON_READ for variable "
                f"{self.name!r}, found NONE; leave it out for the default"
            )
        self._given_split = options.split
        self._keep(self._initialize(initial_value, dtype))
        self._made()

    @staticmethod
    def adopt(
        array: Array,
        *,
        name: str | None = None,
        trainable: bool = True,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> Variable:
        """Return a variable whose memory another library owns and updates.

        In a strategy's scope the call is collective over the strategy's replicas: the
        variable is mirrored, and replica 0's value is written to the memory on all
        replicas. Outside of a scope the variable is plain, and nothing is written. The
        variable is saved, restored in place, checked for divergence and updated like
        any other variable. Because the memory is shared, the variable changes when the
        owner writes; the owner must write the same values on all replicas. For the
        library's own modules.
        """
        return Variable(Adopted(array), trainable, name=name, aggregation=aggregation)

    def _require_place(self) -> None:
        """Raise an error if a logical replica makes a variable inside ``run``."""
        entry = current()
        inside = entry is not None and entry.replica_context is not None
        if inside and self._strategy.logical:
            raise RuntimeError(
                f"expected variable {self.name!r} to be made outside of strategy.run, "
                "as logical replicas of a rank share it, found it inside; make it in "
                "the strategy's scope, before run"
            )

    def _keep(self, component: Array) -> None:
        """Store an array as the component, or as the first of several components."""
        self._component = component
        self._view = view_of(component)

    def _made(self) -> None:
        """Finish the constructor; subclasses override this method."""

    def _initialize(self, initial_value: Any, dtype: Any) -> Array:
        value = self._first_value(initial_value)
        if type(value) is Adopted:
            return _require_lendable(value.array, self.name)
        stays = type(value) is HostValue
        array = as_array(value.array if stays else value, dtype)
        # A plain variable has no strategy, but if it is made in a scope, the scope's
        # strategy decides about its device.
        entry = current()
        strategy = self._strategy
        if strategy is None and entry is not None:
            strategy = entry.strategy
        if strategy is not None and strategy.puts_on_gpu and not stays:
            array = to_device(array)
        copied: Array = array_module(array).array(array, order="C")
        return copied

    def _first_value(self, initial_value: Any) -> Any:
        """Return ``initial_value``, or its result if it is callable."""
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, PerReplica):
            raise ValueError(
                f"expected one initial value for variable {self.name!r}, found a "
                "PerReplica; pass an array"
            )
        return value

    @property
    def component(self) -> Array:
        """This replica's own array, not a copy; writes to the array are not checked."""
        return self._component

    @property
    def components(self) -> Sequence[Array]:
        """The arrays of this process's replicas, in replica order."""
        return (self._component,)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value."""
        return self._component.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self._component.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._component.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._component.size

    @property
    def device(self) -> str:
        """Device on which this replica's component is stored."""
        if self._strategy is None or is_device(self._component):
            return device_of(self._component)
        return str(self._strategy.device)

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that made the variable; None for a plain variable."""
        return self._strategy

    def _operand(self) -> Array:
        return self.value()

    def value(self) -> Array:
        """Return the value without a copy.

        Collective over the strategy's replicas for a SyncOnRead variable in
        cross-replica context, else not collective.

        Returns
        -------
        ndarray
            A read-only view, whose elements change with the next update. Arrays on a
            GPU cannot be made read-only: a write to such an array changes this
            replica's component without an error.
        """
        return self._view

    def read_value(self) -> Array:
        """Return a copy of the value.

        Collective over the strategy's replicas in the same cases as `value`.

        Returns
        -------
        ndarray
            A new array.
        """
        return self.value().copy()

    def numpy(self) -> Array:
        """Return a copy of the value as a NumPy array.

        Collective over the strategy's replicas in the same cases as `value`. For a
        variable on a GPU, the call waits until the GPU has computed the value.

        Returns
        -------
        numpy.ndarray
            A new array.
        """
        value = self.value()
        return to_host(value) if is_device(value) else value.copy()

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(
            f"expected a method to write to variable {self.name!r}, found an "
            "assignment to its elements; use assign, assign_add or assign_sub, or "
            "scatter_update for rows"
        )

    def assign(self, value: Any, read_value: bool = True) -> Any:
        """Replace the value.

        Collective over the strategy's replicas for a mirrored variable with an
        aggregation in replica context, else not collective.

        Parameters
        ----------
        value : array_like of the variable's shape
            Arrays must have the variable's dtype; Python numbers are converted to it.
            If the variable is on a GPU, arrays in host memory are copied to that GPU.
        read_value : bool
            Whether to return a copy of the new value.

        Returns
        -------
        ndarray, Mirrored or None
            The new value: a Mirrored in cross-replica context for a mirrored variable
            of several replicas, else an array. None if ``read_value`` is False.

        Raises
        ------
        ValueError
            For another shape or dtype, a PerReplica in cross-replica context (TypeError
            for a SyncOnRead variable), or aggregation ``NONE``: of a mirrored variable
            in replica context of several replicas, or of a SyncOnRead variable in
            cross-replica context.
        CollectiveError
            If replicas update different variables; on every replica.
        """
        return self._update("assign", value, read_value)

    def assign_add(self, value: Any, read_value: bool = True) -> Any:
        """Add an array to the value.

        Collective over the strategy's replicas in the same cases as `assign`. For a
        SyncOnRead variable also collective in cross-replica context, unless
        ``read_value`` is False.

        Parameters
        ----------
        value, read_value : array_like, bool
            See `assign`.

        Returns
        -------
        ndarray, Mirrored or None
            See `assign`.

        Raises
        ------
        ValueError
            In the cases listed at `assign`, and in cross-replica context for a
            SyncOnRead variable with aggregation ``SUM``.
        """
        return self._update("assign_add", value, read_value)

    def assign_sub(self, value: Any, read_value: bool = True) -> Any:
        """Subtract an array from the value.

        Collective over the strategy's replicas in the same cases as `assign_add`.

        Parameters
        ----------
        value, read_value : array_like, bool
            See `assign_add`, which also lists the errors.

        Returns
        -------
        ndarray, Mirrored or None
            See `assign`.
        """
        return self._update("assign_sub", value, read_value)

    def scatter_add(self, sparse_delta: IndexedSlices) -> Any:
        """Add values to some rows of the variable.

        Collective over the strategy's replicas in the same cases as `assign`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            Row indices, and values that have the variable's dtype and, except for the
            first dimension, its shape. If an index is repeated, all its values are
            applied. In replica context, ``SUM`` concatenates the rows of all replicas,
            ``MEAN`` also divides the values by the number of replicas, and
            ``ONLY_FIRST_REPLICA`` uses replica 0's rows.

        Returns
        -------
        ndarray or Mirrored
            The new value, as `assign` returns it.

        Raises
        ------
        ValueError
            For an index out of range, a wrong shape or dtype, `scatter_div` of an
            integer variable, or aggregation ``NONE`` as in `assign`.
        NotImplementedError
            For a SyncOnRead variable.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Any:
        """Subtract values from some rows of the variable.

        Collective over the strategy's replicas in the same cases as `scatter_add`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            See `scatter_add`.

        Returns
        -------
        ndarray or Mirrored
            See `scatter_add`.
        """
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Any:
        """Multiply some rows of the variable by values.

        Collective over the strategy's replicas in the same cases as `scatter_add`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            See `scatter_add`.

        Returns
        -------
        ndarray or Mirrored
            See `scatter_add`.
        """
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Any:
        """Divide some rows of the variable by values.

        Collective over the strategy's replicas in the same cases as `scatter_add`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            See `scatter_add`.

        Returns
        -------
        ndarray or Mirrored
            See `scatter_add`.
        """
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Any:
        """Replace elements of some rows by smaller values: the elementwise minimum.

        Collective over the strategy's replicas in the same cases as `scatter_add`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            See `scatter_add`. With aggregation ``SUM`` or ``MEAN`` the call raises
            NotImplementedError.

        Returns
        -------
        ndarray or Mirrored
            See `scatter_add`.
        """
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Any:
        """Replace elements of some rows by larger values: the elementwise maximum.

        Collective over the strategy's replicas in the same cases as `scatter_add`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            See `scatter_min`, which also says when the call raises NotImplementedError.

        Returns
        -------
        ndarray or Mirrored
            See `scatter_add`.
        """
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Any:
        """Replace some rows of the variable.

        Collective over the strategy's replicas in the same cases as `scatter_add`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            See `scatter_min`, which also says when the call raises NotImplementedError.

        Returns
        -------
        ndarray or Mirrored
            See `scatter_add`.
        """
        return self._scatter("scatter_update", sparse_delta)

    def _require_alone(self, method: str) -> None:
        """Raise an error if a plain variable inside ``run`` has an aggregation."""
        entry = current()
        if (
            entry is not None
            and entry.replica_context is not None
            and self.aggregation is not VariableAggregation.NONE
            and entry.strategy.num_replicas_in_sync > 1
        ):
            raise ValueError(
                f"expected a variable made in the scope of {entry.strategy!r} for "
                f"{method} with aggregation {self.aggregation.name}, found the plain "
                f"variable {self.name!r}, of which each rank has its own; create it in "
                "the strategy's scope"
            )

    def _update(self, method: str, value: Any, read_value: bool) -> Any:
        self._require_alone(method)
        return self._apply(method, self._converted(method, value), read_value)

    def _apply(self, method: str, array: Array, read_value: bool) -> Any:
        # Update in place, so that views from `value` show the new value.
        apply_into(self._component, method, array)
        return self._component.copy() if read_value else None

    def _scatter(self, method: str, rows: IndexedSlices) -> Any:
        self._require_alone(method)
        return self._scatter_own(method, rows)

    def _scatter_own(self, method: str, rows: IndexedSlices) -> Any:
        """Update rows of this replica's component."""
        values, indices = self._rows(method, rows), rows.indices
        if is_device(self._component):
            values, indices = to_device(values), to_device(indices)
        scatter_into(self._component, method, indices, values)
        return self._component.copy()

    def _rows(self, method: str, rows: IndexedSlices) -> Array:
        """Return the values of rows, after a check that the rows fit this variable."""
        dtype = self._component.dtype
        # In an integer variable, quotients would be truncated without a message.
        if method == "scatter_div" and dtype.kind in "biu":
            raise ValueError(
                f"expected a floating variable for scatter_div, found {self.name!r} of "
                f"{dtype}; make it a float, or assign its whole value"
            )
        shape = self._component.shape
        length = shape[0] if shape else 0
        indices = rows.indices
        if indices.size and (indices.min() < 0 or indices.max() >= length):
            raise ValueError(
                f"expected indices from 0 to {length - 1} for variable {self.name!r}, "
                f"found {indices.min()} to {indices.max()}; check the rows"
            )
        if rows.values.shape[1:] != shape[1:]:
            raise ValueError(
                f"expected rows of shape {shape[1:]} for variable {self.name!r}, "
                f"found {rows.values.shape[1:]}; check the rows"
            )
        if is_device(rows.values) and not is_device(self._component):
            raise ValueError(
                f"expected rows in host memory for variable {self.name!r}, found rows "
                "on a GPU; make the variable of a CuPy array, or copy them with "
                "cupy.asnumpy"
            )
        return self._typed(method, rows.given)

    def _typed(self, method: str, value: Any) -> Array:
        """Return a value as an array of this variable's dtype.

        All updates of variables follow the same rule: arrays must have the variable's
        dtype. Python numbers are converted if the dtype can represent them.
        """
        dtype = self._component.dtype
        # Plain NumPy arrays, the usual case, skip the slower test of attributes.
        array = value if type(value) is np.ndarray else None
        if array is None:
            is_array = any(hasattr(value, mark) for mark in _MARKS)
            array = as_array(value, None if is_array else dtype)
        if array.dtype != dtype:
            raise ValueError(
                f"expected dtype {dtype} in {method} of variable {self.name!r}, found "
                f"{array.dtype}; {_advice(array.dtype, dtype)}"
            )
        return array

    def _converted(self, method: str, value: Any) -> Array:
        """Return a value as an array of this variable's dtype and shape."""
        value = value._local if type(value) is Mirrored else value
        if isinstance(value, ArrayOperators):
            value = value._operand()
        array = self._typed(method, value)
        # Other shapes are refused: broadcasting by NumPy would mostly hide a mistake.
        if array.shape != self._component.shape:
            raise ValueError(
                f"expected shape {self._component.shape} in {method} of variable "
                f"{self.name!r}, found {array.shape}; nothing is broadcast"
            )
        if is_device(self._component):
            return to_device(array)
        if is_device(array):
            raise ValueError(
                f"expected an array in host memory in {method} of variable "
                f"{self.name!r}, found one on {device_of(array)}; make the variable of "
                "a CuPy array, or copy the value with cupy.asnumpy"
            )
        return array

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # NumPy tests for many ``__`` names, so no long message is built for them.
            raise AttributeError(name)
        kind = type(self).__name__
        advice = (
            f"write variable.value().{name}, of its array"
            if hasattr(np.ndarray, name)
            else f"dir({kind}) lists them"
        )
        raise AttributeError(
            f"expected an attribute of a {kind}, found {name!r}; {advice}"
        )

    def __dlpack__(self, **options: Any) -> Any:
        return self.read_value().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._component.__dlpack_device__()
        return int(kind), int(number)

    def _copied(self) -> Array:
        """Return the component's value in new memory, for a copy of the variable."""
        own: Array = self._component.copy()
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._keep(self._copied())
        memo[id(self)] = other
        return other

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"expected an array to pickle, found variable {self.name!r}, which belongs "
            "to its strategy; pickle variable.numpy()"
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} {self.dtype}{list(self.shape)} "
            f"{self._component!r}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows = {
            "type": f"{self.dtype}{list(self.shape)}",
            "trainable": self.trainable,
            "synchronization": self.synchronization.name,
            "aggregation": self.aggregation.name,
            "this replica's value": self._component,
        }
        return table(f"{type(self).__name__} {self.name}", rows)


def _options(
    trainable: Any = None,
    synchronization: Any = VariableSynchronization.AUTO,
    aggregation: Any = VariableAggregation.NONE,
    split: Any = None,
    on: Any = None,
    **_: Any,
) -> VariableOptions:
    """Parse the options of a variable; raise ValueError for a wrong option."""
    aggregation = VariableAggregation.parse(aggregation)
    when = VariableSynchronization.parse(synchronization)
    # As in tf.distribute, ON_READ variables are not trainable by default: the replicas'
    # parts of a total have no gradient.
    default = when is not VariableSynchronization.ON_READ
    if on is not None:
        if split is not None:
            raise ValueError(
                f"expected split or on of a variable, found both, {split!r} and {on!r};"
                " leave one of the two out"
            )
        try:
            split = ((0, operator.index(on)),)
        except TypeError:
            raise TypeError(
                f"expected an integer as on of a variable, found {on!r}; pass the "
                "position of a rank in its replica"
            ) from None
    if split is not None and when is VariableSynchronization.ON_READ:
        raise ValueError(
            "expected no synchronization ON_READ of a variable with split or on, found "
            "it; leave one of the two out"
        )
    trains = default if trainable is None else bool(trainable)
    return VariableOptions(when, aggregation, trains, split)


def apply_into(component: Array, method: str, array: Array) -> None:
    """Assign an array to a component, or add or subtract it, in place."""
    operation = _OPERATIONS.get(method)
    if operation is None:
        np.copyto(component, array)
    elif is_device(component):
        # CuPy emits no floating-point warnings.
        operation(component, array, out=component)
    else:
        call_without_fp_warnings(operation, component, array, component)


def scatter_into(component: Array, method: str, indices: Array, values: Array) -> None:
    """Update rows of a component in place by a scatter method of `Variable`."""
    if method == "scatter_update":
        replace_at(component, indices, values)
    else:
        apply_at(_SCATTER[method], component, indices, values)


def _require_lendable(array: Any, name: str) -> Array:
    """Raise an error if an array's memory cannot be a component; return the array."""
    found = ""
    if not (isinstance(array, np.ndarray) or is_device(array)):
        found = f"{type(array).__name__}; pass a view of it, as tensor.numpy() is"
    elif not array.flags.c_contiguous:
        found = f"strides {array.strides} of shape {array.shape}; pass a whole array"
    elif not is_device(array) and not array.flags.writeable:
        found = "one that is read-only; copy it, or make its owner give a writable view"
    elif array.dtype.hasobject or not array.dtype.isnative:
        found = f"dtype {array.dtype.str}; pass numbers in native byte order"
    if found:
        raise ValueError(
            "expected a contiguous, writable array of NumPy or CuPy to adopt for "
            f"variable {name!r}, found {found}"
        )
    own: Array = array
    return own


def view_of(component: Array) -> Array:
    """Return a read-only view of a component; for CuPy, a writable view."""
    view = component.view()
    if not is_device(component):
        view.flags.writeable = False
    return view


def _advice(found: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    """Return advice for an error message about a value of a wrong dtype."""
    whole = wanted.kind in "iub"
    if found.kind == "c" and wanted.kind != "c":
        return "take the value's real part, if that is meant"
    if whole and found.kind not in "iub":
        return "create the variable with a floating dtype, or round the value"
    return "cast the value with astype"
