"""Models under the first FSDP: each rank's stretches of the flattened parameters, where they lie.

``FullyShardedDataParallel`` lays the parameters of a wrapped module behind one another and cuts the
whole into equal pieces, without regard to rows. Its own ``state_dict`` gathers them, and is a
collective: a rank that fails before it leaves the others waiting. Here nothing is gathered.

Relied on, torch 2.13 distributed/fsdp/_flat_param.py: ``FlatParameter`` with ``_params``,
``_param_infos``, ``_shared_param_infos``, ``_shapes``, ``_shard_param_infos`` and ``_local_shard``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resumekit.capture.model import ModelState
from resumekit.capture.naming import clean_name, clean_names, wrapped_attribute
from resumekit.capture.restore import Mismatch, describe, name_mismatches, refuse
from resumekit.errors import DeclarationError, StateMismatchError
from resumekit.serialization import FlatPart, fill

# By name: importing it costs seconds, and a model that has one has loaded it. torch 2.13.
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_EXTRA_STATE = "_extra_state"
_REMEDY = "Build the model as it was when the checkpoint was written"


def flat_modules(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The sub-modules that the first FSDP wraps, by raw name."""
    for name, each in module.named_modules():
        if any(f"{kind.__module__}.{kind.__qualname__}" == _FSDP1 for kind in type(each).__mro__):
            yield name, each


def require_no_flat_parameters(key: str, module: Any) -> None:
    """Raises DeclarationError for an object with a module under the first FSDP."""
    for name, _ in flat_modules(module) if isinstance(module, nn.Module) else ():
        raise DeclarationError(
            f"{key}: {name}" if name else key,
            found="wrapped in FullyShardedDataParallel",
            expected="a module under fully_shard, DDP or tensor parallel, or a plain one",
            remedy="Use torch.distributed.fsdp.fully_shard",
        )


def model_state(module: nn.Module, *, key: str) -> ModelState:
    """The state of a module, under the first FSDP or not."""
    is_flat = any(True for _ in flat_modules(module))
    return FlatModelState(module, key=key) if is_flat else ModelState(module, key=key)


def flat_parts(key: str, module: nn.Module) -> dict[str, FlatPart]:
    """This rank's live stretch of every parameter under the first FSDP, by wrapper-free name.

    Names of one tied parameter have one and the same object.

    Args:
        key: of the component, for errors.
        module: the model.

    Raises:
        DeclarationError: the parameters are not of a kind that can be told apart here.
    """
    parts: dict[str, FlatPart] = {}
    for raw, fsdp in flat_modules(module):
        if fsdp._handle is not None:
            where = f"{key}: {raw}" if raw else key
            prefix = f"{raw}.{wrapped_attribute(fsdp)}" if raw else wrapped_attribute(fsdp)
            for name, part in _parts_of(where, fsdp._handle):
                parts[clean_name(module, f"{prefix}.{name}")] = part
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
        return  # each rank has them whole, in their own shape
    shard, copies = shard_of(flat).detach(), _holders(handle)
    first: dict[tuple[str, str], FlatPart] = {}
    for info, shape, held in zip(
        flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True
    ):
        begin, offset, count = 0, 0, 0
        if held.in_shard:
            begin, offset, count = (
                held.intra_param_start_idx,
                held.offset_in_shard,
                held.numel_in_shard,
            )
        part = FlatPart(shape, begin, shard[offset : offset + count], copies)
        first[info.module_name, info.param_name] = part
        yield _joined(info.module_name, info.param_name), part
    for info in flat._shared_param_infos:
        part = first[info.prim_module_name, info.prim_param_name]
        yield _joined(info.module_name, info.param_name), part


def shard_of(flat: Any) -> Tensor:
    """The memory that the optimizer steps on, also while the parameters are gathered."""
    shard: Tensor = getattr(flat, "_local_shard", flat.data)  # none before the first forward pass
    return shard


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _holders(handle: Any) -> str | None:
    """What the ranks have in common that hold the same shard; None where there is one of them."""
    if handle.world_size == dist.get_world_size():
        return None
    return f"shard {handle.rank} of {handle.world_size}"


