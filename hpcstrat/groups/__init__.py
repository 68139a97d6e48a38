"""Replicas in sync inside of groups, whose parameters are averaged now and then."""

from hpcstrat.groups.sync_groups import SyncGroups

__all__ = ["SyncGroups"]
