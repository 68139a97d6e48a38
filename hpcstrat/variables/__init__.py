"""Variables: plain, mirrored, synchronized on read, sharded, and in central storage.

In replica context an assignment to a mirrored variable combines the replicas' values by
the variable's aggregation; an assignment to a SyncOnRead variable changes only the
replica's own component. In cross-replica context, a read combines the components.
"""

from hpcstrat.engine.values import HostValue
from hpcstrat.variables.aggregation_rules import rule_of, share_of
from hpcstrat.variables.central import CentralVariable
from hpcstrat.variables.divided import DividedVariable
from hpcstrat.variables.replicated import (
    DistributedVariable,
    MirroredVariable,
    SyncOnReadVariable,
    class_for_state,
    has_logical_replicas,
    read_all,
)
from hpcstrat.variables.sharded import (
    ShardedVariable,
    exchange_parts,
    part_of_rank,
)
from hpcstrat.variables.variable import Variable

__all__ = [
    "CentralVariable",
    "DistributedVariable",
    "DividedVariable",
    "HostValue",
    "MirroredVariable",
    "ShardedVariable",
    "SyncOnReadVariable",
    "Variable",
    "class_for_state",
    "exchange_parts",
    "has_logical_replicas",
    "part_of_rank",
    "read_all",
    "rule_of",
    "share_of",
]
