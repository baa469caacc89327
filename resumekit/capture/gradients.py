"""The gradients that an accumulation window has summed up, for a save in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from resumekit.capture.buffers import RankBuffers
from resumekit.capture.gradient_buckets import GradientBuckets
from resumekit.capture.inplace import fits
from resumekit.capture.mismatch import Mismatch, describe, refuse
from resumekit.capture.model import ModelState
from resumekit.capture.module_attributes import ModuleAttributes
from resumekit.capture.names import clean_names
from resumekit.contract import SharingPattern, Slot, StateComponent
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.layout import WorldChange
from resumekit.sharding import is_sharded

_REMEDY = "Build the model as it was when the checkpoint was written"
_SUFFIX = "gradients"


class AccumulatedGradients:
    """This rank's ``.grad`` of every parameter of a module, while a window is open.

    Between two windows there is nothing to save: what stands in ``.grad`` then was used.

    Args:
        module: the module, wrapped or not.
        is_within: whether batches were used since the last optimizer step.
        key: the component's key, for errors.
    """

    def __init__(self, module: nn.Module, is_within: Callable[[], bool], *, key: str) -> None:
        self.module = module
        self.key = key
        self._is_within = is_within
        self._pending: dict[str, Any] = {}  # to be put back with the random state

    def state_dict(self) -> dict[str, Any]:
        """The live gradients, not copies, by wrapper-free parameter name."""
        if self._pending or not self._is_within():
            return dict(self._pending)
        live = {name: parameter.grad for name, parameter in self._parameters().items()}
        return {name: _in_parts(grad) for name, grad in live.items() if grad is not None}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: a gradient of no parameter here, or of another shape.
        """
        parameters = self._parameters()
        problems = [
            Mismatch(
                name,
                f"a gradient of shape {_shape(grad)} in the checkpoint",
                f"{describe(parameters[name])}, as here" if name in parameters else "a parameter",
            )
            for name, grad in state.items()
            if name not in parameters or _shape(grad) != tuple(parameters[name].shape)
        ]
        refuse(self.key, problems, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps them until ``put_back_with_random``: code before the next batch may clear them."""
        self._pending = dict(state)
        return ()

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Any]], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Nothing: between two windows another number of ranks may take over.

        Raises:
            StateMismatchError: the checkpoint was written inside a window.
        """
        former = change.former_world_size
        if any(states.values()):
            raise StateMismatchError(
                self.key,
                found=f"the gradients of an accumulation window that {former} ranks have begun, "
                f"for a job of {change.world_size}",
                expected=f"{former} ranks until the window is over",
                remedy=f"Launch with {former} ranks",
            )
        return {}, ()

    def start_fresh(self) -> tuple[str, ...]:
        """A checkpoint that was written between two windows lacks nothing."""
        return ()

    def put_back_with_random(self) -> None:
        """Gives every parameter the gradient that it had; a no-op when there is none."""
        pending, self._pending = self._pending, {}
        if not pending:
            return
        for name, parameter in self._parameters().items():
            saved = pending.get(name)
            if saved is None:
                parameter.grad = None
            elif parameter.grad is not None and fits(parameter.grad, saved):
                parameter.grad.copy_(saved)
            else:
                parameter.grad = _as_gradient(saved, parameter)

    def _parameters(self) -> dict[str, nn.Parameter]:
        parameters = dict(self.module.named_parameters())
        names = clean_names(self.module, parameters)
        return {names[raw]: parameter for raw, parameter in parameters.items()}


def _in_parts(gradient: Tensor) -> Any:
    """The gradient itself, or what a sparse one is made of: an embedding may have such."""
    if gradient.layout != torch.sparse_coo:
        return gradient
    return {
        "indices": gradient._indices(),
        "values": gradient._values(),
        "size": list(gradient.shape),
        "is_coalesced": gradient.is_coalesced(),
    }


def _shape(saved: Any) -> tuple[int, ...]:
    return tuple(saved.shape if isinstance(saved, Tensor) else saved["size"])


def _as_gradient(saved: Any, parameter: nn.Parameter) -> Tensor:
    """A copy that lies in memory as torch lays out the gradient of this parameter."""
    if isinstance(saved, Tensor):
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False).copy_(saved)
    return torch.sparse_coo_tensor(
        saved["indices"].to(parameter.device, copy=True),
        saved["values"].to(parameter.device, copy=True),
        saved["size"],
        is_coalesced=saved["is_coalesced"],
        check_invariants=True,
    )


_BESIDE_A_MODEL = (RankBuffers, GradientBuckets, AccumulatedGradients, ModuleAttributes)


def gradient_components(
    components: Iterable[StateComponent], is_within: Callable[[], bool]
) -> tuple[StateComponent, ...]:
    """The gradients of the models among the components, as components: each rank has its own.

    Without an all-reduce inside the window (``no_sync``) every rank sums up other gradients.

    Args:
        components: of a run.
        is_within: whether batches were used since the last optimizer step.

    Raises:
        ConfigurationError: a model keeps its gradients where they cannot be found.
    """
    return tuple(
        _component(component, is_within)
        for component in components
        if component.slot == Slot.MODEL.value
        and not isinstance(component.stateful, _BESIDE_A_MODEL)
    )


def holds_gradients(keys: Iterable[str]) -> bool:
    """Whether a checkpoint has such components."""
    return any(key.startswith(f"{Slot.MODEL.value}/") and key.endswith(_SUFFIX) for key in keys)


def _component(component: StateComponent, is_within: Callable[[], bool]) -> StateComponent:
    stateful, key = component.stateful, f"{component.key}/{_SUFFIX}"
    # A subclass is a framework's own: it may keep them somewhere else than in `.grad`.
    module = stateful.module if type(stateful) is ModelState else stateful
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            "mid_accumulation",
            found=f"'gradients', and {component.key} is a {type(stateful).__name__}",
            expected="a model whose gradients stand in the .grad of its parameters",
            remedy="Leave mid_accumulation at 'boundary'",
        )
    if any(map(is_sharded, module.parameters())):
        # FSDP2 keeps what a window has summed up to itself. torch 2.13
        # distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam.unsharded_accumulated_grad.
        raise ConfigurationError(
            "mid_accumulation",
            found=f"'gradients', and the parameters of {component.key} are sharded",
            expected="parameters that every rank holds whole",
            remedy="Leave mid_accumulation at 'boundary'",
        )
    gradients = AccumulatedGradients(module, is_within, key=key)
    return StateComponent(key, gradients, SharingPattern.PER_RANK, required=False)
