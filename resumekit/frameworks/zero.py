"""ZeRO's partitions by parameter name: fp32 weights and moments, where each rank has them.

ZeRO lays the parameters of a group behind one another and cuts the whole into equal pieces (stages
1 and 2), or cuts each parameter (stage 3). Either way a rank has a stretch of some parameters, and
the optimizer steps on flat tensors of such stretches. Stored as stretches of named tensors they fit
any number of ranks, any stage, and a plain optimizer.

Relied on, deepspeed 0.19: ``_hp_mapping`` of a parameter (utils/tensor_fragment.py) and
``update_lp_params`` at stages 1 and 2 (runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py);
at stage 3 ``fp16_groups``, ``sub_group_to_group_id``, ``fp32_partitioned_groups_flat``
(runtime/zero/stage3.py), ``ds_tensor``, ``ds_shape``, ``ds_numel`` and ``partition_numel``
(runtime/zero/partition_parameters.py);
``fp16_groups``, ``fp32_groups`` (runtime/fp16/unfused_optimizer.py) in bf16 and fp16 without ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resumekit.capture import (
    IN_FP32,
    TRAINED_IN,
    FlatModelState,
    Mismatch,
    OptimizerState,
    Restorer,
    class_name,
    clean_name,
    describe,
    fits,
    hyperparameters,
    inherits_load,
    is_host_step,
    refuse,
)
from resumekit.requirements import require
from resumekit.serialization import WHOLE, FlatPart, local_part, part_like

require("deepspeed")

from deepspeed import comm  # noqa: E402
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # noqa: E402
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer  # noqa: E402
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402

_LOWER = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_PARTITIONING = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer)


@dataclass(frozen=True)
class Stretch:
    """What this rank has of a parameter that the optimizer trains.

    Args:
        shape: of the whole parameter.
        group: the number of its param group.
        flat: the tensor that the optimizer steps on in its place.
        offset: where in it this rank's elements are.
        begin: the first of them in the parameter.
        numel: how many there are; 0 where this rank has nothing of it.
        copies: as in ``FlatPart``.
        position: its name where it is in no module; DeepSpeed takes such ones without ZeRO alone.
    """

    shape: torch.Size
    group: int
    flat: Tensor
    offset: int
    begin: int
    numel: int
    copies: str | None = None
    position: str = ""

    def of(self, memory: Tensor) -> FlatPart:
        """The part of a tensor that is as long as ``flat``: the weights or a moment of them."""
        local = memory.detach().view(-1).narrow(0, self.offset, self.numel)
        return FlatPart(self.shape, self.begin, local, self.copies)


def is_by_name(engine: Any) -> bool:
    """Whether the engine's optimizer keeps what can be told apart by parameter and by element."""
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


def stretches(engine: Any) -> dict[str, Stretch]:
    """This rank's stretch of every parameter that is trained, by name, in the optimizer's order."""
    found = _trained(engine.optimizer)
    return {_name_of(engine, p, each): each for p, each in found}


def _trained(zero: Any) -> Iterator[tuple[Any, Stretch]]:
    if _cuts_parameters(zero):
        return _of_cut_parameters(zero)
    return _of_whole_parameters(zero) if _cuts_nothing(zero) else _of_cut_groups(zero)


def _name_of(engine: Any, parameter: Any, stretch: Stretch) -> str:
    raw = engine.param_names.get(parameter)
    return stretch.position if raw is None else clean_name(engine.module, raw)


def _cuts_parameters(zero: Any) -> bool:
    return isinstance(zero, DeepSpeedZeroOptimizer_Stage3)


def _cuts_nothing(zero: Any) -> bool:
    return isinstance(zero, FP16_UnfusedOptimizer)


def _of_whole_parameters(zero: Any) -> Iterator[tuple[Any, Stretch]]:
    for number, parameters in enumerate(zero.fp16_groups):
        pairs = zip(parameters, zero.fp32_groups[number], strict=True)
        for place, (parameter, weights) in enumerate(pairs):
            shape, numel, position = (
                parameter.shape,
                parameter.numel(),
                f"group{number}.param{place}",
            )
            stretch = Stretch(shape, number, weights, 0, 0, numel, copies=WHOLE, position=position)
            yield parameter, stretch


