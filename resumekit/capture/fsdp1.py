"""FSDP1 models and their optimizers: each rank's shard of the flat parameters. No collectives.

``FullyShardedDataParallel`` concatenates the parameters of a wrapped module and splits the result
evenly, regardless of rows. Its own ``state_dict`` gathers them, which is collective: a rank that
fails before it leaves the others waiting. Nothing is gathered here.

A rank that holds nothing of a parameter has no optimizer state for it, not even a step count. So
that all ranks have shards of one state, each describes its values (``outline``) and adds empty
shards for those that only other ranks have (``join``).

Relied on, torch 2.13 distributed/fsdp/_flat_param.py: ``FlatParameter`` with ``_params``,
``_param_infos``, ``_shared_param_infos``, ``_shapes``, ``_shard_param_infos`` and ``_local_shard``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resumekit.capture.model import (
    ModelState,
    by_clean_name,
    clean_name,
    tying_mismatches,
    wrapped_attribute,
)
from resumekit.capture.nested_state import (
    describe,
    leaves,
    refuse,
    require_dict,
    state_mismatches,
)
from resumekit.capture.optimizer import OptimizerState
from resumekit.errors import DeclarationError, UnsupportedValueError
from resumekit.serialization.sharding import FlatPart, fill, part_like

_WRAPPED = "_fsdp_wrapped_module"  # of FullyShardedDataParallel, as in naming.py
_EXTRA_STATE = "_extra_state"
_REMEDY = "Build the model as it was when the checkpoint was written"

Outline = dict[str, dict[str, Any]]


def flat_modules(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The sub-modules that FSDP1 wraps, by raw name."""
    for name, each in module.named_modules():
        if wrapped_attribute(each) == _WRAPPED:
            yield name, each


def require_no_flat_parameters(key: str, module: Any) -> None:
    """Raises DeclarationError for an object with a module under FSDP1."""
    for name, _ in flat_modules(module) if isinstance(module, nn.Module) else ():
        raise DeclarationError(
            f"{key}: {name}" if name else key,
            found="wrapped in FullyShardedDataParallel",
            expected="a module under fully_shard, DDP or tensor parallel, or a plain one",
            remedy="Use torch.distributed.fsdp.fully_shard",
        )


def model_state(module: nn.Module, *, key: str) -> ModelState:
    """The state of a module, under FSDP1 or not."""
    is_flat = any(True for _ in flat_modules(module))
    return FlatModelState(module, key=key) if is_flat else ModelState(module, key=key)


def flat_parts(key: str, module: nn.Module) -> dict[str, FlatPart]:
    """This rank's live shard of every FSDP1 parameter, by wrapper-free name.

    The names of a tied parameter have the same object.

    Args:
        key: of the component, for errors.
        module: the model.

    Raises:
        DeclarationError: the parameters have no names, or are tensor parallel.
    """
    parts: dict[str, FlatPart] = {}
    for raw, fsdp in flat_modules(module):
        if fsdp._handle is not None:
            where = f"{key}: {raw}" if raw else key
            for name, part in _parts_of(where, fsdp._handle):
                parts[clean_name(module, _joined(raw, _WRAPPED, name))] = part
    return parts


