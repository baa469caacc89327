"""A checkpoint of DeepSpeed, which its own scripts continue without this library.

Source: deepspeed 0.19 runtime/engine.py _common_checkpoint_state, _save_zero_checkpoint;
zero/stage_1_and_2.py and zero/stage3.py state_dict; fp16/unfused_optimizer.py state_dict.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from resumekit.capture.nested_state import is_same
from resumekit.capture.optimizer import by_position
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.export.formats import Joined, mapped, save_state, write_bytes
from resumekit.export.stored_run import ExportOptions, StoredRun
from resumekit.export.weights import AS_TRAINED
from resumekit.state import Slot

_COUNTERS = "callbacks/deepspeed"
_VERSION = {"ds_version": "0.19.0"}  # of this layout
# What is None but at some stages, or with features that no run has.
_ABSENT = (
    *("optimizer", "param_shapes", "shared_params", "data_sampler", "random_ltd"),
    *("frozen_param_shapes", "frozen_param_fragments"),
)
_LOWER = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_SUB_GROUP = 10**9  # elements; zero/config.py sub_group_size
# fp16/unfused_optimizer.py: what it keeps of a loss scaler.
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


class _StaticScale:
    """What is written as an object of DeepSpeed."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class _DynamicScale(_StaticScale): ...


# Python's own pickler: the one in C imports a class before it writes its name.
_PICKLER: Any = pickle._Pickler  # noqa: SLF001


class _Pickler(_PICKLER):  # type: ignore[misc]
    """Writes the names of DeepSpeed's classes, without DeepSpeed."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj in (_StaticScale, _DynamicScale):
            name = "LossScaler" if obj is _StaticScale else "DynamicLossScaler"
            self.write(f"cdeepspeed.runtime.fp16.loss_scaler\n{name}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


class _WithNames:
    """What ``torch.save`` takes for the module ``pickle``."""

    Pickler = _Pickler


class _Flat(NamedTuple):
    """The parameters that one tensor of ZeRO's optimizer has, and the number of their group."""

    group: int
    names: tuple[str, ...]


def write_tag(path: Path, run: StoredRun, options: ExportOptions) -> None:
    """What ``engine.load_checkpoint`` opens: one tag, and the file that names it."""
    optimizer, scheduler = run.only(Slot.OPTIMIZER), run.only(Slot.LR_SCHEDULER)
    if optimizer is None:
        raise StateMismatchError(str(run.step.name), found="no optimizer", expected="one")
    to = _Tag(run, options)
    progress, counts = run.progress, run.state(_COUNTERS) or {}
    step = counts.get("global_steps", progress["step"])
    tag = path / f"global_step{step}"
    tag.mkdir(parents=True)
    keys = [optimizer, *filter(None, [scheduler])]
    with (
        mapped(path / "weights", to.weights) as weights,
        nullcontext(weights) if not to.precision else mapped(path / "module", to.module) as module,
        run.objects(path / "states", keys, by_name=True) as given,
    ):
        common = {
            **dict.fromkeys(_ABSENT),
            "module": module,
            "lr_scheduler": given[scheduler] if scheduler else None,
            "global_steps": step,
            "global_samples": counts.get("global_samples", progress["samples"]),
            "skipped_steps": counts.get("skipped_steps", 0),
            "dp_world_size": to.ranks,
            "mp_world_size": 1,
            "ds_config": to.config,
            **_VERSION,
        }
        to.write(tag, common, weights, given[optimizer])
    write_bytes(path / "latest", tag.name.encode())
    run.mark("data", Slot.RNG.value)
    if to.stage == 0:
        run.notes.append("zero_to_fp32.py opens no files of stage 0; export safetensors instead")
    if scheduler is None:
        run.notes.append(
            "lr_scheduler: the checkpoint has none; with one in the script, pass "
            "load_lr_scheduler_states=False"
        )
    run.notes.append("rng: DeepSpeed's checkpoints have no RNG states")
    run.notes.append(
        "client_state: has no values of the script; continue in epoch "
        f"{progress['epoch']} after {progress['batch']} batches"
    )