def _of_cut_groups(zero: Any) -> Iterator[tuple[Any, Stretch]]:
    groups = zero.bf16_groups if isinstance(zero, BF16_Optimizer) else zero.bit16_groups
    for number, parameters in enumerate(groups):
        (flat,) = zero.optimizer.param_groups[number]["params"]
        for parameter in parameters:
            place = parameter._hp_mapping
            if place is None:
                yield parameter, Stretch(parameter.shape, number, flat, 0, 0, 0)
                continue
            here, there = place.hp_fragment_address, place.lp_fragment_address
            yield (
                parameter,
                Stretch(parameter.shape, number, flat, here.start, there.start, here.numel),
            )


def _of_cut_parameters(zero: Any) -> Iterator[tuple[Any, Stretch]]:
    for number, parameters in enumerate(zero.fp16_groups):
        flat, offset = zero.fp32_partitioned_groups_flat[number], 0
        group = zero.sub_group_to_group_id[number]
        for parameter in parameters:
            begin, numel = _own_elements(parameter)
            yield parameter, Stretch(parameter.ds_shape, group, flat, offset, begin, numel)
            offset += parameter.partition_numel()


def _own_elements(parameter: Any) -> tuple[int, int]:
    """The first of this rank's elements of a parameter at stage 3, and their number."""
    size = parameter.partition_numel()
    begin = min(size * comm.get_rank(group=parameter.ds_process_group), parameter.ds_numel)
    return begin, min(size, parameter.ds_numel - begin)


