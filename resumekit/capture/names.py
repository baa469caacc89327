"""Parameter names that do not depend on how a model is wrapped.

A name is found by walking the modules from the root and stepping over those that only wrap another,
never by cutting substrings: a sub-module that the user called ``module`` keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from resumekit.errors import ConfigurationError

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
    """The attribute that holds the wrapped module, or None when this is no wrapper."""
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


def clean_name(module: nn.Module, raw_name: str) -> str:
    """The wrapper-free name of a parameter, buffer or extra state.

    Args:
        module: the root that the name starts from, wrapped or not.
        raw_name: a dotted name as ``named_parameters`` or ``state_dict`` gives it. Some wrappers
            already leave their own part out there; both spellings are understood.
    """
    parts = raw_name.split(".")
    clean: list[str] = []
    here: nn.Module | None = module
    position = 0
    while here is not None and position < len(parts):
        attribute = wrapped_attribute(here)
        if attribute is not None:
            position += parts[position] == attribute
            here = here._modules.get(attribute)
            continue
        clean.append(parts[position])
        here = here._modules.get(parts[position])
        position += 1
    return ".".join(clean + parts[position:])


def clean_names(module: nn.Module, raw_names: Iterable[str] | None = None) -> dict[str, str]:
    """Wrapper-free names by raw name.

    Args:
        module: the root, wrapped or not.
        raw_names: the names to clean; by default those of every parameter and buffer.

    Raises:
        ConfigurationError: two raw names become one.
    """
    if raw_names is None:
        raw_names = _tensor_names(module)
    names = {raw: clean_name(module, raw) for raw in raw_names}
    owner: dict[str, str] = {}
    for raw, clean in names.items():
        first = owner.setdefault(clean, raw)
        if first != raw:
            raise ConfigurationError(
                clean, found=f"both {first!r} and {raw!r}", expected="one tensor for one name"
            )
    return names


def _tensor_names(module: nn.Module) -> Iterator[str]:
    for name, _ in module.named_parameters(remove_duplicate=False):
        yield name
    for name, _ in module.named_buffers(remove_duplicate=False):
        yield name


def parameter_names(modules: Mapping[str, nn.Module], parameters: Iterable[Tensor]) -> list[str]:
    """A name for each parameter that an optimizer holds, in the order given.

    A parameter is called by its FQN; where the parameters given belong to several modules, by
    ``<module>.<FQN>``. One that belongs to no module has the name ``""``.

    Args:
        modules: the modules by name; where two share a parameter, the first one names it.
        parameters: the parameters in question.
    """
    homes: dict[int, tuple[str, str]] = {}
    for home, module in modules.items():
        for raw, parameter in module.named_parameters():
            homes.setdefault(id(parameter), (home, clean_name(module, raw)))
    found = [homes.get(id(parameter)) for parameter in parameters]
    is_shared = len({entry[0] for entry in found if entry}) > 1
    return [(".".join(entry) if is_shared else entry[1]) if entry else "" for entry in found]
