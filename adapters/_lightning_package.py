"""Which of the two packages that hold Lightning is meant, and what the adapter takes from it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resumekit.requirements import installed_version, require

require("lightning")


def _is_lightning() -> bool:
    """Whether it is ``lightning.pytorch``: what the script has imported, or else what there is."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return name == "lightning.pytorch"
    return installed_version("lightning") is not None


if TYPE_CHECKING or _is_lightning():
    from lightning.pytorch import Callback, Trainer, callbacks, strategies
    from lightning.pytorch.loops.fetchers import _DataFetcher
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultCollection,
        _ResultMetric,
        _Sync,
    )
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.combined_loader import _ModeIterator
else:
    from pytorch_lightning import Callback, Trainer, callbacks, strategies
    from pytorch_lightning.loops.fetchers import _DataFetcher
    from pytorch_lightning.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultCollection,
        _ResultMetric,
        _Sync,
    )
    from pytorch_lightning.utilities import CombinedLoader
    from pytorch_lightning.utilities.combined_loader import _ModeIterator

DataFetcher = _DataFetcher
Metadata = _Metadata
ModeIterator = _ModeIterator
ResultCollection = _ResultCollection
ResultMetric = _ResultMetric
Sync = _Sync

__all__ = [
    "Callback",
    "CombinedLoader",
    "DataFetcher",
    "Metadata",
    "ModeIterator",
    "ResultCollection",
    "ResultMetric",
    "Sync",
    "Trainer",
    "callbacks",
    "strategies",
]
