"""Adapters to other libraries, with one package for each library.

The adapters to PyTorch and JAX are independent of one another. The adapter to Keras
builds on both, because Keras runs on them; the adapter to Horovod builds on PyTorch's.
"""
