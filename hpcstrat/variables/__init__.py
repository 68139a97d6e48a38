"""Variables: plain, mirrored, and synchronized on read.

In replica context an assignment to a mirrored variable combines the replicas' values by
the variable's aggregation; an assignment to a SyncOnRead variable touches the replica's
own component only, and reading it in cross-replica context combines the components.
"""

from hpcstrat.values import HostValue
from hpcstrat.variables.replicated import (
    DistributedVariable,
    MirroredVariable,
    SyncOnReadVariable,
    read_all,
    share_of,
)
from hpcstrat.variables.variable import Variable

__all__ = [
    "DistributedVariable",
    "HostValue",
    "MirroredVariable",
    "SyncOnReadVariable",
    "Variable",
    "read_all",
    "share_of",
]
