"""A DeepSpeed engine's state, without pickle and by parameter name wherever that is possible.

Where it is not, DeepSpeed itself assembles and loads the state. The user's script has made the
engine, or a framework such as Accelerate or Lightning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypedDict

import torch

from resumekit.capture.model import ModelState, by_clean_name
from resumekit.capture.nested_state import Mismatch, class_name, refuse
from resumekit.capture.objects import AttributeState, KnownObjects
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.rng import GeneratorState
from resumekit.capture.slots import attribute_components, rank_buffer_components, state_components
from resumekit.errors import ConfigurationError
from resumekit.frameworks.deepspeed._private import (
    CHECKPOINT_ENGINE,
    GRADIENT_NORM,
    HAS_REDUCED,
    IS_COMPACT,
    IS_MANAGED,
    NUM_UNMANAGED,
    PARAM_SHAPES,
    SAVES_PARTITIONS,
    SET_BOUNDARY,
    CheckpointEngine,
    DeepSpeedEngine,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    DynamicLossScaler,
    FP16_UnfusedOptimizer,
    LossScaler,
    ZeroStageEnum,
    engine_faults,
    fragment_address,
    get_cuda_rng_tracker,
)
from resumekit.frameworks.deepspeed.zero import ZeroModelState, ZeroOptimizerState, is_by_name
from resumekit.state import Checked, Count, SharingPattern, Slot, StateComponent

__all__ = [
    "dynamic_scaler",
    "engine_components",
    "engine_faults",
    "has_leftover_gradients",
    "is_within_window",
    "require_resumable",
]

_TAG = "resumekit"
_COUNTERS_KEY = f"{Slot.CALLBACKS.value}/deepspeed"
_TRACKED_KEY = f"{Slot.CALLBACKS.value}/tracked_rng"
_NORM = "global_grad_norm"
_WINDOW = "gradient_accumulation_steps"
_WINDOW_AT_START = "gradient_accumulation_steps_at_start"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# These have a component of their own, or are settings: not kept from what DeepSpeed saves.
_ELSEWHERE = ("module", "lr_scheduler", "ds_config", *_COUNTERS)

# deepspeed 0.19 fp16/loss_scaler.py DynamicLossScaler, LossScaleConfig: what training changes.
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")
_HYSTERESIS = "cur_hysteresis"

# deepspeed 0.19 zero/stage_1_and_2.py, stage3.py: the objects in their states.
_KNOWN = KnownObjects(DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)

# deepspeed 0.19 runtime/engine.py: what is asked of the engine, and what a yes would mean.
_REFUSED = {
    "pipeline_parallelism": "a pipeline module",
    "has_moe_layers": "mixture-of-experts layers",
    "curriculum_learning_enabled": "curriculum learning",
    "random_ltd_enabled": "random layer token drop",
    "zenflow": "ZenFlow",
    "zero_nvme_offload_optimizer": "optimizer state on NVMe",
    "zero_elastic_checkpoint": "zero_optimization.elastic_checkpoint",
    "load_universal_checkpoint": "checkpoint.load_universal",
}


def engine_components(
    engine: Any, *, lr_scheduler: Any = None, ema: Any = None, name: str = ""
) -> Iterator[StateComponent]:
    """The engine's state; weights and moments as under every other adapter where possible.

    Args:
        engine: what ``deepspeed.initialize`` returns first; see ``require_resumable``.
        lr_scheduler: schedulers that step outside of the engine; without any, the engine's own.
        ema: averaged models, or objects with ``state_dict``.
        name: of the engine, where a run has several: the keys become ``model/<name>``, ...
    """

    def key_of(slot: str) -> str:
        return f"{slot}/{name}" if name else slot

    def named(given: Any) -> Any:
        return {name: given} if name and given is not None else given

    model, optimizer = key_of(Slot.MODEL.value), key_of(Slot.OPTIMIZER.value)
    per_rank, by_name = SharingPattern.PER_RANK, is_by_name(engine)
    partitioned = engine.zero_optimization_partition_weights() and not by_name
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        yield from state_components(model=named(engine.module), optimizer=named(engine.optimizer))
    elif by_name:
        yield StateComponent(model, ZeroModelState(engine, key=model), SharingPattern.SHARDED)
        yield StateComponent(
            optimizer, ZeroOptimizerState(engine, key=optimizer), SharingPattern.SHARDED
        )
        scaler = dynamic_scaler(engine.optimizer)
        if scaler is not None:
            key = key_of(Slot.GRAD_SCALER.value)
            yield StateComponent(key, _LossScaler(scaler, key=key))
    else:
        pattern = per_rank if partitioned else SharingPattern.REPLICATED
        yield StateComponent(model, _EngineModel(engine, key=model), pattern)
        yield StateComponent(optimizer, _Optimizer(engine, key=optimizer), per_rank)
    yield from state_components(
        model=None,
        lr_scheduler=named(engine.lr_scheduler) if lr_scheduler is None else lr_scheduler,
        grad_scaler=named(_autocast_scaler(engine)),
        ema=ema,
    )
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        yield from attribute_components(named(engine.module))
    if engine.world_size > 1:
        module = None if partitioned else named(engine.module)
        yield from rank_buffer_components(model=module, ema=ema)
    counters = key_of(_COUNTERS_KEY)
    # A run that began under plain PyTorch has none.
    yield StateComponent(
        counters, _Counters(engine, key=counters), required=False, framework="DeepSpeed"
    )
    tracked = _TrackedRng(key=key_of(_TRACKED_KEY))
    if tracked.state_dict()["states"]:
        yield StateComponent(tracked.key, tracked, per_rank, required=False)


def _autocast_scaler(engine: Any) -> Any:
    """The scaler of ``torch_autocast`` in fp16; ZeRO has it for itself, and saves it nowhere."""
    of_zero = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return engine.torch_autocast_z0_gradscaler if of_zero is None else of_zero


def require_resumable(engine: Any, *, name: str = "engine") -> None:
    """Raises ConfigurationError unless all of the engine's state can be saved and loaded.

    Args:
        engine: what ``deepspeed.initialize`` returns first.
        name: of the engine, for errors.

    Raises:
        ConfigurationError: it is no engine, or uses something that cannot be resumed yet.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise ConfigurationError(
            name,
            found=f"a {type(engine).__name__}",
            expected="the first value that deepspeed.initialize returns",
        )
    if engine.optimizer is None:
        raise ConfigurationError(name, found="no optimizer", expected="an engine that trains")

    def holds(name: str) -> bool:
        answer = getattr(engine, name)
        return bool(answer() if callable(answer) else answer)

    found = [what for name, what in _REFUSED.items() if holds(name)]
    if engine.mp_world_size > 1 or engine.autotp_size() > 1:
        found.append("tensor parallelism")
    if hasattr(engine.optimizer, "backup_optimizer"):  # steps the parts that stay on the GPU
        found.append("zero_optimization.offload_optimizer.ratio below 1")
    if not engine.zero_load_from_fp32_weights():
        found.append("zero_optimization.load_from_fp32_weights=false")
    if found:
        raise ConfigurationError(name, found=f"{', '.join(found)}: not available yet")


