"""What objects of the user's keep in their attributes: averages, sums, counters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from resumekit.capture.devices import device_of, made_on, off_host
from resumekit.capture.generator import GENERATOR_KINDS, generator_state, set_generator_state
from resumekit.capture.inplace import Restorer
from resumekit.capture.mismatch import require_fields
from resumekit.capture.names import unwrapped
from resumekit.contract import Stateful
from resumekit.errors import StateMismatchError
from resumekit.layout import WorldChange
from resumekit.sharding import local_part

# Of as many bytes as a tensor's elements.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LARGE_BYTES = 2**20

_PLAIN = (bool, int, float, str, bytes, type(None))


class HeldState:
    """The state of several objects that were not written to be saved.

    Of an object with ``state_dict`` and ``load_state_dict`` that is its state. Of any other one it
    is what its attributes hold: modules and objects with a state, private random generators,
    tensors and containers of them; beside those, the numbers that changed since this was built, for
    they count along. A number that never changed is a setting, and stays that of the script. Of an
    object that holds nothing of the kind nothing is kept.

    Args:
        holders: the objects by name.
        key: the component's key, for errors.
        foreign: gives what is not theirs, as a model or an optimizer that they refer to; what
            shares memory with it is left out as well.
        left_out: of some of the objects, the attributes that are others' as well. Their modules
            and large tensors count only once they change: what stays as it was made, as a teacher
            or the samples, is no state.
    """

    def __init__(
        self,
        holders: Mapping[str, Any],
        *,
        key: str,
        foreign: Callable[[], Iterable[Any]],
        left_out: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self._holders = dict(holders)
        self._foreign = foreign
        self._left_out = dict(left_out)
        self._as_made = {name: _heavy(holders[name], left_out[name]) for name in left_out}
        self._settings = {name: _numbers(holder) for name, holder in holders.items()}
        self._pending: dict[str, Any] = {}
        self.key = key

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies, by name of the object and of the attribute."""
        if self._pending:
            return dict(self._pending)
        foreign = _Foreign(self._foreign())
        states: dict[str, Any] = {}
        for name, holder in self._holders.items():
            if isinstance(holder, Stateful):
                states[name] = {"own": holder.state_dict()}
                continue
            held = dict(_held(holder, foreign, self._left_out.get(name, ())))
            for attribute in self._unchanged(name, held):
                del held[attribute]
            if held:
                data = {n: v for n, v in held.items() if _is_data(v)}
                states[name] = {
                    "objects": {n: v.state_dict() for n, v in held.items() if _is_stateful(v)},
                    "values": data | self._counters(name),
                    "generators": {n: generator_state(v) for n, v in held.items() if _draws(v)},
                    "off_host": off_host(data, _tensors_of),
                }
        return states

    def _unchanged(self, name: str, held: Mapping[str, Any]) -> list[str]:
        made = self._as_made.get(name, {})
        for attribute in [each for each in made if each in held]:
            if _checksums(held[attribute]) != made[attribute]:
                del made[attribute]  # from now on it is state, without a look
        return [each for each in made if each in held]

    def _counters(self, name: str) -> dict[str, Any]:
        settings = self._settings[name]
        others = self._left_out.get(name, ())
        return {
            n: value
            for n, value in _numbers(self._holders[name]).items()
            if n not in others and (n not in settings or settings[n] != value)
        }

    def names(self) -> set[str]:
        """The attributes that are state just now, ``holder.attribute``."""
        foreign = _Foreign(self._foreign())
        found: set[str] = set()
        for name, holder in self._holders.items():
            held = dict(_held(holder, foreign, self._left_out.get(name, ())))
            if held:
                found.update(f"{name}.{attribute}" for attribute in (*held, *self._counters(name)))
        return found

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be kept; changes nothing.

        Raises:
            StateMismatchError: it is no state of such objects.
        """
        require_fields(
            self.key, state, dict.fromkeys(state if isinstance(state, dict) else (), dict)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the state until ``put_back``: the objects may make their attributes first.

        Returns:
            Which objects are not there any more.
        """
        self._pending = {name: each for name, each in state.items() if name in self._holders}
        gone = ", ".join(name for name in state if name not in self._holders)
        return (f"{gone}: not in this run, what it held is left out",) if gone else ()

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Any]], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What the objects of one former rank held."""
        return dict(states[change.model_rank]), ()

    def put_back(self) -> None:
        """Gives every object what it held, once.

        Raises:
            StateMismatchError: an object that had a state is not there.
        """
        pending, self._pending = self._pending, {}
        device = device_of(each for each in self._foreign() if isinstance(each, nn.Module))
        for name, state in pending.items():
            holder, restore = self._holders[name], Restorer()
            if "own" in state:
                holder.load_state_dict(restore(None, state["own"]))
                continue
            generators = state.get("generators", {})
            for attribute in (*state["objects"], *generators):
                live = getattr(holder, attribute, None)
                if not (_draws(live) if attribute in generators else isinstance(live, Stateful)):
                    raise StateMismatchError(
                        f"{self.key}: {name}.{attribute}",
                        found=f"a {type(live).__name__}",
                        expected="the object whose state the checkpoint has",
                        remedy="Make it in __init__ or when the training begins",
                    )
            for attribute, saved in state["objects"].items():
                live = getattr(holder, attribute)
                live.load_state_dict(restore(None, saved))
            for attribute, saved in generators.items():
                set_generator_state(getattr(holder, attribute), restore(None, saved))
            for attribute, saved in state["values"].items():
                live = getattr(holder, attribute, None)
                made = made_on(device if attribute in state.get("off_host", ()) else None)
                setattr(holder, attribute, restore(live, saved, made))


class _Foreign:
    """Objects of others, and the memory of their tensors."""

    def __init__(self, objects: Iterable[Any]) -> None:
        given = [each for each in objects if each is not None]
        self._ids = {id(each) for each in given}
        modules = [each for each in given if isinstance(each, nn.Module)]
        self._memory = {place for module in modules for place in map(_place, _tensors_of(module))}

    def __contains__(self, value: Any) -> bool:
        if id(value) in self._ids:
            return True
        return any(_place(tensor) in self._memory for tensor in _tensors_of(value))


def _held(holder: Any, foreign: _Foreign, left_out: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The attributes that are state, by name."""
    for name, value in getattr(holder, "__dict__", {}).items():
        is_state = _is_stateful(value) or _draws(value) or _is_data(value)
        if is_state and name not in left_out and value not in foreign:
            yield name, value