class _Tag:
    """The files that engines of a stage and a number of ranks save."""

    def __init__(self, run: StoredRun, options: ExportOptions) -> None:
        self.run, self.name = run, str(run.step.name)
        described: Any = run.step.manifest.fingerprint
        self.config: dict[str, Any] = described.get(_COUNTERS, {}).get("config", {})
        zero = self.config.get("zero_optimization", {})
        self.ranks = run.step.manifest.world_size if options.ranks is None else options.ranks
        self.stage = zero.get("stage", 0) if options.stage is None else options.stage
        if self.stage not in range(4) or self.ranks < 1:
            raise ConfigurationError(
                "deepspeed",
                found=f"stage {self.stage} on {self.ranks} ranks",
                expected="a stage of ZeRO from 0 to 3, and a number of ranks",
            )
        self.sub_group = zero.get("sub_group_size", _SUB_GROUP) if self.stage == 3 else None
        self.weights, self.module = run.only_model("fp32"), run.only_model(AS_TRAINED)
        records = self.module.arranged([*self.module.sizes])
        self.shapes = {each.name: torch.Size(each.shape) for each in records}
        self.floats = {e.name for e in records if e.element.dtype.is_floating_point}
        types = (_LOWER.get(each.element.dtype) for each in records)
        self.precision = next(filter(None, types), None)
        self.totals: Mapping[str, int] = described.get(self.module.record.key, {})
        self.scaler = self._scaler()

    def write(
        self,
        path: Path,
        common: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Any],
    ) -> None:
        """All files of a tag."""
        groups = self._trained(optimizer)
        trained = {*chain(*groups)}
        frozen = self._frozen(trained) if self.stage == 3 else []
        known = {*trained, *frozen, *self.module.tied}
        state = {**common, "buffer_names": [n for n in self.shapes if n not in known]}
        if self.stage == 0:
            state["optimizer"] = self._whole(optimizer, groups, weights)
            save_state(path / "mp_rank_00_model_states.pt", state)
            return
        flats, module = [*self._flats(groups)], common["module"]
        state["param_shapes"] = [{n: self.shapes[n] for n in each.names} for each in flats]
        state["shared_params"] = self.module.tied
        if self.stage < 3:
            save_state(path / "mp_rank_00_model_states.pt", state)
        else:  # each rank has placeholders, and its partitions of frozen parameters
            state["frozen_param_shapes"] = {name: self.shapes[name] for name in frozen}
            state["module"] = {
                n: each.new_empty(0) if n in known else each for n, each in module.items()
            }
        for rank in range(self.ranks):
            self._write_partitions(path, rank, optimizer, flats, weights)
            if self.stage == 3:
                parts = {name: self._part([module[name]], rank) for name in frozen}
                with mapped(path / "fragments", Joined(parts)) as fragments:
                    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                    save_state(path / name, {**state, "frozen_param_fragments": fragments})

    def _write_partitions(
        self,
        path: Path,
        rank: int,
        optimizer: Mapping[str, Any],
        flats: Sequence[_Flat],
        weights: Mapping[str, Tensor],
    ) -> None:
        """The weights and moments of a rank."""
        states = optimizer["state"]
        kept = [states.get(flat.names[0], {}) for flat in flats]
        parts = {
            f"{i}": self._part([weights[n] for n in e.names], rank) for i, e in enumerate(flats)
        }
        parts |= {
            f"{i}.{key}": self._part([states[name][key] for name in flat.names], rank)
            for i, flat in enumerate(flats)
            for key, value in kept[i].items()
            if self._is_moment(flat.names[0], key, value)
        }
        numbers = range(len(flats))
        with mapped(path / "partitions", Joined(parts)) as joined:
            base = {
                "state": {
                    i: {key: joined.get(f"{i}.{key}", value) for key, value in kept[i].items()}
                    for i in numbers
                    if kept[i]
                },
                "param_groups": [
                    {**group, "params": [i for i in numbers if flats[i].group == number]}
                    for number, group in enumerate(optimizer["param_groups"])
                ],
            }
            zero = {
                "zero_stage": self.stage,
                "loss_scaler": self.scaler,
                "dynamic_loss_scale": isinstance(self.scaler, _DynamicScale),
                "overflow": False,
                **_VERSION,
            }
            if self.stage == 3:
                zero["partition_count"] = self.ranks
                zero["optimizer_state_dict"] = base
                zero["fp32_flat_groups"] = [joined[f"{i}"] for i in numbers]
            else:
                zero["partition_count"] = [self.ranks for _ in numbers]
                zero["base_optimizer_state"] = base
                zero["group_paddings"] = [len(parts[f"{i}"][-1]) for i in numbers]
                lengths = [sum(map(len, parts[f"{i}"][:-1])) for i in numbers]
                zero["single_partition_of_fp32_groups"] = [
                    joined[f"{i}"][: lengths[i]] for i in numbers
                ]
            prefix = "bf16_" if self.precision == "bf16" else ""
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            content = {"optimizer_state_dict": zero, "ds_config": self.config, **_VERSION}
            save_state(path / name, content, pickle_module=_WithNames)

    def _whole(
        self,
        optimizer: Mapping[str, Any],
        groups: Sequence[Sequence[str]],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """The optimizer without ZeRO; in 16 bits it has the weights, and the loss scale."""
        state = by_position(optimizer, groups)
        if self.precision is None:
            return state
        scale = {name: value for name, value in vars(self.scaler).items() if name in _SCALE}
        return {
            **{"cur_iter": 0, **scale},
            "dynamic_loss_scale": isinstance(self.scaler, _DynamicScale),
            "optimizer_state_dict": state,
            "fp32_groups": [[weights[name] for name in group] for group in groups],
        }

    def _trained(self, optimizer: Mapping[str, Any]) -> list[list[str]]:
        """The parameters of each group; with ZeRO those that are trained.

        Raises:
            StateMismatchError: they have states that ZeRO cannot step together.
        """
        groups = [[*group["params"]] for group in optimizer["param_groups"]]
        states = optimizer["state"]
        strange = [name for name in chain(*groups) if name not in self.shapes]
        if strange:
            self._refuse(strange[0], "a trained parameter that is not in the model")
        if self.stage == 0:
            return groups
        stepped = {name for name in chain(*groups) if states.get(name)}
        if self._numel(stepped) == self.totals.get("num_trainable_parameters"):
            groups = [[name for name in group if name in stepped] for group in groups]
        for name, first in ((name, group[0]) for group in groups for name in group):
            mine, other = states.get(name, {}), states.get(first, {})
            if mine.keys() != other.keys() or not all(
                self._is_moment(name, key, value) or is_same(value, other[key])
                for key, value in mine.items()
            ):
                self._refuse(name, f"another state or count of steps than {first!r} has", 0)
        return groups

    def _is_moment(self, name: str, key: str, value: Any) -> bool:
        if not isinstance(value, Tensor) or key == "step":
            return False
        if value.dim() and value.shape != self.shapes[name]:
            self._refuse(f"{name}: {key}", f"a tensor of the shape {tuple(value.shape)}", 0)
        return value.shape == self.shapes[name]

    def _frozen(self, trained: set[str]) -> list[str]:
        """The parameters that nothing trains, of which the checkpoint has the number of elements.

        Raises:
            StateMismatchError: there are buffers too that may be such parameters.
        """
        rest = [n for n in self.module.untied if n in self.floats and n not in trained]
        numel = self.totals.get("num_parameters", -1) - self._numel(trained)
        if rest and numel not in (0, self._numel(rest)):
            self._refuse(rest[0], "frozen parameters and buffers, which it does not distinguish", 2)
        return rest if numel else []

    def _numel(self, names: Iterable[str]) -> int:
        return sum(self.shapes[name].numel() for name in names)

    def _refuse(self, where: str, found: str, stage: int | None = None) -> NoReturn:
        raise StateMismatchError(
            f"{self.name}: {where}",
            found=found,
            expected=f"what DeepSpeed has at stage {self.stage}",
            remedy=None if stage is None else f"Export it with --stage {stage}",
        )

    def _flats(self, groups: Sequence[Sequence[str]]) -> Iterator[_Flat]:
        """One for each group; at stage 3 several for a large one."""
        for number, group in enumerate(groups):
            names: list[str] = []
            length = 0
            for name in group:
                names.append(name)
                length += -(-self.shapes[name].numel() // self.ranks)
                is_full = self.sub_group is not None and length >= self.sub_group
                if is_full or name == group[-1]:
                    yield _Flat(number, tuple(names))
                    names, length = [], 0

    def _part(self, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
        """What a rank has of tensors one after the other, with padding at its end.

        Stage 3 cuts each of them; the others cut all together, with an even number of elements.
        """
        found: list[Tensor] = []
        flat = [each.reshape(-1) for each in tensors]
        if self.stage == 3:
            for each in flat:
                length = -(-len(each) // self.ranks)
                piece = each[length * rank : length * (rank + 1)]
                found += [piece, each.new_zeros(length - len(piece))]
            return found
        length = -(-sum(map(len, flat)) // (2 * self.ranks)) * 2
        begin = length * rank
        for each in flat:
            found.append(each[max(begin, 0) : max(begin + length, 0)])
            begin -= len(each)
        return [*found, flat[0].new_zeros(length - sum(map(len, found)))]

    def _scaler(self) -> _StaticScale:
        """The loss scaler, with what the configuration says of it."""
        key = self.run.only(Slot.GRAD_SCALER)
        state = {} if key is None else self.run.state(key)
        if "values" in state:
            self.run.notes.append(f"{key}: no file of deepspeed has the state of a GradScaler")
            state = {}
        fp16 = self.config.get("fp16", {})
        static = fp16.get("loss_scale", 0) if self.precision == "fp16" else 1.0
        if static:
            return _StaticScale(cur_scale=static, dynamic=False)
        # fp16/loss_scaler.py DynamicLossScaler, precision_config.py dynamic_loss_scale_args
        hysteresis = fp16.get("hysteresis", 2)
        values = {
            "cur_scale": 2.0 ** fp16.get("initial_scale_power", 16),
            "cur_iter": 0,
            "last_overflow_iter": -1,
            "cur_hysteresis": hysteresis,
            "delayed_shift": hysteresis,
            "scale_window": fp16.get("loss_scale_window", 1000),
            "min_scale": fp16.get("min_loss_scale", 1),
            "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
            "scale_factor": 2.0,
            "raise_error_at_min_scale": True,
            "dynamic": True,
            "dtype": torch.half,
        }
        return _DynamicScale(**{**values, **state})
