"""What the models and the optimizers of a process are seen to hold.

An averaged model, a target network or a frozen teacher belongs to the state of a training run, and
no hook shows it. Looking at the live objects runs no code of theirs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from resumekit.recorder.digests import combined, tensor_digest, value_digest
from resumekit.recorder.launches import Position

# Settings of a param group that are numbers: a schedule may change them.
_NUMBERS = (bool, int, float)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of every group."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def learning_rates(optimizer: Any) -> list[str]:
    """The learning rate of every group, to the bit."""
    return [float(group["lr"]).hex() for group in optimizer.param_groups if "lr" in group]


def position_of(optimizer: Any) -> Position:
    """What is true before a step of this optimizer, its number aside."""
    return Position(
        step=0,
        weights=combined(map(tensor_digest, parameters_of(optimizer))),
        counter=_counter(optimizer),
        lr=tuple(learning_rates(optimizer)),
    )


def parameter_digests(optimizer: Any, names: Mapping[int, str]) -> dict[str, str]:
    """The digests of the parameters that no module names: flat shards, parameters on their own."""
    return {
        name: tensor_digest(parameter)
        for name, parameter in _named(optimizer, names)
        if id(parameter) not in names
    }


def state_digests(optimizer: Any, names: Mapping[int, str]) -> dict[str, str]:
    """The digests of the optimizer's state.

    Args:
        optimizer: anything with ``param_groups`` and ``state``.
        names: of its parameters, by ``id``.
    """
    leaves: dict[str, str] = {}
    for name, parameter in _named(optimizer, names):
        # A defaultdict: asking for an absent key with [] would add it.
        state = optimizer.state.get(parameter) or {}
        leaves.update({f"{name}.{key}": value_digest(value) for key, value in state.items()})
    return leaves


def settings_of(optimizer: Any) -> dict[str, str]:
    """The numbers of the param groups, to the bit, but for the learning rates."""
    leaves: dict[str, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            if key not in ("params", "lr") and all(isinstance(one, _NUMBERS) for one in values):
                leaves[f"group{index}.{key}"] = ",".join(float(one).hex() for one in values)
    return leaves


def _named(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"group{index}.{number}"), parameter


def _counter(optimizer: Any) -> int:
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return max((int(step) for step in steps), default=0)


# ---------------------------------------------------------------- models

Leaves = dict[str, str]

# Models may be made after the first steps. The relaunched process has to look at the same steps, so
# they are steps of the whole run, apart from the first ones of a process.
_SCAN_EVERY = 20
_FIRST_SCANS = 2


class Modules:
    """The outermost modules of this process, its optimizers and gradient scalers."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._scalers: list[weakref.ref[Any]] = []
        self._trained: WeakSet[nn.Module] = WeakSet()
        self._num_scans = 0
        # Deterministic scripts make their models in one order, which names those of one class.
        self._created: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def saw_module(self, module: nn.Module) -> None:
        """A module gets a parameter."""
        self._created.setdefault(module, len(self._created))

    def saw_trained(self, model: nn.Module) -> None:
        """A model is trained by an optimizer that has copies of its parameters."""
        self._trained.add(model)

    def scan_if_due(self, step: int) -> None:
        """Looks for objects again: at the first steps of a process, and now and then.

        Args:
            step: of the whole run.
        """
        if self._num_scans < _FIRST_SCANS or step % _SCAN_EVERY == 0:
            self._num_scans += 1
            self.scan()

    def components(
        self, parameters: Iterable[torch.Tensor]
    ) -> tuple[dict[str, Leaves], dict[int, str]]:
        """The digests of every model, and the names of trained parameters by ``id``.

        Models that are trained are parameters and buffers, each other one is a component.

        Args:
            parameters: of the optimizer that steps.
        """
        trained = set(map(id, parameters))
        for optimizer in _live(self._optimizers):
            trained.update(map(id, _parameters_of(optimizer)))
        for each in self._trained:
            trained.update(map(id, each.parameters()))
        models = self._models()
        components = _of_trained([model for model in models if model.has_any(trained)])
        others: dict[str, list[Leaves]] = {}
        for model in models:
            if not model.has_any(trained) and (state := {**model.digests, **model.buffers}):
                others.setdefault(model.kind, []).append(state)
        # Two of one class have no names to distinguish them, and one of them may be garbage.
        unique = {kind: states[0] for kind, states in others.items() if len(states) == 1}
        components.update({f"modules/{kind}": state for kind, state in unique.items()})
        scalers = [scaler for scaler in _live(self._scalers) if scaler.is_enabled()]
        if len(scalers) == 1:
            scale = scalers[0].state_dict()
            components["grad_scaler"] = {name: repr(value) for name, value in scale.items()}
        return components, _names([model for model in models if model.has_any(trained)])

    def number_of(self, optimizer: Any, names: Mapping[int, str]) -> int:
        """The number of an optimizer, by the first of its parameters in the order of the models.

        Not by who steps first: a relaunched process may begin with another one.

        Args:
            optimizer: the one that steps.
            names: of the trained parameters by ``id``, in the order of the models.
        """
        positions = {parameter: index for index, parameter in enumerate(names)}

        def first(one: Any) -> int:
            found = (positions.get(id(each), sys.maxsize) for each in _parameters_of(one))
            return min(found, default=sys.maxsize)

        # A wrapper has the parameters, and so the number, of what it wraps.
        firsts = {first(each) for each in (*_live(self._optimizers), optimizer)}
        return sorted(firsts).index(first(optimizer))

    def scan(self) -> None:
        """Looks for objects now."""
        # isinstance() would ask objects for their __class__, which runs code of lazy modules.
        alive = gc.get_objects()
        modules = [each for each in alive if issubclass(type(each), nn.Module)]
        modules = [each for each in modules if "_parameters" in vars(each)]  # __init__ has run
        inner = {id(child) for each in modules for child in each.children()}
        self._roots = [weakref.ref(each) for each in modules if id(each) not in inner]
        self._optimizers = _refs(alive, torch.optim.Optimizer)
        self._scalers = _refs(alive, torch.amp.grad_scaler.GradScaler)

    def _models(self) -> list[_Model]:
        """The models, those that contain others' parameters first, always in the same order."""
        roots = [(root, list(root.named_parameters())) for root in _live(self._roots)]
        roots.sort(key=lambda each: (-len(each[1]), type(each[0]).__name__))
        seen: set[int] = set()
        models: list[_Model] = []
        for root, parameters in roots:
            mine = {name: each for name, each in parameters if id(each) not in seen}
            buffers = {k: v for k, v in root.named_buffers() if id(v) not in seen}
            seen.update(map(id, [*mine.values(), *buffers.values()]))
            created = min(map(self._order_of, root.modules()))
            kind = type(root).__name__
            models.append(_Model(kind, created, mine, _digests(mine), _digests(buffers)))
        return sorted(models, key=lambda model: model.order)

    def _order_of(self, module: nn.Module) -> int:
        return self._created.get(module, sys.maxsize)  # a deep copy registers nothing