def _heavy(holder: Any, left_out: Collection[str]) -> dict[str, list[int]]:
    """What its modules and large tensors hold now, by attribute."""
    own = ((n, v) for n, v in getattr(holder, "__dict__", {}).items() if n not in left_out)
    return {name: _checksums(value) for name, value in own if _is_heavy(value)}


def _is_heavy(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return True
    num_bytes: int = sum(local_part(each).nbytes for each in _tensors_of(value))
    return num_bytes > _LARGE_BYTES


def _checksums(module: Any) -> list[int]:
    """A number for each tensor, in one pass and where it lies; another one when it has changed.

    torch 2.13 counts no write through ``.data``, nor those of a fused optimizer.
    """
    return [_checksum(local_part(each)) for each in _tensors_of(module)]


def _checksum(tensor: torch.Tensor) -> int:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta:
        return id(tensor)
    words = tensor.detach().contiguous().view(_WORDS[min(tensor.element_size(), 8)])
    return int(words.sum(dtype=torch.int64))


def _is_stateful(value: Any) -> bool:
    """Whether it is a module with tensors, or another object with a state, but no data set."""
    if isinstance(value, nn.Module):
        return any(True for _ in _tensors_of(value))
    is_object = isinstance(value, Stateful) and not isinstance(value, type)
    return is_object and not hasattr(value, "__iter__")


def _draws(value: Any) -> bool:
    return isinstance(value, GENERATOR_KINDS)


def _is_data(value: Any) -> bool:
    """Whether it is a tensor, or a container of tensors and, perhaps, of plain values."""
    return any(True for _ in _tensors_of(value)) and _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (torch.Tensor, *_PLAIN))


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        module = unwrapped(value)
        yield from module.parameters()
        yield from module.buffers()
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_of(each)


def _place(tensor: torch.Tensor) -> int:
    """Where its memory begins; of a tensor without memory of its own, which object it is."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    address = tensor.untyped_storage().data_ptr() if is_plain else 0
    return address or id(tensor)


def _numbers(holder: Any) -> dict[str, Any]:
    attributes = getattr(holder, "__dict__", {})
    return {name: value for name, value in attributes.items() if type(value) in (int, float)}
