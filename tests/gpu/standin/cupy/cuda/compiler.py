"""The errors of compiling a kernel."""

from cupy._raw import CompileException

__all__ = ["CompileException"]