class _EngineCounts(TypedDict):
    global_steps: Count
    global_samples: Count
    micro_steps: Count
    skipped_steps: Count
    gradient_accumulation_steps: Count
    gradient_accumulation_steps_at_start: Count
    global_grad_norm: Any


class _Counters(AttributeState):
    """The engine's counts and its last gradient norm; its own checkpoint lacks half of them."""

    schema = _EngineCounts

    def __init__(self, engine: Any, *, key: str = _COUNTERS_KEY) -> None:
        super().__init__(engine, _COUNTERS, key=key)
        self._engine = engine
        self._window_at_start: int = engine.gradient_accumulation_steps()

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        return {
            **super().state_dict(),
            _WINDOW: engine.gradient_accumulation_steps(),
            _WINDOW_AT_START: self._window_at_start,
            _NORM: engine.get_global_grad_norm(),
        }

    def replicated_state(self) -> dict[str, Any]:
        """Without the norm: it may differ by some bits between the ranks."""
        return {name: value for name, value in self.state_dict().items() if name != _NORM}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        messages = super().load_state_dict(state)
        engine = self._engine
        norm = state[_NORM]
        GRADIENT_NORM.write(engine, norm.clone() if isinstance(norm, torch.Tensor) else norm)
        window, saved = self._window_at_start, state[_WINDOW]
        if state[_WINDOW_AT_START] == window:  # what differs now, the training has changed
            in_one_step = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
            engine.set_train_batch_size(saved * in_one_step)
        elif saved != window:
            # A save is between two accumulation windows. Their length differs, so a new one begins.
            engine.micro_steps -= engine.micro_steps % window
        return messages

    def fingerprint(self) -> dict[str, Any]:
        return {"config": self._engine.config}


