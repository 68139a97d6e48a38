"""Groups of replicas: in sync inside of each group, averaged after every few steps."""

from hpcstrat.groups.sync_groups import SyncGroups

__all__ = ["SyncGroups"]
