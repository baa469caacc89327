"""What a checkpoint of another program holds, as the components of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from resumekit.capture.global_rng import python_state
from resumekit.capture.nested_state import is_same
from resumekit.errors import ConfigurationError
from resumekit.imports.deepspeed_tags import read_tag
from resumekit.imports.reading import (
    read_attributes,
    read_json,
    read_state,
    read_torch_file,
    refuse,
)
from resumekit.imports.recognition import SHARDED_META, OtherCheckpoint, WrittenBy, recognise
from resumekit.imports.sharded import read_dcp, read_ranks
from resumekit.state import Slot

_MODEL, _OPTIMIZER = Slot.MODEL.value, Slot.OPTIMIZER.value
_SCHEDULER, _SCALER = Slot.LR_SCHEDULER.value, Slot.GRAD_SCALER.value


@dataclass(frozen=True)
class StartPosition:
    """Where a run continues. What is None is not known.

    Args:
        step: optimizer steps.
        epoch: the epoch of the next batch, from 0.
        batch: the index of the next batch in it.
    """

    step: int | None = None
    epoch: int | None = None
    batch: int | None = None

    def with_asked(self, asked: StartPosition) -> StartPosition:
        """The position, with what the user gives where the source has none.

        Raises:
            ConfigurationError: the source says something else.
        """
        for name, value in vars(asked).items():
            known = getattr(self, name)
            if value is not None and known not in (None, value):
                raise ConfigurationError(
                    f"--{name} {value}", found=f"the checkpoint is at {name} {known}"
                )
        given = {name: value for name, value in vars(asked).items() if value is not None}
        return replace(self, **given)


@dataclass(frozen=True)
class OtherContent:
    """A checkpoint of another program, taken apart.

    Args:
        source: what it is called in messages.
        position: of the run.
        given: ``state_dict`` of the run's objects as they were saved, by component key.
        rng: the RNG states of each rank; None where they were not saved.
        num_ahead: the batches that the framework had fetched ahead.
        num_batches: used in all epochs.
        batch_size: samples in a batch; 0 where it is not known.
        counts: the Trainer's own counts.
        engine_states: states of DeepSpeed's own as this library stores them, by component key.
        lacks: what it does not hold, in words.
        named_epoch: a number that may be the finished epoch, or the next one.
    """

    source: str
    position: StartPosition
    given: Mapping[str, Any]
    rng: tuple[Mapping[str, Any] | None, ...] = (None,)
    num_ahead: int = 0
    num_batches: int = 0
    batch_size: int = 0
    counts: Mapping[str, Any] = field(default_factory=dict)
    engine_states: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    named_epoch: int | None = None

    @property
    def num_ranks(self) -> int:
        """The ranks that wrote it, as far as it shows them."""
        return len(self.rng)

    @property
    def all_lacks(self) -> tuple[str, ...]:
        """What it does not hold, in words."""
        slots = {_OPTIMIZER: "optimizer", _SCHEDULER: "LR scheduler"}
        found = {key.partition("/")[0] for key in self.given}
        parts = [f"state of {noun}" for slot, noun in slots.items() if slot not in found]
        missing = [str(rank) for rank, state in enumerate(self.rng) if state is None]
        if missing:
            ranks = f" (that of rank {', '.join(missing)} is missing)" if self.num_ranks > 1 else ""
            parts.append(f"RNG state{ranks}")
        if self.position.epoch is None:
            parts.append("position in the data")
        return (*parts, *self.lacks)


def read_content(path: Path, *, trusts: bool = False) -> OtherContent:
    """What another program has saved.

    Args:
        path: a file or a directory.
        trusts: the user asks for objects of any class in it: code that it names is run.

    Raises:
        ConfigurationError: it is not recognised, is damaged, or cannot be taken over; says why.
    """
    found = recognise(path)
    if found is None:
        exists = "" if path.exists() else "no such file or directory, "
        raise ConfigurationError(
            str(path),
            found=f"{exists}not a checkpoint that can be imported",
            expected="a Trainer's checkpoint-N, a save_state folder of Accelerate, a .ckpt of "
            "Lightning, a tag of DeepSpeed, a DCP directory, or a torch.save file",
        )
    try:
        return _READERS[found.kind](replace(found, trusted=trusts))
    except _NOT_AS_SAVED as error:
        if isinstance(error, ConfigurationError):
            raise
        refuse(found.path, f"{error!r:.160}, so not one as {found.kind.value}", "an intact one")


# torch raises RuntimeError.
_NOT_AS_SAVED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


# ---------------------------------------------------------------- parts


# By slot, with a place for the number of an object but the first: transformers 5.23 trainer.py,
# accelerate 1.15 checkpointing.py and utils/fsdp_utils.py.
_FILES = {
    _MODEL: (
        *("model{}.safetensors", "pytorch_model{}.bin", "pytorch_model_fsdp{}.bin"),
        *("adapter_model{}.safetensors", "adapter_model{}.bin"),  # of PEFT
    ),
    _OPTIMIZER: ("optimizer{}.pt", "optimizer{}.bin"),
    _SCHEDULER: ("scheduler{}.pt", "scheduler{}.bin"),
    _SCALER: ("scaler{}.pt",),
}
_SHARDED = {_MODEL: "pytorch_model_fsdp", _OPTIMIZER: "optimizer"}


def _objects(found: OtherCheckpoint) -> dict[str, Any]:
    """What the files of a folder hold, by component key."""
    given: dict[str, Any] = {}
    for slot in _FILES:
        given |= _by_key(slot, [*_numbered(found, slot)])
    if not any(key.partition("/")[0] == _MODEL for key in given):
        files = (
            "model.safetensors, pytorch_model.bin, pytorch_model_fsdp.bin or pytorch_model_fsdp_0"
        )
        refuse(found.path, f"{found} without the weights of a model", files)
    return given


def _by_key(slot: str, states: Sequence[Any]) -> dict[str, Any]:
    """The states of one object, or of several in their order."""
    if len(states) == 1:
        return {slot: states[0]}
    return {f"{slot}/{number}": state for number, state in enumerate(states)}


def _numbered(found: OtherCheckpoint, slot: str) -> Iterator[Any]:
    folder, trusts, base = found.path, found.trusted, _SHARDED.get(slot, slot)
    for number in count():
        suffix, shards = f"_{number}" if number else "", f"{base}_{number}"
        states = (read_state(folder / name.format(suffix), trusts=trusts) for name in _FILES[slot])
        state = next((each for each in states if each is not None), None)
        # Those of LOCAL_STATE_DICT have no number of a first object.
        of_ranks = (_of_ranks(folder, f"{each}_rank{{}}.bin") for each in (shards, base + suffix))
        if state is None and (folder / shards).is_dir():
            (state,) = read_dcp(folder / shards, trusts=trusts).values()
        elif state is None:
            files = next(filter(None, of_ranks), None)
            if files is None:
                return
            state = read_ranks(files.values(), trusts=trusts)
        yield state


def _of_ranks(folder: Path, name: str) -> dict[int, Path]:
    """The files of the ranks in their order; ``name`` has a place for the rank."""
    prefix, suffix = name.split("{}")
    found = {
        each.name[len(prefix) : -len(suffix)]: each for each in folder.glob(f"{prefix}*{suffix}")
    }
    return {int(rank): found[rank] for rank in sorted(filter(str.isdecimal, found), key=int)}


def _rng_of_ranks(
    found: OtherCheckpoint, name: str, python: str, numpy: str, cpu: str, cuda: str
) -> tuple[Mapping[str, Any] | None, ...]:
    """The RNG states of all ranks.

    Args:
        found: the checkpoint.
        name: of the file of a single process; those of ranks have a number before its end.
        python: where a file has the state of ``random.getstate``.
        numpy: that of ``np.random.get_state``.
        cpu: that of ``torch.get_rng_state``.
        cuda: that of ``torch.cuda.get_rng_state``, or those of all devices.
    """

    def read(path: Path) -> dict[str, Any]:
        saved = read_torch_file(path, trusts=found.trusted)
        of_python, of_numpy = random.Random(0), np.random.RandomState(0)
        of_python.setstate(saved[python])
        of_numpy.set_state(saved[numpy])
        of_cuda = saved.get(cuda, ())
        return {
            "python": python_state(of_python),
            "numpy": of_numpy.get_state(legacy=False),
            "torch": saved[cpu],
            "cuda": list(of_cuda) if isinstance(of_cuda, (list, tuple)) else [of_cuda],
            "generators": {},
        }

    if (found.path / name).is_file():
        return (read(found.path / name),)
    files = _of_ranks(found.path, name.replace(".", "_{}."))
    ranks = range(max(files, default=0) + 1)
    return tuple(read(files[r]) if r in files else None for r in ranks)


# ---------------------------------------------------------------- the Trainer

# transformers 5.23 trainer_callback.py TrainerState: what the adapter restores of it.
_COUNTS = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)


def _trainer(found: OtherCheckpoint) -> OtherContent:
    """As of transformers 5.23 trainer.py ``Trainer._save_checkpoint``."""
    folder, state = found.path, read_json(found.path / "trainer_state.json")
    accumulation = read_attributes(folder / "training_args.bin").get("gradient_accumulation_steps")
    step, each = int(state["global_step"]), int(accumulation or 1)
    epoch, batch, num_batches = _position(step, float(state["epoch"] or 0), each)
    callbacks = [name for name in state.get("stateful_callbacks", {}) if name != "TrainerControl"]
    lacks = [f"state of {name}" for name in callbacks]
    if accumulation is None:
        lacks.append("gradient_accumulation_steps (taken to be 1)")
    if any(folder.glob("adapter_model.*")):
        lacks.append("weights of the base model, which are the script's")
    return OtherContent(
        f"Trainer {folder.name}",
        StartPosition(step, epoch, batch),
        _objects(found),
        rng=_rng_of_ranks(found, "rng_state.pth", "python", "numpy", "cpu", "cuda"),
        num_ahead=1,  # accelerate 1.15 data_loader.py DataLoaderShard.__iter__
        num_batches=num_batches,
        batch_size=int(state.get("train_batch_size") or 0),
        counts={name: state[name] for name in _COUNTS if name in state},
        lacks=tuple(lacks),
    )


def _position(step: int, epoch: float, accumulation: int) -> tuple[int, int, int]:
    """The epoch, the batch in it and the batches so far, from what the Trainer counts.

    transformers 5.23 trainer.py _run_epoch: ``epoch`` has the part of the batches that was used.
    """
    done = math.floor(epoch + 1e-9)
    part = epoch - done
    if part < 1e-9:
        return done, 0, step * accumulation
    if done == 0:
        return 0, step * accumulation, step * accumulation
    for per_epoch in (math.floor(step / epoch), math.ceil(step / epoch)):
        batch = (step - done * per_epoch) * accumulation
        length = batch / part
        if length > 0 and abs(length - round(length)) < 1e-6 * length:
            length = round(length)
            if -(-length // accumulation) == per_epoch:
                return done, batch, done * length + batch
    raise ValueError(f"step {step} is not in epoch {epoch} with {accumulation} batches a step")


# ---------------------------------------------------------------- Accelerate


def _accelerate(found: OtherCheckpoint) -> OtherContent:
    """As of accelerate 1.15 checkpointing.py ``save_accelerator_state``."""
    folder = found.path
    given = _objects(found)
    lacks = [each.name for each in sorted(folder.glob("custom_checkpoint_*.pkl"))]
    return OtherContent(
        f"Accelerate {folder.name}",
        StartPosition(_steps_in(given)),
        given,
        rng=_rng_of_ranks(
            found,
            "random_states.pkl",
            *("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed"),
        ),
        num_ahead=1,  # data_loader.py DataLoaderShard.__iter__
        lacks=tuple(f"registered object {name}, a pickle" for name in lacks),
    )


# ---------------------------------------------------------------- Lightning


def _lightning(found: OtherCheckpoint) -> OtherContent:
    """As of lightning 2.6 trainer/connectors/checkpoint_connector.py ``dump_checkpoint``."""
    saved = _whole_checkpoint(found)
    fit = saved["loops"]["fit_loop"]
    batches, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]["current"]
    epoch, batch = epochs["ready"] - 1, batches["current"]["processed"]
    if batches["is_last_batch"] or epochs["processed"] == epochs["ready"]:
        epoch, batch = epochs["ready"], 0
    given = {_MODEL: saved["state_dict"]}
    for key, name in ((_OPTIMIZER, "optimizer_states"), (_SCHEDULER, "lr_schedulers")):
        given |= _by_key(key, saved.get(name) or [])
    scaler = saved.get("MixedPrecision")
    num_batches = batches["total"]["processed"]
    return OtherContent(
        f"Lightning {found.path.name}",
        StartPosition(min(int(saved["global_step"]), num_batches), epoch, batch),
        {**given, **({_SCALER: scaler} if scaler else {})},
        num_batches=num_batches,
        lacks=tuple(f"state of {name.partition('{')[0]}" for name in saved.get("callbacks") or {}),
    )


def _whole_checkpoint(found: OtherCheckpoint) -> Any:
    """A file, or the folder that a strategy writes with shards: its FSDP2 or its FSDP1 one."""
    path, trusts = found.path, found.trusted
    if path.is_file():
        return read_torch_file(path, trusts=trusts)
    sharded = read_dcp(path, trusts=trusts)
    weights = sharded.pop("state_dict", None) or sharded.pop("model")
    optimizers = [sharded[f"optimizer_{number}"] for number in range(len(sharded))]
    meta = read_torch_file(path / SHARDED_META, trusts=trusts)
    return {**meta, "state_dict": weights, "optimizer_states": optimizers}


# ---------------------------------------------------------------- DeepSpeed


def _deepspeed(found: OtherCheckpoint) -> OtherContent:
    """As of deepspeed 0.19 runtime/engine.py ``save_checkpoint``."""
    tag = read_tag(found.path, trusts=found.trusted)
    taken = ("epoch", *(name for name in _STEP_NAMES if tag.client.get(name) == tag.step))
    named = tag.client.get("epoch")
    return OtherContent(
        f"DeepSpeed {found.path.name}",
        StartPosition(tag.step),
        tag.given,
        num_batches=tag.micro_steps,
        engine_states=tag.engine_states,
        lacks=tuple(f"a place for {name!r}" for name in tag.client if name not in taken),
        named_epoch=named if type(named) is int else None,
    )


# ---------------------------------------------------------------- a file of a plain loop

_MODEL_NAMES = ("model", "model_state_dict", "state_dict", "net", "network", "module")
_STEP_NAMES = ("global_step", "step", "iteration", "iter", "it", "iter_num", "num_steps")


def _dcp(found: OtherCheckpoint) -> OtherContent:
    """Where Fabric wrote it, another file has what is no shard."""
    trusts = found.trusted
    more = read_state(found.path / SHARDED_META, trusts=trusts) or {}
    return _of_state_dicts(found, {**read_dcp(found.path, trusts=trusts), **more})


def _of_state_dicts(found: OtherCheckpoint, saved: Any) -> OtherContent:
    """A dict of ``state_dict``s under whatever names, or one of a model."""
    if found.trusted:  # else there are no such objects
        saved = _state_of(saved)
        saved = {k: _state_of(v) for k, v in saved.items()} if isinstance(saved, dict) else saved
    if not isinstance(saved, Mapping):
        refuse(found.path, f"{found} of a {type(saved).__name__}", "a dict of state_dicts")
    parts: dict[str, dict[str, Any]] = {}
    for name, value in [("model", saved)] if _slot_of(saved) else _values(saved):
        parts.setdefault(_slot_of(value) or "", {})[name] = value
    others = parts.pop("", {})
    given = {k: v for slot, values in parts.items() for k, v in _named(slot, values).items()}
    if _MODEL not in parts:
        refuse(found.path, f"{found} without a dict of tensors", "the state_dict of a model")
    steps = [others[name] for name in _STEP_NAMES if type(others.get(name)) is int]
    step = steps[0] if steps else _steps_in(given)
    taken = [name for name in _STEP_NAMES if name in others][:1]
    several = {slot: values for slot, values in parts.items() if slot in given and len(values) > 1}
    for slot, values in several.items():
        others |= {name: each for name, each in values.items() if each is not given[slot]}
    return OtherContent(
        f"{found.kind.value.partition(' ')[2]} {found.path.name}",
        StartPosition(step),
        given,
        lacks=tuple(f"a place for {name!r}" for name in others if name not in (*taken, "epoch")),
        named_epoch=others["epoch"] if type(others.get("epoch")) is int else None,
    )


def _state_of(value: Any) -> Any:
    """That of a model, an optimizer or a scheduler that was saved whole."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def _values(saved: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values, and those of dicts with ``state_dict``s; by name."""
    for name, value in saved.items():
        is_above = isinstance(value, Mapping) and any(map(_slot_of, value.values()))
        if is_above and _slot_of(value) is None:
            yield from _values(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", _unflattened(value)


_FLAT_GROUP, _FLAT_STATE = "param_groups.", "state."


def _unflattened(value: Any) -> Any:
    """The state of an optimizer that was flattened; anything else as it is.

    Parameters with the same hyperparameters become one group: the groups are not in there.

    Source: torch 2.13 distributed/checkpoint/state_dict.py _flatten_optim_state_dict.
    """
    names = [*map(str, value)] if isinstance(value, Mapping) else []
    if not any(name.startswith(_FLAT_GROUP) for name in names):
        return value
    of_each: dict[str, dict[str, dict[str, Any]]] = {_FLAT_GROUP: {}, _FLAT_STATE: {}}
    for name in names:
        part = _FLAT_GROUP if name.startswith(_FLAT_GROUP) else _FLAT_STATE
        parameter, _, key = name.removeprefix(part).rpartition(".")
        of_each[part].setdefault(parameter, {})[key] = value[name]
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for parameter, given in of_each[_FLAT_GROUP].items():
        members = next((m for known, m in groups if is_same(known, given)), None)
        if members is None:
            groups.append((given, members := []))
        members.append(parameter)
    strange = of_each[_FLAT_STATE].keys() - of_each[_FLAT_GROUP].keys()
    if strange:
        raise ValueError(f"a flattened state of {min(strange)}, which is no parameter")
    return {
        "state": of_each[_FLAT_STATE],
        "param_groups": [{**given, "params": members} for given, members in groups],
    }


def _slot_of(value: Any) -> str | None:
    """What a value of a dict is the state of."""
    if not isinstance(value, Mapping) or not value:
        return None
    if {"state", "param_groups"} <= value.keys():
        return _OPTIMIZER
    if {"scale", "growth_factor"} <= value.keys():
        return _SCALER
    if "last_epoch" in value:
        return _SCHEDULER
    is_model = all(isinstance(key, str) and hasattr(each, "dtype") for key, each in value.items())
    return _MODEL if is_model else None


def _named(slot: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The states of a slot by component key: of several models one may be the trained one."""
    last = {name.rpartition(".")[2]: each for name, each in values.items()}
    trained = [last[name] for name in _MODEL_NAMES if name in last] if slot == _MODEL else []
    if len(values) == 1 or len(trained) == 1:
        return {slot: trained[0] if trained else next(iter(values.values()))}
    named = last if len(last) == len(values) else values
    return {f"{slot}/{name.replace('/', '|')}": each for name, each in named.items()}


def _steps_in(given: Mapping[str, Any]) -> int | None:
    """The steps that the optimizers have counted."""
    optimizers = [each for key, each in given.items() if key.partition("/")[0] == _OPTIMIZER]
    states = [each for optimizer in optimizers for each in optimizer["state"].values()]
    counts = [int(each["step"]) for each in states if isinstance(each, dict) and "step" in each]
    return max(counts, default=None)


_READERS: Mapping[WrittenBy, Callable[[OtherCheckpoint], OtherContent]] = {
    WrittenBy.TRAINER: _trainer,
    WrittenBy.ACCELERATE: _accelerate,
    WrittenBy.LIGHTNING: _lightning,
    WrittenBy.DEEPSPEED: _deepspeed,
    WrittenBy.TORCH: lambda it: _of_state_dicts(it, read_torch_file(it.path, trusts=it.trusted)),
    WrittenBy.DCP: _dcp,
}
