"""The version of the package, which saved files contain."""

__all__ = ["__version__"]

__version__ = "0.2.0"
