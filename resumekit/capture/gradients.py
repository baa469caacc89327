"""Gradients that training still needs when a checkpoint is written.

They are saved within an accumulation window and, at a step boundary, for a loop that never clears
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from resumekit.capture.ddp_buckets import GradientBuckets
from resumekit.capture.fsdp1 import FlatModelState
from resumekit.capture.gradient_watch import FlatGradients, GradientWatch, StorageWatch
from resumekit.capture.model import ModelState, by_clean_name
from resumekit.capture.named_tensors import RankBuffers
from resumekit.capture.nested_state import Mismatch, fits, refuse
from resumekit.capture.slots import OptimizerParameters
from resumekit.capture.user_state.user_state import UserState
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.serialization.digests import state_digest
from resumekit.serialization.sharding import is_sharded, local_part, sharded_like
from resumekit.state import (
    AfterRng,
    Checked,
    Count,
    Renamed,
    Renaming,
    Resplit,
    SharingPattern,
    Slot,
    StateComponent,
    WorldChange,
)

_REMEDY = "Build the model as it was when the checkpoint was written"
_SUFFIX = "gradients"

# Why a checkpoint has gradients.
_WINDOW = "window"  # an accumulation window is open
_CARRIED = "carried"  # a step began with gradients of the one before
_UNKNOWN = "unknown"  # no step has shown yet whether one does
_ZEROS = "zeros"  # steps begin with zeros, which are not stored

Named = Mapping[str, Tensor]


class _NotNeeded(TypedDict):
    """No gradient outlives its step."""


class _Sparse(TypedDict):
    indices: Tensor
    values: Tensor
    size: list[Count]
    is_coalesced: bool


class _Shard(TypedDict):
    local: Tensor
    placements: list[str]
    size: list[Count]
    mesh: list[Count]
    coordinate: list[Count] | None


class _GradientsState(TypedDict):
    reason: Literal["window", "carried", "unknown", "zeros"]
    gradients: dict[str, Tensor | _Sparse | _Shard | None]


class AccumulatedGradients(Checked, Renamed, AfterRng):
    """This rank's ``.grad`` of some parameters, while training still needs them.

    Args:
        named: gives the parameters by wrapper-free name.
        is_within: whether batches were used since the last optimizer step.
        key: the component's key, for errors.
        flat: gives the parameters of a model under FSDP1.
    """

    schema = _GradientsState | _NotNeeded

    def __init__(
        self,
        named: Callable[[], Named],
        is_within: Callable[[], bool],
        *,
        key: str,
        flat: FlatGradients | None = None,
    ) -> None:
        self.key = key
        kind = GradientWatch if flat is None else StorageWatch
        self.watch: GradientWatch | StorageWatch = kind(lambda: list(named().values()))
        self._flat = flat
        self._named = named
        self._is_within = is_within
        self._pending: dict[str, Any] = {}  # until after_rng_restore

    def component(self) -> StateComponent:
        """This state as a component; each rank has its own."""
        return StateComponent(self.key, self, SharingPattern.PER_RANK, required=False)

    @property
    def is_needed(self) -> bool:
        """Whether a checkpoint written now contains gradients."""
        return bool(self._pending) or bool(self._reason(self._live()))

    def state_dict(self) -> dict[str, Any]:
        """The live gradients, not copies, by name, and why they are saved; empty without any."""
        if self._pending:
            return dict(self._pending)
        live = self._live()
        reason = self._reason(live)
        if not reason:
            return {}
        if reason == _ZEROS:
            return {"reason": reason, "gradients": dict.fromkeys(live)}
        zeros = _zeros_among(live)
        return {
            "reason": reason,
            "gradients": {n: None if n in zeros else _encoded(p) for n, p in live.items()},
        }

    def _live(self) -> Named:
        """The parameters that have a gradient."""
        return {n: p for n, p in self._named().items() if p.grad is not None}

    def _reason(self, live: Named) -> str:
        """Why a checkpoint written now contains gradients; empty where it does not."""
        if not live:
            return ""
        if self._is_within():
            return _WINDOW
        if self.watch.must_save:
            return _CARRIED if self.watch.is_carried else _UNKNOWN
        return _ZEROS if self.watch.keeps_zeros else ""

    def comparable_state(self) -> dict[str, Any]:
        """The gradients that a later step is known to use, not those saved for lack of evidence."""
        state = self.state_dict()
        is_used = bool(state) and state["reason"] in (_WINDOW, _CARRIED)
        return dict(state["gradients"]) if is_used else {}

    def check_state_dict(self, state: Any) -> None:
        """Refuses a gradient without a parameter, of another shape or of another shard."""
        if not state:
            return
        problems = list(self._mismatches(state["gradients"]))
        if state["reason"] != _UNKNOWN:
            refuse(self.key, problems, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps them until ``after_rng_restore``: code before the next batch may clear them.

        Returns:
            A message where the gradients do not fit and no step is known to need them.
        """
        reason = state["reason"] if state else ""
        if reason != _UNKNOWN:
            self.watch.inherit(is_carried=reason == _CARRIED, keeps_zeros=reason == _ZEROS)
        elif any(True for _ in self._mismatches(state["gradients"])):
            return (f"{self.key}: not restored, because the ranks or the layout changed",)
        self._pending = dict(state)
        return ()

    def renamed(self, state: Any, renaming: Renaming) -> Any:
        is_saved = isinstance(state, Mapping) and "gradients" in state
        return {**state, "gradients": renaming.keys(state["gradients"])} if is_saved else state

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """The gradients that are equal on all former ranks.

        Raises:
            StateMismatchError: they differ, for instance within an accumulation window.
        """
        first = states[0]
        if len({state_digest(state) for state in states.values()}) == 1 and not _has_shards(first):
            return first, ()
        if {state.get("reason", _UNKNOWN) for state in states.values()} == {_UNKNOWN}:
            return {}, (f"{self.key}: not restored, because the number of ranks changed",)
        former = change.former_world_size
        raise StateMismatchError(
            self.key,
            found=f"different gradients on each of {former} ranks, and {change.world_size} ranks "
            "in this run",
            expected=f"{former} ranks",
            remedy=f"Launch with {former} ranks, or pass exclude={{{self.key!r}}}",
        )

    def start_fresh(self) -> tuple[str, ...]:
        """A checkpoint without gradients was written where none were needed."""
        return ()

    def after_rng_restore(self) -> None:
        """Restores the gradient of every parameter; a no-op where none were saved."""
        pending, self._pending = self._pending, {}
        if not pending:
            return
        saved = pending["gradients"]
        for name, parameter in self._named().items():
            gradient = saved.get(name)
            if name not in saved:
                parameter.grad = None
            elif gradient is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            elif parameter.grad is not None and fits(parameter.grad, gradient):
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = _as_gradient(gradient, parameter)
        if self._flat is not None:
            self._flat.set_views()
        self.watch.look()

    def _mismatches(self, saved: Mapping[str, Any]) -> Iterator[Mismatch]:
        parameters = self._named()
        for name, gradient in saved.items():
            if name not in parameters:
                yield Mismatch(name, "a gradient in the checkpoint", "a parameter")
            elif gradient is not None:
                then, now = _shard(gradient), _shard_of(parameters[name])
                if then != now:
                    found = f"a gradient of {_shape_text(then)} in the checkpoint"
                    yield Mismatch(name, found, f"{_shape_text(now)}, as in this run")


