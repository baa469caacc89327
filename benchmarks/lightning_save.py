"""What does a save through the ResumeCallback take, next to ``trainer.save_checkpoint``?

One Trainer saves every step twice: with ``trainer.save_checkpoint`` into a new file, and through
the callback. Lightning's file may be lost in a power cut: it asks for no ``fsync`` and takes no
digest. Ours is durable and digested when the save returns.

    python benchmarks/lightning_save.py [--saves 12] [--record]

What the callback adds to a step is measured by ``overheads.py``.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from measuring import Findings, Timed, bytes_of, paired_row, parser_for, silenced, timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.lightning import ResumeCallback

BATCH_SIZE = 16
WARM_UP = 2  # saves
WIDTH = 2048


class Module(LightningModule):
    """Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        self.layers = nn.Sequential(*layers, nn.Dropout(0.1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class SavesToo(Callback):
    """Saves every step in Lightning's way, and times both ways."""

    def __init__(self, folder: Path, callback: ResumeCallback) -> None:
        self.folder = folder
        self.callback = callback
        self.times: list[float] = []
        self.ours: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        checkpointer: Any = self.callback._checkpointer
        save = checkpointer._run.save = Timed(checkpointer._run.save)
        self.ours = save.seconds

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        former = self.folder / f"{trainer.global_step - 2}.ckpt"

        def save() -> None:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
            former.unlink(missing_ok=True)

        self.times.append(timed(save)[0])


def fit(num_steps: int, *callbacks: Any) -> None:
    """A fit of so many steps."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
    )
    data = TensorDataset(torch.randn(num_steps * BATCH_SIZE, WIDTH))
    trainer.fit(Module(), DataLoader(data, BATCH_SIZE, shuffle=True))


def save_times(num_saves: int, folder: Path) -> tuple[list[float], list[float], int]:
    """Lightning's own saves, ours, and the bytes of one of ours."""
    callback = ResumeCallback(folder / "run", save_every=1)
    both = SavesToo(folder, callback)
    fit(num_saves + WARM_UP, callback, both)
    newest = max((folder / "run").glob("step-*"))
    return both.times[WARM_UP:], both.ours[WARM_UP : num_saves + WARM_UP], bytes_of(newest)


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--saves", type=int, default=12, help="measured saves (default 12)")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory, silenced():
        own_saves, our_saves, size = save_times(arguments.saves, Path(directory))
    Findings(
        "lightning-save",
        heading="Saves of Lightning",
        before=[
            "`python benchmarks/lightning_save.py --record`: a module of 6 layers of width",
            f"{WIDTH} with AdamW is saved every step by `trainer.save_checkpoint` into a new",
            "file and by the callback; Lightning asks for no `fsync` and takes no digest.",
            "Medians, also of differences and ratios.",
        ],
        title=f"saves of Lightning, its own and the callback's, {arguments.saves} of each",
        headings=("what", "stock ms", "with the callback ms", "added ms", "ratio"),
        rows=[paired_row(f"a save of {size / 2**20:,.0f} MiB", own_saves, our_saves)],
        packages=("torch", "lightning"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
