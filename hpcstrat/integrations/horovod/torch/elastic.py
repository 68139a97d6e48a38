"""Replaces Horovod's elastic training: every name raises an error with advice."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    raise NotImplementedError(
        f"expected no elastic training of Horovod, found hvd.elastic.{name}; use "
        "hpcstrat.elastic.run, under mpirun --with-ft ulfm"
    )
