"""The slots of one object, which hold its user state: attributes, flags, parameters, buffers.

Also the submodules of modules. Each value of a module is restored into the live module at its path.
A submodule that training adds has none: it is reported. Those of a ModuleList with nothing in their
``state_dict`` are values of the list: torchmetrics' MetricTracker appends one in each epoch (1.9
wrappers/tracker.py ``increment``).
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import CellType, FrameType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook  # torch 2.13: around a state_dict's hooks
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from resumekit.capture.model import unwrapped, wrapped_attribute
from resumekit.capture.user_state.exclusions import (
    KINDS_OF_TENSORS,
    attributes_set_by,
    registered,
    tensors_in_state_dict,
)
from resumekit.capture.user_state.value_types import (
    LIBRARIES,
    NAMED,
    Absent,
    Kind,
    class_of,
    is_user_object,
    kind_of,
    slots_of,
    word_set,
)
from resumekit.state import Renaming

# torch 2.13 nn/modules/module.py Module.__init__: the bookkeeping of every module.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

# deepspeed 0.19 runtime/zero/parameter_offload.py: what stage 3 sets in every module.
_OF_ZERO = word_set(
    """
    _external_params _original_parameters applied_pre_backward_ref_cnt ds_external_parameters
    ds_grads_remaining ds_id ds_inflight_param_registry ds_recompute_parameters
    """
)

# torchmetrics 1.9 metric.py Metric: `_defaults` names what it sums up; the rest follows from that.
_UPDATES = "_update_count"

# What wrappers keep next to those sums: torchmetrics 1.9 wrappers/minmax.py, wrappers/running.py.
_OF_WRAPPERS = frozenset({_UPDATES, "min_val", "max_val", "_num_vals_seen"})

# transformers 5.23 utils/output_capturing.py maybe_install_capturing_hooks: with it restored, a
# model adds no hooks and gives hidden states and attentions of the last layer at most.
_OF_TRANSFORMERS = frozenset({"_output_capturing_hooks_installed"})

_NOT_OWN = _OF_EVERY_MODULE | _OF_ZERO | _OF_TRANSFORMERS

# What an object of a class that is derived from a container holds next to its attributes.
_CONTAINERS = (list, dict, set)


class Role(str, Enum):
    """Where a slot's value is kept."""

    ATTRIBUTE = "attribute"
    ITEMS = "items"
    TRAINING = "training"
    REQUIRES_GRAD = "requires_grad"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    EXTRA_STATE = "extra_state"
    MODULES = "modules"  # of a ModuleList, by name: those without anything in their state_dict
    STATE = "state_dict"
    OPTIMIZER = "state"  # and param groups, of an optimizer that no component saves
    CELL = "cell"  # a variable of a closure
    DEFAULTS = "defaults"  # of the arguments of a function
    GLOBAL = "global"  # of a module; the owner is its dict


@dataclass(frozen=True)
class Holder:
    """An object whose attributes are user state.

    Args:
        value: the object.
        left_out: attributes of library code, or that are saved elsewhere.
        only: where it is known, which attributes are state.
        is_component: of a module: a component saves its ``state_dict``; flags, attributes and
            non-persistent buffers are left.
        data_only: leave out attributes with plain values only, as the counters of library code.
        has_generators: False where its random generators are saved elsewhere.
        attributes_only: of an object with ``state_dict``: that is empty or saved elsewhere.
        is_trusted: a state has what nothing can read; with ``attributes_only`` tensors and arrays.
        frame: a running function, whose variables these are.
        is_saved: of an optimizer or a scheduler: a component saves what torch keeps in it.
    """

    value: Any
    left_out: Collection[str] = ()
    only: Collection[str] | None = None
    is_component: bool = False
    data_only: bool = False
    has_generators: bool = True
    attributes_only: bool = False
    is_trusted: bool = False
    frame: FrameType | None = None
    is_saved: bool = False


