"""Adapters to other libraries, one each.

Those to PyTorch and JAX know nothing of one another; what takes the place of a library
that is itself an adapter, as Horovod is, or computes with them, as Keras does, stands
on those to the frameworks.
"""
