"""Names of parameters that do not depend on wrappers, and names of the objects in a slot.

A parameter's name is found by walking the modules from the root and stepping over wrappers, never
by cutting substrings: a sub-module that the user called ``module`` keeps its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn

from resumekit.errors import ConfigurationError, DeclarationError
from resumekit.state import Slot, Stateful

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
