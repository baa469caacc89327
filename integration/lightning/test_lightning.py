"""What the Lightning adapter takes over, what it leaves alone, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning
import torch
from digits import Digits
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.strategies import (
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import CombinedLoader
from lightning_rows_workloads import EachEpochAnother, OfTwoLoaders, make_loaders
from lightning_workloads import (
    NUM_SAMPLES,
    QUIET,
    Classifier,
    Counting,
    TwoOptimizers,
    make_loader,
)
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, Subset
from torchmetrics import MetricCollection, MetricTracker, MinMaxMetric, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.wrappers import Running

from resumekit.adapters.lightning import ResumeCallback
from resumekit.adapters.lightning._private import trainer_faults
from resumekit.adapters.lightning.fit_components import ModelCheckpointState
from resumekit.errors import ConfigurationError, DriftError, InexactError, ResumekitError
from resumekit.record.trace import KILL_VARIABLE, TRACE_VARIABLE
from resumekit.storage.store import Store

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"
PINNED = f"read from lightning 2.6, installed is {lightning.__version__}"
STEPS_PER_EPOCH = 12

pytestmark = [
    # Lightning's class for advice that may not apply: more workers, a validation loader, and so on.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # lightning 2.6 utilities/_pytree.py and utilities/combined_loader.py with torch 2.13
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]


class CrashError(Exception):
    """Raised by a callback: the process survives it, the fit does not."""


class Recorder(Callback):
    """Notes what it is called for, and crashes at a step; each launch has notes of its own."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at
        self.losses: list[float] = []
        self.events: list[str] = []

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.events.append("sanity check")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.events.append(f"start at step {trainer.global_step} of epoch {trainer.current_epoch}")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.events.append(f"epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())
        if len(self.losses) == self.crash_at:
            raise CrashError

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.events.append("end")


# Each launch has notes of its own.
resuming = partial(
    ResumeCallback, transient={"losses", "events", "seconds", "seconds_before", "began"}
)


class OfSize(LightningDataModule):
    """Its loader has batches of a size that a tuner finds."""

    batch_size = 4

    def train_dataloader(self) -> Any:
        return DataLoader(Digits(NUM_SAMPLES, augment=True), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Digits(8, augment=False), self.batch_size)


class Planned(Classifier):
    """Asks for the number of steps, and so for the loader, before the fit begins."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, max_lr=0.02, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PlateauInSteps(Classifier):
    """Its learning rate follows each of several validations in an epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
        settings = {"interval": "step", "frequency": 2, "monitor": "val_loss"}
        return [optimizer], [{"scheduler": plateau, **settings}]


class KeepsGradients(TwoOptimizers):
    """Its second optimizer steps in every third batch, the first one in each."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, last = self.optimizers()
        loss = Classifier.training_step(self, batch, batch_idx)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 3 == 2:
            last.step()
            last.zero_grad()
        return loss


class LogsFewBatches(Classifier):
    """What some batches of an epoch have alone, reduced in all ways, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.first_accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < 3:
            settings: dict[str, Any] = {"on_step": True, "on_epoch": True}
            for reduce_fx in ("mean", "max", min, sum):
                name = f"first_{getattr(reduce_fx, '__name__', reduce_fx)}"
                self.log(name, loss, reduce_fx=reduce_fx, **settings)
            self.first_accuracy(self.layers(batch[0]), batch[1])
            self.log("first_accuracy", self.first_accuracy, **settings)
        return loss


class LogsAtFirst(Classifier):
    """The first batches of an epoch have an average of their own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < 3:
            self.log("first_loss", loss, on_step=False, on_epoch=True)
        return loss


class WithLoader(Classifier):
    def train_dataloader(self) -> Any:
        return make_loader(True, "shuffle", "0", NUM_SAMPLES)


class ValidatesRandomly(Classifier):
    """Its validation takes samples that the hook draws."""

    def val_dataloader(self) -> Any:
        digits = Digits(NUM_SAMPLES, augment=False)
        chosen = torch.randperm(NUM_SAMPLES)[: 8 + self.current_epoch].tolist()
        return DataLoader(Subset(digits, chosen), 4)


class FreezesByEpoch(Classifier):
    """Its first layer is trained from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch > 0)


class WithCollection(Classifier):
    """Its metrics keep their state once for both, and have it computed at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        metrics = {"precision": MulticlassPrecision(10), "recall": MulticlassRecall(10)}
        self.collection = MetricCollection(metrics)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.collection.update(self.layers(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.collection.compute())
        self.collection.reset()


class Data(LightningDataModule):
    """A data module with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0

    def train_dataloader(self) -> Any:
        self.num_requests += 1
        return make_loader(True, "shuffle", "0", NUM_SAMPLES)

    def state_dict(self) -> dict[str, int]:
        return {"num_requests": self.num_requests}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_requests = state_dict["num_requests"]


class Stream(IterableDataset[Any]):
    def __init__(self, length: int = 10**9) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield torch.rand(64), torch.randint(10, ())


def validation(workers: str = "0") -> DataLoader[Any]:
    return make_loader(False, "in order", workers, 20)


def fit(
    *callbacks: Callback,
    module: Callable[[], LightningModule] = Classifier,
    loader: Any = None,
    val: Any = None,
    **settings: Any,
) -> Trainer:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        callbacks=list(callbacks),
        **{"max_epochs": 2, "enable_checkpointing": False, **QUIET, **settings},
    )
    if loader is None and module not in (WithLoader, KeepsWorkers, EachEpochAnother):
        loader = make_loader(True, "shuffle", "0", NUM_SAMPLES)
    trainer.fit(module(), loader, val)
    return trainer


