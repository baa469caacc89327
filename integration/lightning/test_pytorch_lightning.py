"""The adapter with ``pytorch_lightning``, where that is the package that the script imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

import lightning.pytorch  # noqa: F401  the one that the adapter takes in this process
import pytorch_lightning

from resumekit.adapters.lightning import ResumeCallback
from resumekit.errors import ConfigurationError
from resumekit.testing import DEFAULT_PRELOAD, Cell, KillPoint, Kit

PRELOAD = (
    *DEFAULT_PRELOAD,
    "sklearn.datasets",
    "pytorch_lightning",
    "resumekit.adapters.lightning",
)
# By its file: importing it here would load the package that is tested in a process of its own.
TRAIN = f"{Path(__file__).with_name('pytorch_lightning_workloads.py')}:train"


def test_a_killed_run_continues_exactly(tmp_path: Path) -> None:
    with Kit(tmp_path, preload=PRELOAD) as kit:
        cell = Cell(TRAIN, {}, 1, (KillPoint.step(5), KillPoint.step(17)))
        kit.assert_exact(cell)
        kit.assert_caught(cell, "ema")


@pytest.mark.filterwarnings(
    "ignore::lightning_fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",
)
def test_a_trainer_of_the_other_package_is_refused_and_named(tmp_path: Path) -> None:
    class Module(pytorch_lightning.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> None: ...

    saving: Any = ResumeCallback(tmp_path)
    trainer = pytorch_lightning.Trainer(
        callbacks=[saving], max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False
    )
    with pytest.raises(ConfigurationError, match="a Trainer of pytorch_lightning"):
        trainer.fit(Module(), [1, 2])
