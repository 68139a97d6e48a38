"""JAX's arrays and functions on replicas: reductions inside and outside of jit."""

from hpcstrat.integrations.frameworks import require

# Check before the import, so that a missing or old jax is reported in one sentence.
require("jax", "0.5.3")

# ruff: noqa: E402
from hpcstrat.engine.logical.threads import let_xla_wait
from hpcstrat.integrations.jax import inside
from hpcstrat.integrations.jax.collective_calls import (
    all_gather,
    all_reduce,
    broadcast,
    global_mean,
)
from hpcstrat.integrations.jax.held_state import HeldState, state
from hpcstrat.integrations.jax.transformation import (
    GradientTransformation,
    cross_replica,
)

# A strategy with logical replicas may exist already, and needs this call.
let_xla_wait()

__all__ = [
    "GradientTransformation",
    "HeldState",
    "all_gather",
    "all_reduce",
    "broadcast",
    "cross_replica",
    "global_mean",
    "inside",
    "state",
]