def crashed(directory: Path, at: int, *callbacks: Callback, **settings: Any) -> None:
    with pytest.raises(CrashError):
        fit(*callbacks, Recorder(at), resuming(directory, save_every=2), **settings)


def outcome(trainer: Trainer) -> dict[str, Any]:
    weights = {key: value.clone() for key, value in trainer.lightning_module.state_dict().items()}
    logged = {**trainer.logged_metrics, **trainer.callback_metrics}
    metrics = {key: value.item() for key, value in logged.items()}
    return {**weights, **metrics, "step": trainer.global_step, "epoch": trainer.current_epoch}


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


def saved_steps(directory: Path) -> list[int]:
    return [name.step for name in Store(directory).step_names()]


def saved_keys(directory: Path) -> list[str]:
    store = Store(directory)
    manifest = store.open_step(store.step_names()[0]).manifest
    return [record.key for record in manifest.components]


# ---------------------------------------------------------------- what is private in Lightning


def test_the_private_attributes_are_where_the_adapter_looks() -> None:
    averaging = EMAWeightAveraging()
    trainer = fit(averaging, Recorder(), max_steps=1, val=validation())
    assert not list(trainer_faults(trainer)), PINNED
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    assert "dataloader" in vars(type(fit_loop._data_source)), PINNED
    assert "epoch_loop.batch_progress" in fit_loop.state_dict(), PINNED
    assert (fit_loop._restarting, epoch_loop.restarting) == (False, False), PINNED
    assert type(epoch_loop._results) is _ResultCollection, PINNED
    assert "_data_fetcher" in vars(fit_loop), PINNED
    assert _PrefetchDataFetcher().fetched == 0, PINNED
    assert fit_loop._last_train_dl_reload_epoch == 0, PINNED
    assert epoch_loop.val_loop._last_val_dl_reload_epoch == 0, PINNED
    fit_loop.epoch_progress.current.completed = 7
    assert trainer.current_epoch == 7, PINNED
    assert trainer._logger_connector._first_loop_iter is None, PINNED
    assert callable(trainer.strategy.on_train_end), PINNED
    assert BackboneFinetuning()._restarting is False, PINNED
    averaged = StochasticWeightAveraging(0.1, swa_epoch_start=2).state_dict()
    assert averaged["scheduler_state"] is None, PINNED
    logged = [each.name for each in fields(epoch_loop._results["training_step.loss"].meta)]
    assert logged == [
        "fx",
        "name",
        "prog_bar",
        "logger",
        "on_step",
        "on_epoch",
        "reduce_fx",
        "enable_graph",
        "add_dataloader_idx",
        "dataloader_idx",
        "metric_attribute",
        "_sync",
    ], PINNED
    assert epoch_loop._results["training_step.loss"].is_tensor, PINNED
    assert set(epoch_loop._results["training_step.loss"].metric_state) == {
        "value",
        "cumulated_batch_size",
    }, PINNED
    assert trainer.callback_metrics is trainer._logger_connector._callback_metrics, PINNED
    assert trainer.logged_metrics is trainer._logger_connector._logged_metrics, PINNED
    assert epoch_loop.val_loop._combined_loader.flattened, PINNED
    assert fit_loop._combined_loader._mode == "max_size_cycle", PINNED
    assert fit_loop._combined_loader._state_dicts() == [], PINNED
    assert not fit_loop._data_source.is_module(), PINNED
    assert ModelParallelStrategy()._tensor_parallel_size == "auto", PINNED
    saving = vars(ModelCheckpoint())
    assert (saving["_last_global_step_saved"], saving["_last_checkpoint_saved"]) == (0, ""), PINNED
    assert averaging._average_model is not None, PINNED
    logged = trainer._logger_connector
    assert trainer.progress_bar_metrics is logged._progress_bar_metrics, PINNED
    assert len(trainer.strategy._lightning_optimizers) == 1, PINNED
    assert epoch_loop._results["training_step.loss"]._defaults["value"].item() == 0.0, PINNED
    accuracy = trainer.lightning_module.accuracy
    assert accuracy._update_count == 0, PINNED  # of this epoch
    tracker = MetricTracker(accuracy)
    tracker.increment()
    assert (tracker.n_steps, list(tracker._modules)) == (1, ["_base_metric", "1"]), PINNED
    counted = (vars(MinMaxMetric(accuracy)), vars(Running(SumMetric())))
    assert all(name in counted[0] for name in ("min_val", "max_val")), PINNED
    assert counted[1]["_num_vals_seen"] == 0, PINNED


