"""ZeRO's partitions by parameter name: fp32 weights and moments, where each rank has them.

ZeRO concatenates the parameters of a group and cuts the whole into equal partitions (stages 1 and
2), or partitions each parameter (stage 3). Either way a rank has a shard of some parameters, and
the optimizer steps on flat tensors of such shards. Stored as shards of named tensors they fit any
number of ranks, any stage, and a plain optimizer. ``_private.py`` lists what DeepSpeed does not
document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resumekit.capture.fsdp1 import FlatModelState
from resumekit.capture.model import IN_FP32, TRAINED_IN, clean_name
from resumekit.capture.nested_state import Mismatch, fits, is_same, refuse
from resumekit.capture.optimizer import OptimizerState, inherits_load, is_host_step, restore_groups
from resumekit.frameworks.deepspeed._private import (
    FRAGMENT,
    IS_LINKED,
    LINK,
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    FP16_UnfusedOptimizer,
    comm,
)
from resumekit.serialization.sharding import WHOLE, FlatPart, local_part, part_like
from resumekit.state import AfterResume

_LOWER = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_PARTITIONING = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer)


@dataclass(frozen=True)
class Shard:
    """What this rank has of a parameter that the optimizer trains.

    Args:
        shape: of the whole parameter.
        group: the number of its param group.
        flat: the tensor that the optimizer steps on instead.
        offset: where in it this rank's elements are.
        begin: the first of them in the parameter.
        numel: how many there are; 0 where this rank has nothing of it.
        copies: as in ``FlatPart``.
        fallback_name: of a parameter that is in no module, which only works without ZeRO.
    """

    shape: torch.Size
    group: int
    flat: Tensor
    offset: int
    begin: int
    numel: int
    copies: str | None = None
    fallback_name: str = ""

    def of(self, memory: Tensor) -> FlatPart:
        """The part of a tensor that is as long as ``flat``: the weights or a moment of them."""
        local = memory.detach().view(-1).narrow(0, self.offset, self.numel)
        return FlatPart(self.shape, self.begin, local, self.copies)


def is_by_name(engine: Any) -> bool:
    """Whether the optimizer's state can be saved by parameter name and element."""
    zero = engine.optimizer
    inner = getattr(zero, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or not inherits_load(inner):
        return False
    if any(group.get("use_muon") for group in inner.param_groups):
        return False
    if type(zero) is FP16_UnfusedOptimizer:  # bf16 and fp16 without ZeRO
        row_by_row = all(each.is_contiguous() for group in zero.fp32_groups for each in group)
        return row_by_row and not zero.fused_lamb_legacy
    return (
        type(zero) in _PARTITIONING
        and not engine.zero_quantized_nontrainable_weights()
        and comm.get_world_size(group=zero.dp_process_group) == comm.get_world_size()
    )


def shards(engine: Any) -> dict[str, Shard]:
    """This rank's shard of every parameter that is trained, by name, in the optimizer's order."""
    return {_name_of(engine, p, each): each for p, each in _trained(engine.optimizer)}


def _trained(zero: Any) -> Iterator[tuple[Any, Shard]]:
    if _partitions_parameters(zero):
        return _shards_of_parameters(zero)
    return _whole_parameters(zero) if _keeps_whole(zero) else _shards_of_groups(zero)


def _name_of(engine: Any, parameter: Any, shard: Shard) -> str:
    raw = engine.param_names.get(parameter)
    return shard.fallback_name if raw is None else clean_name(engine.module, raw)


def _partitions_parameters(zero: Any) -> bool:
    return isinstance(zero, DeepSpeedZeroOptimizer_Stage3)


def _keeps_whole(zero: Any) -> bool:
    return isinstance(zero, FP16_UnfusedOptimizer)


def _whole_parameters(zero: Any) -> Iterator[tuple[Any, Shard]]:
    for number, parameters in enumerate(zero.fp16_groups):
        pairs = zip(parameters, zero.fp32_groups[number], strict=True)
        for index, (parameter, weights) in enumerate(pairs):
            shape, numel = parameter.shape, parameter.numel()
            name = f"group{number}.param{index}"
            yield parameter, Shard(shape, number, weights, 0, 0, numel, WHOLE, name)


def _shards_of_groups(zero: Any) -> Iterator[tuple[Any, Shard]]:
    groups = zero.bf16_groups if isinstance(zero, BF16_Optimizer) else zero.bit16_groups
    for number, parameters in enumerate(groups):
        (flat,) = zero.optimizer.param_groups[number]["params"]
        for parameter in parameters:
            fragment = FRAGMENT.of(parameter)
            if fragment is None:
                yield parameter, Shard(parameter.shape, number, flat, 0, 0, 0)
                continue
            here, begin = fragment.hp_fragment_address, fragment.lp_fragment_address.start
            yield parameter, Shard(parameter.shape, number, flat, here.start, begin, here.numel)


def _shards_of_parameters(zero: Any) -> Iterator[tuple[Any, Shard]]:
    for number, parameters in enumerate(zero.fp16_groups):
        flat, offset = zero.fp32_partitioned_groups_flat[number], 0
        group = zero.sub_group_to_group_id[number]
        for parameter in parameters:
            begin, numel = _own_elements(parameter)
            yield parameter, Shard(parameter.ds_shape, group, flat, offset, begin, numel)
            offset += parameter.partition_numel()


def _own_elements(parameter: Any) -> tuple[int, int]:
    """The first of this rank's elements of a parameter at stage 3, and their number."""
    size = parameter.partition_numel()
    begin = min(size * comm.get_rank(group=parameter.ds_process_group), parameter.ds_numel)
    return begin, min(size, parameter.ds_numel - begin)


class ZeroModelState(FlatModelState, AfterResume):
    """The module under ZeRO: trained parameters as fp32 weights, everything else as it is.

    In bf16 and fp16 the module's own weights are the rounded fp32 ones. ``after_resume``, which is
    collective, completes the load.
    """

    def __init__(self, engine: Any, *, key: str = "model") -> None:
        self._engine = engine
        self._is_loaded = False
        super().__init__(engine.module, key=key)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into this rank's live memory; without collectives."""
        zero = self._engine.optimizer
        if _partitions_parameters(zero):
            zero.checkpoint_event_prologue()  # all parameters become placeholders
        super().load_state_dict(state)
        if _partitions_parameters(zero):
            for parameter, each in _shards_of_parameters(zero):
                rounded = parameter.ds_tensor.data.narrow(0, 0, each.numel)
                rounded.copy_(each.of(each.flat).local)
        self._is_loaded = True
        return ()

    def after_resume(self) -> tuple[str, ...]:
        """Makes the module's own weights of the fp32 ones. Collective."""
        if not self._is_loaded:
            return ()
        self._is_loaded = False
        zero = self._engine.optimizer
        if _partitions_parameters(zero):
            zero.checkpoint_event_epilogue()
        elif _keeps_whole(zero):
            for parameter, each in _whole_parameters(zero):
                parameter.data.copy_(each.flat.data)
        else:
            zero.update_lp_params()
        return ()

    def state_and_copies(self) -> dict[str, Any]:
        """The state, and the module's weights of this rank, which may be rounded.

        At stage 3 this rank's partitions: a forward pass gathers the others, or frees them.
        """
        raw = self.module.named_parameters()
        partitions = {name: getattr(each, "ds_tensor", each).data for name, each in raw}
        return {"state": self.state_dict(), "partitions": partitions}

    def fingerprint(self) -> dict[str, Any]:
        """As of a plain module; in bf16 and fp16 also which tensors stay in fp32."""
        module, lower = self._engine.module, _LOWER.get(self._engine.get_data_types()[0])
        if lower is None:
            return super().fingerprint()
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        in_fp32 = [clean_name(module, raw) for raw, t in tensors if t.dtype == torch.float32]
        return {**super().fingerprint(), TRAINED_IN: lower, IN_FP32: in_fp32}

    def _parts(self) -> dict[str, FlatPart]:
        module, trained = self._engine.module, shards(self._engine)
        parts: dict[int, FlatPart] = {}
        found: dict[str, FlatPart] = {}
        for raw, parameter in module.named_parameters(remove_duplicate=False):
            name = clean_name(module, raw)
            if id(parameter) in parts:  # tied: one part for all its names
                found[name] = parts[id(parameter)]
            elif name in trained:
                found[name] = trained[name].of(trained[name].flat)
            elif hasattr(parameter, "ds_tensor"):
                begin, numel = _own_elements(parameter)
                local = parameter.ds_tensor.data.narrow(0, 0, numel)
                found[name] = FlatPart(parameter.ds_shape, begin, local)
            if name in found:
                parts[id(parameter)] = found[name]
        return found


class ZeroOptimizerState(OptimizerState):
    """The state of the optimizer inside ZeRO, as it would be without ZeRO. No collectives."""

    def __init__(self, engine: Any, *, key: str = "optimizer") -> None:
        super().__init__(engine.optimizer.optimizer, {"model": engine.module}, key=key)
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """The values by parameter name, moments as live shards.

        A value that the parameters of a flat tensor share is given to each: a plain optimizer
        counts the steps of each parameter in place.
        """
        found = shards(self._engine)
        state = {}
        for name, each in found.items():
            values = self.optimizer.state.get(each.flat, {})
            if values:
                state[name] = {
                    key: each.of(value) if _is_moment(value, each.flat.shape) else _copied(value)
                    for key, value in values.items()
                }
        groups = self.optimizer.param_groups
        return self._in_layout(self._named_groups(), groups, state, unnamed={}, other={})

    def adopted(self, given: Any) -> dict[str, Any]:
        """The state of the optimizer without ZeRO by name, by the position of a parameter."""
        named = self._named_groups()
        groups = given.get("param_groups") if isinstance(given, dict) else None
        then = [len(group["params"]) for group in groups or ()]
        self.require_sizes(then, [len(pairs) for pairs in named])
        state = {
            name: given["state"].get(position, {})
            for pairs, group in zip(named, groups or (), strict=True)
            for (name, _), position in zip(pairs, group["params"], strict=True)
        }
        state = {name: values for name, values in state.items() if values}
        return self._in_layout(named, groups or (), state, unnamed={}, other={})

    def check_state_dict(self, state: Any) -> None:
        """As of a plain optimizer; parameters that ZeRO steps together need equal step counts."""
        super().check_state_dict(state)
        refuse(
            self.key,
            list(self._uneven(state)),
            remedy=f"Pass exclude={{{self.key!r}}} to start it afresh",
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies this rank's shard into the live state."""
        restore_groups(self.optimizer, state["param_groups"])
        restored: dict[Tensor, dict[str, Any]] = {}
        for name, each in shards(self._engine).items():
            values = restored.setdefault(each.flat, {})
            for key, value in state["state"].get(name, {}).items():
                if _is_moment(value, each.shape, key):
                    if key not in values:
                        values[key] = self._moment(each, key, value.dtype)
                    target = each.of(values[key])
                    target.local.copy_(local_part(part_like(target, value)))
                elif key not in values:
                    values[key] = self._single(each, key, value)
        restored = {flat: values for flat, values in restored.items() if values}
        self.optimizer.state.clear()
        self.optimizer.state.update(restored)
        self._link()
        return ()

    def named_parameters(self) -> dict[str, Tensor]:
        """The fp32 weights of the parameters that are not in the module."""
        found = shards(self._engine)
        return {name: each.flat for name, each in found.items() if name == each.fallback_name}

    def replicated_state(self) -> dict[str, Any]:
        """The moments that are not partitioned."""
        given, found = self.state_dict()["state"], shards(self._engine)
        return {"state": {name: v for name, v in given.items() if found[name].copies is not None}}

    def _moment(self, each: Shard, key: str, dtype: torch.dtype) -> Tensor:
        """The memory of a moment as long as a flat tensor: the live one where it fits."""
        live = self.optimizer.state.get(each.flat, {}).get(key)
        if isinstance(live, Tensor) and live.shape == each.flat.shape and live.dtype == dtype:
            return live
        return torch.zeros_like(each.flat, dtype=dtype, requires_grad=False)

    def _single(self, each: Shard, key: str, value: Any) -> Any:
        """A value that all parameters of a flat tensor share, in the live one where it fits.

        Flat tensors do not share it with each other: the optimizer counts steps in place.
        """
        live = self.optimizer.state.get(each.flat, {}).get(key)
        if fits(live, value):
            return live.copy_(value)
        is_on_host = is_host_step(key, self.optimizer.param_groups[each.group])
        return _copied(value, torch.device("cpu") if is_on_host else each.flat.device)

    def _named_groups(self) -> list[list[tuple[str, Tensor]]]:
        named: list[list[tuple[str, Tensor]]] = [[] for _ in self.optimizer.param_groups]
        for name, each in shards(self._engine).items():
            named[each.group].append((name, each.flat))
        return named

    def _parts(self) -> dict[str, FlatPart]:
        return {name: each.of(each.flat) for name, each in shards(self._engine).items()}

    def _uneven(self, state: Mapping[str, Any]) -> Iterator[Mismatch]:
        first: dict[Tensor, str] = {}
        for name, each in shards(self._engine).items():
            other = first.setdefault(each.flat, name)
            values, partner = (state["state"].get(which, {}) for which in (name, other))
            if values.keys() != partner.keys() or not all(
                _is_moment(value, each.shape, key) or is_same(value, partner[key])
                for key, value in values.items()
            ):
                yield Mismatch(
                    name,
                    f"another count of steps than {other!r} has",
                    "one count for both, as ZeRO steps them together",
                )

    def _link(self) -> None:
        """Lets ``deepspeed.utils.safe_get_full_optimizer_state`` see what was loaded."""
        zero = self._engine.optimizer
        if not _partitions_parameters(zero) and not _keeps_whole(zero):
            IS_LINKED.write(zero, False)
            if self.optimizer.state:
                LINK.of(zero)()


def _is_moment(value: Any, shape: torch.Size, key: str = "") -> bool:
    return isinstance(value, (Tensor, FlatPart)) and value.shape == shape and key != "step"


def _copied(value: Any, device: torch.device | None = None) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
