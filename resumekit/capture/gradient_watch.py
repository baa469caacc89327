"""Finds out whether gradients outlive the optimizer step that used them.

A loop that never calls ``zero_grad()`` accumulates gradients over all its steps. At a step boundary
it looks like one that clears them just before its next backward pass. The two differ one step
later: ``zero_grad()`` drops the tensor, and autograd adds to one that still exists. No value is
read on a device before a checkpoint needs it. See docs/design/0009-user-state.md.

FSDP1 keeps a flat gradient for each wrapped module. Its ``.grad`` is another tensor object in each
step, but a sum over steps stays in one storage; ``zero_grad()`` drops it. Relied on, torch 2.13
distributed/fsdp: ``_reset_flat_param_grad_info_if_needed`` and ``_use_sharded_grad_views`` of
``FlatParamHandle`` (_flat_param.py), and the in-place addition of ``_accumulate_sharded_grad``
(_runtime_utils.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from resumekit.capture.fsdp1 import flat_modules, free_gathered
from resumekit.capture.model import by_clean_name, clean_name, wrapped_attribute
from resumekit.serialization.sharding import local_part

# At the first boundaries every parameter is checked, later some of them in turn.
_NUM_FULL = 3
_NUM_SAMPLED = 4


class GradientProbe:
    """A hook that reads ``.grad`` of one parameter before the first backward pass of a step.

    It is registered for one step after a start, and as long as a loop keeps the tensor that it
    clears: with ``zero_grad(set_to_none=False)``, or under DDP with
    ``gradient_as_bucket_view=True``. It moves from parameter to parameter. Its results stay on the
    device until they are read.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.has_found_tensor = False
        self.was_called = False
        self._carried: Any = False
        self._cleared: Any = False
        self._attach(parameter)

    def __call__(self, gradient: Tensor) -> None:
        if self.was_called:
            return
        self.was_called = True
        now = self._parameter.grad
        if now is None:
            self._cleared = True
            return
        self.has_found_tensor = True
        has_values = _any(now)
        self._carried = has_values | self._carried
        self._cleared = (self._had_values & ~has_values) | self._cleared

    def next_step(self) -> None:
        """A step boundary; the next backward pass is the first one of a step."""
        now = self._parameter.grad
        if not self.was_called and now is not None and self._had_values is not False:
            # FSDP2 calls no hook, or the step did not use the parameter. The tensor is the same.
            self.has_found_tensor = True
            self._carried = _any(now) | self._carried
        self.move(self._parameter)

    def move(self, parameter: Tensor) -> None:
        """Checks this parameter in the step that begins."""
        self._handle.remove()
        self._attach(parameter)

    @property
    def has_found_values(self) -> bool:
        """Whether a step began with a gradient that was not zero. Waits for the device."""
        return bool(self._carried)

    @property
    def has_seen_clearing(self) -> bool:
        """Whether a gradient with values was gone when a step began. Waits for the device."""
        return bool(self._cleared)

    def inherit_zeros(self) -> None:
        """Takes over from the checkpoint that steps cleared the gradient and kept its tensor."""
        self.has_found_tensor = self._cleared = True

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def _attach(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self.was_called = False
        grad = parameter.grad
        self._had_values: Any = False if grad is None else _any(grad)
        self._handle = parameter.register_hook(self)  # type: ignore[no-untyped-call]  # torch's


def _any(gradient: Tensor) -> Tensor:
    """Whether any element is not zero, on the gradient's device."""
    values = local_part(gradient).detach()
    # The public values() refuses an uncoalesced tensor. torch 2.13.
    has_values: Tensor = (values._values() if values.is_sparse else values).any()
    return has_values


class GradientWatch:
    """Whether the gradients of some parameters are state, as far as the steps so far show.

    Args:
        parameters: returns them; called at the first boundaries and after each checkpoint.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._give = parameters
        self._parameters: Sequence[Tensor] = ()
        self._before: list[tuple[Tensor, Any]] = []
        self._num_boundaries = 0
        self._num_full = _NUM_FULL
        self._probe: GradientProbe | None = None
        self._is_carried = False
        self._is_known = False  # whether a step was seen that began after another one
        self._had_zeros = False  # before a resume

    @property
    def is_carried(self) -> bool:
        """Whether a step began with gradients of the one before. May wait for the device."""
        if not self._is_carried and self._probe is not None and self._probe.has_found_values:
            self._set_carried()
        return self._is_carried

    @property
    def must_save(self) -> bool:
        """Whether a checkpoint at this boundary needs the gradients that are there."""
        if self.is_carried or not self._is_known:
            return True
        return self._probe is not None and not self._probe.has_seen_clearing

    @property
    def keeps_zeros(self) -> bool:
        """Whether steps begin with gradients of zeros and not without any."""
        return self._probe is not None and self._probe.has_found_tensor and not self.must_save

    def inherit(self, *, is_carried: bool = False, keeps_zeros: bool = False) -> None:
        """Restores what the steps before the checkpoint have shown."""
        self._is_known, self._is_carried, self._had_zeros = True, is_carried, keeps_zeros

    def look(self) -> None:
        """Remembers the gradients with which the next step begins."""
        if self._num_full > 0 or not self._parameters:
            self._num_full -= 1
            self._parameters = self._give()
            chosen = self._parameters
        else:
            first = self._num_boundaries * _NUM_SAMPLED % len(self._parameters)
            chosen = self._parameters[first : first + _NUM_SAMPLED]
        there = [(each, each.grad) for each in chosen]
        self._before = [(each, weakref.ref(grad)) for each, grad in there if grad is not None]
        if self._before:
            self._attach_probe()

    def observe(self) -> None:
        """A step boundary: compares the gradients with those that the step began with."""
        self._num_boundaries += 1
        if not self._is_carried:
            if self._before or self._probe is not None:
                self._compare()
            if self._probe is not None:
                self._probe.next_step()
            self.look()

    def saved(self) -> None:
        """A checkpoint was written here: every parameter is checked in the step that begins."""
        self._num_full = max(self._num_full, 1)
        if not self._is_carried:
            self.look()

    def _compare(self) -> None:
        there = [(each.grad, before()) for each, before in self._before]
        is_kept = any(now is not None and now is before for now, before in there)
        probe = self._probe
        if probe is not None and (is_kept or probe.was_called):
            self._is_known = True
            if not is_kept and not probe.has_found_tensor and probe.was_called:
                self._remove_probe()
        elif is_kept:
            # The loop dropped them so far. They are saved until a step shows what it does now.
            self._is_known = False
        elif any(now is not None and now.requires_grad for now, _ in there):
            self._set_carried()  # with create_graph=True autograd does not add in place
        elif there:
            self._is_known = True
            self._remove_probe()

    def _attach_probe(self) -> None:
        trained = [each for each, _ in self._before if each.requires_grad and each.is_leaf]
        if self._probe is not None:
            if trained:
                self._probe.move(trained[0])
        elif trained and (self._had_zeros or not self._is_known):
            self._probe = GradientProbe(min(trained, key=Tensor.numel))
            if self._had_zeros:
                self._probe.inherit_zeros()
            self._had_zeros = False

    def _remove_probe(self) -> None:
        if self._probe is not None:
            self._probe.remove()
            self._probe = None

    def _set_carried(self) -> None:
        self._is_carried = self._is_known = True
        self._remove_probe()


class StorageWatch:
    """``GradientWatch`` for FSDP1: compares the storages of the gradients.

    A loop that fills gradients with zeros counts as one that carries them, which only makes its
    checkpoints larger.

    Args:
        parameters: returns them; called at every step boundary.
    """

    keeps_zeros = False

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self._before: list[tuple[Tensor, StorageWeakRef]] = []
        self._is_known = False  # whether a step was seen that began after another one
        self.is_carried = False

    @property
    def must_save(self) -> bool:
        """Whether a checkpoint at this boundary needs the gradients that are there."""
        return self.is_carried or not self._is_known

    def inherit(self, *, is_carried: bool = False, keeps_zeros: bool = False) -> None:
        """Restores what the steps before the checkpoint have shown."""
        self._is_known, self.is_carried = True, is_carried or keeps_zeros

    def look(self) -> None:
        """Remembers the gradients with which the next step begins."""
        there = [(each, each.grad) for each in self._parameters()]
        self._before = [(each, _storage(grad)) for each, grad in there if grad is not None]

    def observe(self) -> None:
        """A step boundary: compares the gradients with those that the step began with."""
        if self.is_carried:
            return
        former = self._before
        self.look()
        if former:
            self._is_known = True
            now = {id(each): storage for each, storage in self._before}
            self.is_carried = any(now.get(id(each)) == storage for each, storage in former)

    def saved(self) -> None:
        """A checkpoint was written here, which changes nothing."""


def _storage(gradient: Tensor) -> StorageWeakRef:
    """A reference that keeps the address from being reused, but not the memory of the values."""
    return StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]  # torch's


class FlatGradients:
    """The parameters of an FSDP1 model whose ``.grad`` FSDP1 and the optimizer read.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._handles: dict[str, Any] = {}
        managed: set[int] = set()
        for raw, fsdp in flat_modules(module):
            handle = fsdp._handle
            if handle is None:
                continue
            flat = handle.flat_param
            managed |= {id(each) for each in (*flat._params, *flat._shared_params)}
            if not handle._offload_params:  # FSDP1 accumulates no gradients on the CPU
                path = f"{raw}." if raw else ""
                name = clean_name(module, f"{path}{wrapped_attribute(fsdp)}.flat_param")
                self._handles[name] = handle
        whole = {name: each for name, each in module.named_parameters() if id(each) not in managed}
        self._whole = by_clean_name(module, whole)

    def named(self) -> dict[str, Tensor]:
        """The flat parameters, resharded and with current ``.grad``, and the unwrapped ones."""
        for handle in self._handles.values():
            free_gathered(handle)
            handle._reset_flat_param_grad_info_if_needed()
        flat = {name: handle.flat_param for name, handle in self._handles.items()}
        return {**self._whole, **flat}

    def set_views(self) -> None:
        """Makes ``.grad`` of the original parameters views of the flat gradients."""
        for handle in self._handles.values():
            handle._use_sharded_grad_views()