def test_a_sized_loader_is_asked_for_a_batch_when_all_code_of_the_step_before_has_run() -> None:
    order: list[str] = []

    class Read(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            order.append("fetch")
            return super().__getitem__(index)

    class Listener(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            order.append(f"validated, fetched {trainer.fit_loop._data_fetcher.fetched}")

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            order.append("epoch")

    data: Any = Read((torch.rand(64), 1) for _ in range(6))
    settings: dict[str, Any] = {
        "num_sanity_val_steps": 0,
        "val_check_interval": 2,
        "val": validation(),
    }
    fit(Listener(), loader=DataLoader(data, batch_size=2), **settings)
    validated = [f"validated, fetched {fetched}" for fetched in (2, 2)]
    epoch = ["epoch", *["fetch"] * 4, validated[0], *["fetch"] * 2]
    assert order == epoch * 2, PINNED


# ---------------------------------------------------------------- what does not change


@pytest.mark.quick("Classifier-0")
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("module", [Classifier, Planned, WithLoader])
def test_the_callback_changes_no_bit_of_the_training(
    tmp_path: Path, module: Any, workers: str
) -> None:
    runs = []
    for callbacks in ([], [resuming(tmp_path, save_every=5)]):
        recorder = Recorder()
        loader = None
        if module is not WithLoader:
            loader = make_loader(True, "shuffle", workers, NUM_SAMPLES)
        trainer = fit(recorder, *callbacks, module=module, loader=loader, val=validation())
        runs.append((recorder.losses, recorder.events, outcome(trainer)))
    stock, followed = runs
    assert followed[:2] == stock[:2]
    assert is_equal(followed[2], stock[2])


KINDS = (
    "a list of two",
    "until the shortest ends",
    "a dict of two",
    "max_size",
    "stateful",
    "stream",
    "of the module",
)


@pytest.mark.quick("a list of two-0", "stream-0")
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_callback_changes_no_bit_of_training_on(
    tmp_path: Path, kind: str, workers: str
) -> None:
    runs = []
    for callbacks in ([], [resuming(tmp_path, save_every=5)]):
        recorder = Recorder()
        seed_everything(0, verbose=False)  # making a stateful loader draws
        alone = {"stateful": Classifier, "stream": Classifier, "of the module": EachEpochAnother}
        fit(
            recorder,
            *callbacks,
            module=alone.get(kind, OfTwoLoaders),
            loader=make_loaders(kind, workers),
            reload_dataloaders_every_n_epochs=int(kind == "of the module"),
        )
        runs.append(recorder.losses)
    assert runs[0] == runs[1]


def test_other_callbacks_see_the_restored_run_and_nothing_twice(tmp_path: Path) -> None:
    whole, recorder = Recorder(), Recorder()
    fit(whole, val=validation())
    crashed(tmp_path, 17, val=validation())
    fit(resuming(tmp_path), recorder, val=validation())
    assert whole.events[:2] == ["sanity check", "start at step 0 of epoch 0"]
    assert recorder.events == ["start at step 16 of epoch 1", "end"]
    assert recorder.losses == whole.losses[16:]


@pytest.mark.quick("averaging1")
@pytest.mark.parametrize("averaging", [[], [EMAWeightAveraging]])
def test_a_finished_run_trains_nothing_and_stays_as_it_was(
    tmp_path: Path, averaging: list[Any]
) -> None:
    def run(recorder: Recorder) -> dict[str, Any]:
        callbacks = [each(decay=0.9) for each in averaging]
        return outcome(fit(resuming(tmp_path), recorder, *callbacks, val=validation()))

    first, again = Recorder(), Recorder()
    ended = run(first)
    assert is_equal(run(again), ended)
    assert (again.events, again.losses) == ([], [])
    assert saved_steps(tmp_path) == [2 * STEPS_PER_EPOCH]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_lightnings_own_saving_still_works_with_the_callback(tmp_path: Path) -> None:
    def best_models() -> ModelCheckpoint:
        folder = tmp_path / "own"
        return ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, every_n_train_steps=5)

    settings: dict[str, Any] = {
        "enable_checkpointing": True,
        "val_check_interval": 5,
        "val": validation(),
    }
    crashed(tmp_path / "run", 17, best_models(), **settings)
    saving = best_models()
    fit(resuming(tmp_path / "run"), saving, **settings)
    assert len(saving.best_k_models) == 2
    assert "callbacks/ModelCheckpoint-0" in saved_keys(tmp_path / "run")


@pytest.mark.parametrize("other_score", [False, True])
def test_two_runs_whose_launches_have_folders_of_their_own_are_equal(
    tmp_path: Path, other_score: bool
) -> None:
    """Each launch of Lightning's logger has the next version; only scores and names count."""
    settings: dict[str, Any] = {"enable_checkpointing": True, "val": validation()}

    def run(name: str, version: int, *callbacks: Callback) -> str:
        folder = tmp_path / name / f"version_{version}"
        saving = ModelCheckpoint(folder, monitor="val_loss", mode="max")  # the best is the first
        fit(resuming(tmp_path / name / "run", save_every=3), saving, *callbacks, **settings)
        if other_score:  # the negative control
            saving.best_k_models = dict.fromkeys(saving.best_k_models, torch.tensor(float(version)))
        return repr(ModelCheckpointState(saving).comparable_state())

    with pytest.raises(CrashError):
        run("killed", 0, Recorder(STEPS_PER_EPOCH + 5))
    killed, whole = run("killed", 1), run("whole", 0)
    assert (killed == whole) is not other_score


def test_a_trial_run_leaves_the_run_directory_alone(tmp_path: Path) -> None:
    fit(resuming(tmp_path / "run"), fast_dev_run=True)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- what is restored


EXACT: dict[str, tuple[Callable[[], dict[str, Any]], tuple[int, ...]]] = {
    "fewer batches than there are": (lambda: {"limit_train_batches": 5}, (3, 5)),
    "fewer batches, on the boundary": (lambda: {"limit_train_batches": 6}, (7,)),
    "a schedule that asks for the steps": (lambda: {"module": Planned}, (17,)),
    "a loader of the module": (lambda: {"module": WithLoader}, (17,)),
    "a loader of a data module": (lambda: {"loader": Data()}, (17,)),
    "a loader by name": (
        lambda: {"loader": CombinedLoader(make_loader(True, "shuffle", "0", NUM_SAMPLES))},
        (17,),
    ),
    "a stream of which so many batches are used": (
        lambda: {"loader": DataLoader(Stream(), batch_size=4), "limit_train_batches": 6},
        (9,),
    ),
    "a loader beside a stream, as far as a limit": (
        lambda: {
            "loader": [make_loader(True, "shuffle", "0", 20), DataLoader(Stream(40), batch_size=4)],
            "module": OfTwoLoaders,
            "limit_train_batches": 8,
        },
        (5, 7),
    ),
    "a stream that ends before the limit": (
        lambda: {"loader": DataLoader(Stream(22), batch_size=4), "limit_train_batches": 8},
        (9, 2),
    ),
    "accumulation windows that change with the epoch": (
        lambda: {"callbacks": [GradientAccumulationScheduler({1: 2})]},
        (17,),
    ),
    "a validation every second epoch": (
        lambda: {
            "callbacks": [EarlyStopping("val_loss", patience=3, strict=False)],
            "check_val_every_n_epoch": 2,
            "max_epochs": 4,
            "val": validation("persistent"),
        },
        (31,),
    ),
    "a first validation after the resume": (
        lambda: {"num_sanity_val_steps": 0, "val": validation("persistent")},
        (9,),
    ),
    "a validation of any step of the run": (
        lambda: {"check_val_every_n_epoch": None, "val_check_interval": 7, "val": validation()},
        (17,),
    ),
    "a validation that shuffles by itself": (
        lambda: {
            "val": make_loader(False, "generator", "0", NUM_SAMPLES),
            "limit_val_batches": 2,
            "max_epochs": 3,
        },
        (13, 17),  # after a save at an epoch's end, and inside the next one
    ),
    "a validation of samples that a hook draws": (
        lambda: {"module": ValidatesRandomly, "max_epochs": 3},
        (5, 17),
    ),
    "a validation of samples that a hook draws when it is due": (
        lambda: {"module": ValidatesRandomly, "max_epochs": 3, "num_sanity_val_steps": 0},
        (5, 17),
    ),
    "a validation of new samples in each epoch": (
        lambda: {
            "module": ValidatesRandomly,
            "max_epochs": 3,
            "reload_dataloaders_every_n_epochs": 1,
        },
        (5, 17),
    ),
    "a validation of new samples in every second epoch": (
        lambda: {
            "module": ValidatesRandomly,
            "max_epochs": 4,
            "reload_dataloaders_every_n_epochs": 2,
        },
        (17, 15),
    ),
    "a layer that a hook has frozen": (lambda: {"module": FreezesByEpoch}, (5,)),
    "a validation and a plateau at each saved step": (
        lambda: {"module": PlateauInSteps, "val_check_interval": 2, "val": validation()},
        (5, 10),
    ),
    "an average of the first batches": (lambda: {"module": LogsAtFirst, "max_epochs": 3}, (17,)),
    "averages that the rest does not log": (
        lambda: {"module": LogsFewBatches, "max_epochs": 3},
        (5, 20),
    ),
    "gradients kept over a step of another optimizer": (lambda: {"module": KeepsGradients}, (17,)),
    "a stop that has to wait": (
        lambda: {
            "callbacks": [EarlyStopping("val_loss", patience=1, min_delta=5.0)],
            "min_epochs": 3,
            "max_epochs": 6,
            "val": validation(),
        },
        (20, 5),
    ),
    "a stop on an average of the epoch": (
        lambda: {
            "callbacks": [EarlyStopping("loss", patience=1, min_delta=0.4)],
            "max_epochs": 6,
        },
        (17, 12),
    ),
    "a collection of metrics": (lambda: {"module": WithCollection}, (4, 15)),
    "fitted to a few batches": (lambda: {"overfit_batches": 4}, (7,)),
}


@pytest.mark.quick(
    "fewer batches than there are",
    "a schedule that asks for the steps",
    "a stream that*",
    "accumulation*",
    "a first validation*",
    "a layer that a hook has frozen",
    "a validation and*",
    "an average of the first batches",
    "averages*",
    "gradients*",
    "fitted to a few batches",
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")  # it turns off the shuffling
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize("name", EXACT)
def test_a_crashed_run_continues_exactly_with(tmp_path: Path, name: str) -> None:
    make, crashes = EXACT[name]

    def run(directory: Path, recorder: Recorder) -> dict[str, Any]:
        settings = make()
        callbacks = settings.pop("callbacks", [])
        saving = resuming(directory, save_every=2)
        return outcome(fit(*callbacks, recorder, saving, **settings))

    whole, rest, again = Recorder(), Recorder(), Recorder()
    expected = run(tmp_path / "whole", whole)
    for crash in crashes:
        with pytest.raises(CrashError):
            run(tmp_path / "crashed", Recorder(crash))
    found = run(tmp_path / "crashed", rest)
    assert 0 < len(rest.losses) < len(whole.losses)
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert is_equal(found, expected)
    assert is_equal(run(tmp_path / "crashed", again), expected)
    assert again.events == []


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_a_tuner_tries_batches_before_the_run_begins(tmp_path: Path, kind: str) -> None:
    loader = DataLoader(Stream(22), batch_size=4) if kind == "stream" else None
    finder = LearningRateFinder(num_training_steps=5, attr_name="rate")
    recorder, saving = Recorder(), resuming(tmp_path, save_every=5)
    fit(finder, recorder, saving, loader=loader, module=WithRate)
    assert len(recorder.losses) == (12 if kind == "stream" else 24)
    assert saved_steps(tmp_path)[0] == len(recorder.losses)


class PlannedAndDraws(Planned):
    """Draws between the first request for its loader and the first batch."""

    def on_fit_start(self) -> None:
        self.layers[0].bias.data.add_(torch.rand(()))  # type: ignore[operator]


@pytest.mark.parametrize("finder", ["in fit", "before fit", "none"])
def test_a_request_for_the_loader_before_the_run_begins_changes_no_number(
    tmp_path: Path, finder: str
) -> None:
    def losses(*saving: ResumeCallback) -> list[float]:
        recorder = Recorder()
        if finder == "before fit":
            seed_everything(0, verbose=False)
            settings: dict[str, Any] = {"default_root_dir": tmp_path, "enable_checkpointing": False}
            trainer = Trainer(callbacks=[recorder, *saving], max_epochs=1, **settings, **QUIET)
            data = OfSize()
            module = Classifier()
            Tuner(trainer).scale_batch_size(module, datamodule=data, max_trials=1)
            trainer.fit(module, datamodule=data)
            return recorder.losses
        finders = [LearningRateFinder(num_training_steps=5, attr_name="rate")]
        others = finders if finder == "in fit" else []
        kind = WithRate if finder == "in fit" else PlannedAndDraws
        fit(*others, recorder, *saving, module=kind, max_epochs=1)
        return recorder.losses

    assert losses(resuming(tmp_path / "run")) == losses()


def test_what_a_tuner_has_logged_is_not_taken_for_what_the_run_has(tmp_path: Path) -> None:
    class Seen(Recorder):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            self.events.append(f"{trainer.global_step}: {sorted(trainer.callback_metrics)}")
            super().on_train_batch_end(trainer, *rest)

    def run(directory: Path, seen: Recorder) -> None:
        finder = LearningRateFinder(num_training_steps=15, attr_name="rate")
        val = make_loader(False, "shuffle", "0", 8)  # a sanity check clears what was logged
        fit(finder, seen, resuming(directory, save_every=5), module=WithRate, val=val)

    crashed, whole, rest = Seen(7), Seen(), Seen()
    with pytest.raises(CrashError):
        run(tmp_path / "crashed", crashed)
    run(tmp_path / "crashed", rest)
    run(tmp_path / "whole", whole)

    def of_steps(seen: Recorder) -> list[str]:
        return [each for each in seen.events if ": " in each]

    assert of_steps(rest) == of_steps(whole)[-len(of_steps(rest)) :]


def test_each_part_of_the_trainer_has_its_key(tmp_path: Path) -> None:
    counting = Counting({"num_batches": 0})
    callbacks = (counting, EarlyStopping("loss"), EMAWeightAveraging(), resuming(tmp_path))
    fit(*callbacks, module=partial(Classifier, "step"), loader=Data(), max_epochs=1)
    assert saved_keys(tmp_path) == [
        "model",
        "optimizer",
        "lr_scheduler",
        "ema",
        "model/attributes",
        "callbacks/lightning",
        "callbacks/hooks",
        "callbacks/attributes",
        "callbacks/Counting-0",
        "callbacks/EarlyStopping-0",
        "callbacks/EMAWeightAveraging-0",
        "callbacks/Data-0",
        "data",
        "data/attributes",
        "rng",
        "progress",
        "best_metric",
        "extras",
    ]


def test_callbacks_in_another_order_are_restored_by_class(tmp_path: Path) -> None:
    crashed(tmp_path, 5, Counting({"num_batches": 0}), EarlyStopping("loss"))
    counting = Counting({"num_batches": 0})
    fit(resuming(tmp_path), EarlyStopping("loss"), counting)
    assert counting.num_images == counting.num_labels == 2 * NUM_SAMPLES


def test_an_early_stop_is_the_end_of_the_run(tmp_path: Path) -> None:
    def run(**settings: Any) -> list[float]:
        recorder = Recorder()
        stopping = EarlyStopping("val_loss", patience=1, min_delta=5.0)
        callbacks = (stopping, recorder, resuming(tmp_path))
        fit(*callbacks, val=validation(), max_epochs=9, **settings)
        return recorder.losses

    assert len(run()) == 2 * STEPS_PER_EPOCH
    assert run() == []
    with pytest.raises(ConfigurationError, match="an epoch more for a run that has finished"):
        run(min_epochs=3)


def test_an_improved_metric_of_a_validation_is_saved(tmp_path: Path) -> None:
    values: list[float] = []

    class Listener(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                values.append(trainer.callback_metrics["val_loss"].item())

    saving = resuming(tmp_path, best_metric="val_loss", keep_latest=None)
    fit(Listener(), saving, val=validation(), val_check_interval=3)
    best = [step for step in range(8) if values[step] < min(values[:step], default=1e9)]
    assert saved_steps(tmp_path) == sorted({*(3 * (step + 1) for step in best), 24}, reverse=True)


class WithRate(Classifier):
    rate = 1e-2


class DrawsAtStart(Classifier):
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        torch.rand(1)


def test_more_epochs_for_a_finished_run_are_those_of_a_longer_one(tmp_path: Path) -> None:
    whole, first, rest = Recorder(), Recorder(), Recorder()
    longer = outcome(fit(whole, resuming(tmp_path / "whole"), module=DrawsAtStart))
    fit(first, resuming(tmp_path / "a"), module=DrawsAtStart, max_epochs=1)
    saving = resuming(tmp_path / "a", allow_changes={"horizon"})
    found = outcome(fit(rest, saving, module=DrawsAtStart))
    assert first.losses + rest.losses == whole.losses
    assert is_equal(found, longer)


class ChangesAtEnd(Classifier):
    def on_train_end(self) -> None:
        self.layers[4].bias.data.zero_()  # type: ignore[operator]


def test_what_the_module_does_when_the_training_ends_is_saved(tmp_path: Path) -> None:
    ended = fit(resuming(tmp_path), module=ChangesAtEnd)
    again = fit(resuming(tmp_path), module=ChangesAtEnd)
    assert not ended.lightning_module.layers[4].bias.any()
    assert is_equal(outcome(again), outcome(ended))
    ended.fit(Classifier(), make_loader(True, "shuffle", "0", NUM_SAMPLES))  # left as it was
    assert "on_train_end" not in vars(ended.strategy)


class Clocked(Callback):
    """Takes its time for each batch, and crashes after so many seconds of the run."""

    def __init__(self, crash_after: float = 1e9) -> None:
        self.crash_after = crash_after
        self.seconds_before = self.seconds = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (self.timer,) = (each for each in trainer.callbacks if isinstance(each, Timer))
        self.seconds_before = self.timer.time_elapsed("train")
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        time.sleep(0.01)
        self.seconds = time.monotonic() - self.began
        if self.timer.time_elapsed("train") > self.crash_after:
            raise CrashError


@pytest.mark.parametrize("left_out", [(), ("callbacks/Timer-0",)])
def test_a_limit_of_time_counts_what_the_run_took_before_the_crash(
    tmp_path: Path, left_out: tuple[str, ...]
) -> None:
    settings: dict[str, Any] = {"max_time": timedelta(seconds=1.5), "max_epochs": 10_000}
    with pytest.raises(CrashError):
        fit(Clocked(1.0), resuming(tmp_path, save_every=1), **settings)
    rest = Clocked()
    fit(rest, resuming(tmp_path, save_every=1, exclude=left_out), **settings)
    if left_out:  # the negative control: the time starts at zero
        assert rest.seconds > 1.4
    else:
        assert rest.seconds_before > 0.8
    again = Recorder()
    fit(again, resuming(tmp_path, save_every=1, exclude=left_out), **settings)
    assert again.losses == []


def test_another_horizon_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    fit(resuming(tmp_path), max_epochs=1)
    with pytest.raises(DriftError, match="epochs=2, expected epochs=1"):
        fit(resuming(tmp_path))
    with pytest.raises(DriftError, match="no limit, expected epochs=1"):
        fit(resuming(tmp_path), max_epochs=-1)
    recorder = Recorder()
    trainer = fit(recorder, resuming(tmp_path, allow_changes={"horizon"}))
    assert recorder.events == ["start at step 12 of epoch 1", "epoch 1", "end"]
    assert trainer.global_step == 2 * STEPS_PER_EPOCH


# ---------------------------------------------------------------- what ends otherwise


def test_nothing_is_saved_of_a_step_that_an_exception_has_ended(tmp_path: Path) -> None:
    class Listener(Callback):
        def __init__(self, saving: ResumeCallback) -> None:
            self.saving = saving
            self.checkpointer: Any = None

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
            if trainer.global_step == 10:  # a save is due, and the module is being validated
                self.checkpointer = self.saving._checkpointer
                raise KeyboardInterrupt

    saving = resuming(tmp_path, save_every=5)
    listener = Listener(saving)
    with pytest.raises(SystemExit):
        fit(saving, listener, val=validation(), val_check_interval=5)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # lightning 2.6 call.py ignores it
    listener.checkpointer.close()  # as at the exit of the process
    assert saved_steps(tmp_path) == [5]
    fit(resuming(tmp_path, save_every=5), max_epochs=2)  # the directory is free
    assert saved_steps(tmp_path)[0] == 24


@pytest.mark.parametrize("hook", ["on_sanity_check_start", "on_train_start"])
def test_a_sigterm_before_the_first_step_is_the_exit_status(tmp_path: Path, hook: str) -> None:
    def terminate(trainer: Any, pl_module: Any) -> None:
        signal.raise_signal(signal.SIGTERM)  # lightning 2.6 has registered its handler

    listener = Callback()
    setattr(listener, hook, terminate)
    sanity: dict[str, Any] = {"num_sanity_val_steps": 2} if hook == "on_sanity_check_start" else {}
    with pytest.raises(SystemExit) as ended:
        fit(listener, resuming(tmp_path), val=validation(), **sanity)
    assert ended.value.code == 128 + signal.SIGTERM
    fit(resuming(tmp_path), max_epochs=2)


def test_one_callback_serves_fit_after_fit_and_nothing_else(tmp_path: Path) -> None:
    saving = resuming(tmp_path, save_every=5)
    trainer = fit(saving)
    steps = saved_steps(tmp_path)
    trainer.validate(trainer.lightning_module, validation(), verbose=False)
    trainer.fit(Classifier(), make_loader(True, "shuffle", "0", NUM_SAMPLES))
    assert saved_steps(tmp_path) == steps
    assert trainer.global_step == 2 * STEPS_PER_EPOCH


# ---------------------------------------------------------------- what is refused


class FetchesItself(Classifier):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class FSDPStrategyOnCpu(FSDPStrategy):
    """lightning 2.6 strategies/fsdp.py takes it for accelerators only."""

    def setup_environment(self) -> None: ...


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "FSDPStrategy": lambda: {"strategy": FSDPStrategyOnCpu()},
    "ModelPruning": lambda: {"callbacks": [ModelPruning("l1_unstructured")]},
    "dataloader_iter": lambda: {"module": FetchesItself},
    "several training loaders without a length": lambda: {
        "loader": [validation(), DataLoader(Stream())]
    },
}


@pytest.fixture
def _no_process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_no_process_group")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_followed_is_refused_and_named(tmp_path: Path, what: str) -> None:
    settings = REFUSED[what]()
    callbacks = settings.pop("callbacks", [])
    with pytest.raises(ConfigurationError, match=what):
        fit(resuming(tmp_path), *callbacks, **settings)
    assert not list(tmp_path.glob("step-*"))


def continued(directory: Path, path: Any, **settings: Any) -> tuple[Trainer, Recorder]:
    """A fit that is given a path, and what it was called for."""
    recorder = Recorder()
    seed_everything(0, verbose=False)
    saving = resuming(directory, save_every=2)
    trainer = Trainer(
        callbacks=[recorder, saving],
        **{"max_epochs": 2, "enable_checkpointing": False, **QUIET, **settings},
    )
    module = Classifier()
    trainer.fit(module, make_loader(True, "shuffle", "0", NUM_SAMPLES), ckpt_path=path)
    return trainer, recorder


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
@pytest.mark.parametrize("kind", ["step", "relative step", "run", "new run", "last"])
def test_a_path_of_the_run_is_what_the_fit_resumes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    whole = fit(resuming(tmp_path / "whole", save_every=2))
    if kind != "new run":
        crashed(run, 17)
    path: Any = {"step": run / "step-00000014", "relative step": "run/step-00000014"}.get(kind)
    step = 0 if kind == "new run" else 14 if path else 16
    trainer, recorder = continued(run, path or ("last" if kind == "last" else str(run)))
    assert recorder.events[0] == f"start at step {step} of epoch {step // STEPS_PER_EPOCH}"
    assert is_equal(outcome(trainer), outcome(whole))
    assert len(recorder.losses) == 24 - step
    assert continued(run, path or str(run))[1].losses == []  # the same command, once more


class RestoresLate(SingleDeviceStrategy):
    """Reads a checkpoint after ``on_fit_start``, as Lightning's sharded strategies do."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize(("step", "is_refused"), [(14, True), (16, False)])
def test_a_path_that_comes_after_the_resume_is_refused_unless_it_is_the_newest(
    tmp_path: Path, step: int, is_refused: bool
) -> None:
    crashed(tmp_path, 17)
    expected: Any = nullcontext()
    if is_refused:
        expected = pytest.raises(ConfigurationError, match="pass resume_from='step-00000014'")
    with expected:
        path = tmp_path / f"step-{step:08d}"
        strategy = RestoresLate(torch.device("cpu"))
        trainer, _ = continued(tmp_path, path, strategy=strategy)
        assert trainer.global_step == 24


def test_another_start_gives_another_outcome(tmp_path: Path) -> None:
    whole = fit(resuming(tmp_path / "whole", save_every=2))
    native = tmp_path / "own.ckpt"
    fit(max_epochs=1).save_checkpoint(native)
    resumed = Trainer(max_epochs=2, enable_checkpointing=False, **QUIET)  # by Lightning itself
    loader = make_loader(True, "shuffle", "0", NUM_SAMPLES)
    resumed.fit(Classifier(), loader, ckpt_path=native)
    assert not is_equal(outcome(resumed), outcome(whole))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
def test_the_last_checkpoint_that_lightning_finds_is_passed_over_for_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "own", save_last=True, every_n_train_steps=3)

    whole = fit(resuming(tmp_path / "whole", save_every=2))
    crashed(tmp_path / "run", 17, saving(), enable_checkpointing=True)
    seed_everything(0, verbose=False)
    callbacks = [saving(), resuming(tmp_path / "run", save_every=2)]
    trainer = Trainer(max_epochs=2, callbacks=callbacks, **QUIET)
    loader = make_loader(True, "shuffle", "0", NUM_SAMPLES)
    trainer.fit(Classifier(), loader, ckpt_path="last")
    assert is_equal(outcome(trainer), outcome(whole))
    assert "last.ckpt is not read: fit() resumes from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "holds", "found"),
    [
        ("own.ckpt", False, "a checkpoint of Lightning, and .* is empty"),
        ("own.ckpt", True, "a checkpoint of Lightning, and .* holds step-00000016"),
        ("missing.ckpt", True, "no such file or directory, and .* holds step-00000016"),
        ("other/step-00000024", False, "of another run, in .*other, and .* is empty"),
        ("other", True, "of another run, in .*other, and .* holds step-00000016"),
        ("run/step-00000099", True, "no such checkpoint"),
    ],
)
def test_a_path_elsewhere_is_refused_before_anything_is_loaded(
    tmp_path: Path, kind: str, holds: bool, found: str
) -> None:
    fit(resuming(tmp_path / "other", save_every=2)).save_checkpoint(tmp_path / "own.ckpt")
    if holds:
        crashed(tmp_path / "run", 17)
    seed_everything(0, verbose=False)
    module = Classifier()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trainer = Trainer(callbacks=[resuming(tmp_path / "run")], max_epochs=2, **QUIET)
    with pytest.raises(ResumekitError, match=found):
        trainer.fit(module, make_loader(True, "shuffle", "0", 16), ckpt_path=tmp_path / kind)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert (tmp_path / "run").is_dir() is holds


def test_a_wrong_option_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="save_evry"):
        resuming(tmp_path, save_evry=5)  # type: ignore[call-arg]


def test_what_is_no_dataloader_is_reported_as_less_than_exact_and_refused_when_strict(
    tmp_path: Path,
) -> None:
    class Batches:
        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[Any]:
            return ((torch.rand(4, 64), torch.tensor([1, 2, 3, 4])) for _ in range(6))

    with pytest.raises(InexactError, match="data: equivalent"):
        fit(resuming(tmp_path, strict=True), loader=Batches())


LESS_THAN_EXACT: dict[str, Callable[[], dict[str, Any]]] = {
    "workers of a loader for validation": lambda: {"val": validation("persistent")},
    "beyond limit_train_batches": lambda: {
        "loader": make_loader(True, "shuffle", "persistent", NUM_SAMPLES),
        "limit_train_batches": 5,
    },
}


@pytest.mark.parametrize("what", LESS_THAN_EXACT)
def test_what_persistent_workers_would_lose_is_reported_at_the_start(
    tmp_path: Path, what: str
) -> None:
    with pytest.raises(InexactError, match=f"callbacks/lightning: lost .*{what}"):
        fit(resuming(tmp_path, strict=True), **LESS_THAN_EXACT[what]())


class KeepsWorkers(Classifier):
    """Its hooks make loaders with persistent workers."""

    def train_dataloader(self) -> Any:
        return make_loader(True, "shuffle", "persistent", NUM_SAMPLES)


class KeepsWorkersForValidation(Classifier):
    def val_dataloader(self) -> Any:
        return validation("persistent")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"module": KeepsWorkers, "limit_train_batches": 5}, "beyond limit_train_batches"),
        ({"module": KeepsWorkersForValidation}, "workers of a loader for validation"),
        (
            {"module": KeepsWorkersForValidation, "num_sanity_val_steps": 0},
            "workers of a loader for validation",
        ),
    ],
    ids=["training", "validation", "validation, known when it is due"],
)
def test_what_workers_of_a_hooks_loaders_would_lose_is_refused_when_it_is_known(
    tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    recorder = Recorder()
    with pytest.raises(InexactError, match=f"callbacks/lightning: lost .*{what}"):
        fit(resuming(tmp_path, strict=True), recorder, **settings)
    assert len(recorder.losses) <= (12 if "num_sanity_val_steps" in settings else 0)


class LogsForAGroup(Classifier):
    """Logs an average over ranks of a group, in every batch or in the first ones alone."""

    def __init__(self, num_batches: int = 3) -> None:
        super().__init__()
        self.num_batches = num_batches

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < self.num_batches:
            group = torch.distributed.group.WORLD
            settings: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True}
            self.log("of a group", loss, sync_dist_group=group, **settings)
        return loss


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("num_batches", [3, 12], ids=["first batches", "every batch"])
def test_an_average_of_a_group_that_is_not_logged_again_is_reported_and_refused(
    one_rank: None, tmp_path: Path, num_batches: int, capfd: pytest.CaptureFixture[str]
) -> None:
    module = partial(LogsForAGroup, num_batches)
    crashed(tmp_path, 7, module=module)  # the last save was after step 6
    capfd.readouterr()
    is_lost = num_batches == 3
    context = pytest.raises(InexactError, match="of a group: lost") if is_lost else nullcontext()
    with context:
        fit(resuming(tmp_path, save_every=2, strict=True), module=module)
    if is_lost:
        capfd.readouterr()
        crashed(tmp_path, 9, module=module)
        # It was not logged again before the second interruption either.
        assert "training_step.of a group: lost" in capfd.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        {"val": lambda: validation("persistent"), "limit_val_batches": 0},
        {"loader": lambda: make_loader(True, "shuffle", "persistent", 16), "max_epochs": 1},
        {
            "loader": lambda: make_loader(True, "shuffle", "persistent", 16),
            "limit_train_batches": 2,
            "max_epochs": 1,
        },
    ],
    ids=["nothing is validated", "no limit", "a limit that is not met"],
)
def test_persistent_workers_that_lose_nothing_are_exact(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    made = {key: value() if callable(value) else value for key, value in settings.items()}
    fit(resuming(tmp_path, strict=True), **made)


# ---------------------------------------------------------------- the script


class Launch:
    """One run of the script with ``--epochs 2``."""

    def __init__(self, directory: Path, **variables: str) -> None:
        command = [sys.executable, str(SCRIPTS / "train_lightning.py"), "--epochs", "2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(
            [*command, "--directory", str(directory)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.status, self.log = done.returncode, done.stderr


@pytest.mark.full
def test_the_identical_command_starts_continues_and_is_done(tmp_path: Path) -> None:
    at_step_45 = {TRACE_VARIABLE: str(tmp_path / "trace"), KILL_VARIABLE: "step:45"}
    killed = Launch(tmp_path / "run", **at_step_45)
    assert killed.status == -signal.SIGKILL, killed.log
    assert "starting in" in killed.log
    continued = Launch(tmp_path / "run")
    assert continued.status == 0, continued.log
    assert "resuming at step 40" in continued.log
    finished = Launch(tmp_path / "run")
    assert finished.status == 0, finished.log
    assert "the run finished at step 58" in finished.log
    assert "(epochs=2)" in finished.log


def test_the_script_differs_from_its_stock_twin_by_the_adapters_lines_alone() -> None:
    stock, ours = (
        (SCRIPTS / name).read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()
        for name in ("stock_lightning.py", "train_lightning.py")
    )
    assert [line.strip() for line in ours if line and line not in stock] == [
        "from lightning.pytorch.callbacks import Callback",
        "from resumekit.adapters.lightning import ResumeCallback",
        "saving = ResumeCallback(arguments.directory, ema=averaging.ema, "
        "save_every=arguments.save_every)",
        "callbacks=[averaging, saving],",
        "enable_checkpointing=False,",
        "trainer.fit(module, loader)",
    ]
    left_out = [line.strip() for line in stock if line and line not in ours]
    assert left_out[:2] == [
        "from lightning.pytorch.callbacks import Callback, ModelCheckpoint",
        "import resumekit",
    ]
    assert 'trainer.fit(module, loader, ckpt_path="last")' in left_out


class Tallying(Callback):
    """Counts in a number of its own, and in a dict that is saved."""

    def __init__(self, saved: dict[str, int]) -> None:
        self.num_steps, self.every, self.saved = 0, 2, saved

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.num_steps += 1


def test_what_a_callback_counts_is_restored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    crashed(tmp_path, 17, Tallying({}))
    again = Tallying({})
    fit(again, resuming(tmp_path, strict=True))
    assert again.num_steps == 2 * STEPS_PER_EPOCH
    assert "lost" not in capfd.readouterr().err


# ---------------------------------------------------------------- mistakes


def test_two_callbacks_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="2 of them in one Trainer: expected one"):
        fit(resuming(tmp_path / "a"), resuming(tmp_path / "b"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("given", ["s3://bucket/a", "", 5], ids=str)
def test_what_is_no_directory_is_refused_when_the_callback_is_made(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="directory"):
        resuming(given)


def test_extras_and_options_are_checked_when_the_callback_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="extras"):
        resuming(tmp_path, extras=[1])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="step-00000500"):
        resuming(tmp_path, resume_from=500)  # type: ignore[arg-type]
