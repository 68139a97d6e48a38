"""Local SGD and DiLoCo: groups of replicas that are averaged only every few steps."""

from hpcstrat.groups.sync_groups import SyncGroups

__all__ = ["SyncGroups"]
