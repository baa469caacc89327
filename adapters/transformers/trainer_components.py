"""The components of a Trainer's run, and the files that ``from_pretrained`` needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import torch
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState

from resumekit import Progress
from resumekit.adapters.transformers import _private as private
from resumekit.adapters.transformers.arguments import (
    evaluates_in_persistent_workers,
    saves_by_itself,
)
from resumekit.adapters.transformers.user_state import lost_of_trl, trl_components, without_times
from resumekit.capture.ddp_buckets import buckets_of
from resumekit.capture.model import (
    ADAPTER_NAMES,
    by_class_and_ordinal,
    frozen_parameters,
)
from resumekit.capture.nested_state import OneNumber
from resumekit.capture.objects import AttributeState
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.scheduler import SchedulerState
from resumekit.capture.user_state.user_state import UserState
from resumekit.frameworks.accelerate import accelerator_components
from resumekit.state import (
    CLOCK_SUFFIXES,
    Checked,
    Count,
    Fidelity,
    OfType,
    Resplit,
    SharingPattern,
    Slot,
    StateComponent,
    WorldChange,
)

_WEIGHTS = "rank-00000.safetensors"
_FROZEN_WEIGHTS = "rank-00000.frozen.safetensors"

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
_PER_RANK = SharingPattern.PER_RANK  # each rank sums up its own losses
_TRAINER = "the Trainer"  # other frameworks' loops do not need it


class _SameOnAllRanks(AttributeState):
    """Attributes that are equal on all ranks except for times."""

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """Rank 0's."""
        return dict(states[0]), ()


class _OptionalSums(TypedDict, total=False):
    _metrics: dict[str, Any]  # of TRL
    _total_train_tokens: float


class _SumsState(_OptionalSums):
    _tr_loss: torch.Tensor
    _total_loss_scalar: float
    _globalstep_last_logged: Count
    current_flos: float


class _Sums(AttributeState):
    """Losses and counts since the last line of the log."""

    schema = _SumsState

    def __init__(self, trainer: Any, *, progress: Callable[[], Progress]) -> None:
        self._trainer = trainer
        of_trl = (each for each in private.TRL_SUMS if hasattr(trainer, each.name))
        self._sums = (*private.SUMS, *of_trl)
        super().__init__(trainer, [each.name for each in self._sums], key=f"{_CALLBACKS}/trainer")
        self._progress = progress

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        for each in self._sums:
            live, value = each.of(self._trainer), state[each.name]
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                value = value.to(live.device)
            each.write(self._trainer, value)
        return ()

    def start_fresh(self) -> tuple[str, ...]:
        """The next line of the log is about the steps from here on."""
        private.LAST_LOGGED.write(self._trainer, self._progress().step)
        return ()

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """The mean of the former ranks' losses and the sum of their operations, as in the log."""
        ranks = change.inherited or (change.model_rank,)
        losses = [states[rank][private.LOSS_SUM.name] for rank in ranks]
        operations = sum(states[rank]["current_flos"] for rank in change.inherited)
        mean = sum(losses) / len(losses)
        return {**states[0], private.LOSS_SUM.name: mean, "current_flos": operations}, ()

    def comparable_state(self) -> dict[str, Any]:
        state = self.state_dict()
        if "_metrics" in state:
            state["_metrics"] = without_times(state["_metrics"])
        return state


_TRAINER_STATE = f"{_CALLBACKS}/trainer_state"
_INTERVALS = "intervals"
_OF_ARGUMENTS = (*private.INTERVALS, "train_batch_size", "max_steps", "num_train_epochs")


def trainer_settings(trainer: Any) -> dict[str, Any]:
    """What people change between two launches, under its key in the fingerprint."""
    data = trainer.train_dataset
    length = len(data) if hasattr(data, "__len__") else None
    settings = {name: getattr(trainer.args, name) for name in _SETTINGS}
    return {_TRAINER_STATE: {**settings, "samples": length}}


class _TrainerFields(TypedDict, total=False):
    """Of ``TrainerState``; other versions may have fewer."""

    epoch: float | None
    global_step: Count
    num_input_tokens_seen: float
    total_flos: float
    log_history: list[dict[str, Any]]
    best_metric: OneNumber | None
    best_global_step: Count | None
    best_model_checkpoint: str | None
    intervals: dict[str, int | None]