def _parts_of(where: str, handle: Any) -> Iterator[tuple[str, FlatPart]]:
    flat = handle.flat_param
    if flat._params is None:
        raise DeclarationError(
            where,
            found="wrapped in FullyShardedDataParallel with use_orig_params=False",
            expected="parameters that keep their names",
            remedy="Pass use_orig_params=True, or use torch.distributed.fsdp.fully_shard",
        )
    if any(extension is not None for extension in flat._param_extensions):
        raise DeclarationError(
            where,
            found="tensor parallel parameters in FullyShardedDataParallel",
            expected="FullyShardedDataParallel alone",
            remedy="Use torch.distributed.fsdp.fully_shard with tensor parallel",
        )
    if not handle.uses_sharded_strategy:
        return  # not sharded: each rank has every parameter in its own shape
    shard, copies = _local_shard(flat).detach(), None
    if handle.world_size != dist.get_world_size():  # several ranks hold it
        copies = f"shard {handle.rank} of {handle.world_size}"
    first: dict[tuple[str, str], FlatPart] = {}
    for info, shape, local in zip(
        flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True
    ):
        begin, elements = 0, shard[:0]
        if local.in_shard:
            begin = local.intra_param_start_idx
            elements = shard.narrow(0, local.offset_in_shard, local.numel_in_shard)
        part = FlatPart(shape, begin, elements, copies)
        first[info.module_name, info.param_name] = part
        yield _joined(info.module_name, info.param_name), part
    for info in flat._shared_param_infos:
        part = first[info.prim_module_name, info.prim_param_name]
        yield _joined(info.module_name, info.param_name), part


