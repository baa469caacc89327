"""Lightning with other loaders, modules, callbacks and strategies than ``lightning_workloads``.

Every launch writes down what it validated, what it logged, and in the end what the Trainer holds.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from annealed import Annealed
from digits import Digits
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import CombinedLoader
from lightning_workloads import BATCH_SIZE, NUM_SAMPLES, QUIET, Classifier, make_loader
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info
from torchmetrics import MeanMetric, MetricTracker, MinMaxMetric, MinMetric
from torchmetrics.wrappers import Running

from resumekit.adapters.lightning import ResumeCallback

LOGGED, VALIDATED, RESULT = "logged.jsonl", "validated.jsonl", "result.json"


class EachEpoch(Classifier):
    """Its learning rate falls when an epoch ends."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "epoch"}]


class OnBackbone(EachEpoch):
    """The optimizer gets the parameters of its backbone later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.layers.parameters(), lr=1e-2)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


class Bare(LightningModule):
    """No metric: torchmetrics 1.9 cannot be compiled beside lightning_utilities 0.15."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.3), nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2)


class OfTwoLoaders(Classifier):
    """Trains on a batch of each of two loaders, as far as they have one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        given = [each for each in (batch.values() if isinstance(batch, dict) else batch) if each]
        both = [torch.cat(parts) for parts in zip(*given, strict=True)]
        return super().training_step(both, batch_idx)


class Stream(IterableDataset[Any]):
    """Digits in their order, sharded over ranks and workers; the length is unknown."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self._digits = Digits(num_samples, augment=True)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        for number in range(worker * ranks + rank, len(self._digits), workers * ranks):
            yield self._digits[number]


class EachEpochAnother(Classifier):
    """Its loader is recreated in each epoch, with a generator of its own and another split."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(self.trainer.current_epoch)
        chosen = torch.randperm(NUM_SAMPLES + 40)[:NUM_SAMPLES].tolist()
        data = Subset(Digits(NUM_SAMPLES + 40, augment=True), chosen)
        return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, generator=generator)


class KeepsOutputs(Classifier):
    """Collects what an epoch gives, as tutorials do it: in lists, and in metrics of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.kept = {"mean": MeanMetric()}
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.largest = MinMaxMetric(MeanMetric())
        self.best = MinMetric()
        self.latest = Running(MeanMetric(), window=3)

    def on_train_start(self) -> None:
        self.best.reset()  # of the sanity check

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("in the progress bar", float(len(self.trainer.progress_bar_metrics)))
        self.outputs.append(loss)
        for metric in (self.kept["mean"], self.tracker, self.best, self.latest):
            metric.update(loss)
        self.log_dict({"largest": self.largest(loss)["max"], "latest": self.latest.compute()})
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("of outputs", torch.stack(self.outputs).mean(), prog_bar=True)
        self.log("of a dict", self.kept["mean"].compute())
        self.log_dict({"tracked": self.tracker.best_metric(), "best": self.best.compute()})
        self.outputs.clear()
        self.kept["mean"].reset()


class Keeping(Callback):
    """Collects losses, and declares no state."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.mean = MeanMetric()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.losses = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
        self.losses.append(outputs["loss"])
        self.mean.update(outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("of a callback", torch.stack(self.losses).sum() + self.mean.compute())
        self.losses.clear()


class Lines(Logger):
    """Appends what is logged to a file, as trackers do on their servers."""

    name = version = None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def log_hyperparams(self, *parameters: Any, **more: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        append(self.path, {"step": step, **metrics})


class Validated(Callback):
    """Writes down what is validated, and kills the process there on request.

    Args:
        path: the file that it appends to.
        kill: ``before``, ``during`` or ``after`` the validation of step 6.
    """

    def __init__(self, path: Path, kill: str) -> None:
        self.path = path
        self.kill = kill

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self._come_to("before", trainer)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if trainer.sanity_checking:
            append(self.path, {"sanity check": batch_idx})
            return
        labels = batch[1].tolist()
        append(self.path, {"step": trainer.global_step, "batch": batch_idx, "labels": labels})
        if batch_idx == 1:
            self._come_to("during", trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._come_to("after", trainer)

    def _come_to(self, moment: str, trainer: Any) -> None:
        if (moment, 6) == (self.kill, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


class Gathering(Classifier):
    """Gathers what its steps gave until the epoch is over, beside a layer that anneals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = Annealed(32)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("gathered", torch.stack(self.losses).mean())
        self.losses.clear()


