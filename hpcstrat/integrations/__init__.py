"""Adapters to other libraries, one each.

Those to PyTorch and JAX are independent of one another. Those to libraries that use
them, as Keras does, or that are adapters themselves, as Horovod is, build on them.
"""
