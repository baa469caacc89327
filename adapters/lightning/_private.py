"""Which of Lightning's two packages is used, and its names that are not documented."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from resumekit.requirements import PrivateName, faults, installed_version, require

require("lightning")


def _is_lightning() -> bool:
    """Whether it is ``lightning.pytorch``: what the script has imported, or else what there is."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return name == "lightning.pytorch"
    return installed_version("lightning") is not None


if TYPE_CHECKING or _is_lightning():
    from lightning.pytorch import Callback, Trainer, callbacks, strategies
    from lightning.pytorch.loops import fetchers
    from lightning.pytorch.trainer.connectors.logger_connector import result
    from lightning.pytorch.utilities import combined_loader
else:
    from pytorch_lightning import Callback, Trainer, callbacks, strategies
    from pytorch_lightning.loops import fetchers
    from pytorch_lightning.trainer.connectors.logger_connector import result
    from pytorch_lightning.utilities import combined_loader

# Of the packages, for the other modules of this adapter.
__all__ = ["Callback", "Trainer", "callbacks", "strategies"]

# Classes that the adapter derives from, or makes objects of from saved values.
CombinedLoader = combined_loader.CombinedLoader
ModeIterator = combined_loader._ModeIterator
DataFetcher = fetchers._DataFetcher
Metadata = result._Metadata
ResultCollection = result._ResultCollection
ResultMetric = result._ResultMetric
Sync = result._Sync


def _name(
    path: str, source: str, parameters: tuple[str, ...] | None = None, *, is_written: bool = False
) -> PrivateName:
    return PrivateName(path, f"lightning 2.6 {source}", parameters, is_written)


_FIT_LOOP = "loops/fit_loop.py _FitLoop"
_EPOCH_LOOP = "loops/training_epoch_loop.py _TrainingEpochLoop"
_VALIDATION = "loops/evaluation_loop.py _EvaluationLoop"
_LOGGED = "trainer/connectors/logger_connector/logger_connector.py _LoggerConnector"
_RESULT = "trainer/connectors/logger_connector/result.py _ResultMetric"

# Each name is defined where it is listed, so that none is left unchecked.
# Of the Trainer. setup_data takes the loaders from the sources, and makes iterators by the fetcher.
_OF_TRAINER = (
    TRAIN_SOURCE := _name("fit_loop._data_source", _FIT_LOOP),
    TRAIN_LOADER := _name("fit_loop._combined_loader", _FIT_LOOP, is_written=True),
    FETCHER := _name("fit_loop._data_fetcher", _FIT_LOOP, is_written=True),
    # reset: plateau schedulers would miss an epoch that restarts.
    RESTARTS := _name("fit_loop._restarting", _FIT_LOOP, is_written=True),
    TRAIN_RELOADED := _name("fit_loop._last_train_dl_reload_epoch", _FIT_LOOP, is_written=True),
    RESULTS := _name("fit_loop.epoch_loop._results", _EPOCH_LOOP, is_written=True),
    VALIDATION_SOURCE := _name("fit_loop.epoch_loop.val_loop._data_source", _VALIDATION),
    VALIDATION_LOADER := _name("fit_loop.epoch_loop.val_loop._combined_loader", _VALIDATION),
    VALIDATION_RELOADED := _name(
        "fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch", _VALIDATION, is_written=True
    ),
    IS_FIRST_BATCH := _name("_logger_connector._first_loop_iter", _LOGGED, is_written=True),
    CALLBACK_METRICS := _name("_logger_connector._callback_metrics", _LOGGED),
    LOGGED_METRICS := _name("_logger_connector._logged_metrics", _LOGGED),
    PROGRESS_BAR_METRICS := _name("_logger_connector._progress_bar_metrics", _LOGGED),
    # teardown restores the signal handlers that Lightning found.
    SIGNALS := _name("_signal_connector.teardown", "trainer/connectors/signal_connector.py", ()),
    CLUSTER := _name(
        "_accelerator_connector.cluster_environment",
        "trainer/connectors/accelerator_connector.py _AcceleratorConnector",
    ),
    OPTIMIZERS := _name("strategy._lightning_optimizers", "strategies/strategy.py Strategy"),
    # fit_loop.py on_run_end calls it after the module's on_train_end.
    ON_TRAIN_END := _name(
        "strategy.on_train_end", "strategies/strategy.py Strategy", (), is_written=True
    ),
    CONNECTOR := _name("_checkpoint_connector", "trainer/trainer.py Trainer"),
    # Reads the checkpoint of ckpt_path, after the callbacks' setup and before all else.
    RESUME_START := _name(
        "_checkpoint_connector.resume_start",
        "trainer/connectors/checkpoint_connector.py _CheckpointConnector",
        ("checkpoint_path",),
        is_written=True,
    ),
)