class _TrackedState(TypedDict):
    states: dict[str, GeneratorState]


class _TrackedRng(Checked):
    """The RNG states of the process that ``deepspeed.checkpointing`` draws from in ``fork()``."""

    schema = _TrackedState

    def __init__(self, *, key: str) -> None:
        self.key = key
        self._tracker = get_cuda_rng_tracker()

    def state_dict(self) -> dict[str, Any]:
        return {"states": self._tracker.get_states()}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        self._tracker.set_states(copy.deepcopy(state["states"]))
        return ()


class _LossScaler(AttributeState):
    """The dynamic loss scale of fp16; how it changes is in the configuration."""

    def __init__(self, scaler: Any, *, key: str) -> None:
        names = (name for name in (*_SCALE, _HYSTERESIS) if hasattr(scaler, name))
        super().__init__(scaler, names, key=key)

    def check_state_dict(self, state: Any) -> None:
        super().check_state_dict({**self.state_dict(), **state})

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        # An optimizer without ZeRO has no hysteresis.
        return super().load_state_dict({**self.state_dict(), **state})


def dynamic_scaler(zero: Any) -> Any:
    """What holds the dynamic loss scale of fp16, or None."""
    if type(zero) is FP16_UnfusedOptimizer:
        return zero.loss_scale_config if zero.loss_scale_config.dynamic_loss_scale else None
    scaler = getattr(zero, "loss_scaler", None)
    return scaler if isinstance(scaler, DynamicLossScaler) else None


class _EngineModel(ModelState):
    """The module of an optimizer that only DeepSpeed can save.

    At ZeRO stage 3 a parameter is saved as this rank's partition, and loading is collective.
    """

    def __init__(self, engine: Any, *, key: str) -> None:
        super().__init__(engine.module, key=key)
        self._optimizer = engine.optimizer

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._partitions()}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        partitions = self._partitions()
        if partitions:
            self._optimizer.checkpoint_event_prologue()  # all parameters become placeholders
        with torch.no_grad():
            for name, partition in partitions.items():
                partition.copy_(state[name])
        placeholders = super().state_dict()
        whole = {**state, **{name: placeholders[name] for name in partitions}}
        messages = super().load_state_dict(whole)
        # The optimizer's own copies follow: it may be left out of this resume.
        self._optimizer.refresh_fp32_params()
        if partitions:
            self._optimizer.checkpoint_event_epilogue()
        return messages

    def _partitions(self) -> dict[str, Any]:
        # deepspeed 0.19 runtime/zero/partition_parameters.py keeps the partition in `ds_tensor`.
        named: dict[str, Any] = dict(self.module.named_parameters(remove_duplicate=False))
        found = {raw: p.ds_tensor.data for raw, p in named.items() if hasattr(p, "ds_tensor")}
        return by_clean_name(self.module, found)


class _FilesState(TypedDict):
    layout: dict[str, str]
    files: dict[str, dict[str, Any]]


