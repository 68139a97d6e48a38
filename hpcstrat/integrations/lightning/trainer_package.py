"""Lightning's package with the Trainer, which exists under two names."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hpcstrat.integrations.frameworks import require

__all__ = ["BasePredictionWriter", "Callback", "CombinedLoader"]

_NAMES = "lightning.pytorch", "pytorch_lightning"
# The package that the program has imported; its classes are not those of the other.
_imported = [name for name in _NAMES if name in sys.modules]
if _imported != [_NAMES[1]]:
    require("lightning", "2.4")
_package = importlib.import_module((_imported or _NAMES)[0])

Callback: Any = _package.Callback
BasePredictionWriter: Any = _package.callbacks.BasePredictionWriter
CombinedLoader: Any = _package.utilities.CombinedLoader