class ValueSlot(NamedTuple):
    """One value of an object.

    Args:
        owner: the object.
        role: where the value is kept.
        name: of the attribute, parameter or buffer; empty where the role says it.
    """

    owner: Any
    role: Role
    name: str

    def get(self) -> Any:
        """The value. Raises AttributeError, KeyError or ValueError where there is none."""
        return _ACCESS[self.role][0](self.owner, self.name)

    def set(self, value: Any) -> None:
        """Writes the value; what other code does on assignment is not done."""
        _ACCESS[self.role][1](self.owner, self.name, value)

    def is_method(self, value: Any) -> bool:
        """Whether a value is the method that the owner has under this name without the attribute.

        Lightning leaves ``forward`` there, PEFT 0.21 peft_model.py ``generate`` one of a submodule.
        """
        is_method = isinstance(value, MethodType)
        found = is_method and inspect.getattr_static(type(self.owner), self.name, None)
        if found is None and isinstance(self.owner, nn.Module):
            with suppress(AttributeError):
                return bool(type(self.owner).__getattr__(self.owner, self.name) == value)
        return is_method and value.__self__ is self.owner and found is value.__func__

    def label(self, path: str) -> str:
        """The path of the value, below the path of its owner."""
        if self.role is Role.STATE:
            return path
        if self.role is Role.ITEMS:  # unlike the slot that holds the object itself
            return f"{path}[...]"
        if self.role is Role.REQUIRES_GRAD:
            return f"{path}.{self.name}.requires_grad"
        return f"{path}.{self.name or self.role.value}"


def _read_attribute(owner: Any, name: str) -> Any:
    attributes = getattr(owner, "__dict__", {})
    return attributes[name] if name in attributes else object.__getattribute__(owner, name)


def deleted_slots(
    paths: Iterable[str], objects: Mapping[str, Any]
) -> Iterator[tuple[str, str, ValueSlot]]:
    """Path, owner and slot of each attribute that an object had and has no more.

    Args:
        paths: of slots that are not there.
        objects: the objects that are, by path.
    """
    for path in paths:
        where, _, name = path.rpartition(".")
        owner = objects.get(where)
        is_there = is_user_object(owner) or kind_of(owner) is Kind.CLASS
        is_gone = is_there and name.isidentifier() and name not in attribute_names(owner)
        is_tensor = isinstance(owner, nn.Module) and any(
            name in registered(owner, f"{kind}s") for kind in KINDS_OF_TENSORS
        )
        if is_gone and not is_tensor:
            yield path, where, ValueSlot(owner, Role.ATTRIBUTE, name)


def _write_attribute(owner: Any, name: str, value: Any) -> None:
    if isinstance(value, Absent):
        if name in attribute_names(owner):
            (type if isinstance(owner, type) else object).__delattr__(owner, name)
    elif name in slots_of(class_of(owner)):
        object.__setattr__(owner, name, value)
    elif isinstance(owner, type):
        type.__setattr__(owner, name, value)
    else:
        vars(owner)[name] = value


def _read_items(owner: Any, _: str) -> Any:
    kind = next(each for each in _CONTAINERS if isinstance(owner, each))
    return kind(owner)


def _refill(owner: Any, _: str, items: Any) -> None:
    if isinstance(owner, list):
        list.__setitem__(owner, slice(None), items)
    else:
        kind: Any = dict if isinstance(owner, dict) else set
        kind.clear(owner)
        kind.update(owner, items)


def _write_requires_grad(owner: Any, name: str, value: bool) -> None:
    parameter = registered(owner, "parameters")[name]
    # Weights in 8 or 4 bits have no gradient, and reject even the same flag.
    if parameter.requires_grad != value:
        parameter.requires_grad_(value)


def modules_of_list(parent: nn.ModuleList, _: str) -> dict[str, nn.Module]:
    """The submodules of a list without anything in their ``state_dict``, which are its values."""
    found = registered(parent, "modules").items()
    numbered = {name: each for name, each in found if name.isdecimal() and each is not None}
    return {name: each for name, each in numbered.items() if not has_state(each)}


def has_state(module: nn.Module) -> bool:
    """Whether anything is in the ``state_dict`` of a module."""
    return any(has_extra_state(m) or [*tensors_in_state_dict(m)] for m in module.modules())