class _TrainerState(_SameOnAllRanks):
    """``TrainerState``; for an export also what the arguments give it, if they set intervals."""

    schema = _TrainerFields

    def __init__(self, trainer: Any, progress: Callable[[], Progress]) -> None:
        super().__init__(trainer.state, private.STATE, key=_TRAINER_STATE)
        self._trainer = trainer
        self._progress = progress

    def state_dict(self) -> dict[str, Any]:
        found, state, args = super().state_dict(), self._trainer.state, self._trainer.args
        if not saves_by_itself(args) and args.eval_strategy == "no":
            return found
        return {**found, _INTERVALS: {name: getattr(state, name) for name in _OF_ARGUMENTS}}

    def check_state_dict(self, state: Any) -> None:
        super().check_state_dict({n: each for n, each in state.items() if n != _INTERVALS})

    def progress_in(self, state: Any) -> dict[str, tuple[Any, str]]:
        return {"global_step": (state["global_step"], "step")} if "global_step" in state else {}

    def start_fresh(self) -> tuple[str, ...]:
        """Takes the counts of a run under another framework."""
        state, progress = self._trainer.state, self._progress()
        state.global_step, state.epoch = progress.step, float(progress.epoch)
        state.num_input_tokens_seen = progress.tokens
        return (f"the Trainer counts on from step {progress.step}; its log begins there",)

    def fingerprint(self) -> dict[str, Any]:
        """The settings that people change between two launches."""
        return dict(trainer_settings(self._trainer)[_TRAINER_STATE])

    def comparable_state(self) -> dict[str, Any]:
        state = self.state_dict()
        best = state["best_model_checkpoint"]
        # Without its own saving it is in the run directory, and each resume finds it there.
        is_own = saves_by_itself(self._trainer.args)
        state["best_model_checkpoint"] = Path(best).name if best and is_own else None
        state["log_history"] = [
            {key: value for key, value in line.items() if not key.endswith(CLOCK_SUFFIXES)}
            for line in state["log_history"]
        ]
        return state


def known_components(trainer: Any) -> tuple[StateComponent, ...]:
    """The components whose types are known before the Trainer has made their objects.

    Args:
        trainer: the ``transformers.Trainer``.
    """
    types: dict[str, type[Checked]] = {
        f"{_CALLBACKS}/trainer": _Sums,
        f"{_CALLBACKS}/attributes": UserState,
        f"{_CALLBACKS}/settings": UserState,
        Slot.LR_SCHEDULER.value: SchedulerState,
    }
    if not trainer.is_deepspeed_enabled:
        types[Slot.OPTIMIZER.value] = OptimizerState
    counts = _TrainerState(trainer, Progress)
    others = (StateComponent(key, OfType(kind.schema)) for key, kind in types.items())
    return (StateComponent(counts.key, counts), *others)


