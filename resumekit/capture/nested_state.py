"""Nested states: what differs between two, restoring one in place, merging several."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import product, zip_longest
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from resumekit.errors import IncompleteLoadError, ResumekitError, StateMismatchError
from resumekit.serialization.sharding import FlatPart, fill, is_sharded, local_part
from resumekit.serialization.subclasses import described, rebuilt
from resumekit.serialization.tensors import is_subclass, parts_of
from resumekit.state import ComponentState, Rule, Slot

# A renamed layer keeps most of its name; below this ratio of common characters it is another one.
_LIKELY_RENAME = 0.5
# Limits of the search for renamed entries: comparing every pair of a large model takes minutes.
_MOST_SEARCHED, _MOST_CANDIDATES = 8, 500

NewTensor = Callable[[Tensor], Tensor]

# The types of a metric's sum and of its value.
Scalar = Annotated[Tensor, Rule("a tensor of one number", lambda value: value.numel() == 1)]
OneNumber = float | np.number | Scalar


@dataclass(frozen=True)
class Mismatch:
    """One difference that prevents a load.

    Args:
        where: a name inside the component, or ``""`` for the component itself.
        found: what the checkpoint holds.
        expected: what this run has.
        remedy: advice for this mismatch; None for the general one.
    """

    where: str
    found: str
    expected: str
    remedy: str | None = None

    @classmethod
    def changed(cls, where: str, then: object, now: object) -> Mismatch:
        """A value that the checkpoint and this run both have, and that differs."""
        return cls(where, f"{then} in the checkpoint", f"{now}, as in this run")


def refuse(key: str, mismatches: Sequence[Mismatch], *, remedy: str) -> None:
    """Raises StateMismatchError for the first mismatch and counts the others.

    Args:
        key: the component's key.
        mismatches: no error is raised for an empty sequence.
        remedy: the advice for a mismatch without one.
    """
    if not mismatches:
        return
    first, others = mismatches[0], [each.where for each in mismatches[1:]]
    expected = first.expected
    if others:
        shown = ", ".join(others[:3]) + (", .." if len(others) > 3 else "")
        expected += f" (and {len(others)} more that do not fit: {shown})"
    raise StateMismatchError(
        f"{key}: {first.where}" if first.where else key,
        found=first.found,
        expected=expected,
        remedy=first.remedy or remedy,
    )


def require_dict(key: str, state: Any) -> None:
    """Raises StateMismatchError unless the state is a mapping."""
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            key, found=f"{describe(state)} in the checkpoint", expected="a dict"
        )


def require_fields(key: str, state: Any, fields: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raises StateMismatchError unless the state is a dict with these fields of these types."""
    require_dict(key, state)
    for name, kind in fields.items():
        if not isinstance(state.get(name), kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise StateMismatchError(
                f"{key}: {name}",
                found=describe(state[name]) if name in state else "missing",
                expected=" or ".join(each.__name__ for each in kinds),
                remedy="Resume with the kind of object that wrote the checkpoint",
            )


def class_name(value: Any) -> str:
    """The full dotted name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def require_class(key: str, saved: str, live: Any, *, remedy: str) -> None:
    """Raises StateMismatchError unless a saved class name is that of the live object."""
    if not is_same_class(saved, class_name(live)):
        raise StateMismatchError(
            key,
            found=f"the checkpoint has the state of a {saved}",
            expected=f"a {class_name(live)}, as in this run",
            remedy=remedy,
        )


def is_same_class(name: str, other: str) -> bool:
    """Whether two full names mean one class.

    Only the package and the class are compared: libraries move classes between their modules, and
    a script's classes are in ``__main__`` or in a module, depending on how it was started.
    """
    package, _, kind = name.partition(".")
    other_package, _, other_kind = other.partition(".")
    is_script = "__main__" in (package, other_package)
    same_package = package == other_package or is_script
    return same_package and kind.rpartition(".")[2] == other_kind.rpartition(".")[2]


def describe(value: Any) -> str:
    """A value in an error message: a tensor's dtype and shape, or a type."""
    if is_subclass(value):
        return described(value)
    if isinstance(value, (Tensor, FlatPart)):
        return f"{_name_of(value.dtype)} {tuple(value.shape)}"
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeiouAEIOU" else f"a {kind}"


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_mismatches(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[Mismatch]:
    """Entries that only one side has, or whose dtype, shape or type differs.

    Args:
        saved: values of the checkpoint by name.
        live: the same of this run.
    """
    then = {name: describe(value) for name, value in saved.items()}
    return description_mismatches(then, {name: describe(value) for name, value in live.items()})


def description_mismatches(saved: Mapping[str, str], live: Mapping[str, str]) -> list[Mismatch]:
    """Entries that only one side has, or whose descriptions differ.

    Args:
        saved: a description (see ``describe``) of each entry in the checkpoint, by name.
        live: the same of this run.
    """
    changed = (name for name, now in live.items() if saved.get(name, now) != now)
    return [
        *_name_mismatches(saved, live),
        *(Mismatch.changed(name, saved[name], live[name]) for name in changed),
    ]


def _name_mismatches(saved: Mapping[str, str], live: Mapping[str, str]) -> list[Mismatch]:
    """The names that only one side has; a likely rename is reported with both names."""
    missing = [name for name in live if name not in saved]
    unexpected = [name for name in saved if name not in live]
    found: list[Mismatch] = []
    for index, name in enumerate(missing):
        twin = None
        if index < _MOST_SEARCHED:
            alike = [other for other in unexpected if saved[other] == live[name]]
            twin = _likely_twin(name, alike[:_MOST_CANDIDATES])
        if twin is None:
            expected = f"{live[name]}, as in this run"
            found.append(Mismatch(name, "this parameter is not in the checkpoint", expected))
            continue
        unexpected.remove(twin)
        found.append(
            Mismatch(
                name,
                f"the checkpoint has no such parameter, but has {twin!r} of the same kind",
                f"{name!r}",
                remedy=f"Give {name!r} its old name {twin!r} back",
            )
        )
    found += [
        Mismatch(name, f"the checkpoint has this parameter ({saved[name]})", "no such parameter")
        for name in unexpected
    ]
    return found


def _likely_twin(name: str, candidates: Iterable[str]) -> str | None:
    def likeness(candidate: str) -> float:
        return SequenceMatcher(None, name, candidate).ratio()

    best = max(candidates, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _LIKELY_RENAME else None


def own_tensor(saved: Tensor) -> Tensor:
    """A copy that shares no memory with ``saved``."""
    return saved.detach().clone()


class Restorer:
    """Restores saved values into the live objects that can hold them. Use one for one load.

    A live tensor of the same dtype, shape and layout is filled in place and stays the same object,
    as do dicts and lists. Other tensors are created; a saved tensor that occurs several times is
    created once. Nothing shares memory with the saved value unless ``new_tensor`` makes it so.
    """

    def __init__(self) -> None:
        self._filled: dict[int, Tensor] = {}
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, live: Any, saved: Any, new_tensor: NewTensor = own_tensor) -> Any:
        """The saved value, in the live object where that is possible.

        Args:
            live: the present value, or None.
            saved: the value to restore.
            new_tensor: creates a tensor with the values and the dtype of a saved one.
        """
        if isinstance(saved, Tensor):
            return self._tensor(live, saved, new_tensor)
        if isinstance(saved, dict):
            return self._dict(live, saved, new_tensor)
        if isinstance(saved, (list, tuple)):
            return self._sequence(live, saved, new_tensor)
        if isinstance(saved, deque):
            return deque((self(None, each, new_tensor) for each in saved), saved.maxlen)
        return copy.deepcopy(saved)

    def _tensor(self, live: Any, saved: Tensor, new_tensor: NewTensor) -> Tensor:
        if not fits(live, saved) or self._is_taken(live, saved):
            made = self._new(saved, new_tensor)
            return made.to(live.device) if isinstance(live, Tensor) else made
        fill(live, saved)
        assert isinstance(live, Tensor)
        self._filled[id(live)] = saved
        return live

    def _is_taken(self, live: Tensor, saved: Tensor) -> bool:
        # Two entries may share a live tensor (param groups share a default tensor lr) while their
        # saved values differ: the second entry then gets a new tensor.
        first = self._filled.get(id(live))
        if first is None or first is saved:
            return False
        return not is_same(local_part(first), local_part(saved))

    def _new(self, saved: Tensor, new_tensor: NewTensor) -> Tensor:
        if is_subclass(saved):
            return rebuilt(saved, lambda part: self._new(part, new_tensor))
        if is_sharded(saved) or saved.layout != torch.strided or saved.data_ptr() == 0:
            return new_tensor(saved)
        view = (saved.data_ptr(), saved.shape, saved.stride(), saved.dtype, saved.device)
        if view not in self._made:
            self._made[view] = new_tensor(saved)
        return self._made[view]

    def _dict(self, live: Any, saved: dict[Any, Any], new: NewTensor) -> dict[Any, Any]:
        if type(live) is not type(saved):
            live = copy.copy(saved)  # keeps the type: OrderedDict, Counter, defaultdict
            live.clear()
        values = {key: self(live.get(key), value, new) for key, value in saved.items()}
        live.clear()
        live.update(values)
        assert isinstance(live, dict)
        return live

    def _sequence(self, live: Any, saved: Any, new: NewTensor) -> Any:
        is_alike = isinstance(live, type(saved)) and len(live) == len(saved)
        partners = live if is_alike else [None] * len(saved)
        values = [self(each, value, new) for each, value in zip(partners, saved, strict=True)]
        if isinstance(saved, list):
            if type(live) is not type(saved):
                return values
            live[:] = values
            return live
        # A namedtuple takes its fields as arguments.
        return getattr(type(saved), "_make", type(saved))(values)


def fits(live: Any, saved: Any) -> bool:
    """Whether both are tensors of the same dtype, shape, layout and sharding, made of the same."""
    if is_subclass(live) or is_subclass(saved):
        return describe(live) == describe(saved)
    return (
        isinstance(live, Tensor)
        and isinstance(saved, Tensor)
        and live.dtype == saved.dtype
        and live.shape == saved.shape
        and live.layout == saved.layout
        and is_sharded(live) == is_sharded(saved)
    )


def pairs_in(saved: Any, live: Any) -> Iterator[tuple[Tensor, Any]]:
    """The tensors at the same position of two states whose live one is a DTensor of that shape."""
    for _, then, now in paired(saved, live):
        if isinstance(then, Tensor) and is_sharded(now) and then.shape == now.shape:
            yield then, now


def paired(saved: Any, live: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The values at the same position of two nested states, with the path ``where['lr'][0]``."""
    if isinstance(saved, Mapping) and isinstance(live, Mapping):
        for key, item in saved.items():
            if key in live:
                yield from paired(item, live[key], f"{where}[{key!r}]")
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        if len(saved) != len(live) and (isinstance(saved, tuple) or isinstance(live, tuple)):
            yield where, saved, live
        for index, (item, partner) in enumerate(zip(saved, live, strict=False)):
            yield from paired(item, partner, f"{where}[{index}]")
    else:
        yield where, saved, live


def structure_mismatches(
    saved: Any, live: Any, where: str = "", *, may_lack: bool = False
) -> Iterator[Mismatch]:
    """Where a saved state has no such key, or another kind of value, than a live one.

    Args:
        saved: it may have more keys and items: states grow.
        live: what is None may become anything.
        where: the path of both.
        may_lack: whether it may have fewer keys.
    """
    if isinstance(saved, Mapping) and isinstance(live, Mapping):
        for key, partner in live.items():
            path = f"{where}[{key!r}]"
            if key in saved:
                yield from structure_mismatches(saved[key], partner, path, may_lack=may_lack)
            elif not may_lack:
                yield Mismatch(path, "missing in the checkpoint", describe(partner))
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        for index, (item, partner) in enumerate(zip(saved, live, strict=False)):
            yield from structure_mismatches(item, partner, f"{where}[{index}]", may_lack=may_lack)
    elif (live is not None and not is_same_sort(saved, live)) or (
        isinstance(saved, Tensor) and isinstance(live, Tensor) and saved.dim() != live.dim()
    ):
        yield Mismatch.changed(where, describe(saved), describe(live))


_SORTS: tuple[Any, ...] = (
    (bool, int, float, complex, np.generic, np.ndarray, Tensor),
    (str, bytes, bytearray),
    (Mapping,),
    (list, tuple, deque, Set),
)


def is_too_large(value: Any) -> bool:
    """Whether it is an integer that torch does not take."""
    return type(value) is int and not -(2**63) <= value < 2**63


def is_same_sort(value: Any, other: Any) -> bool:
    """Whether one may become the other as training goes: a number a tensor, a list a tuple."""
    sorts = [
        next((sort for sort in _SORTS if isinstance(each, sort)), type(each))
        for each in (value, other)
    ]
    return bool(sorts[0] == sorts[1])


def require_loadable(key: str, live: Any, saved: Any) -> None:
    """Raises StateMismatchError where a copy of an object does not load a state; changes nothing.

    A state of the live one's structure is not tried, nor is an object that cannot be copied.

    Args:
        key: of the component, perhaps with a name in it: ``extras: 'meter'``.
        live: the object.
        saved: its state in the checkpoint.
    """
    suspect = next(structure_mismatches(saved, live.state_dict()), None)
    if suspect is None:
        return
    try:
        trial = copy.deepcopy(live)
    except Exception:  # noqa: BLE001 - the user's objects raise anything
        return
    try:
        trial.load_state_dict(Restorer()(None, saved))
    except Exception as error:  # noqa: BLE001 - the same
        found = f"{suspect.found}, and its load_state_dict raises {error!r:.100}"
        component = key.partition(": ")[0]
        remedy = f"Give it a load_state_dict for this state, or pass exclude={{{component!r}}}"
        refuse(key, [replace(suspect, found=found)], remedy=remedy)


@contextmanager
def live_load(key: str) -> Iterator[None]:
    """What is raised while live objects change is an IncompleteLoadError."""
    try:
        yield
    except ResumekitError:
        raise
    except Exception as error:
        component = key.partition(": ")[0]
        raise IncompleteLoadError(
            key,
            found=f"its state could not be loaded ({error!r:.200}), and live objects are changed",
            remedy="End this process, and correct load_state_dict or pass "
            f"exclude={{{component!r}}}",
        ) from error


def leaves(state: Any) -> Iterator[Any]:
    """The values of a nested state."""
    if isinstance(state, (Mapping, list, tuple)):
        for each in state.values() if isinstance(state, Mapping) else state:
            yield from leaves(each)
    else:
        yield state


# ---------------------------------------------------------------- states of pipeline stages

Group = dict[str, Any]


def merge_states(live: ComponentState | None, key: str, states: Sequence[Any]) -> Any:
    """One state of those of all groups.

    Args:
        live: the live state, None where it is not known yet; its ``merge_state_dicts`` decides
            where it has one.
        key: of the component, for errors.
        states: one of each group.

    Raises:
        StateMismatchError: two groups have different values under one name.
    """
    if len(states) == 1:
        return states[0]
    result = None if live is None else live.merge_state_dicts(states)
    return union(key, states) if result is None else result


def merge_stored(key: str, states: Sequence[Any]) -> Any:
    """One state of those of all groups, where the live one is not known."""
    if len(states) > 1 and key.partition("/")[0] == Slot.OPTIMIZER.value:
        return merged_optimizers(key, states)
    return merge_states(None, key, states)


def union(where: str, states: Sequence[Any]) -> Any:
    """The union of nested dicts; other values must be equal in all.

    Args:
        where: the name in errors.
        states: all dicts, or all other values.

    Raises:
        StateMismatchError: two of them have different values under one name.
    """
    first = states[0]
    if not all(isinstance(state, Mapping) for state in states):
        for other in states[1:]:
            if not is_same(first, other):
                raise StateMismatchError(
                    where,
                    found=f"{describe(first)} and {describe(other)} of two groups of ranks",
                    expected="the same from all groups",
                    remedy="Make the component a ComponentState with the method merge_state_dicts",
                )
        return first
    names = dict.fromkeys(name for state in states for name in state)
    return {
        name: union(f"{where}: {name}", [state[name] for state in states if name in state])
        for name in names
    }


def is_same(value: Any, other: Any) -> bool:
    """Whether two values have the same type and bits; of meta tensors, the same shape."""
    if is_subclass(value) or is_subclass(other):
        return describe(value) == describe(other) and is_same(
            parts_of(value).parts, parts_of(other).parts
        )
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value.dtype != other.dtype or value.shape != other.shape:
            return False
        return value.is_meta or other.is_meta or torch.equal(value, other)
    if isinstance(value, (list, tuple)) and type(value) is type(other):
        same_length = len(value) == len(other)
        return same_length and all(is_same(a, b) for a, b in zip(value, other, strict=True))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(is_same(value[k], other[k]) for k in value)
    return type(value) is type(other) and bool(value == other)


def entries_of(state: Any, live: Any) -> Any:
    """The entries of a merged state that the live one has."""
    if not isinstance(state, Mapping) or not isinstance(live, Mapping):
        return state
    return {name: entries_of(item, live[name]) for name, item in state.items() if name in live}


def merged_optimizers(key: str, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state in the layout of ``OptimizerState``.

    Param groups with the same index and hyperparameters become one group. Groups with different
    hyperparameters, for instance a learning rate of each stage, stay separate.

    Raises:
        StateMismatchError: the stages have different optimizers, or different values for one name.
    """
    if any("opaque" in state for state in states):
        return dict(union(key, states))
    rest = [{name: v for name, v in state.items() if name != "param_groups"} for state in states]
    groups: list[Group] = []
    for of_stages in zip_longest(*(state["param_groups"] for state in states)):
        alike: list[Group] = []
        for group in filter(None, of_stages):  # a stage may have fewer groups
            _join(alike, group)
        groups += alike
    return {**union(key, rest), "param_groups": groups}


def part_of_optimizer(
    key: str, state: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The part of a merged state that an optimizer with these parameters needs.

    Args:
        key: of the component, for errors.
        state: in the layout of ``OptimizerState``.
        names: of the live parameters, group by group.

    Raises:
        StateMismatchError: the parameters of a live group had different hyperparameters.
    """
    if "opaque" in state:
        return dict(state)
    group_of = {name: group for group in state["param_groups"] for name in group["params"]}
    live = {name for group in names for name in group}
    return {
        **state,
        "parameters": _only(state["parameters"], live),
        "state": _only(state["state"], live),
        "param_groups": [_group(key, n, group, group_of) for n, group in enumerate(names)],
    }


def _join(groups: list[Group], group: Group) -> None:
    """Adds the parameters of a group to an equal one of ``groups``, or the group to ``groups``."""
    for other in groups:
        if is_same(_settings(other), _settings(group)):
            other["params"] = list(dict.fromkeys([*other["params"], *group["params"]]))
            return
    groups.append(dict(group))


def _group(key: str, number: int, names: Sequence[str], group_of: Mapping[str, Group]) -> Group:
    known = [name for name in names if name in group_of]
    if not known:
        return {"params": []}
    first = _settings(group_of[known[0]])
    for name, setting in product(known[1:], first):
        other = group_of[name].get(setting)
        if not is_same(first[setting], other):
            raise StateMismatchError(
                f"{key}: param_groups[{number}][{setting!r}]",
                found=f"{first[setting]} for {known[0]} and {other} for {name}",
                expected="one value for all parameters of a group",
                remedy="Give the parameters groups of their own, as when they were saved",
            )
    return {**first, "params": known}


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name != "params"}


def _only(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}
