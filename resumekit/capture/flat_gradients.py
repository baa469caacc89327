"""Gradients of models under FSDP1 that outlive the optimizer step that used them.

FSDP1 keeps a flat gradient for each wrapped module. Its ``.grad`` is another tensor object in each
step, but a sum over steps stays in one storage; ``zero_grad()`` drops it. See
docs/design/0022-gradients-across-steps.md.

Relied on, torch 2.13 distributed/fsdp: ``_reset_flat_param_grad_info_if_needed`` and
``_use_sharded_grad_views`` of ``FlatParamHandle`` (_flat_param.py), and the addition in place of
``_accumulate_sharded_grad`` (_runtime_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from resumekit.capture.flat import flat_modules, free_gathered
from resumekit.capture.naming import clean_name, clean_names, wrapped_attribute


class StorageWatch:
    """Whether gradients are state, as ``GradientWatch`` decides it, by the gradients' storage.

    A loop that fills gradients with zeros counts as one that carries them: its checkpoints are
    larger than they need be.

    Args:
        parameters: gives them; called at every step boundary.
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
        """Takes over what the steps before the checkpoint have shown."""
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
    """It keeps the address from being used again, and no memory of the values."""
    return StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]  # torch's


class FlatGradients:
    """The parameters of a model under FSDP1 whose ``.grad`` FSDP1 and the optimizer read.

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
            if not handle._offload_params:  # FSDP1 sums up no gradients on the CPU
                path = f"{raw}." if raw else ""
                name = clean_name(module, f"{path}{wrapped_attribute(fsdp)}.flat_param")
                self._handles[name] = handle
        whole = {name: each for name, each in module.named_parameters() if id(each) not in managed}
        names = clean_names(module, whole)
        self._whole = {names[name]: parameter for name, parameter in whole.items()}

    def named(self) -> dict[str, Tensor]:
        """The flat parameters, and those that are not wrapped, by name.

        The flat ones are sharded then, and their ``.grad`` is up to date.
        """
        for handle in self._handles.values():
            free_gathered(handle)
            handle._reset_flat_param_grad_info_if_needed()
        flat = {name: handle.flat_param for name, handle in self._handles.items()}
        return {**self._whole, **flat}

    def set_views(self) -> None:
        """Makes ``.grad`` of the original parameters views of the flat gradients."""
        for handle in self._handles.values():
            handle._use_sharded_grad_views()
