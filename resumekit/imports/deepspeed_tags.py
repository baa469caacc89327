"""What a tag of DeepSpeed holds: whole weights and moments, of partitions of any number of ranks.

Source: deepspeed 0.19 runtime/engine.py _common_checkpoint_state, _save_zero_checkpoint;
zero/stage_1_and_2.py, zero/stage3.py and bf16_optimizer.py state_dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from resumekit.imports.reading import StandIn, read_torch_file, refuse
from resumekit.state import Slot

COUNTERS = "callbacks/deepspeed"
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# What the engine writes; all else is client_state.
_OF_ENGINE = {
    *("module", "buffer_names", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
    *("param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
    *("ds_config", "ds_version", "checkpoint_parallel_dims", "universal_checkpoint_info"),
}


# Classes of DeepSpeed in its files.
_CLASSES: list[Any] = [
    (StandIn, f"deepspeed.{name}")
    for name in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
]


class Tag(NamedTuple):
    """A tag.

    Args:
        given: ``state_dict`` of the run's objects, by component key.
        engine_states: states of DeepSpeed's own, by component key.
        step: optimizer steps.
        micro_steps: batches of each rank.
        client: what the script has saved.
    """

    given: dict[str, Any]
    engine_states: dict[str, Any]
    step: int
    micro_steps: int
    client: dict[str, Any]


def read_tag(folder: Path, *, trusts: bool) -> Tag:
    """What the files of a tag hold.

    Args:
        folder: the tag.
        trusts: see ``read_torch_file``.

    Raises:
        ConfigurationError: a file is damaged, is missing, or has objects of other classes; the
            checkpoint is of a kind that is not read.
    """
    models = [_read(path, trusts) for path in _files(folder, "model_states.pt")]
    optimizers = [_read(path, trusts) for path in _files(folder, "optim_states.pt")]
    zeros = [each["optimizer_state_dict"] for each in optimizers]
    first = models[0]
    ranks = int(first["dp_world_size"])
    if zeros and len(zeros) != ranks:
        refuse(folder, f"{len(zeros)} files of partitions", f"those of {ranks} ranks")
    if first["mp_world_size"] != 1:
        refuse(folder, "tensor parallelism", "a data-parallel job")
    weights: dict[str, Any] = dict(first["module"])
    optimizer = first["optimizer"]
    scaler = vars(zeros[0].get("loss_scaler", StandIn())) if zeros else {}
    if zeros:
        optimizer = _Partitions(zeros, first["param_shapes"]).load(folder, weights)
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            if "fp32_flat_groups" in zeros[0]:
                parts = [each["frozen_param_fragments"][name] for each in models]
                weights[name] = _joined(parts)[: shape.numel()].view(shape)
        tied = first.get("shared_params") or {}  # not of early versions
        weights |= {name: weights[other] for name, other in tied.items()}
    elif "fp32_groups_flat" in optimizer:
        refuse(folder, "stage 0 in 16 bits with a fused optimizer", "stage 1, 2 or 3")
    elif "fp32_groups" in optimizer:
        weights |= _unrounded(folder, weights, optimizer["fp32_groups"])
        scaler = {**optimizer, "dynamic": optimizer["dynamic_loss_scale"]}
        optimizer = optimizer["optimizer_state_dict"]
    given = {Slot.MODEL.value: weights, Slot.OPTIMIZER.value: optimizer}
    if first["lr_scheduler"] is not None:
        given[Slot.LR_SCHEDULER.value] = first["lr_scheduler"]
    step, window = int(first["global_steps"]), _window(first["ds_config"], ranks)
    counters = {
        "global_steps": step,
        "global_samples": int(first["global_samples"]),
        "micro_steps": step * window,
        "skipped_steps": int(first["skipped_steps"]),
        "gradient_accumulation_steps": window,
        "gradient_accumulation_steps_at_start": window,
        "global_grad_norm": None,
    }
    states: dict[str, Any] = {COUNTERS: counters}
    if scaler.get("dynamic"):
        states[Slot.GRAD_SCALER.value] = {n: scaler[n] for n in _SCALE if n in scaler}
    client = {name: value for name, value in first.items() if name not in _OF_ENGINE}
    return Tag(given, states, step, step * window, client)


def _read(path: Path, trusts: bool) -> Any:
    with torch.serialization.safe_globals(_CLASSES):
        return read_torch_file(path, trusts=trusts)


def _files(folder: Path, end: str) -> list[Path]:
    """The files of the ranks, in their order."""
    found = [(_RANK.search(path.name), path) for path in folder.glob(f"*{end}")]
    return [path for _, path in sorted((int(m[1]) if m else 0, path) for m, path in found)]


def _unrounded(
    folder: Path, weights: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor]:
    """The fp32 weights of stage 0, which have no names, by what they are in 16 bits.

    Those that are equal in 16 bits have the order of the module, if the rest of their group has.
    """
    types = {each.dtype for each in weights.values()}
    names: dict[Any, list[str]] = {}
    for name, each in weights.items():
        names.setdefault(_bits(each), []).append(name)
    found: dict[Any, list[tuple[int, Tensor]]] = {}
    is_ordered, order = True, [*weights]
    for number, group in enumerate(groups):
        bits = [next(filter(names.get, (_bits(p.to(t)) for t in types)), None) for p in group]
        known = [order.index(names[each][0]) for each in bits if each and len(names[each]) == 1]
        is_ordered &= known == sorted(known)
        for each, parameter in zip(bits, group, strict=True):
            found.setdefault(each, []).append((number, parameter))
    named: dict[str, Tensor] = {}
    for each, members in found.items():
        of_groups, exact = zip(*members, strict=True)
        mine, is_one = names.get(each, []), all(torch.equal(exact[0], other) for other in exact)
        in_order = is_ordered and len({*of_groups}) == 1 and len(exact) == len(mine)
        if not mine or not (is_one or in_order):
            what = f"equal in 16 bits: {', '.join(mine[:3])}" if mine else "not in the module"
            refuse(folder, f"stage 0 with fp32 weights that are {what}", "stage 1, 2 or 3")
        named |= zip(mine, exact[:1] * len(mine) if is_one else exact, strict=True)
    return named


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    content = tensor.reshape(-1).view(torch.uint8).numpy()
    return tensor.dtype, tensor.shape, xxhash.xxh3_128_digest(content.data)


def _window(config: Mapping[str, Any], ranks: int) -> int:
    """The micro-batches of a step."""
    known = config.get("gradient_accumulation_steps")
    if isinstance(known, int):
        return known
    whole, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(whole, int) and isinstance(micro, int):
        return whole // (micro * ranks)
    return 1


class _Partitions:
    """The partitions of all ranks.

    Args:
        zeros: the state of ZeRO's optimizer on each rank.
        shapes: of the parameters in each flat tensor, by name, in their order.
    """

    def __init__(self, zeros: Sequence[Any], shapes: Sequence[Mapping[str, torch.Size]]) -> None:
        self.zeros, self.shapes = zeros, shapes
        self.is_stage_3 = "fp32_flat_groups" in zeros[0]
        names = ("optimizer_state_dict", "fp32_flat_groups")
        others = ("base_optimizer_state", "single_partition_of_fp32_groups")
        self.base, self.flats = names if self.is_stage_3 else others

    def load(self, folder: Path, weights: dict[str, Any]) -> dict[str, Any]:
        """Adds the fp32 weights; gives the optimizer's ``state_dict`` as it is without ZeRO."""
        bases = [zero[self.base] for zero in self.zeros]
        if not isinstance(bases[0], Mapping):
            refuse(folder, "elastic_checkpoint, which leaves hyperparameters out", "one without it")
        groups, state, number = [], {}, 0
        for group in bases[0]["param_groups"]:
            members = []
            for flat in group["params"]:
                states = [base["state"].get(flat, {}) for base in bases]
                whole = self._cut([zero[self.flats][flat] for zero in self.zeros], flat)
                moments = {key: [each[key] for each in states] for key in states[0]}
                cut = {
                    key: dict(self._cut(values, flat)) if _is_flat(values[0]) else None
                    for key, values in moments.items()
                }
                for name, value in whole:
                    weights[name] = value
                    if moments:
                        state[number] = {
                            key: moments[key][0] if parts is None else parts[name]
                            for key, parts in cut.items()
                        }
                    members.append(number)
                    number += 1
            groups.append({**group, "params": members})
        return {"state": state, "param_groups": groups}

    def _cut(self, parts: Sequence[Tensor], flat: int) -> Iterator[tuple[str, Tensor]]:
        """The parameters, or a moment of each, of what the ranks have of a flat tensor."""
        every = self.zeros[0].get("param_alignment_paddings")
        paddings = every[flat] if every else [0] * len(self.shapes[flat])
        begin = 0
        for (name, shape), padding in zip(self.shapes[flat].items(), paddings, strict=True):
            numel = shape.numel()
            length = -(-numel // len(parts)) if self.is_stage_3 else numel
            found, offset = [], begin
            for part in parts:
                found.append(part[max(offset, 0) : max(offset + length, 0)])
                offset -= 0 if self.is_stage_3 else len(part)
            yield name, _joined(found)[:numel].view(shape)
            begin += length + padding


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of several; without a copy where one has all."""
    found = [part for part in parts if len(part)]
    return found[0] if len(found) == 1 else torch.cat([*parts])