# Of a source; replaced on the object.
DATALOADER = _name(
    "dataloader", "trainer/connectors/data_connector.py _DataLoaderSource", (), is_written=True
)
# Of a data fetcher: the batches of the epoch so far.
FETCHED = _name("fetched", "loops/fetchers.py _DataFetcher", is_written=True)
# Of a CombinedLoader: how it combines loaders of unequal lengths; a method that is overridden.
MODE = _name("_mode", "utilities/combined_loader.py CombinedLoader")
_STATE_DICTS = _name("_state_dicts", "utilities/combined_loader.py CombinedLoader", ())
# Of a ModelParallelStrategy.
TENSOR_PARALLEL = PrivateName(
    "_tensor_parallel_size", "lightning 2.6 strategies/model_parallel.py", is_optional=True
)
# Of callbacks.
AVERAGED_MODEL = _name("_average_model", "callbacks/weight_averaging.py WeightAveraging")
FINETUNING_RESTARTS = _name(
    "_restarting", "callbacks/finetuning.py BaseFinetuning", is_written=True
)
# _should_skip_saving_checkpoint: the step that was saved last, and its path.
LAST_SAVED = (
    _name("_last_global_step_saved", "callbacks/model_checkpoint.py", is_written=True),
    _name("_last_checkpoint_saved", "callbacks/model_checkpoint.py", is_written=True),
)
# Of a metric that was logged.
_OF_METRIC = (
    RESULT_LAST := _name("_forward_cache", _RESULT, is_written=True),
    RESULT_DEFAULTS := _name("_defaults", _RESULT),
    RESULT_UPDATES := _name("_update_count", _RESULT, is_written=True),
)

# Of torch's schedulers: one learning rate for each param group at the last step.
LAST_RATES = PrivateName("_last_lr", "torch 2.13 optim/lr_scheduler.py", is_written=True)
# Of torch's DataLoader: the iterator that has persistent workers.
ITERATOR = PrivateName("_iterator", "torch 2.13 utils/data/dataloader.py", is_optional=True)

# Those that `ckpt_path="last"` means.
LAST_CHECKPOINTS = _name("_find_last_checkpoints", "callbacks/model_checkpoint.py", ("trainer",))

_OF_CALLBACKS = (
    (callbacks.WeightAveraging, (AVERAGED_MODEL,)),
    (callbacks.BaseFinetuning, (FINETUNING_RESTARTS,)),
    (callbacks.ModelCheckpoint, (*LAST_SAVED, LAST_CHECKPOINTS)),
)


def trainer_faults(trainer: Any) -> Iterator[str]:
    """What of these names is not as in the tested version of Lightning.

    Args:
        trainer: the Trainer, when a fit sets up its callbacks.
    """
    yield from faults(trainer, _OF_TRAINER)
    for source in (TRAIN_SOURCE, VALIDATION_SOURCE):
        if not source.fault(trainer):
            yield from faults(source.of(trainer), (DATALOADER,))
    yield from faults(CombinedLoader([]), (MODE, _STATE_DICTS))
    yield from faults(DataFetcher(), (FETCHED,))
    metric = ResultMetric(Metadata("training_step", "loss"), is_tensor=True)
    yield from faults(metric, _OF_METRIC)
    for kind, names in _OF_CALLBACKS:
        for each in trainer.callbacks:
            if isinstance(each, kind):
                yield from faults(each, names)