def has_extra_state(module: nn.Module) -> bool:
    """Whether it has a state of its own, next to parameters and buffers."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _write_modules(parent: nn.ModuleList, _: str, modules: Mapping[str, nn.Module]) -> None:
    children = registered(parent, "modules")
    for name in modules_of_list(parent, ""):
        del children[name]
    children.update(modules)
    for name in sorted(filter(str.isdecimal, children), key=int):  # the order of a list
        children[name] = children.pop(name)


def _write_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    if name not in registered(module, "buffers"):  # training has added it
        module.register_buffer(name, None, persistent=False)
    registered(module, "buffers")[name] = value


def _cell(function: Any, name: str) -> CellType:
    cell: CellType = function.__closure__[function.__code__.co_freevars.index(name)]
    return cell


def _write_defaults(function: Any, _: str, value: Any) -> None:
    function.__defaults__, function.__kwdefaults__ = value


def _read_optimizer(optimizer: Any, _: str) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """The state by the position of the parameters, and the hyperparameters of the groups."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = (each for group in groups for each in group["params"])
    found = {number: state[each] for number, each in enumerate(parameters) if each in state}
    return found, [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _write_optimizer(optimizer: Any, _: str, saved: Any) -> None:
    state, groups = saved
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    optimizer.state.clear()
    optimizer.state.update((parameters[number], each) for number, each in state.items())
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


# How the value of each role is read and written.
_ACCESS: dict[Role, tuple[Callable[[Any, str], Any], Callable[[Any, str, Any], Any]]] = {
    Role.ATTRIBUTE: (_read_attribute, _write_attribute),
    Role.ITEMS: (_read_items, _refill),
    Role.TRAINING: (lambda o, _: o.training, lambda o, _, value: setattr(o, "training", value)),
    Role.REQUIRES_GRAD: (
        lambda o, n: registered(o, "parameters")[n].requires_grad,
        _write_requires_grad,
    ),
    Role.PARAMETER: (
        lambda o, name: registered(o, "parameters")[name],
        lambda o, name, value: operator.setitem(registered(o, "parameters"), name, value),
    ),
    Role.BUFFER: (lambda o, name: registered(o, "buffers")[name], _write_buffer),
    Role.EXTRA_STATE: (lambda o, _: o.get_extra_state(), lambda o, _, v: o.set_extra_state(v)),
    Role.MODULES: (modules_of_list, _write_modules),
    Role.STATE: (lambda owner, _: owner, lambda *_: None),  # such an object has loaded its state
    Role.OPTIMIZER: (_read_optimizer, _write_optimizer),
    Role.CELL: (
        lambda function, name: _cell(function, name).cell_contents,
        lambda function, name, value: setattr(_cell(function, name), "cell_contents", value),
    ),
    Role.DEFAULTS: (lambda f, _: (f.__defaults__, f.__kwdefaults__), _write_defaults),
    Role.GLOBAL: (operator.getitem, operator.setitem),
}


def may_appear(owner: Any, name: str) -> bool:
    """Whether a checkpoint may add an attribute of this name to an object that lacks it."""
    if not name.isidentifier() or (name.startswith("__") and name.endswith("__")):
        return False
    if name in slots_of(class_of(owner)):
        return True
    if isinstance(owner, type):
        return not hasattr(owner, name)
    member = inspect.getattr_static(type(owner), name, None)
    # What a cached property has computed once stands in place of it.
    is_code = kind_of(member) in NAMED or isinstance(member, (classmethod, staticmethod))
    is_code = is_code or inspect.isdatadescriptor(member)
    if isinstance(owner, nn.Module):
        is_code = is_code or name in _OF_EVERY_MODULE
        is_code = is_code or any(name in registered(owner, w) for w in ("modules", "parameters"))
    return hasattr(owner, "__dict__") and not is_code


def contents(
    owner: Any, holder: Holder, *, in_component: bool, is_saved: bool
) -> Iterator[tuple[ValueSlot, Any]]:
    """The slots of an object with their values, submodules excepted.

    Args:
        owner: the object.
        holder: the root that it was reached from; its names count for the root itself.
        in_component: whether a component saves the ``state_dict`` of this module.
        is_saved: whether a component saves what torch keeps in this optimizer or scheduler.
    """
    kind = kind_of(owner)
    if kind is Kind.MODULE:
        yield from _of_module(owner, in_component=in_component)
    elif kind is Kind.FUNCTION:
        yield from _with_values(_slots_of_function(owner))
    elif kind is Kind.CLASS:
        yield from _of_class(owner)
    elif isinstance(owner, OF_TORCH):
        yield from _with_values(_slots_of_torch(owner, is_saved=is_saved))
    elif isinstance(owner, Enum):  # not what the module enum keeps in each member
        for name, value in vars(owner).items():
            if not _is_of_enum(name):
                yield ValueSlot(owner, Role.ATTRIBUTE, name), value
    elif owner is not holder.value and _is_simple(class_of(owner)):  # most objects
        for name, value in vars(owner).items():
            yield ValueSlot(owner, Role.ATTRIBUTE, name), value
    else:
        yield from _with_values(_slots_of_object(owner, holder))


def _with_values(slots: Iterable[ValueSlot]) -> Iterator[tuple[ValueSlot, Any]]:
    for slot in slots:
        try:
            yield slot, slot.get()
        except (AttributeError, KeyError, ValueError):
            continue  # it has none now


@functools.cache
def _is_simple(kind: Any) -> bool:
    """Whether the objects of a class keep all that they have in ``__dict__``."""
    return bool(kind.__dictoffset__) and not slots_of(kind) and not issubclass(kind, _CONTAINERS)


def _slots_of_object(owner: Any, holder: Holder) -> Iterator[ValueSlot]:
    if owner is holder.value and not holder.attributes_only and kind_of(owner) is Kind.STATEFUL:
        yield ValueSlot(owner, Role.STATE, "")
    if isinstance(owner, _CONTAINERS):
        yield ValueSlot(owner, Role.ITEMS, "")
    for name in attribute_names(owner):
        is_root = owner is holder.value
        is_asked = holder.only is None or name in holder.only
        if not is_root or (is_asked and name not in holder.left_out):
            yield ValueSlot(owner, Role.ATTRIBUTE, name)


def _slots_of_function(function: Any) -> Iterator[ValueSlot]:
    names = function.__code__.co_freevars
    yield from (ValueSlot(function, Role.CELL, name) for name in names if name != "__class__")
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if any(kind_of(each) is not Kind.SCALAR for each in defaults):
        yield ValueSlot(function, Role.DEFAULTS, "")
    yield from (
        ValueSlot(function, Role.ATTRIBUTE, n) for n in vars(function) if n != "__wrapped__"
    )


def _of_class(kind: type) -> Iterator[tuple[ValueSlot, Any]]:
    """The attributes of a class that are neither code nor bookkeeping."""
    if issubclass(kind, Enum):
        return
    for name, value in vars(kind).items():
        is_own = not (name.startswith("__") and name.endswith("__")) and name[:5] != "_abc_"
        if is_own and not (inspect.isroutine(value) or inspect.isdatadescriptor(value)):
            yield ValueSlot(kind, Role.ATTRIBUTE, name), value


def _is_of_enum(name: str) -> bool:
    """Whether the module ``enum`` reserves this name; the value of a member is the user's."""
    return name.startswith("_") and name.endswith("_") and name != "_value_"


# What torch keeps in these, their components save; the position of a loader is part of the data.
OF_TORCH = (Optimizer, LRScheduler, DataLoader)
_OF_LOADER = frozenset({"dataset", "sampler", "batch_sampler", "collate_fn", "generator"})


def _slots_of_torch(owner: Any, *, is_saved: bool) -> Iterator[ValueSlot]:
    of_torch = attributes_set_by(LIBRARIES, class_of(owner))
    if isinstance(owner, Optimizer):
        of_torch |= attributes_set_by(LIBRARIES, LRScheduler)  # it marks and wraps its optimizer
        if not is_saved:
            yield ValueSlot(owner, Role.OPTIMIZER, "")
    for name in attribute_names(owner):
        is_mine = name not in of_torch and not name.startswith("_optimizer_")
        if not is_mine and not is_saved:
            is_mine = isinstance(owner, LRScheduler) or name in _OF_LOADER
        if is_mine or name == "lr_lambdas":
            yield ValueSlot(owner, Role.ATTRIBUTE, name)


def attribute_names(owner: Any) -> list[str]:
    """The attributes that an object has now, in ``__dict__`` and in ``__slots__``."""
    found: list[str] = list(getattr(owner, "__dict__", ()))
    kind = class_of(owner)
    for name in slots_of(kind):
        descriptor = inspect.getattr_static(kind, name, None)
        if inspect.ismemberdescriptor(descriptor):
            try:
                descriptor.__get__(owner, kind)
            except AttributeError:
                continue  # not set yet
            found.append(name)
    return found


def _of_module(module: nn.Module, *, in_component: bool) -> Iterator[tuple[ValueSlot, Any]]:
    yield ValueSlot(module, Role.TRAINING, ""), module.training
    loose = registered(module, "non_persistent_buffers_set")
    for name, parameter in registered(module, "parameters").items():
        if parameter is not None:
            yield ValueSlot(module, Role.REQUIRES_GRAD, name), parameter.requires_grad
            if not in_component:
                yield ValueSlot(module, Role.PARAMETER, name), parameter
    for name, buffer in registered(module, "buffers").items():
        if name in loose or not (in_component or buffer is None):
            yield ValueSlot(module, Role.BUFFER, name), buffer
    if isinstance(module, nn.ModuleList):
        yield ValueSlot(module, Role.MODULES, ""), modules_of_list(module, "")
    if has_extra_state(module) and not in_component:
        yield from _with_values([ValueSlot(module, Role.EXTRA_STATE, "")])
    values = vars(module)
    for name in _names_in(values):
        yield ValueSlot(module, Role.ATTRIBUTE, name), values[name]


def _names_in(values: Mapping[str, Any]) -> list[str]:
    """The attributes of a module that are no bookkeeping."""
    names = [name for name in values if name not in _NOT_OWN]
    sums = values.get("_defaults")
    if isinstance(sums, dict) and _UPDATES in values:
        return [name for name in names if name in sums or name in _OF_WRAPPERS]
    return names


_HOOKS_OF_MODULES = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(owner: Any) -> Iterator[Any]:
    """What torch calls for a module, its parameters, an optimizer or a tensor."""
    if isinstance(owner, Tensor):
        tables = [getattr(owner, name, None) for name in _HOOKS_OF_TENSORS]
    elif isinstance(owner, nn.Module):
        for each in registered(owner, "parameters").values():
            if each is not None:
                yield from hooks_of(each)
        tables = [vars(owner).get(name) for name in _HOOKS_OF_MODULES]
    else:
        named = vars(owner).items() if isinstance(owner, Optimizer) else ()
        tables = [each for name, each in named if name.endswith("_hooks")]
    for hook in (hook for table in tables if table for hook in table.values()):
        yield hook.hook if isinstance(hook, _WrappedHook) else hook


def submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The direct submodules without their wrappers, by name."""
    for name, each in registered(module, "modules").items():
        if each is not None:
            yield name, unwrapped(each)


def without_wrappers(value: Any) -> Any:
    """A module inside its wrappers; any other object as it is."""
    is_wrapper = isinstance(value, nn.Module) and wrapped_attribute(value) is not None
    return unwrapped(value) if is_wrapper else value


# ---------------------------------------------------------------- paths

# In the path of a module that the checkpoint has and the run does not have.
_NOT_HERE = "<checkpoint>"


def is_below(path: str, names: Iterable[str]) -> bool:
    """Whether a path is that of a holder of one of these names, or leads through one."""
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in names)


def moved_state(
    state: Mapping[str, Any], holders: Iterable[str], renaming: Renaming
) -> dict[str, Any]:
    """A saved user state whose attributes have followed their modules.

    Args:
        state: of the component.
        holders: the names of the models in it.
        renaming: of the parameters in these models.
    """
    names = list(holders)

    def moved(path: str) -> str:
        holder = next((each for each in names if f"{path}.".startswith(f"{each}.")), None)
        if holder is None:
            return path
        below = path[len(holder) + 1 :]
        found = renaming.path(below)
        found = f"{_NOT_HERE}.{below}" if found is None else found
        return f"{holder}.{found}".removesuffix(".")

    return {
        **state,
        "slots": [[moved(entry[0]), *entry[1:]] for entry in state["slots"]],
        "first": {moved(path): digest for path, digest in state["first"].items()},
        "lost": [moved(path) for path in state["lost"]],
    }
