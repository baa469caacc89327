"""What a Trainer's run is made of, as components."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState

from resumekit import Progress
from resumekit.adapters._transformers_arguments import (
    evaluates_in_persistent_workers,
    saves_by_itself,
)
from resumekit.adapters._transformers_files import with_files
from resumekit.adapters._transformers_trl import (
    SUMS_OF_TRL,
    lost_of_trl,
    trl_components,
    without_times,
)
from resumekit.capture import AttributeState, UserState, buckets_of, by_class_and_ordinal
from resumekit.distributed import WorldChange
from resumekit.frameworks.accelerate import accelerator_components
from resumekit.state import Fidelity, SharingPattern, Slot, StateComponent

# transformers 5.23 trainer_callback.py TrainerState: what training changes. The rest is settings.
STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)

# transformers 5.23 trainer.py _run_epoch: what is summed up between two lines of the log.
SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")

# transformers 5.23 trainer_utils.py speed_metrics, trainer.py evaluation_loop: these are read from
# a clock. The last is TRL's.
CLOCK_SUFFIXES = ("_runtime", "_per_second", "_model_preparation_time", "step_time")

# What a user may change between two launches; the rest is compared where it matters.
_SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "seed",
    "data_seed",
)

_CALLBACKS = Slot.CALLBACKS.value
_OWN = SharingPattern.PER_RANK  # each rank sums up its own losses
_TRAINER = "the Trainer"  # whose own loop alone needs it


class _OfTheJob(AttributeState):
    """What all ranks have alike, but for times."""

    def resplit_state_dict(
        self, states: Mapping[int, Any], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Rank 0's; a new rank has none of its own."""
        return dict(states[0]), ()


class _Sums(AttributeState):
    def __init__(
        self, trainer: Any, names: Iterable[str], *, key: str, progress: Callable[[], Progress]
    ) -> None:
        super().__init__(trainer, names, key=key)
        self._progress = progress

    def start_fresh(self) -> tuple[str, ...]:
        """The next line of the log is about the steps from here on."""
        self._given._globalstep_last_logged = self._progress().step
        return ()

    def resplit_state_dict(
        self, states: Mapping[int, Any], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The log has the mean of the ranks' losses, and the sum of their operations."""
        losses = [states[rank]["_tr_loss"] for rank in change.inherited or (change.model_rank,)]
        operations = sum(states[rank]["current_flos"] for rank in change.inherited)
        mean = sum(losses) / len(losses)
        return {**states[0], "_tr_loss": mean, "current_flos": operations}, ()

    def comparable_state(self) -> dict[str, Any]:
        """Two equal runs take different times."""
        state = self.state_dict()
        if "_metrics" in state:
            state["_metrics"] = without_times(state["_metrics"])
        return state


class _TrainerState(_OfTheJob):
    def __init__(self, trainer: Any, progress: Callable[[], Progress]) -> None:
        super().__init__(trainer.state, STATE, key=f"{_CALLBACKS}/trainer_state")
        self._trainer = trainer
        self._progress = progress

    def start_fresh(self) -> tuple[str, ...]:
        """The Trainer counts on from where a run under another framework was left."""
        state, place = self._given, self._progress()
        state.global_step, state.epoch = place.step, float(place.epoch)
        state.num_input_tokens_seen = place.tokens
        return (f"the Trainer counts on from step {place.step}; its log begins there",)

    def fingerprint(self) -> dict[str, Any]:
        """The settings that people change between two launches."""
        data = self._trainer.train_dataset
        length = len(data) if hasattr(data, "__len__") else None
        settings = {name: getattr(self._trainer.args, name) for name in _SETTINGS}
        return {**settings, "samples": length}

    def comparable_state(self) -> dict[str, Any]:
        """Two equal runs log different times, and may stand in different folders."""
        state = self.state_dict()
        best = state["best_model_checkpoint"]
        # Without its own saving it is found in the run directory, at each resume anew.
        is_own = saves_by_itself(self._trainer.args)
        state["best_model_checkpoint"] = Path(best).name if best and is_own else None
        state["log_history"] = [
            {key: value for key, value in line.items() if not key.endswith(CLOCK_SUFFIXES)}
            for line in state["log_history"]
        ]
        return state


def trainer_components(
    trainer: Any,
    attributes: UserState,
    settings: UserState,
    progress: Callable[[], Progress],
    *,
    ema: Any,
) -> tuple[StateComponent, ...]:
    """All that the Trainer holds, and what other callbacks do.

    Args:
        trainer: the ``transformers.Trainer``, prepared for training.
        attributes: of the other callbacks, the Trainer's class and what it calls.
        settings: the arguments that callbacks change.
        progress: tells where the run is.
        ema: averaged models that the user gave.
    """
    scheduler = trainer.lr_scheduler
    components = accelerator_components(
        trainer.accelerator,
        model=trainer.model,
        # accelerate 1.15 optimizer.py, scheduler.py wrap: the state is that of the object inside.
        optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
        lr_scheduler=getattr(scheduler, "scheduler", scheduler),
        ema=ema,
    )
    callbacks = trainer.callback_handler.callbacks
    trainer_state = _TrainerState(trainer, progress)
    present = [name for name in SUMS_OF_TRL if hasattr(trainer, name)]
    sums = _Sums(trainer, (*SUMS, *present), key=f"{_CALLBACKS}/trainer", progress=progress)
    fidelity, reason = _fidelity(trainer)
    return (
        *(with_files(each, trainer.model) for each in components),
        *buckets_of(trainer.model_wrapped),
        StateComponent(trainer_state.key, trainer_state, _OWN, framework=_TRAINER),
        StateComponent(sums.key, sums, _OWN, fidelity=fidelity, reason=reason, framework=_TRAINER),
        *trl_components(trainer, key=f"{_CALLBACKS}/generated", framework=_TRAINER),
        *_exported(callbacks),
        attributes.component(),
        StateComponent(settings.key, settings, _OWN, required=False, framework=_TRAINER),
    )


def _exported(callbacks: Iterable[Any]) -> Iterator[StateComponent]:
    """The state of callbacks that export it; those of transformers are for the Trainer alone."""
    exporting = by_class_and_ordinal(c for c in callbacks if isinstance(c, ExportableState))
    for name, callback in exporting.items():
        state = _OfTheJob(callback, callback.state()["attributes"], key=f"{_CALLBACKS}/{name}")
        framework = _TRAINER if type(callback).__module__.startswith("transformers.") else ""
        yield StateComponent(state.key, state, _OWN, required=False, framework=framework)


def _fidelity(trainer: Any) -> tuple[Fidelity, str]:
    if evaluates_in_persistent_workers(trainer.args):
        return Fidelity.LOST, (
            "the first evaluation of each launch draws a random number for its persistent workers; "
            "use dataloader_persistent_workers=False"
        )
    reason = lost_of_trl(trainer)
    return (Fidelity.LOST, reason) if reason else (Fidelity.EXACT, "")