def _encoded(parameter: Tensor) -> Any:
    """The gradient itself, or the content of a sparse or sharded one."""
    gradient: Any = parameter.grad
    if is_sharded(gradient):
        return {
            "local": local_part(gradient),
            "placements": [str(each) for each in gradient.placements],
            **_shard_of(parameter),
        }
    if gradient.layout != torch.sparse_coo:
        return gradient
    # torch 2.13 _tensor_docs.py: the public indices() and values() refuse an uncoalesced tensor.
    return {
        "indices": gradient._indices(),
        "values": gradient._values(),
        "size": list(gradient.shape),
        "is_coalesced": gradient.is_coalesced(),
    }


def _zeros_among(live: Named) -> set[str]:
    """The names of the parameters whose gradient is ``zeros_like(parameter)``, bit for bit."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, parameter in live.items():
        if _may_be_zeros_like(parameter.grad, parameter):
            local = local_part(parameter.grad)
            has_bits = local.contiguous().view(torch.uint8).any()
            by_device.setdefault(local.device, {})[name] = has_bits
    # All of a device in one copy: each copy waits for the GPU.
    return {
        name
        for found in by_device.values()
        for name, has_bits in zip(found, torch.stack([*found.values()]).tolist(), strict=True)
        if not has_bits
    }


def _may_be_zeros_like(gradient: Any, parameter: Any) -> bool:
    local = local_part(gradient)
    if local.layout != torch.strided or gradient.dtype != parameter.dtype or not local.dim():
        return False
    return not is_sharded(gradient) or gradient.placements == parameter.placements


def _has_shards(state: Mapping[str, Any]) -> bool:
    gradients = state.get("gradients", {}).values()
    return any(isinstance(each, dict) and "local" in each for each in gradients)


def _shard(saved: Any) -> dict[str, Any]:
    """The shape of the parameter of a saved gradient, and this rank's position in the mesh."""
    if isinstance(saved, Tensor):
        return {"size": list(saved.shape)}
    return {name: saved[name] for name in ("size", "mesh", "coordinate") if name in saved}


