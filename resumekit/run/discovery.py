"""Finds models, optimizers, schedulers, scalers and averages in the variables of a loop."""

from __future__ import annotations

import argparse
import functools
import sys
import textwrap
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resumekit.capture.model import by_key, unwrapped
from resumekit.capture.slots import slot_of
from resumekit.capture.user_state.value_types import is_library, is_user_object
from resumekit.distributed import World
from resumekit.errors import ConfigurationError, InvalidStateError, StateMismatchError
from resumekit.live.frames import find_frames
from resumekit.run.report import Reporter
from resumekit.run.resuming.finder import Found
from resumekit.run.steps_taken import inner_optimizers
from resumekit.state import Slot, StateComponent, check_state

# From a variable: e.g. a method, its object, a dict in it, a model in that.
_MAX_DEPTH = 6
_MAX_OBJECTS = 20_000
_MANY_ITEMS = 100  # data, as a rule
_CONTAINERS = (dict, list, tuple, deque)
_PLAIN = (str, bytes, int, float, complex, Tensor, type(None), types.ModuleType)
# Classes of the standard library that hold the user's objects as attributes.
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_WITH_PARTS = (Optimizer, LRScheduler)  # what they hold is a part of them
# torch 2.13 nn/modules/module.py Module: what a module registers is a part of it.
_REGISTERED = frozenset({"_modules", "_parameters", "_buffers"})

# The objects of each slot by the path from a variable, e.g. ``self.nets.generator``.
Objects = dict[Slot, dict[str, Any]]

_SLOTS = (Slot.MODEL, Slot.OPTIMIZER, Slot.LR_SCHEDULER, Slot.GRAD_SCALER, Slot.EMA)


class Discovery:
    """The components of the objects that a loop uses: those that were passed, and all others.

    Args:
        owner: the Checkpointer, which the functions of the user refer to.
        given: what was passed, by slot; None for a slot that is searched for.
        make: makes the components of one object or a dict of named ones for each slot.
        left_out: objects that are saved otherwise.
        transient: names of variables and attributes that are not saved.
    """

    def __init__(
        self,
        owner: Any,
        given: Mapping[Slot, Any],
        make: Callable[..., Sequence[StateComponent]],
        *,
        left_out: Iterable[Any],
        transient: Collection[str],
    ) -> None:
        self._owner = ref(owner)
        self._given = {slot: each for slot, each in given.items() if each is not None}
        self._make = make
        self._left_out = tuple(left_out)
        self._transient = transient
        self._found: Objects = {}
        self._made: Sequence[StateComponent] = ()

    def find(self, world: World, reporter: Reporter) -> Sequence[StateComponent]:
        """Searches the variables of the functions that are running. Collective.

        Args:
            world: the ranks.
            reporter: logs what is found.

        Raises:
            ConfigurationError: neither a model nor an optimizer was passed or found.
        """
        world.everywhere(self._find)
        found = (f"{slot.value} ({', '.join(each)})" for slot, each in self._found.items())
        if self._found:
            reporter.log(f"found {', '.join(found)}")
        return self._made

    def _find(self) -> None:
        variables = _variables_of_loop(self._owner())
        given = {slot: [*by_key(slot, each).values()] for slot, each in self._given.items()}
        found = find_objects(variables, given, self._left_out, self._transient)
        _require_training(found, given, variables)
        self._found = found
        self._made = self._components()

    def renamed(self, found: Found | None, reporter: Reporter) -> Sequence[StateComponent]:
        """The components, where a checkpoint may have other names of the same objects.

        Variables may be renamed: an object is the same if its class and the names and shapes of
        its parameters are, and no other one fits.

        Args:
            found: the checkpoint.
            reporter: logs the names.
        """
        saved = {} if found is None or found.as_given else found.states
        for slot, objects in self._found.items():  # models first: they name optimizers' parameters
            components = {each.key: each for each in self._made}
            names = _saved_names(f"{slot.value}/", components, saved)
            if names:
                self._found[slot] = {names.get(name, name): each for name, each in objects.items()}
                self._made = self._components()
            for new, old in names.items():
                reporter.log(f"{slot.value}/{old} continues as {new}")
        return self._made

    def _components(self) -> Sequence[StateComponent]:
        found = {slot: _as_slot(objects) for slot, objects in self._found.items()}
        every = {**found, **self._given}
        return self._make(**{slot.value: every.get(slot) for slot in _SLOTS})


