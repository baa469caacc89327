"""A model's parameters, buffers and extra state, under names that no wrapper changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from resumekit.capture.naming import clean_names
from resumekit.capture.restore import Mismatch, describe, name_mismatches, refuse
from resumekit.errors import StateMismatchError
from resumekit.serialization import fill, is_sharded, local_part

# What torch 2.13 nn/modules/module.py appends to a module's name for get_extra_state.
_EXTRA_STATE = "_extra_state"
_REMEDY = "Build the model as it was when the checkpoint was written"


# In the fingerprint of a module in 16 bits whose weights are saved in fp32: its type, and what in
# it is in fp32 itself.
TRAINED_IN = "trained_in"
IN_FP32 = "in_fp32"


class ModelState:
    """The state of a module, whatever wraps it now or wrapped it when it was saved.

    Only what ``module.state_dict()`` holds is saved; for the rest see ``attribute_components``.

    Args:
        module: the model, wrapped or not.
        key: the component's key, for errors.
    """

    def __init__(self, module: nn.Module, *, key: str = "model") -> None:
        self.module = module
        self.key = key

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, not copies, by wrapper-free name; extra state as the module gives it.

        Raises:
            ConfigurationError: two tensors have one wrapper-free name.
        """
        raw = self.module.state_dict()
        names = clean_names(self.module, raw)
        return {names[name]: value for name, value in raw.items()}

    def replicated_state(self) -> dict[str, Any]:
        """What must be alike on all ranks that hold it: the parameters, and buffers in parts.

        Other buffers may be each rank's own.
        """
        raw = (name for name, _ in self.module.named_parameters(remove_duplicate=False))
        names = set(clean_names(self.module, raw).values())
        state = self.state_dict()
        return {n: value for n, value in state.items() if n in names or is_sharded(value)}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: a name is missing, unexpected or likely renamed; a shape, a dtype or
                the tying of two names differs; or a live tensor has no memory to load into.
        """
        if not isinstance(state, Mapping):
            raise StateMismatchError(
                self.key, found=f"{describe(state)} in the checkpoint", expected="a dict"
            )
        live = self.state_dict()
        problems = name_mismatches(_described(state, live), _described(live, live))
        for name, value in live.items():
            if name in state:
                problems += _tensor_mismatches(name, state[name], value)
        if not problems:
            problems += _tying_mismatches(state, live)
        refuse(self.key, problems, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into the live tensor of that name; no parameter changes identity.

        Returns:
            What did not come back exactly: nothing.

        Raises:
            StateMismatchError: the module itself did not take what it was given.
        """
        live = self.module.state_dict()
        names = clean_names(self.module, live)
        by_raw_name = {raw: _given(raw, state[name], live[raw]) for raw, name in names.items()}
        # Not strict: a module may leave names out of its own state_dict (adapters without their
        # base model do), and check_state_dict has compared the names with what it gives.
        outcome = self.module.load_state_dict(by_raw_name, strict=False)
        problems = [
            Mismatch(str(names.get(raw, raw)), "in the checkpoint", "a name that the module takes")
            for raw in outcome.unexpected_keys
        ]
        refuse(self.key, problems, remedy=_REMEDY)
        return ()

    def first_rank_only(self) -> frozenset[str]:
        """The buffers of which every rank has its own."""
        buffers = clean_names(self.module, (name for name, _ in self.module.named_buffers()))
        state = self.state_dict()
        return frozenset(
            name for name in buffers.values() if name in state and not is_sharded(state[name])
        )

    def fingerprint(self) -> dict[str, Any]:
        """What describes the model: the numbers of its parameters, trainable and in all."""
        parameters = [p for p in self.module.parameters() if not is_lazy(p)]
        return {
            "num_parameters": sum(p.numel() for p in parameters),
            "num_trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        }


def _given(name: str, value: Any, live: Any) -> Any:
    # torch copies tensors into the live ones, but hands extra state over as it is.
    if name.endswith(_EXTRA_STATE):
        return copy.deepcopy(value)
    if is_sharded(live):  # from host memory, which torch's own copy of DTensors does not expect
        fill(live, value)
        return live
    return value


def _described(state: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, str]:
    # Shapes that are not known yet are no reason to doubt a name.
    return {
        name: describe(value) if name not in live or not is_lazy(live[name]) else "lazy"
        for name, value in state.items()
    }


def _tensor_mismatches(name: str, saved: Any, live: Any) -> Iterator[Mismatch]:
    if isinstance(saved, Tensor) != isinstance(live, Tensor):
        yield Mismatch(name, f"{describe(saved)} in the checkpoint", describe(live))
    elif not isinstance(live, Tensor) or is_lazy(live):
        return
    elif saved.shape != live.shape or saved.dtype != live.dtype:
        yield Mismatch(name, f"{describe(saved)} in the checkpoint", f"{describe(live)}, as here")
    elif live.is_meta and not saved.is_meta:
        yield Mismatch(
            name,
            "the live tensor is on the meta device",
            "memory to load into",
            remedy="Call model.to_empty(device=..) before resuming",
        )


def _tying_mismatches(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Names tied on one side only: tied here, two values there; or tied there, two tensors here."""
    for first, second in _ties(live):
        if not _is_one(saved[first], saved[second]) and not torch.equal(
            local_part(saved[first]), local_part(saved[second])
        ):
            yield Mismatch(second, f"its own values, other than {first!r}", f"tied to {first!r}")
    for first, second in _ties(saved):
        if not _is_one(live[first], live[second]):
            yield Mismatch(second, f"tied to {first!r} in the checkpoint", "no tie, as here")


def _ties(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    owner: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not _address(value):
            continue
        place = (value.device, _address(value), value.shape, value.stride(), value.dtype)
        first = owner.setdefault(place, name)
        if first != name:
            yield first, name


def _is_one(tensor: Any, other: Any) -> bool:
    return _address(tensor) == _address(other)


def _address(value: Any) -> int:
    """Where a tensor's memory is; 0 where it has none of its own (lazy, meta, sparse)."""
    value = local_part(value)
    if not isinstance(value, Tensor) or is_lazy(value) or value.layout != torch.strided:
        return 0
    return value.data_ptr() if value.numel() and not value.is_meta else 0