def _shard_of(parameter: Tensor) -> dict[str, Any]:
    """The same of a live parameter."""
    size = list(parameter.shape)
    if not is_sharded(parameter):
        return {"size": size}
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]  # a DTensor's
    return {"size": size, "mesh": list(mesh.shape), "coordinate": list(mesh.get_coordinate() or ())}


def _shape_text(shard: Mapping[str, Any]) -> str:
    where = f" at {shard['coordinate']} of the mesh {shard['mesh']}" if "mesh" in shard else ""
    return f"shape {tuple(shard['size'])}{where}"


def _as_gradient(saved: Any, parameter: Tensor) -> Tensor:
    """A copy with the memory layout that torch gives the gradient of this parameter."""
    if isinstance(saved, Tensor):
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False).copy_(saved)
    if "local" in saved:
        return _as_sharded(saved, parameter)
    return torch.sparse_coo_tensor(
        saved["indices"].to(parameter.device, copy=True),
        saved["values"].to(parameter.device, copy=True),
        saved["size"],
        is_coalesced=saved["is_coalesced"],
        check_invariants=True,
    )


def _as_sharded(saved: Mapping[str, Any], parameter: Any) -> Tensor:
    local = saved["local"].to(local_part(parameter).device, copy=True)
    if saved["placements"] == [str(each) for each in parameter.placements]:
        made: Tensor = sharded_like(parameter, local)
        return made
    # The gradient of a replicated parameter may be a partial sum.
    from torch.distributed.tensor import DTensor, Partial, Replicate

    known = {str(each): each for each in (*parameter.placements, Partial(), Replicate())}
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        [known[each] for each in saved["placements"]],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def named_parameters(module: nn.Module) -> Named:
    """A module's parameters by wrapper-free name."""
    return by_clean_name(module, dict(module.named_parameters()))


def gradient_states(
    components: Iterable[StateComponent], is_within: Callable[[], bool]
) -> tuple[AccumulatedGradients, ...]:
    """The gradients of the models and parameters among the components.

    Without an all-reduce within the window (``no_sync``) every rank accumulates other gradients.
    Models that keep their gradients elsewhere have none, see ``require_gradients``.

    Args:
        components: of a run.
        is_within: whether batches were used since the last optimizer step.
    """
    found: list[AccumulatedGradients] = []
    for component in components:
        stateful = component.stateful
        flat = FlatGradients(stateful.module) if isinstance(stateful, FlatModelState) else None
        named = _named_of(component) if flat is None else flat.named
        if named is not None:
            key = f"{component.key}/{_SUFFIX}"
            found.append(AccumulatedGradients(named, is_within, key=key, flat=flat))
    return tuple(found)


def gradient_keys(keys: Iterable[str]) -> frozenset[str]:
    """The keys of gradient components among those of a checkpoint."""
    slots = (Slot.MODEL.value, Slot.OPTIMIZER.value)
    return frozenset(
        key for key in keys if key.split("/")[0] in slots and key.endswith(f"/{_SUFFIX}")
    )


def require_gradients(components: Iterable[StateComponent]) -> None:
    """Raises ConfigurationError unless the gradients of an open accumulation window can be saved.

    Raises:
        ConfigurationError: a model keeps its gradients where they cannot be found.
    """
    for component in components:
        if not _is_model(component):
            continue
        module = _module_of(component)
        if module is None:
            found = f"{component.key} is a {type(component.stateful).__name__}"
            expected = "a model whose gradients are in the .grad of its parameters"
        elif any(map(is_sharded, module.parameters())):
            # FSDP2 accumulates in a private tensor. torch 2.13
            # distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam.unsharded_accumulated_grad.
            found = f"the parameters of {component.key} are sharded"
            expected = "parameters that every rank holds whole"
        else:
            continue
        raise ConfigurationError(
            "mid_accumulation",
            found=f"'gradients', and {found}",
            expected=expected,
            remedy="Leave mid_accumulation at 'boundary'",
        )


def _named_of(component: StateComponent) -> Callable[[], Named] | None:
    if isinstance(component.stateful, OptimizerParameters):
        return component.stateful.named
    module = _module_of(component) if _is_model(component) else None
    return None if module is None else partial(named_parameters, module)


def _is_model(component: StateComponent) -> bool:
    derived = (RankBuffers, GradientBuckets, AccumulatedGradients, UserState)
    return component.slot == Slot.MODEL.value and not isinstance(component.stateful, derived)


def _module_of(component: StateComponent) -> nn.Module | None:
    """The model of a component, unless a framework keeps its gradients elsewhere."""
    stateful = component.stateful
    module = stateful.module if type(stateful) is ModelState else stateful
    return module if isinstance(module, nn.Module) else None