def find_objects(
    variables: Mapping[str, Any],
    given: Mapping[Slot, Iterable[Any]],
    left_out: Iterable[Any] = (),
    transient: Collection[str] = (),
) -> Objects:
    """The objects of a training that variables reach, for the slots that were not given.

    Args:
        variables: by name.
        given: the objects of the slots that were passed.
        left_out: further objects that are not to be found.
        transient: names, or paths, that are not to be found.
    """
    known = {id(each) for each in (*left_out, *(o for every in given.values() for o in every))}
    reached: Objects = {slot: {} for slot in _SLOTS}
    for path, value in _walk(variables):
        slot = slot_of(value)
        is_left_out = id(value) in known or {path, path.rpartition(".")[2]} & {*transient}
        if slot is not None and not is_left_out:
            reached[slot][path] = value
    optimizers = _without_parts(reached[Slot.OPTIMIZER], inner_optimizers)
    used = [*given.get(Slot.OPTIMIZER, optimizers.values())]
    used += [inner for each in used for inner in inner_optimizers(each)]
    schedulers = {
        path: each
        for path, each in reached[Slot.LR_SCHEDULER].items()
        if any(getattr(each, "optimizer", None) is optimizer for optimizer in used)
    }
    found = {
        Slot.MODEL: _trained_models(reached[Slot.MODEL], used),
        Slot.OPTIMIZER: optimizers,
        Slot.LR_SCHEDULER: _without_parts(schedulers, _parts_of_scheduler),
        Slot.GRAD_SCALER: {p: s for p, s in reached[Slot.GRAD_SCALER].items() if s.is_enabled()},
        Slot.EMA: reached[Slot.EMA],
    }
    return {
        slot: {_shortest(path, objects): each for path, each in objects.items()}
        for slot, objects in found.items()
        if objects and slot not in given
    }


def _require_training(
    found: Objects, given: Mapping[Slot, Any], looked_at: Mapping[str, Any]
) -> None:
    if given.keys() & {Slot.MODEL, Slot.OPTIMIZER} or Slot.OPTIMIZER in found:
        return
    names = textwrap.shorten(", ".join(looked_at), 100, placeholder=", ...") or "no variables"
    raise ConfigurationError(
        "optimizer",
        found=f"none was passed, and none is in the variables of the loop ({names})",
        expected="the optimizer that trains the model",
        remedy="Make it before the first call of batches() or epochs(), or pass optimizer=...; one "
        "that the loop makes, or none: pass model=... and call step()",
    )


def _as_slot(objects: Mapping[str, Any]) -> Any:
    return next(iter(objects.values()), None) if len(objects) < 2 else dict(objects)


def _saved_names(
    prefix: str, components: Mapping[str, StateComponent], saved: Mapping[str, Any]
) -> dict[str, str]:
    """The name in the checkpoint of each renamed object of a slot, by its name in this run."""
    new = [key for key in components if key.startswith(prefix) and key not in saved]
    old = [key for key in saved if key.startswith(prefix) and key not in components]
    fits = {key: [each for each in old if _fits(components[key], saved[each])] for key in new}
    taken = [each for every in fits.values() for each in every]
    return {
        key.removeprefix(prefix): every[0].removeprefix(prefix)
        for key, every in fits.items()
        if len(every) == 1 and taken.count(every[0]) == 1
    }


def _fits(component: StateComponent, state: Any) -> bool:
    try:
        check_state(component, state)
    except (InvalidStateError, StateMismatchError):
        return False
    return True


# ---------------------------------------------------------------- what belongs together


def _trained_models(modules: Mapping[str, nn.Module], optimizers: Iterable[Any]) -> dict[str, Any]:
    """The modules with parameters of the optimizers, each once, by the outermost one.

    A wrapper (DDP, ``torch.compile``) holds its module, so that it is the outermost one.
    """
    trained = {
        id(parameter)
        for each in optimizers
        for group in getattr(each, "param_groups", ())
        for parameter in group["params"]
    }
    models = {
        path: each
        for path, each in modules.items()
        if any(id(parameter) in trained for parameter in each.parameters())
    }
    outermost = _without_parts(models, nn.Module.modules)
    # Of two wrappers around one module DDP has state of its own.
    order = sorted(outermost.items(), key=lambda o: not isinstance(o[1], DistributedDataParallel))
    first: dict[int, str] = {}
    for path, each in order:
        first.setdefault(id(unwrapped(each)), path)
    return {path: each for path, each in outermost.items() if path in first.values()}


