"""The parameters, buffers and extra state of a model, by names that do not depend on wrappers.

A parameter's name is found by walking the modules from the root and stepping over wrappers, never
by cutting substrings: a sub-module that the user called ``module`` keeps its name.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from resumekit.capture.nested_state import (
    Mismatch,
    describe,
    description_mismatches,
    fits,
    is_same,
    refuse,
    require_dict,
)
from resumekit.capture.stacking import StackedByRank
from resumekit.errors import ConfigurationError, DeclarationError
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.sharding import FlatPart, fill, is_sharded, local_part
from resumekit.serialization.tensors import is_subclass, parts_of
from resumekit.state import (
    Adopting,
    ComponentState,
    InPlace,
    Renamed,
    Slot,
    Stateful,
)

T = TypeVar("T")

# The class of a wrapper, and the attribute under which it registers what it wraps. By name, because
# importing torch._dynamo or FSDP only to ask isinstance costs seconds. torch 2.13.
_WRAPPED_ATTRIBUTE = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute that holds the wrapped module; None for a module that is no wrapper."""
    kind: Any = type(module)
    return _wrapped_attribute_of(kind)


@cache
def _wrapped_attribute_of(kind: Any) -> str | None:
    names = (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
    return next((_WRAPPED_ATTRIBUTE[name] for name in names if name in _WRAPPED_ATTRIBUTE), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module under all wrappers."""
    attribute = wrapped_attribute(module)
    while attribute is not None:
        module = module.get_submodule(attribute)
        attribute = wrapped_attribute(module)
    return module


def modules_in(root: nn.Module) -> list[nn.Module]:
    """A module and all below it, each one once, in no order of their own.

    As ``Module.modules()``, without a generator at each level: at a save the time counts.
    """
    found = {id(root): root}
    waiting = [root]
    while waiting:
        # torch 2.13 nn/modules/module.py Module._modules
        for each in waiting.pop()._modules.values():
            if each is not None and id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return list(found.values())


def clean_name(module: nn.Module, raw_name: str) -> str:
    """The wrapper-free name of a parameter, buffer or extra state.

    Args:
        module: the root that the name starts from, wrapped or not.
        raw_name: a dotted name as ``named_parameters`` or ``state_dict`` gives it, with or without
            the wrappers' attributes.
    """
    return _Cleaner(module).clean(raw_name)


class _Cleaner:
    """Cleans names that start from one root; looks at each module on their way once.

    Args:
        module: the root, wrapped or not. It must not change while names are cleaned.
    """

    def __init__(self, module: nn.Module) -> None:
        self._reached: dict[str, tuple[str, nn.Module | None]] = {"": ("", module)}

    def clean(self, raw_name: str) -> str:
        """The wrapper-free name."""
        return self._step(raw_name)[0]

    def _step(self, raw_name: str) -> tuple[str, nn.Module | None]:
        """The clean name, and the module of this name if it is one of a module."""
        above, _, part = raw_name.rpartition(".")
        reached = self._reached.get(above)
        if reached is None:
            reached = self._reached[above] = self._step(above)
        clean, here = reached
        # torch 2.13 nn/modules/module.py Module._modules; named_children() leaves shared ones out.
        while here is not None and (attribute := wrapped_attribute(here)) is not None:
            here = here._modules.get(attribute)
            if part == attribute:
                return clean, here
        return (f"{clean}.{part}" if clean else part), here and here._modules.get(part)


def by_clean_name(module: nn.Module, values: Mapping[str, T]) -> dict[str, T]:
    """Values of a module (parameters, buffers) by raw name, under their wrapper-free names."""
    names = clean_names(module, values)
    return {names[raw]: value for raw, value in values.items()}


def clean_names(module: nn.Module, raw_names: Iterable[str]) -> dict[str, str]:
    """Wrapper-free names by raw name.

    Args:
        module: the root, wrapped or not.
        raw_names: the names to clean.

    Raises:
        ConfigurationError: two raw names become one.
    """
    cleaner = _Cleaner(module)
    names = {raw: cleaner.clean(raw) for raw in raw_names}
    owner: dict[str, str] = {}
    for raw, clean in names.items():
        first = owner.setdefault(clean, raw)
        if first != raw:
            raise ConfigurationError(
                clean, found=f"both {first!r} and {raw!r}", expected="one tensor for one name"
            )
    return names


def parameter_names(modules: Mapping[str, nn.Module], parameters: Iterable[Tensor]) -> list[str]:
    """A name for each parameter that an optimizer holds, in the order given.

    The name is the FQN, or ``<module>.<FQN>`` where the parameters belong to several modules, or
    ``""`` for a parameter of no module.

    Args:
        modules: the modules by name; where two share a parameter, the first one names it.
        parameters: the parameters to name.
    """
    homes: dict[int, tuple[str, str]] = {}
    for home, module in modules.items():
        cleaner = _Cleaner(module)
        for raw, parameter in module.named_parameters():
            homes.setdefault(id(parameter), (home, cleaner.clean(raw)))
    found = [homes.get(id(parameter)) for parameter in parameters]
    is_shared = len({entry[0] for entry in found if entry}) > 1
    return [(".".join(entry) if is_shared else entry[1]) if entry else "" for entry in found]


def by_key(slot: Slot, given: Any) -> dict[str, Any]:
    """The objects of a slot by component key: ``slot`` for one, ``slot/<name>`` for named ones.

    Args:
        slot: the slot.
        given: what the user gave: an object, a mapping of name to object, or None.

    Raises:
        DeclarationError: a list (its objects could be restored in another order), or a name that
            cannot be part of a key, or an object without ``state_dict``.
    """
    if given is None:
        return {}
    key_of_slot = slot.value
    if isinstance(given, (list, tuple, set, frozenset)):
        raise DeclarationError(
            key_of_slot,
            found=f"a {type(given).__name__} of objects without names",
            expected="one object, or a dict of named ones",
            remedy=f'Pass {key_of_slot}={{"first": ..., "second": ...}}',
        )
    if isinstance(given, Mapping) and not isinstance(given, Stateful):
        found = {f"{key_of_slot}/{_checked(slot, name)}": value for name, value in given.items()}
    else:
        found = {key_of_slot: given}
    for key, value in found.items():
        if not isinstance(value, Stateful):
            raise DeclarationError(
                key,
                found=f"a {type(value).__name__}",
                expected="an object with state_dict and load_state_dict",
            )
    return found


def one_or_named(objects: Sequence[Any]) -> Any:
    """A framework's list as a slot takes it: None, the one object, or named ones."""
    if len(objects) < 2:
        return objects[0] if objects else None
    return by_class_and_ordinal(objects)


def by_class_and_ordinal(objects: Iterable[Any]) -> dict[str, Any]:
    """Names for objects that a framework keeps in a list: ``Adam-0``, ``Adam-1``, ``Linear-0``."""
    counts: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for each in objects:
        bare = unwrapped(each) if isinstance(each, nn.Module) else each
        kind = type(bare).__name__
        named[f"{kind}-{counts[kind]}"] = each
        counts[kind] += 1
    return named


def _checked(slot: Slot, name: Any) -> str:
    if isinstance(name, str) and name and "/" not in name:
        return name
    raise DeclarationError(
        slot.value, found=f"the name {name!r}", expected="a non-empty string without '/'"
    )


# ---------------------------------------------------------------- state of a module

# What torch 2.13 nn/modules/module.py appends to a module's name for get_extra_state.
_EXTRA_STATE = "_extra_state"
REMEDY = "Build the model as it was when the checkpoint was written"


# In the fingerprint of a 16-bit module whose weights are saved in fp32: its dtype, and the names of
# its own fp32 tensors.
TRAINED_IN = "trained_in"
IN_FP32 = "in_fp32"

# A file beside the weights of a sharded model: what PEFT calls each parameter of the adapter.
ADAPTER_NAMES = "adapter_names.json"

# Two more files cost more than to write so little again.
_MIN_FROZEN_BYTES = 4 << 20


class ModelState(Renamed, Adopting, InPlace):
    """The state of a module, independent of its wrappers now and when it was saved.

    Only what ``module.state_dict()`` holds is saved; for the rest see ``attribute_components``.

    Args:
        module: the model, wrapped or not.
        key: the component's key, for errors.
    """

    stacked: StackedByRank | None = None  # how it stores the parameters that FSDP2 does not shard

    def __init__(self, module: nn.Module, *, key: str = "model") -> None:
        self.module = module
        self.key = key

    def live_objects(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, not copies, by wrapper-free name; extra state as the module gives it.

        Raises:
            ConfigurationError: two tensors have one wrapper-free name.
        """
        return {**by_clean_name(self.module, self.module.state_dict()), **self._parts()}

    def state_and_copies(self) -> dict[str, Any]:
        """The state, with live copies of it that code may change, such as rounded weights.

        Not comparable between runs: copies may have padding.
        """
        return self.state_dict()

    def replicated_state(self) -> dict[str, Any]:
        """The parameters and the sharded buffers; other buffers may differ between ranks."""
        raw = dict(self.module.named_parameters(remove_duplicate=False))
        names, state = by_clean_name(self.module, raw), self.state_dict()
        return {n: value for n, value in state.items() if n in names or is_sharded(value)}

    def check_state_dict(self, state: Any) -> None:
        """Refuses other names, dtypes, shapes and ties, and live tensors without memory."""
        require_dict(self.key, state)
        live = self.state_dict()
        problems = description_mismatches(_described(state, live), _described(live, state))
        problems += _without_memory(state, live)
        if not problems:
            problems += tying_mismatches(state, live)
        refuse(self.key, problems, remedy=REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into the live tensor of that name; no parameter changes identity.

        Raises:
            StateMismatchError: the module rejects a name.
        """
        live = self.module.state_dict()
        names = clean_names(self.module, live)
        by_raw_name, parts = {}, self._parts()
        for raw, name in names.items():
            if self.stacked is not None and name in parts:
                fill(live[raw], self.stacked.tensor(state[name]))
            elif is_subclass(live[raw]):  # its own copy may round
                fill(live[raw], state[name])
            else:
                by_raw_name[raw] = _given(raw, state[name], live[raw])
        # Not strict: a module may leave names out of its own state_dict (adapters without their
        # base model do), and check_state_dict has compared the names with what it gives.
        outcome = self.module.load_state_dict(by_raw_name, strict=False)
        problems = [
            Mismatch(str(names.get(raw, raw)), "in the checkpoint", "a name that the module takes")
            for raw in outcome.unexpected_keys
            # bitsandbytes 0.50 nn/modules.py Linear4bit saves scales, which it makes by itself.
            if not (torch.is_tensor(live[raw]) and is_same(live[raw].cpu(), by_raw_name[raw].cpu()))
        ]
        refuse(self.key, problems, remedy=REMEDY)
        return ()

    def adopted(self, given: Any) -> Any:
        """The state, with tied tensors under each of their names: safetensors files have one."""
        given = self._with_base(given, live := self.state_dict())
        names = {address_of(live[name]): name for name in live if name in given}
        others = {name: names.get(address_of(each)) for name, each in live.items()}
        tied = {name: given[other] for name, other in others.items() if other is not None}
        return {**tied, **given}

    def _with_base(self, given: Any, live: Mapping[str, Any]) -> Any:
        """With what is not trained here, where only an adapter of PEFT was saved."""
        bare: Any = unwrapped(self.module)
        named = dict(self.module.named_parameters() if hasattr(bare, "peft_config") else ())
        named = {n: e for n, e in by_clean_name(self.module, named).items() if e.requires_grad}
        if not named or not given.keys().isdisjoint(named):
            return given
        # peft 0.21 utils/save_and_load.py get_peft_model_state_dict leaves this out of names.
        adapter = f".{bare.active_adapters[0]}"
        short = {n.replace(".modules_to_save", "").replace(adapter, "", 1): n for n in named}
        base = {name: each for name, each in live.items() if name not in named}
        return {**base, **{short.get(name, name): each for name, each in given.items()}}

    def live_tensors(self, state: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters and buffers, if the module loads them as ``nn.Module`` does."""
        is_ours = type(self).load_state_dict is ModelState.load_state_dict
        if not (is_ours and isinstance(state, Mapping) and _loads_plainly(self.module)):
            return
        raw = {
            **dict(self.module.named_parameters(remove_duplicate=False)),
            **dict(self.module.named_buffers(remove_duplicate=False)),
        }
        for name, live in by_clean_name(self.module, raw).items():
            if is_lazy(live) or is_sharded(live):
                continue
            if fits(live, state.get(name)):
                yield state[name], live

    def entries(self, state: Any) -> Mapping[str, Any] | None:
        """All of them."""
        return state if isinstance(state, Mapping) else None

    def first_rank_only(self) -> frozenset[str]:
        """The names of the unsharded buffers."""
        return frozenset(self.unsharded_buffers())

    def unsharded_buffers(self) -> dict[str, Tensor]:
        """The live persistent buffers that a replicated module has on each rank."""
        state = self.state_dict()
        names = by_clean_name(self.module, dict(self.module.named_buffers()))
        return {n: state[n] for n in names if n in state and not is_sharded(state[n])}

    def fingerprint(self) -> dict[str, Any]:
        """The number of parameters, trainable and in total."""
        parts = self._parts()
        sizes = [
            (parts.get(clean_name(self.module, raw), each).shape.numel(), each.requires_grad)
            for raw, each in self.module.named_parameters()
            if not is_lazy(each)
        ]
        return {
            "num_parameters": sum(size for size, _ in sizes),
            "num_trainable_parameters": sum(size for size, trains in sizes if trains),
        }

    def _parts(self) -> Mapping[str, FlatPart]:
        """This rank's part of each parameter that is stored sharded and is no DTensor, by name."""
        if self.stacked is None:
            return {}
        raw = dict(self.module.named_parameters(remove_duplicate=False))
        return self.stacked.parts(by_clean_name(self.module, raw))


def frozen_of(state: ComponentState) -> frozenset[str]:
    """Names of a model's parameters without gradients, whose file may be an earlier checkpoint's.

    A wrong name costs time and nothing else: a file is shared only if its bytes are the same.
    """
    if not isinstance(state, ModelState):
        return frozenset()
    frozen = frozen_parameters(state.module, state._parts())
    return frozenset(path.name for path, _ in leaves_of(frozen) if frozen)


def _loads_plainly(module: nn.Module) -> bool:
    """Whether a load copies each tensor into the live one of its name, and does nothing else."""
    # torch 2.13 nn/modules/module.py Module.load_state_dict calls all of these. What torch's own
    # modules override adds entries that old states lack.
    if torch.__future__.get_swap_module_params_on_conversion():
        return False
    kinds = {kind for each in module.modules() for kind in type(each).__mro__}
    overridden = (
        not kind.__module__.startswith("torch.nn.modules.")
        and not {"load_state_dict", "_load_from_state_dict"}.isdisjoint(vars(kind))
        for kind in kinds
    )
    hooked = (vars(each)["_load_state_dict_pre_hooks"] for each in module.modules())
    return not any(overridden) and not any(hooked)


def frozen_parameters(
    module: nn.Module, parts: Mapping[str, FlatPart] = MappingProxyType({})
) -> dict[str, nn.Parameter]:
    """The parameters without gradients, by clean name; empty where files of their own cost more.

    A sharded one counts with all its elements, so that all ranks decide alike.

    Args:
        module: that has them.
        parts: of parameters that are sharded without a DTensor, by clean name.
    """
    large = sum(
        (parts.get(clean_name(module, raw), each) if parts else each).shape.numel()
        * each.element_size()
        for raw, each in module.named_parameters()
        if not (each.requires_grad or is_lazy(each))
    )
    if large < _MIN_FROZEN_BYTES:
        return {}
    raw = dict(module.named_parameters(remove_duplicate=False))
    named = by_clean_name(module, raw)
    return {name: each for name, each in named.items() if not each.requires_grad}


def _given(name: str, value: Any, live: Any) -> Any:
    # torch copies tensors into the live ones, but passes extra state on without a copy.
    if name.endswith(_EXTRA_STATE):
        return copy.deepcopy(value)
    if is_sharded(live):  # from host memory, which torch's own copy of DTensors does not expect
        fill(live, value)
        return live
    return value


def _described(state: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, str]:
    """What is compared of each entry; alike for extra state, whose type only the module knows."""

    def described(value: Any, partner: Any) -> str:
        if is_lazy(value) or is_lazy(partner):
            return "lazy"  # without a shape yet, so only its name is compared
        is_tensor = isinstance(value, Tensor) or isinstance(partner, Tensor)
        return describe(value) if is_tensor or partner is None else "extra state"

    return {name: described(value, other.get(name)) for name, value in state.items()}


def _without_memory(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[Mismatch]:
    for name, value in live.items():
        then: Any = saved.get(name)
        are_tensors = isinstance(value, Tensor) and isinstance(then, Tensor) and not is_lazy(value)
        if are_tensors and value.is_meta and not then.is_meta:
            yield Mismatch(
                name,
                "the live tensor is on the meta device",
                "memory to load into",
                remedy="Call model.to_empty(device=...) before resuming",
            )


def tying_mismatches(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Names tied on one side only."""
    for first, second in _ties(live):
        # Meta tensors are alike: the values are checked again when they are read.
        if not _is_one(saved[first], saved[second]) and not is_same(
            local_part(saved[first]), local_part(saved[second])
        ):
            yield Mismatch(second, f"its own values, other than {first!r}", f"tied to {first!r}")
    for first, second in _ties(saved):
        if not _is_one(live[first], live[second]):
            yield Mismatch(second, f"tied to {first!r} in the checkpoint", "no tie, as in this run")


def _ties(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    owner: dict[object, str] = {}
    for name, value in state.items():
        memory = _memory_of(value)
        first = name if memory is None else owner.setdefault(memory, name)
        if first != name:
            yield first, name


def _memory_of(value: Any) -> object:
    """Equal for tied values; None for a value that cannot be tied."""
    is_tensor = isinstance(value, Tensor) and not is_lazy(value)
    if isinstance(value, FlatPart) or (is_tensor and value.is_meta):
        return id(value)  # a tie is the same object twice, also of empty and unread tensors
    address = address_of(value)
    return (value.device, address, value.shape, value.stride(), value.dtype) if address else None


def _is_one(tensor: Any, other: Any) -> bool:
    if isinstance(tensor, FlatPart):
        return tensor is other
    return address_of(tensor) == address_of(other)


def address_of(value: Any) -> int:
    """The address of a tensor's memory; 0 for a lazy, meta, sparse or empty one."""
    value = local_part(value)
    if is_subclass(value):
        return next(filter(None, map(address_of, parts_of(value).parts.values())), 0)
    if not isinstance(value, Tensor) or is_lazy(value) or value.layout != torch.strided:
        return 0
    return value.data_ptr() if value.numel() and not value.is_meta else 0
