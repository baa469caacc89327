"""The remedies for proofs that save or kill too late, followed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from followed_remedies import Remedy

pytest.importorskip("lightning")

from resumekit.cli import main

SCRIPT = """
import sys, time
import torch
import lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.3)  # a kill that comes late hits before the end
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

pl.seed_everything(0)
off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
trainer = pl.Trainer(max_steps=int(sys.argv[1]), accelerator="cpu", **dict.fromkeys(off, False))
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(150, 1)))
"""


class Proof:
    """A proof of a short training."""

    def __init__(self, directory: Path, capture: pytest.CaptureFixture[str]) -> None:
        self._script = directory / "train.py"
        self._script.write_text(SCRIPT)
        self._capture = capture

    def run(self, *options: str, num_steps: int = 20) -> str:
        """What the command prints where it fails; empty where the run was exact.

        Args:
            *options: of the command.
            num_steps: of the training.
        """
        script = (sys.executable, str(self._script), str(num_steps))
        with pytest.raises(SystemExit) as ended:
            main(["prove", "--with-resumekit", *options, "--", *script])
        output = "".join(self._capture.readouterr())
        if ended.value.code:
            return output
        assert "EXACT with resumekit attached" in output, output
        assert f"{num_steps} steps, 1 resume" in output, output
        return ""


@pytest.fixture
def proof(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Proof:
    return Proof(tmp_path, capfd)


@pytest.mark.full  # nine launches of Lightning
@pytest.mark.remedy("Save more often (--save-every), or kill it later")
def test_a_proof_saves_before_it_kills(proof: Proof, remedy: Remedy) -> None:
    text = remedy.in_text(proof.run("--save-every", "30s", "--at", "step:3"))
    (option,) = re.findall(r"--[\w-]+", text)
    assert not proof.run(option, "1", "--at", "step:3")
    assert not proof.run("--save-every", "30s", "--at", "step:145", num_steps=150)


@pytest.mark.full  # nine launches of Lightning
@pytest.mark.remedy("Save more often (--save-every), or train longer")
def test_a_proof_has_time_to_kill(proof: Proof, remedy: Remedy) -> None:
    text = remedy.in_text(proof.run("--save-every", "30s", "--kills", "1"))
    (option,) = re.findall(r"--[\w-]+", text)
    assert not proof.run(option, "1", "--kills", "1")
    assert not proof.run("--save-every", "30s", "--kills", "1", num_steps=150)
