"""GPUs: binding of ranks, capabilities of MPI and NCCL, streams, memory and kernels.

In ``hpcstrat.engine``, only this package and `hpcstrat.engine.arrays` use CuPy. Both
packages import CuPy when a function is called, never when a module is imported.
"""
