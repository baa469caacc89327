"""The remedy for the two packages that Lightning comes in, followed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from followed_remedies import Remedy

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

SCRIPT = """
import torch
import pytorch_lightning as pl
from resumekit.adapters.lightning import ResumeCallback

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
saving = ResumeCallback({directory!r}, save_every=1)
trainer = pl.Trainer(
    callbacks=[saving], max_epochs=1, accelerator="cpu", **dict.fromkeys(off, False)
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 1)))
"""


def launch(script: str) -> str:
    """What it prints where it fails, else nothing."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.stderr if done.returncode else ""


@pytest.mark.full  # two imports of Lightning
@pytest.mark.remedy("Import {} alone, before resumekit.adapters.lightning")
def test_a_script_imports_one_package_of_lightning(tmp_path: Path, remedy: Remedy) -> None:
    script = SCRIPT.replace("{directory!r}", repr(str(tmp_path / "run")))
    text = remedy.in_text(launch(f"import lightning.pytorch\n{script}"))
    package = re.findall(r"Import (\w+) alone", text)[0]
    assert f"import {package} " in script
    assert not launch(script)
    assert list((tmp_path / "run").glob("step-00000004"))