def _without_parts(objects: Mapping[str, Any], parts_of: Any) -> dict[str, Any]:
    """Without those that are a part of another one."""
    parts = {id(p) for each in objects.values() for p in parts_of(each) if p is not each}
    return {path: each for path, each in objects.items() if id(each) not in parts}


def _parts_of_scheduler(scheduler: Any) -> list[Any]:
    # torch 2.13 optim/lr_scheduler.py SequentialLR, ChainedScheduler.
    parts = list(getattr(scheduler, "_schedulers", ()))
    return [*parts, *(inner for each in parts for inner in _parts_of_scheduler(each))]


def _shortest(path: str, paths: Iterable[str]) -> str:
    others = [f".{each}" for each in paths if each != path]
    parts = path.replace("/", "|").split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[-count:])
        if not parts[-count].isdigit() and not any(o.endswith(f".{name}") for o in others):
            return name
    return ".".join(parts)


# ---------------------------------------------------------------- what variables reach


def _variables_of_loop(owner: Any) -> dict[str, Any]:
    """The variables of the functions that run the loop, the innermost function's first."""
    found: dict[str, Any] = {}
    for each in find_frames(owner, sys._getframe(1)):
        bound, scope = each.bound_variables(), each.frame.f_globals
        is_module = each.code.co_name == "<module>"
        names = each.code.co_names if is_module else bound  # a module loads some
        values = [(name, bound[name]) for name in names if name in bound]
        for name, value in (*values, *_loaded_globals(each.code, scope)):
            if found.setdefault(name, value) is not value:
                found.setdefault(f"{each.code.co_name}.{name}", value)
    return found


def _walk(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Paths and values, each value once, those near to a variable first; long lists last."""
    waiting = deque((name, value, 0) for name, value in variables.items())
    late: deque[tuple[str, Any, int]] = deque()
    seen: dict[int, Any] = {}  # by id; alive, so that no id is used again
    while (waiting or late) and len(seen) < _MAX_OBJECTS:
        path, value, depth = (waiting or late).popleft()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if depth < _MAX_DEPTH:
            is_long = isinstance(value, _CONTAINERS) and len(value) > _MANY_ITEMS
            parts = islice(_parts(path, value), _MAX_OBJECTS)
            (late if is_long else waiting).extend((name, each, depth + 1) for name, each in parts)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a value refers to; no code of the user runs."""
    if isinstance(value, dict):
        for number, (key, each) in enumerate(dict.items(value)):
            yield f"{path}.{key if isinstance(key, str) and key else number}", each
    elif isinstance(value, _CONTAINERS):
        yield from ((f"{path}.{number}", each) for number, each in enumerate(value))
    elif isinstance(value, functools.partial):
        yield path, value.func
        yield from _parts(path, [*value.args, value.keywords])
    elif isinstance(value, types.MethodType):
        yield from ((path, value.__self__), (path, value.__func__))
    elif isinstance(value, _NAMESPACES):
        yield from _attributes(path, value)
    elif isinstance(value, (types.FunctionType, type)):
        if not is_library(value):
            yield from _parts_of_code(path, value)
    elif not isinstance(value, _WITH_PARTS):
        yield from _parts_of_object(path, value)


def _parts_of_object(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    is_of_user = not is_library(type(value))
    if is_of_user or is_user_object(value):  # an agent or a trainer of a library has a model
        yield from _attributes(path, value)
    if is_of_user:
        yield path, type(value)


def _parts_of_code(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, type):
        yield from ((f"{path}.{name}", each) for name, each in vars(value).items())
        yield from ((path, each) for each in value.__bases__)
    else:
        yield from _loaded_globals(value.__code__, value.__globals__)
        yield from _closure(value)
        yield from _defaults(value)


def _attributes(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    with suppress(AttributeError):  # without __dict__; __getattr__ of the user does not run
        for name, each in object.__getattribute__(value, "__dict__").items():
            if name not in _REGISTERED:
                yield f"{path}.{name}", each
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__":
                with suppress(AttributeError):  # a name in __slots__ that is not set
                    yield f"{path}.{name}", member.__get__(value)


def _loaded_globals(code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals that a function loads, and those that the functions inside it load."""
    yield from ((name, scope[name]) for name in code.co_names if name in scope)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _loaded_globals(inner, scope)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(names[len(names) - len(values) :], values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