MODULES = {
    "gathering": Gathering,
    "plain": Classifier,
    "bare": Bare,
    "by epoch": EachEpoch,
    "of two": OfTwoLoaders,
    "with loaders": EachEpochAnother,
    "on a backbone": OnBackbone,
    "keeps outputs": KeepsOutputs,
}


CHANGING = {
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2),
    "backbone": lambda: BackboneFinetuning(1, lambda epoch: 2.0, train_bn=False),
    "keeping": Keeping,
}


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stateful(workers: str, *, stream: bool) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(
        Stream() if stream else Digits(NUM_SAMPLES, augment=True),
        batch_size=BATCH_SIZE,
        shuffle=None if stream else True,
        num_workers=0 if workers == "0" else 2,
        persistent_workers=workers == "persistent",
    )


def make_loaders(kind: str, workers: str) -> Any:
    """One training loader, or two that are used together."""
    if kind.startswith("stateful"):
        return stateful(workers, stream=kind == "stateful stream")
    if kind == "stream":
        number, keeps = (0 if workers == "0" else 2), workers == "persistent"
        return DataLoader(Stream(), BATCH_SIZE, num_workers=number, persistent_workers=keeps)
    if kind == "of the module":
        return None
    one = make_loader(True, "shuffle", workers, NUM_SAMPLES)
    if kind == "one":
        return one
    if kind == "a list of two":
        return [one, make_loader(True, "generator", workers, NUM_SAMPLES - 2)]
    shorter = make_loader(True, "generator", workers, 5 * BATCH_SIZE)
    if kind == "a dict of two":
        return {"shorter": shorter, "one": one}
    if kind == "max_size":
        return CombinedLoader([shorter, one], "max_size")
    longer = make_loader(True, "generator", workers, NUM_SAMPLES + 30)
    return CombinedLoader({"one": one, "longer": longer}, "min_size")


def train(
    directory: str,
    *,
    loader: str = "one",
    workers: str = "0",
    module: str = "plain",
    compiled: bool = False,
    own_saving: bool = False,
    stop_after: int = 0,
    max_time: bool = False,
    log_every: int = 2,
    reload_every: int = 0,
    changing: str = "",
    accumulate: int = 1,
    val_check_interval: int | None = None,
    kill_in_validation: str = "",
    epochs: int = 2,
    save_every: int = 3,
    precision: Any = "32-true",
    async_save: bool = False,
) -> None:
    """Trains the classifier, on as many ranks as the environment says."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    seed_everything(0)
    folder = Path(directory)
    model: Any = MODULES[module]()
    validates = val_check_interval is not None
    callbacks: list[Any] = [
        ResumeCallback(folder / "run", save_every=save_every, strict=True, async_save=async_save),
        LearningRateMonitor("step", log_momentum=True),
        Validated(folder / VALIDATED, kill_in_validation),
    ]
    if changing:
        callbacks.append(CHANGING[changing]())
    if stop_after:
        callbacks.append(EarlyStopping("val_loss", patience=stop_after, min_delta=0.5))
    if own_saving:
        best = {"monitor": "val_loss", "save_top_k": 2, "every_n_train_steps": 4}
        callbacks.append(ModelCheckpoint(folder / "own", filename="{step}", save_last=True, **best))
    trainer = Trainer(
        strategy="ddp" if world_size > 1 else "auto",
        devices=world_size,
        max_epochs=epochs,
        precision=precision,
        max_time=timedelta(days=1) if max_time else None,
        accumulate_grad_batches=accumulate,
        val_check_interval=val_check_interval,
        limit_val_batches=1.0 if validates else 0,
        enable_checkpointing=own_saving,
        log_every_n_steps=log_every,
        reload_dataloaders_every_n_epochs=reload_every,
        callbacks=callbacks,
        **{**QUIET, "logger": Lines(folder / LOGGED)},
    )
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    val: Any = DataLoader(Digits(20, augment=True), batch_size=BATCH_SIZE)
    torch.manual_seed(int(os.environ.get("RANK", "0")) + 1)  # ranks draw different dropout masks
    trainer.fit(model, make_loaders(loader, workers), val if validates else None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    result = {
        "logged": {key: value.item() for key, value in trainer.logged_metrics.items()},
        "for callbacks": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "weights": sum(each.double().sum().item() for each in model.state_dict().values()),
        "step, epoch": [trainer.global_step, trainer.current_epoch],
        "own": sorted(path.name for path in folder.glob("own/*")),
        "own best": own_best(trainer, folder) if own_saving else None,
    }
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


def own_best(trainer: Any, folder: Path) -> dict[str, float]:
    models = trainer.checkpoint_callback.best_k_models.items()
    return {str(Path(path).relative_to(folder)): score.item() for path, score in models}