def _local_shard(flat: Any) -> Tensor:
    """The memory that the optimizer updates, also while the parameters are gathered."""
    shard: Tensor = getattr(flat, "_local_shard", flat.data)  # none before the first forward pass
    return shard


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class FlatModelState(ModelState):
    """The state of a module with sub-modules under FSDP1. ``state_dict`` hooks are not called.

    Raises:
        DeclarationError: the parameters have no names, or are tensor parallel.
    """

    def __init__(self, module: nn.Module, *, key: str = "model") -> None:
        super().__init__(module, key=key)
        self._parts()  # refuses early what cannot be saved

    def state_dict(self) -> dict[str, Any]:
        """Parameters as shards, everything else as the modules give it; live, by clean name."""
        raw: dict[str, Any] = {}
        for name, each in self.module.named_modules(remove_duplicate=False):
            if wrapped_attribute(each) is None:
                each._save_to_state_dict(raw, f"{name}." if name else "", True)
        state = by_clean_name(self.module, raw)
        live = {n: v.detach() if isinstance(v, Tensor) else v for n, v in state.items()}
        return {**live, **self._parts()}

    def check_state_dict(self, state: Any) -> None:
        """Refuses other names, dtypes, shapes and ties."""
        require_dict(self.key, state)
        live = self.state_dict()
        problems = state_mismatches(state, live) or list(tying_mismatches(state, live))
        refuse(self.key, problems, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into the live memory of that name."""
        for _, fsdp in flat_modules(self.module):
            if fsdp._handle is not None:
                free_gathered(fsdp._handle)
        for name, live in self.state_dict().items():
            if isinstance(live, (Tensor, FlatPart)):
                fill(live, state[name])
        for raw, each in self.module.named_modules():
            name = clean_name(self.module, _joined(raw, _EXTRA_STATE))
            if wrapped_attribute(each) is None and name in state:
                each.set_extra_state(copy.deepcopy(state[name]))
        return ()

    def replicated_state(self) -> dict[str, Any]:
        """The parameters: ranks may have different buffers."""
        buffers = self.first_rank_only()
        return {name: value for name, value in self.state_dict().items() if name not in buffers}

    def _parts(self) -> dict[str, FlatPart]:
        """This rank's shards by wrapper-free name."""
        return flat_parts(self.key, self.module)


def free_gathered(handle: Any) -> None:
    """Frees gathered parameters: the next forward pass would use them instead of the shards.

    torch 2.13 distributed/fsdp/_flat_param.py, FlatParamHandle.needs_unshard; the outermost module
    keeps its parameters gathered until a backward pass.
    """
    is_known = hasattr(handle.flat_param, "_full_param_padded")  # not before the first forward pass
    if handle.uses_sharded_strategy and is_known and not handle.needs_unshard():
        handle.reshard(free_unsharded_flat_param=True)


@dataclass(frozen=True)
class OutlinedMoment:
    """Stands in an outline for a value that has the parameter's shape."""

    dtype: torch.dtype


class FlatOptimizerState(OptimizerState):
    """The state of an optimizer of FSDP1 parameters."""

    _joined: Outline | None = None

    def outline(self) -> Outline:
        """Plain values, and ``OutlinedMoment`` for sharded ones, of each FSDP1 parameter."""
        parts = self._parts()
        return {
            fqn: {
                name: OutlinedMoment(value.dtype) if isinstance(value, FlatPart) else value
                for name, value in values.items()
            }
            for fqn, values in self._rank_state()["state"].items()
            if fqn in parts
        }

    def join(self, outlines: Sequence[Outline]) -> None:
        """Merges the outlines for the next ``state_dict``."""
        joined: Outline = {}
        for each in outlines:
            for fqn, values in each.items():
                joined.setdefault(fqn, values)
        self._joined = joined

    def state_dict(self) -> dict[str, Any]:
        """The live values, moments as shards.

        The first call after ``join`` adds empty shards for what only other ranks have.
        """
        given = self._rank_state()
        joined, self._joined = self._joined, None
        if "opaque" in given or joined is None:
            return given
        parts, state = self._parts(), given["state"]
        for fqn, values in joined.items():
            if fqn in parts and fqn not in state:
                state[fqn] = {
                    name: parts[fqn].like(torch.empty(0, dtype=value.dtype))
                    if isinstance(value, OutlinedMoment)
                    else value
                    for name, value in values.items()
                }
        order = [name for group in given["param_groups"] for name in group["params"]]
        given["state"] = {fqn: state[fqn] for fqn in order if fqn in state}
        return given

    def replicated_state(self) -> dict[str, Any]:
        """The moments of replicated shards and of unsharded parameters."""
        parts, given = self._parts(), self._rank_state()
        if "opaque" in given:
            return given
        return {
            "state": {
                fqn: values
                for fqn, values in given["state"].items()
                if fqn not in parts or parts[fqn].copies is not None
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores the state of the parameters of which this rank holds elements."""
        if "opaque" in state:
            return super().load_state_dict(state)
        parts = self._parts()
        local = {
            fqn: {name: _local(name, value, parts.get(fqn)) for name, value in values.items()}
            for fqn, values in state["state"].items()
            if fqn not in parts or parts[fqn].local.numel()
        }
        return super().load_state_dict({**state, "state": local})

    def _rank_state(self) -> dict[str, Any]:
        """The state of this rank, moments as shards."""
        given = super().state_dict()
        parts = self._parts()
        for fqn, values in given.get("state", {}).items():
            if fqn in parts:
                given["state"][fqn] = {
                    name: self._as_part(fqn, name, value, parts[fqn])
                    for name, value in values.items()
                }
        return given

    def _as_part(self, fqn: str, name: str, value: Any, part: FlatPart) -> Any:
        is_single = all(not isinstance(each, Tensor) or not each.dim() for each in leaves(value))
        if name == "step" or is_single:
            return value
        if not isinstance(value, Tensor) or value.shape != part.local.shape:
            raise UnsupportedValueError(
                f"{self.key}: {fqn}.{name}",
                found=f"{describe(value)} for a shard of {part.local.numel()} elements",
                expected="moments of the parameter's shape, or single numbers",
                remedy="Use torch.distributed.fsdp.fully_shard with this optimizer",
            )
        return part.like(value)

    def _parts(self) -> dict[str, FlatPart]:
        """The shards by the names of this optimizer's parameters."""
        found: dict[str, FlatPart] = {}
        several = len(self.modules) > 1
        for home, module in self.modules.items():
            for name, part in flat_parts(home, module).items():
                found.setdefault(name, part)
                if several:
                    found.setdefault(f"{home}.{name}", part)
        return found


def _local(name: str, value: Any, part: FlatPart | None) -> Any:
    mine = value if name == "step" else part_like(part, value)
    return mine.local if isinstance(mine, FlatPart) else mine