def trainer_components(
    trainer: Any,
    attributes: UserState,
    settings: UserState,
    progress: Callable[[], Progress],
    *,
    ema: Any,
) -> tuple[StateComponent, ...]:
    """The state of the Trainer, of the other callbacks, and user state.

    Args:
        trainer: the ``transformers.Trainer``, prepared for training.
        attributes: of the other callbacks, the Trainer's class and what it calls.
        settings: the arguments that callbacks change.
        progress: gives the progress of the run.
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
    state, sums = _TrainerState(trainer, progress), _Sums(trainer, progress=progress)
    fidelity, reason = _fidelity(trainer)
    common: Any = {"sharing_pattern": _PER_RANK, "framework": _TRAINER}
    return (
        *(with_files(each, trainer.model, trainer.processing_class) for each in components),
        *buckets_of(trainer.model_wrapped),
        StateComponent(state.key, state, **common),
        StateComponent(sums.key, sums, fidelity=fidelity, reason=reason, **common),
        *trl_components(trainer, key=f"{_CALLBACKS}/generated", framework=_TRAINER),
        *_exported(trainer.callback_handler.callbacks),
        attributes.component(),
        StateComponent(settings.key, settings, required=False, **common),
    )


def _exported(callbacks: Iterable[Any]) -> Iterator[StateComponent]:
    """The state of callbacks that export it; those of transformers are for the Trainer alone."""
    exporting = by_class_and_ordinal(c for c in callbacks if isinstance(c, ExportableState))
    for name, callback in exporting.items():
        names = callback.state()["attributes"]
        state = _SameOnAllRanks(callback, names, key=f"{_CALLBACKS}/{name}")
        framework = _TRAINER if type(callback).__module__.startswith("transformers.") else ""
        yield StateComponent(state.key, state, _PER_RANK, required=False, framework=framework)


def _fidelity(trainer: Any) -> tuple[Fidelity, str]:
    if evaluates_in_persistent_workers(trainer.args):
        return Fidelity.LOST, (
            "the first evaluation of each launch draws a random number for its persistent workers; "
            "use dataloader_persistent_workers=False"
        )
    reason = lost_of_trl(trainer)
    return (Fidelity.LOST, reason) if reason else (Fidelity.EXACT, "")


# ---------------------------------------------------------------- files for other tools


def with_files(component: StateComponent, model: nn.Module, processor: Any) -> StateComponent:
    """The component; the Trainer's model with its configuration and its tokenizer's files."""
    if component.key != Slot.MODEL.value:
        return component
    is_whole = component.sharing_pattern is SharingPattern.REPLICATED
    inner = private.FSDP1_MODULE.of(model)
    model = model if inner is None else inner
    read = cache(partial(_processor_files, processor))  # training changes none of them

    def files() -> Mapping[str, bytes]:
        names = None if is_whole else [*component.state.state_dict()]
        return {**read(), **_files(model, names)}

    return replace(component, files=files)


def _processor_files(processor: Any) -> Mapping[str, bytes]:
    """Those of a tokenizer, or of another processing class, as ``save_pretrained`` writes them."""
    if not hasattr(processor, "save_pretrained"):
        return {}
    with TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        written = [each for each in Path(folder).iterdir() if each.is_file()]
        return {each.name: each.read_bytes() for each in written}


def _files(model: Any, names: Sequence[str] | None) -> Mapping[str, bytes]:
    """The files by name; of a sharded model only what an export adds to its weights.

    Args:
        model: that has the weights.
        names: of the weights of a sharded one.
    """
    files: dict[str, bytes] = {}
    if isinstance(model, PreTrainedModel):
        files.update(_configurations(model))
    if names is None:
        # transformers 5.23 utils/hub.py get_checkpoint_shard_files: an index may name any file.
        frozen = dict.fromkeys(frozen_parameters(model), _FROZEN_WEIGHTS)
        weight_map = {**dict.fromkeys(model.state_dict(), _WEIGHTS), **frozen}
        index = {"metadata": {}, "weight_map": weight_map}
        files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    if hasattr(model, "peft_config"):
        files.update(_adapter(model, names))
    return files


def _configurations(model: PreTrainedModel) -> Mapping[str, bytes]:
    """What ``PreTrainedModel.save_pretrained`` writes beside the weights."""
    config = deepcopy(model.config)
    # torch 2.13 distributed/fsdp/_fully_shard: fully_shard makes a class of its own of each model.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    texts = {"config.json": config.to_json_string()}
    if model.can_generate() and model.generation_config is not None:
        texts["generation_config.json"] = model.generation_config.to_json_string()
    return {name: text.encode() for name, text in texts.items()}


def _adapter(model: Any, names: Sequence[str] | None) -> Mapping[str, bytes]:
    """The adapter that is trained, as peft 0.21 ``PeftModel.save_pretrained`` writes it.

    Of a sharded one the names of its parameters, by those in its file.
    """
    from peft import get_peft_model_state_dict

    name = model.active_adapters[0]
    config = deepcopy(model.peft_config[name])
    config.inference_mode = True
    files = {"adapter_config.json": json.dumps(config.to_dict(), indent=2, default=sorted).encode()}
    if names is None:
        weights = get_peft_model_state_dict(model, adapter_name=name)
        whole = {key: value.detach().cpu().clone() for key, value in weights.items()}
        files["adapter_model.safetensors"] = save(whole, metadata={"format": "pt"})
        return files
    if config.is_prompt_learning:
        # peft 0.21 get_prompt_embedding_to_save: what an encoder gives, which has one table or more
        prompts = [each for each in names if each.startswith("prompt_encoder.")]
        is_one = prompts == [f"prompt_encoder.{name}.embedding.weight"]
        adapter = {"prompt_embeddings": prompts[0]} if is_one else {}
    else:
        # Empty under FSDP1: peft looks for the names with which that wraps the modules.
        adapter = get_peft_model_state_dict(model, {each: each for each in names}, name)
    return files | ({ADAPTER_NAMES: json.dumps(adapter, indent=2).encode()} if adapter else {})
