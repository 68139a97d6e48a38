"""Adapters to other libraries, one each.

Those to frameworks know nothing of one another; what takes the place of a library that
is itself an adapter, as Horovod is, stands on that to the framework.
"""