class FlatModelState(ModelState):
    """The state of a module with parts under ``FullyShardedDataParallel``. No collectives.

    What hooks of ``state_dict`` would change is stored as the sub-modules give it themselves.

    Raises:
        DeclarationError: the parameters are not of a kind that can be told apart here.
    """

    def __init__(self, module: nn.Module, *, key: str = "model") -> None:
        super().__init__(module, key=key)
        self._parts()  # refuses now what no save could store

    def state_dict(self) -> dict[str, Any]:
        """Parameters as stretches, everything else as it is; live, by wrapper-free name."""
        parts = self._parts()
        raw: dict[str, Any] = {}
        for name, each in self.module.named_modules(remove_duplicate=False):
            if wrapped_attribute(each) is None:
                own: dict[str, Any] = {}
                each._save_to_state_dict(own, f"{name}." if name else "", True)
                raw.update(own)
        names = clean_names(self.module, raw)
        state = {names[n]: v.detach() if isinstance(v, Tensor) else v for n, v in raw.items()}
        return {**state, **parts}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: a name is missing, unexpected or likely renamed; a shape or a dtype
                differs, or two names are tied here and have two values.
        """
        if not isinstance(state, Mapping):
            raise StateMismatchError(
                self.key, found=f"{describe(state)} in the checkpoint", expected="a dict"
            )
        live = self.state_dict()
        said = {name: describe(value) for name, value in state.items()}
        here = {name: describe(value) for name, value in live.items()}
        problems = name_mismatches(said, here)
        problems += [
            Mismatch(name, f"{said[name]} in the checkpoint", f"{words}, as here")
            for name, words in here.items()
            if said.get(name, words) != words
        ]
        if not problems:
            problems += _untied(state, live)
        refuse(self.key, problems, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into the live memory of that name.

        Returns:
            What did not come back exactly: nothing.
        """
        for _, fsdp in flat_modules(self.module):
            if fsdp._handle is not None:
                free_gathered(fsdp._handle)
        for name, live in self.state_dict().items():
            if isinstance(live, (Tensor, FlatPart)):
                fill(live, state[name])
        for raw, each in self.module.named_modules():
            name = clean_name(self.module, f"{raw}.{_EXTRA_STATE}" if raw else _EXTRA_STATE)
            if wrapped_attribute(each) is None and name in state:
                each.set_extra_state(copy.deepcopy(state[name]))
        return ()

    def replicated_state(self) -> dict[str, Any]:
        """What must be alike on all ranks that hold it: parameters. Buffers may be each rank's."""
        own = self.first_rank_only()
        return {name: value for name, value in self.state_dict().items() if name not in own}

    def fingerprint(self) -> dict[str, Any]:
        """What describes the model: the numbers of its parameters, trainable and in all."""
        parts = self._parts()
        sizes: dict[int, tuple[int, bool]] = {}
        for raw, parameter in self.module.named_parameters():
            part = parts.get(clean_name(self.module, raw))
            count = parameter.numel() if part is None else part.shape.numel()
            sizes[id(parameter)] = (count, parameter.requires_grad)
        return {
            "num_parameters": sum(count for count, _ in sizes.values()),
            "num_trainable_parameters": sum(count for count, trains in sizes.values() if trains),
        }

    def _parts(self) -> dict[str, FlatPart]:
        """This rank's stretches by wrapper-free name."""
        return flat_parts(self.key, self.module)


def _untied(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Names that are one parameter here and have values of their own in the checkpoint."""
    first: dict[int, str] = {}
    for name, part in live.items():
        other = first.setdefault(id(part), name) if isinstance(part, FlatPart) else name
        if other != name and saved[name] is not saved[other] and not _alike(saved, name, other):
            yield Mismatch(name, f"its own values, other than {other!r}", f"tied to {other!r}")


def _alike(saved: Mapping[str, Any], name: str, other: str) -> bool:
    values = [
        each.local if isinstance(each, FlatPart) else each for each in (saved[name], saved[other])
    ]
    if values[0].is_meta or values[1].is_meta:
        return True  # checked again once the values are there
    return bool(torch.equal(*values))


def free_gathered(handle: Any) -> None:
    """Frees what a forward pass has left gathered: the next one would take it for the parameters.

    torch 2.13 distributed/fsdp/_flat_param.py, FlatParamHandle.needs_unshard; the outermost module
    keeps its parameters until a backward pass.
    """
    is_known = hasattr(handle.flat_param, "_full_param_padded")  # not before the first forward pass
    if handle.uses_sharded_strategy and is_known and not handle.needs_unshard():
        handle.reshard(free_unsharded_flat_param=True)
