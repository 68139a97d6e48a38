"""The version, apart from the package's names: files that are saved tell it."""

__all__ = ["__version__"]

__version__ = "0.2.0"
