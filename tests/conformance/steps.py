"""The steps of programs, except for input and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.conformance.expressions import (
    as_tensor,
    constant,
    evaluate,
    indexed_slices,
)
from tests.conformance.observe import dtype_of, encode_tensor, own, own_component
from tests.conformance.replica import context_of, op_run, op_update, raise_error
from tests.conformance.session import (
    Frame,
    Session,
    variable_kind,
)

__all__ = ["NULL_STEPS", "PLAIN_STEPS", "STEPS", "Shown"]


class Shown:
    """A step's value whose observation is not just the value in JSON form."""

    def __init__(self, value: Any, observation: Any) -> None:
        self.value = value
        self.observation = observation


def attribute(value: Any, name: str) -> Any:
    """Return an attribute of a value."""
    return getattr(value, name)


def _reduce_op(step: dict[str, Any]) -> Any:
    return step["reduce_op"]


def _axis(axis: Any) -> Any:
    """Return an axis; a list in JSON is a tuple."""
    return tuple(axis) if isinstance(axis, list) else axis


class _Counter:
    """A callable that returns 1, 2, 3, ... and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return constant(float(self.calls))


def _description(variable: Any) -> dict[str, Any]:
    """Return the observation of a new variable."""
    return {
        "class": variable_kind(variable),
        "synchronization": variable.synchronization.name,
        "aggregation": variable.aggregation.name,
        "trainable": bool(variable.trainable),
        "dtype": np.dtype(variable.dtype).name,
        "shape": list(variable.shape),
    }


def _op_variable(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    init: Any = step["init"]
    counter = _Counter()
    special = init if isinstance(init, dict) else {}
    if "replica_id_callable" in special:
        init = counter
    elif "worker_id_callable" in special:
        alone = session.kind in ("default", "one_device")
        worker = 0 if alone else session.strategy.topology.worker_id
        init = lambda: constant(10.0 + worker)  # noqa: E731
    elif special:
        init = evaluate(session, frame, init)
    options: dict[str, Any] = {"name": step["name"]}
    if "dtype" in step:
        options["dtype"] = dtype_of(step["dtype"])
    if "sync" in step:
        options["synchronization"] = step["sync"]
    for key in ("aggregation", "trainable"):
        if key in step:
            options[key] = step[key]
    variable = hs.Variable(init, **options)
    session.add_variable(step["name"], variable)
    if "replica_id_callable" in special:
        calls = counter.calls
        # Only the replica that provides the initial value must call the function.
        replica = session.strategy.replica_id
        return {"init_calls": max(calls, 1) if replica else calls}
    if "worker_id_callable" in special:
        return {"created": True}
    return _description(variable)


def _op_reduce(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    value = evaluate(session, frame, step["value"])
    axis = _axis(step.get("axis"))
    event = session.log("reduce", reduce_op=step["reduce_op"], axis=axis, value=value)
    result = session.strategy.reduce(_reduce_op(step), value, axis=axis)
    event["result"] = session.encode(result)
    return result


def _destination(session: Session, frame: Frame, spec: Any) -> Any:
    return "/cpu:0" if spec == "host" else evaluate(session, frame, spec)


def _op_reduce_to(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    value = evaluate(session, frame, step["value"])
    to = _destination(session, frame, step["destinations"])
    event = session.log("reduce", reduce_op=step["reduce_op"], axis=None, value=value)
    result = session.strategy.extended.reduce_to(_reduce_op(step), value, to)
    event["result"] = session.encode(result)
    return result


def _op_batch_reduce_to(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    pairs = [
        (evaluate(session, frame, value), _destination(session, frame, to))
        for value, to in step["pairs"]
    ]
    events = [
        session.log("reduce", reduce_op=step["reduce_op"], axis=None, value=v)
        for v, _ in pairs
    ]
    results = session.strategy.extended.batch_reduce_to(_reduce_op(step), pairs)
    for event, result in zip(events, results, strict=True):
        event["result"] = session.encode(result)
    return results


def _op_assign(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    variable = session.variables[step["var"]]
    value = evaluate(session, frame, step["value"])
    kind = "replica_assign" if frame.mode == "replica" else "cross_assign"
    event = session.log(kind, method=step["op"], var=step["var"], value=value)
    options = {"read_value": step["read_value"]} if "read_value" in step else {}
    result = getattr(variable, step["op"])(value, **options)
    event["done"] = True
    return result


def _op_components(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    variable = session.variables[step["var"]]
    if variable_kind(variable) == "plain":
        part = variable.numpy()
        return Shown([part], {"list": [encode_tensor(part)]})
    parts = [np.array(part) for part in variable.values]
    return Shown(parts, {"list": [own(encode_tensor(part)) for part in parts]})


def _op_attr(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    value = evaluate(session, frame, step["value"])
    result = attribute(value, step["name"])
    if step["name"] == "values" and isinstance(value, hs.DistributedValues):
        entries = [own(session.encode(part)) for part in result]
        return Shown(result, {"list": entries})
    return result


def _op_update_step(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    result = op_update(session, frame, step)
    count = len(session.strategy.local_replicas)
    own_results = isinstance(result, tuple) and len(result) == count
    if not step.get("group", True) and own_results:
        return Shown(result, {"tuple": [own(session.encode(one)) for one in result]})
    return result


def _op_local_results(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    value = evaluate(session, frame, step["value"])
    return session.strategy.experimental_local_results(value)


def _op_gather(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    value = evaluate(session, frame, step["value"])
    event = session.log("gather", axis=step["axis"], value=value)
    result = session.strategy.gather(value, step["axis"])
    event["result"] = session.encode(result)
    return result


def _op_recall(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    name = step["name"]
    if name in session.recalls:
        return Shown(session.names.get(name), session.recalls[name])
    return session.names[name]


def _op_values(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    shared = session.object_with("vf")
    same_tensor = constant(7.0)

    def entry(r: int) -> Any:
        return {"a": constant(float(r)), "b": [constant(10.0 + r)]}

    functions: dict[str, Callable[[Any], Any]] = {
        "context": lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync),
        "values": lambda c: constant(
            step["values"][c.replica_id_in_sync_group], step.get("dtype")
        ),
        "shared": lambda c: shared,
        "same_tensor": lambda c: same_tensor,
        "replica_id": lambda c: c.replica_id_in_sync_group,
        "none": lambda c: None,
        "dict": lambda c: entry(c.replica_id_in_sync_group),
    }
    function = functions[step["fn"]]
    return session.strategy.experimental_distribute_values_from_function(function)


def _op_new_strategy(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    session.use_strategy(step["replicas"], step.get("strategy"))


def _op_other_strategy(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    kind = step.get("strategy", session.kind)
    other = session.make_strategy(step["replicas"], kind)
    session.strategies[step["name"]] = other


def _op_enter_scope_of(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    other = session.strategies[step["name"]]
    if other is None:
        # Raise the same error as on the ranks of the other strategy.
        if hs.has_strategy():
            raise_error("RuntimeError")
        return
    inner = Frame(frame.mode, frame.names, nested=True)
    with other.scope():
        for part in step.get("body", []):
            session.run_step(inner, part)


def _op_colocated(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    other = evaluate(session, frame, step["with"])
    with session.strategy.extended.colocate_vars_with(other):
        variable = hs.Variable(step["init"], name=step["name"])
    session.add_variable(step["name"], variable)
    return {"same_devices": variable.device == other.device}


def _op_created_in_scope(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    name = step.get("var", step.get("name"))
    variable = (
        session.variables[name]
        if isinstance(name, str)
        else evaluate(session, frame, step["value"])
    )
    return bool(session.strategy.extended.variable_created_in_scope(variable))


def _op_value_container(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    # Every replica asks for its own component only.
    component = own_component(session.variables[step["var"]])
    return session.strategy.extended.value_container(component)


def _op_scatter(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    variable = session.variables[step["var"]]
    values, indices = (
        evaluate(session, frame, step[key]) for key in ("values", "indices")
    )
    shape = list(variable.shape)
    rows = indexed_slices(
        {
            "values": values,
            "indices": indices,
            "dense_shape": shape,
            "dtype": step.get("dtype"),
        }
    )
    session.log(
        "replica_assign" if frame.mode == "replica" else "cross_assign",
        method=step["method"],
        var=step["var"],
        value=rows,
    )
    return getattr(variable, step["method"])(rows)


def _op_input_context(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    context = hs.InputContext(**step["args"])
    return context.get_per_replica_batch_size(step["global_batch_size"])


def _op_isinstance(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    value = evaluate(session, frame, step["value"])
    types = ("DistributedValues", "PerReplica", "Mirrored", "Variable")
    return {name: isinstance(value, getattr(hs, name)) for name in types}


def _op_loss_reduction(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    reduction = hs.get_loss_reduction()
    return getattr(reduction, "name", reduction).upper()


def _op_to_tensor(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    return as_tensor(evaluate(session, frame, step["value"]))


Step = Callable[[Session, Frame, dict[str, Any]], Any]

STEPS: dict[str, Step] = {
    "variable": _op_variable,
    "run": op_run,
    "reduce": _op_reduce,
    "reduce_to": _op_reduce_to,
    "batch_reduce_to": _op_batch_reduce_to,
    "update": _op_update_step,
    "assign": _op_assign,
    "assign_add": _op_assign,
    "assign_sub": _op_assign,
    "read_value": lambda s, f, step: s.variables[step["var"]].read_value(),
    "value": lambda s, f, step: s.variables[step["var"]].value(),
    "numpy": lambda s, f, step: s.variables[step["var"]].numpy(),
    "components": _op_components,
    "to_tensor": _op_to_tensor,
    "eval": lambda s, f, step: evaluate(s, f, step["value"]),
    "attr": _op_attr,
    "local_results": _op_local_results,
    "gather": _op_gather,
    "context": lambda s, f, step: context_of(s),
    "recall": _op_recall,
    "values_from_function": _op_values,
    "new_strategy": _op_new_strategy,
    "other_strategy": _op_other_strategy,
    "enter_scope_of": _op_enter_scope_of,
    "colocated_variable": _op_colocated,
    "variable_created_in_scope": _op_created_in_scope,
    "value_container": _op_value_container,
    "scatter": _op_scatter,
    "input_context": _op_input_context,
    "isinstance": _op_isinstance,
    "loss_reduction": _op_loss_reduction,
    "sleep": lambda s, f, step: time.sleep(step["seconds"]),
    "num_replicas": lambda s, f, step: s.strategy.num_replicas_in_sync,
}

# Steps whose observation is their JSON value, unchanged.
PLAIN_STEPS = {
    "variable",
    "context",
    "colocated_variable",
    "variable_created_in_scope",
    "input_context",
    "isinstance",
    "loss_reduction",
    "num_replicas",
}
# Steps without an observation.
NULL_STEPS = {
    "new_strategy",
    "other_strategy",
    "save",
    "restore",
    "sleep",
}