class ZeroModelState(FlatModelState):
    """The module under ZeRO: what is trained, as the fp32 weights; everything else as it is.

    In bf16 and fp16 the module's own weights are those, rounded. Loading them is completed by
    ``after_resume``, which is collective.
    """

    def __init__(self, engine: Any, *, key: str = "model") -> None:
        self._engine = engine
        self._is_loaded = False
        super().__init__(engine.module, key=key)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into this rank's live memory; the ranks have not met yet."""
        if _cuts_parameters(self._engine.optimizer):
            # All parameters become placeholders. deepspeed 0.19 runtime/zero/stage3.py.
            self._engine.optimizer.checkpoint_event_prologue()
        super().load_state_dict(state)
        if _cuts_parameters(self._engine.optimizer):
            self._round_parts()
        self._is_loaded = True
        return ()

    def after_resume(self) -> tuple[str, ...]:
        """Makes the module's own weights of the fp32 ones. Collective."""
        if not self._is_loaded:
            return ()
        self._is_loaded = False
        zero = self._engine.optimizer
        if _cuts_parameters(zero):
            zero.checkpoint_event_epilogue()
        elif _cuts_nothing(zero):
            for parameter, each in _of_whole_parameters(zero):
                parameter.data.copy_(each.flat.data)
        else:
            zero.update_lp_params()
        return ()

    def fingerprint(self) -> dict[str, Any]:
        """As of a plain module; in 16 bits, which tensors are and which are not."""
        module, lower = self._engine.module, _LOWER.get(self._engine.get_data_types()[0])
        if lower is None:
            return super().fingerprint()
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        in_fp32 = [clean_name(module, raw) for raw, t in tensors if t.dtype == torch.float32]
        return {**super().fingerprint(), TRAINED_IN: lower, IN_FP32: in_fp32}

    def _round_parts(self) -> None:
        for parameter, each in _of_cut_parameters(self._engine.optimizer):
            parameter.ds_tensor.data.narrow(0, 0, each.numel).copy_(each.of(each.flat).local)

    def _parts(self) -> dict[str, FlatPart]:
        module, trained = self._engine.module, stretches(self._engine)
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
        """The values by parameter name, moments as live stretches.

        What parameters have in common under ZeRO, each gets by itself: without ZeRO it counts its
        steps in place.
        """
        found = stretches(self._engine)
        state = {}
        for name, each in found.items():
            values = self.optimizer.state.get(each.flat, {})
            if values:
                state[name] = {
                    key: each.of(value) if _is_moment(value, each.flat.shape) else _own(value)
                    for key, value in values.items()
                }
        groups = [
            {**hyperparameters(group), "params": names}
            for group, names in zip(self.optimizer.param_groups, self._names(), strict=True)
        ]
        return {
            "class": class_name(self.optimizer),
            "parameters": {n: describe(each.of(each.flat)) for n, each in found.items()},
            "state": state,
            "param_groups": groups,
            "unnamed_state": {},
            "other": {},
        }

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: as for a plain optimizer; or parameters that ZeRO steps as one had
                counts of steps of their own.
        """
        super().check_state_dict(state)
        refuse(
            self.key,
            list(self._uneven(state)),
            remedy='Pass exclude={"optimizer"} to start it afresh',
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Makes the live state that of the checkpoint, each rank its own part."""
        restore = Restorer()
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            for name, value in hyperparameters(saved).items():
                group[name] = restore(group.get(name), value)
        restored: dict[Tensor, dict[str, Any]] = {}
        for name, each in stretches(self._engine).items():
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

    def trained_parameters(self) -> list[Tensor]:
        """The parameters that the script knows, not their fp32 weights."""
        return [parameter for parameter, _ in _trained(self._engine.optimizer)]

    def named_parameters(self) -> dict[str, Tensor]:
        """The fp32 weights of the parameters that are not in the module."""
        found = stretches(self._engine)
        return {name: each.flat for name, each in found.items() if name == each.position}

    def pairs(self, state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
        """Each saved moment with the stretch of its parameter."""
        for name, each in stretches(self._engine).items():
            for key, value in state["state"].get(name, {}).items():
                if _is_moment(value, each.shape, key):
                    yield value, each.of(each.flat)

    def replicated_state(self) -> dict[str, Any]:
        """What must be alike on all ranks that hold it: the moments where nothing is cut."""
        given, found = self.state_dict()["state"], stretches(self._engine)
        return {"state": {name: v for name, v in given.items() if found[name].copies is not None}}

    def fingerprint(self) -> dict[str, Any]:
        """The class and, for each group, its size and hyperparameters."""
        return {
            "class": class_name(self.optimizer),
            "param_groups": [
                {"num_parameters": len(names), **hyperparameters(group)}
                for group, names in zip(self.optimizer.param_groups, self._names(), strict=True)
            ],
        }

    def _moment(self, each: Stretch, key: str, dtype: torch.dtype) -> Tensor:
        """Memory for a moment of all that a flat tensor holds: the live one where that fits."""
        live = self.optimizer.state.get(each.flat, {}).get(key)
        if isinstance(live, Tensor) and live.shape == each.flat.shape and live.dtype == dtype:
            return live
        return torch.zeros_like(each.flat, dtype=dtype, requires_grad=False)

    def _single(self, each: Stretch, key: str, value: Any) -> Any:
        """A value that all parameters in a flat tensor have in common, in the live one if it fits.

        Flat tensors do not share it: the optimizer counts steps in place.
        """
        live = self.optimizer.state.get(each.flat, {}).get(key)
        if fits(live, value):
            return live.copy_(value)
        is_on_host = is_host_step(key, self.optimizer.param_groups[each.group])
        return _own(value, torch.device("cpu") if is_on_host else each.flat.device)

    def _names(self) -> list[list[str]]:
        names: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for name, each in stretches(self._engine).items():
            names[each.group].append(name)
        return names

    def _uneven(self, state: Mapping[str, Any]) -> Iterator[Mismatch]:
        first: dict[Tensor, str] = {}
        for name, each in stretches(self._engine).items():
            other = first.setdefault(each.flat, name)
            values, partner = (state["state"].get(which, {}) for which in (name, other))
            if values.keys() != partner.keys() or not all(
                _is_moment(value, each.shape, key) or _alike(value, partner[key])
                for key, value in values.items()
            ):
                yield Mismatch(
                    name,
                    f"another count of steps than {other!r} has",
                    "one count for both, as ZeRO steps them together",
                )

    def _link(self) -> None:
        """Lets ``deepspeed.utils.safe_get_full_optimizer_state`` see what was loaded."""
        # deepspeed 0.19 runtime/zero/stage_1_and_2.py, bf16_optimizer.py: else at the next step.
        zero = self._engine.optimizer
        if hasattr(zero, "_hp_optimizer_states_linked"):
            zero._hp_optimizer_states_linked = False
            if self.optimizer.state:
                zero._lazy_init_hp_params_optimizer_state()


def _is_moment(value: Any, shape: torch.Size, key: str = "") -> bool:
    return isinstance(value, (Tensor, FlatPart)) and value.shape == shape and key != "step"


def _alike(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return bool(value == other)
    if value.is_meta or other.is_meta:
        return True  # checked again once the values are there
    return bool(torch.equal(value, other))


def _own(value: Any, device: torch.device | None = None) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
