"""What compiling a kernel raises."""

from cupy._raw import CompileException

__all__ = ["CompileException"]
