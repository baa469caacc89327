"""Overwrites all that a process holds: every tensor, array, number and text of the training.

What a save has copied must not change by it. Objects that write checkpoints, threads, files and
modules are left alone.
"""

from __future__ import annotations

import collections
import enum
import gc
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

_GARBAGE = 0xA5
_HARNESS = ("background_workloads.py", "overwriting.py")
_LEFT_ALONE = (type, types.ModuleType, types.CodeType, types.FrameType, enum.Enum, PurePath)
# By the module of a type: the checkpoint in flight and its thread need these.
_KEPT = (
    "_io",
    "_thread",
    "concurrent",
    "ctypes",
    "importlib",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "re",
    "resumekit.distributed",
    "resumekit.log",
    "resumekit.run.save",
    "resumekit.run.saving",
    "resumekit.storage",
    "socket",
    "threading",
    "typing",
    "torch._C",
    "torch._ops",
    "weakref",
)


def overwrite_everything(*roots: Any) -> None:
    """Overwrites every tensor, all random generators, and what can be reached.

    Args:
        *roots: objects to start from, beside the local variables of the training function.
    """
    gc.collect()
    for each in gc.get_objects():
        # Not isinstance(): it asks objects for their __class__, and some import modules then.
        if issubclass(type(each), torch.Tensor):
            _overwrite_tensor(each)
    random.seed(_GARBAGE)
    np.random.seed(_GARBAGE)
    torch.manual_seed(_GARBAGE)
    found = list(_reachable([*roots, *_locals_of_tests()]))
    attributes = {id(values): values for values in map(_attributes, found)}
    for each in found:
        if id(each) not in attributes:  # those are overwritten once, below
            _overwrite(each)
    for values in attributes.values():
        _overwrite_dict(values)


def _overwrite_tensor(tensor: torch.Tensor) -> None:
    if isinstance(tensor, (DTensor, FakeTensor)) or tensor.device.type == "meta":
        return  # its local tensor is an object of its own
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes():
        plain = torch.empty(0, dtype=torch.uint8)
        plain.set_(tensor.untyped_storage())
        plain.fill_(_GARBAGE)


def _locals_of_tests() -> Iterator[Any]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if "integration" in file.parts and file.name not in _HARNESS:
            yield from dict(frame.f_locals).values()
        frame = frame.f_back


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or not _may_change(each):
            continue
        seen[id(each)] = each
        waiting.extend(_parts(each))
    yield from seen.values()


def _may_change(each: Any) -> bool:
    kind = type(each)
    module = kind.__module__ or ""
    return not issubclass(kind, _LEFT_ALONE) and not any(
        module == name or module.startswith(f"{name}.") for name in _KEPT
    )


def _parts(each: Any) -> Iterable[Any]:
    if isinstance(each, types.FunctionType):  # its globals are a module's
        return [*(each.__closure__ or ()), *(each.__defaults__ or ())]
    return [*gc.get_referents(each), *_attributes(each).values()]


def _attributes(each: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(each, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _overwrite(each: Any) -> None:
    if isinstance(each, types.FunctionType):
        return
    for kind, overwrite in _BY_TYPE.items():
        if issubclass(type(each), kind):
            overwrite(each)
    for name in _slots(type(each)):
        value = getattr(each, name, None)
        if type(value) in _OTHER:
            object.__setattr__(each, name, _other(value))


def _slots(kind: type) -> Iterator[str]:
    if kind.__module__ == "builtins":
        return
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (name for name in names if not name.startswith("__"))


def _overwrite_dict(values: dict[Any, Any]) -> None:
    for key, value in list(values.items()):
        other = _other(value)
        if other is not value:
            dict.__setitem__(values, key, other)


def _overwrite_list(values: Any) -> None:
    for index, value in enumerate(values):
        values[index] = _other(value)


def _overwrite_set(values: set[Any]) -> None:
    values.add("garbage")


def _overwrite_bytes(values: bytearray) -> None:
    values[:] = bytes([_GARBAGE]) * len(values)


def _overwrite_array(values: Any) -> None:
    if values.dtype != object and values.flags.writeable:
        values[...] = np.frombuffer(bytes([_GARBAGE]) * values.itemsize, values.dtype)[0]


_BY_TYPE: dict[type, Callable[[Any], object]] = {
    dict: _overwrite_dict,
    list: _overwrite_list,
    collections.deque: _overwrite_list,
    set: _overwrite_set,
    bytearray: _overwrite_bytes,
    np.ndarray: _overwrite_array,
    random.Random: lambda generator: generator.seed(_GARBAGE),
    np.random.RandomState: lambda generator: generator.seed(_GARBAGE),
    np.random.Generator: lambda generator: generator.bit_generator.random_raw(1000),
    torch.Generator: lambda generator: generator.manual_seed(_GARBAGE),
}
_OTHER: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value + 1_000_003,
    float: lambda value: value + 12345.678,
    str: lambda value: f"{value}~",
    bytes: lambda value: value + b"~",
    type(None): lambda value: "garbage",
    tuple: lambda value: tuple(map(_other, value)),
}


def _other(value: Any) -> Any:
    """Another value of the same type; of an object, itself."""
    change = _OTHER.get(type(value))
    return value if change is None else change(value)
