"""GPUs: binding of ranks, abilities of MPI and NCCL, streams, memory and kernels.

Beside `hpcstrat.engine.arrays.kinds` the only modules that know CuPy, which they load
when they are called, never when they are imported.
"""
