"""Local SGD and DiLoCo: groups of replicas average parameters every few steps."""

from hpcstrat.groups.sync_groups import SyncGroups

__all__ = ["SyncGroups"]