@dataclass(frozen=True)
class _Model:
    """One outermost module: its class, when it was made, and what no larger one has."""

    kind: str
    created: int
    parameters: dict[str, torch.Tensor]
    digests: Leaves
    buffers: Leaves

    def has_any(self, parameters: set[int]) -> bool:
        return any(id(each) in parameters for each in self.parameters.values())

    @property
    def order(self) -> tuple[int, int, str, str]:
        # Of two copies with one class and size, what they contain decides.
        return self.created, -len(self.digests), self.kind, combined(self.digests.values())


def _prefixes(models: Sequence[_Model]) -> list[str]:
    """What distinguishes the names of several trained models; nothing for one."""
    if len(models) == 1:
        return [""]
    kinds = [model.kind for model in models]
    counts = [kinds[: index + 1].count(kind) for index, kind in enumerate(kinds)]
    return [
        f"{kind}." if count == 1 else f"{kind}-{count}."
        for kind, count in zip(kinds, counts, strict=True)
    ]


def _of_trained(models: Sequence[_Model]) -> dict[str, Leaves]:
    components: dict[str, Leaves] = {}
    for prefix, model in zip(_prefixes(models), models, strict=True):
        for key, leaves in (("parameters", model.digests), ("buffers", model.buffers)):
            if leaves:
                named = {f"{prefix}{name}": digest for name, digest in leaves.items()}
                components.setdefault(key, {}).update(named)
    return components


def _names(models: Sequence[_Model]) -> dict[int, str]:
    return {
        id(parameter): f"{prefix}{name}"
        for prefix, model in zip(_prefixes(models), models, strict=True)
        for name, parameter in model.parameters.items()
    }


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", [])  # absent before its __init__ has run
    return [each for group in groups for each in group["params"]]


def _refs(alive: Iterable[Any], kind: type) -> list[weakref.ref[Any]]:
    return [weakref.ref(each) for each in alive if issubclass(type(each), kind)]


def _live(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [each for ref in refs if (each := ref()) is not None]


def _digests(tensors: Mapping[str, torch.Tensor]) -> Leaves:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}
