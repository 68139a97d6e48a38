"""One watcher for each node of a job: ``hpcstrat watch``.

The watchers notice lost nodes, launchers and ranks, and start the program again on the
nodes that are left. This package needs the standard library only, so that a watcher
starts at once, and works while the ranks or the environment are slow.
"""