class _Optimizer(OptimizerState):
    """This rank's part of what ``engine.save_checkpoint`` saves. Collective, but for its check."""

    schema: ClassVar[Any] = _FilesState

    def __init__(self, engine: Any, *, key: str) -> None:
        super().__init__(engine.optimizer, {}, key=key)
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        files: dict[str, dict[str, Any]] = {}
        with _in_memory(self._engine, files) as folder:
            self._engine.save_checkpoint(
                folder, tag=_TAG, save_latest=False, exclude_frozen_parameters=True
            )
        for content in files.values():
            for name in _ELSEWHERE:
                content.pop(name, None)
        return {"layout": self._layout(), "files": _KNOWN.plain(files, where=self.key)}

    def check_state_dict(self, state: Any) -> None:
        then, now = state["layout"], self._layout()
        mismatches = [
            Mismatch.changed(name, then.get(name), now.get(name))
            for name in {**now, **then}
            if then.get(name) != now.get(name)
        ]
        refuse(self.key, mismatches, remedy="Start with the configuration of the checkpoint")
        _KNOWN.live(state["files"])

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        live = {"module": {}, **_Counters(self._engine).state_dict()}
        kept = _KNOWN.live(state["files"]).items()
        files = {name: {**content, **live} for name, content in kept}
        with _in_memory(self._engine, files) as folder:
            self._engine.load_checkpoint(
                folder,
                tag=_TAG,
                load_lr_scheduler_states=False,
                custom_load_fn=lambda src, dst: None,  # the module is loaded already
            )
        return ()

    def named_parameters(self) -> dict[str, Any]:
        """None: DeepSpeed saves and loads all of the module's."""
        return {}

    def lost_parameters(self) -> dict[str, Any]:
        """The parameters that are not in the module, by position."""
        groups = getattr(self.optimizer, "fp16_groups", ())
        return {
            f"group{g}.param{p}": parameter
            for g, group in enumerate(groups)
            for p, parameter in enumerate(group)
            if parameter not in self._engine.param_names
        }

    def _layout(self) -> dict[str, str]:
        """What decides which numbers stand where in a shard."""
        engine = self._engine
        stage = int(engine.zero_optimization_stage())
        groups = PARAM_SHAPES.of(engine)() if stage else ()
        layout = {"class": class_name(self.optimizer), "ZeRO": f"stage {stage}"}
        for number, group in enumerate(groups):
            for index, (name, shape) in enumerate(group.items()):
                # Stored in checkpoints and compared on resume, so the wording stays.
                layout[name] = f"{tuple(shape)} at place {index} of group {number}"
        return layout


class _InMemory(CheckpointEngine):  # type: ignore[misc]
    """Keeps what DeepSpeed saves in a dict by file name."""

    def __init__(self, files: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self._files = files

    def create(self, info: Any) -> None: ...

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        self._files[Path(path).name] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._files[Path(path).name]

    def commit(self, info: Any) -> None: ...


@contextmanager
def _in_memory(engine: Any, files: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The folder to give to DeepSpeed; it saves into and loads from ``files``."""
    former, writes = CHECKPOINT_ENGINE.of(engine), SAVES_PARTITIONS.of(engine)
    with TemporaryDirectory(prefix="resumekit-") as folder:
        (Path(folder) / _TAG).mkdir()
        for name in files:  # it looks for a file before it asks for its content
            (Path(folder) / _TAG / name).touch()
        try:
            CHECKPOINT_ENGINE.write(engine, _InMemory(files))
            SAVES_PARTITIONS.write(engine, True)  # every rank, also those that would not write
            yield folder
        finally:
            CHECKPOINT_ENGINE.write(engine, former)
            SAVES_PARTITIONS.write(engine, writes)


def is_within_window(engine: Any, *, steps_before: int) -> bool:
    """Whether an engine has accumulated gradients for a step that it has not taken yet.

    Args:
        engine: what ``deepspeed.initialize`` returns first.
        steps_before: its ``global_steps`` when the iteration of the loop began.
    """
    is_managed = IS_MANAGED.of(engine)
    if is_managed is not None and not is_managed():
        return bool(NUM_UNMANAGED.of(engine) > 0)
    is_boundary = SET_BOUNDARY.of(engine)
    if is_boundary is not None:
        # By set_gradient_accumulation_boundary(); some loops reset it after the step.
        return not (is_boundary or engine.global_steps > steps_before)
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def has_leftover_gradients(engine: Any) -> bool:
    """Whether ZeRO has gradients between two accumulation windows, and adds them to its next step.

    The backward pass of another engine leaves them where it goes through this engine's parameters.
    They are in private buffers, which no checkpoint has. Without ZeRO they are in ``.grad``.
    """
    zero = engine.optimizer
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        return zero.micro_step_id > 0 or bool(HAS_REDUCED.of(zero))
    if not isinstance(zero, DeepSpeedZeroOptimizer):
        return False
    if zero.cpu_offload:  # otherwise the next backward pass replaces them
        return bool(zero.micro_step_id >= 0)
    compact = filter(IS_COMPACT.of(zero), zero.averaged_gradients)
    kept = [*zero.all_grad_tensors.values(), *map(zero.averaged_gradients.get, compact)]
    return any(gradients is not None for gradients in kept)
