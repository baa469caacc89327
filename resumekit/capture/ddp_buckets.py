"""The state of DistributedDataParallel: its gradient buckets, and whether it broadcasts buffers.

After its first iteration DDP rebuilds its buckets in the order in which gradients became ready. The
position of a gradient decides the order in which three or more ranks add it, and so its last bits:
a new DDP module reduces its first iteration in another order than the interrupted run. Measured
with torch 2.13 on gloo: every parameter differs after the first resumed step.

After a forward pass without gradients, such as an evaluation, or within ``no_sync``, DDP does not
broadcast rank 0's buffers before the next forward pass.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from resumekit.capture.gradient_watch import GradientProbe
from resumekit.capture.model import ModelState, by_clean_name
from resumekit.state import (
    AfterResume,
    BeforeSave,
    Fidelity,
    Renamed,
    Renaming,
    SharingPattern,
    Slot,
    StateComponent,
)

# What the key of such a component ends in.
GRADIENT_BUCKETS = "gradient_buckets"

Buckets = list[list[str]]

# Of the state of one DDP module: the names of the parameters in each bucket, and a bool.
_BUCKETS = "buckets"
_BROADCASTS = "broadcasts_buffers"


def bucket_components(components: Sequence[StateComponent]) -> tuple[StateComponent, ...]:
    """The gradient buckets of the DDP models among some components.

    Args:
        components: of a run.
    """
    found: list[StateComponent] = []
    seen: set[int] = set()
    for component in components:
        stateful = component.stateful
        module = stateful.module if isinstance(stateful, ModelState) else stateful
        if component.slot != Slot.MODEL.value or not isinstance(module, nn.Module):
            continue
        wrappers = {id(each) for _, each in ddp_modules(module)} - seen
        if wrappers:
            found += buckets_of(module, key=component.key, process_group=component.process_group)
            seen |= wrappers
    return tuple(found)


def buckets_of(
    model: nn.Module, *, key: str = Slot.MODEL.value, process_group: Any = None
) -> tuple[StateComponent, ...]:
    """The gradient buckets of one model; none without DDP.

    Args:
        model: wrapped in DDP.
        key: of the model's component.
        process_group: of the model's component.
    """
    if not any(True for _ in ddp_modules(model)):
        return ()
    buckets = GradientBuckets(model, key=f"{key}/{GRADIENT_BUCKETS}")
    fidelity, reason = buckets.fidelity
    of_group = process_group is not None
    component = StateComponent(
        buckets.key,
        buckets,
        SharingPattern.PER_GROUP if of_group else SharingPattern.REPLICATED,
        required=False,
        process_group=process_group,
        fidelity=fidelity,
        reason=reason,
    )
    return (component,)


class GradientBuckets(Renamed, BeforeSave, AfterResume):
    """The state of every DDP module in a model: its buckets, and whether it broadcasts buffers.

    Args:
        model: a module that is wrapped in DDP, or holds modules that are.
        key: the component's key, for messages.
    """

    def __init__(self, model: nn.Module, *, key: str) -> None:
        self.key = key
        self._wrappers = dict(ddp_modules(model))
        self._saved: dict[str, Mapping[str, Any]] = {}

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """EXACT where the buckets can be restored, else the reason why not."""
        for kept in filter(None, map(_kept_by_hooks, self._wrappers.values())):
            reason = "the errors, counts and RNG states in it are reinitialised"
            return Fidelity.LOST, f"the {kept} of a communication hook: {reason}"
        for obstacle in filter(None, map(_obstacle, self._wrappers.values())):
            reason = "the first step sums gradients in another order"
            return Fidelity.EQUIVALENT, f"{obstacle}: {reason}"
        return Fidelity.EXACT, ""

    @property
    def requires_equal_batches(self) -> bool:
        """Whether training is inside ``join()``, where ranks with fewer batches wait."""
        # torch 2.13 distributed/algorithms/join.py Join sets it.
        return any(module._join_config.enable for module in self._wrappers.values())

    def before_save(self) -> None:
        """Rebuilds the buckets now instead of at the next iteration. Collective."""
        for module in self._wrappers.values():
            if not _buckets(module):
                _rebuild(module)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By the name of the DDP module; empty for one that does not rebuild its buckets."""
        found = {name: _state(module) for name, module in self._wrappers.items()}
        return {name: state for name, state in found.items() if state}

    def renamed(self, state: Any, renaming: Renaming) -> Any:
        """Of one DDP module, there and here; the names of parameters are relative to it."""
        if len(state) != 1 or len(self._wrappers) != 1:
            return state
        ((then, saved),), (now,) = state.items(), self._wrappers
        old, new = (f"{name}." if name else "" for name in (then, now))
        buckets = [
            [name.removeprefix(new) for name in renaming.listed(old + each for each in names)]
            for names in saved.get(_BUCKETS, ())
        ]
        return {now: {**saved, _BUCKETS: buckets} if buckets else saved}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Keeps the state until ``after_resume``, which is collective."""
        self._saved = dict(state)

    def after_resume(self) -> tuple[str, ...]:
        """Restores the buckets by a backward pass of zero gradients in the saved order. Collective.

        DDP takes the order from the backward pass of its first iteration.
        """
        messages = []
        for name, module in self._wrappers.items():
            saved = self._saved.pop(name, {})
            if _BROADCASTS in saved:
                module.require_forward_param_sync = bool(saved[_BROADCASTS])
            buckets = saved.get(_BUCKETS)
            if buckets is None or _obstacle(module) or _buckets(module) == buckets:
                continue
            if module.find_unused_parameters:  # it never rebuilds its buckets
                messages.append(f"{self.key}: with find_unused_parameters=True they stay the first")
                continue
            parameters = _parameters(module)
            order = [fqn for bucket in buckets for fqn in bucket]
            if sorted(order) != sorted(parameters):
                messages.append(f"{self.key}: other parameters have gradients than before")
                continue
            _learn_order(module, [parameters[fqn] for fqn in order])
            if _buckets(module) != buckets:
                messages.append(f"{self.key}: they are of other sizes than in the checkpoint")
        return tuple(messages)


def ddp_around(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module that wraps a model, found among all live objects.

    The wrapped model has no reference to it.
    """
    wrappers = (
        each
        for each in gc.get_objects()
        if issubclass(type(each), DistributedDataParallel) and each.module is model
    )
    return next(wrappers, None)


def ddp_modules(model: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Every DDP module in a model, by its name in it."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            yield name, module


def _obstacle(module: DistributedDataParallel) -> str:
    """Why the buckets of a module cannot be restored; empty where they can."""
    if module.static_graph:
        return "static_graph=True"
    if module.mixed_precision is not None:
        return "mixed_precision of DistributedDataParallel"
    if module._comm_hooks:
        return "a communication hook"
    if any(map(_has_hooks, _parameters(module).values())):
        return "hooks on the gradients of parameters"
    if any(getattr(each, "sparse", False) for each in module.modules()):
        return "sparse gradients"
    return ""


def _has_hooks(parameter: Any) -> bool:
    # torch 2.13 _tensor.py, Tensor.register_hook and register_post_accumulate_grad_hook.
    hooks = (parameter._backward_hooks or {}).values()
    return bool(parameter._post_accumulate_grad_hooks) or any(
        not isinstance(hook, GradientProbe) for hook in hooks
    )


def _kept_by_hooks(module: DistributedDataParallel) -> str:
    """The class of a communication hook's state; empty where there is none.

    The hooks that DDP registers itself, for instance for mixed precision, have no state.
    """
    # torch 2.13 nn/parallel/distributed.py, DistributedDataParallel.register_comm_hook.
    states = [state for _, state in module._comm_hooks if state is not None]
    kept = [type(state).__name__ for state in states if not isinstance(state, ProcessGroup)]
    return next((name for name in kept if not name.startswith("_")), "")


def _state(module: DistributedDataParallel) -> dict[str, Any]:
    buckets = _buckets(module)
    state: dict[str, Any] = {_BUCKETS: buckets} if buckets else {}
    # torch 2.13 nn/parallel/distributed.py, will_sync_module_buffers. Without broadcasts the flag
    # may differ between ranks: one of them may have run an evaluation alone.
    if module.broadcast_buffers and module.modules_buffers:
        state[_BROADCASTS] = module.require_forward_param_sync
    return state


def _rebuild(module: DistributedDataParallel) -> None:
    """Rebuilds the buckets if an order is known, and updates the log with them. Collective."""
    # torch 2.13 nn/parallel/distributed.py, _pre_forward: the same calls at the next iteration.
    if module.reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True
    logger: Any = module.logger
    logger.set_runtime_stats_and_log()  # in the first ten iterations, and then now and then


def _parameters(module: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters in the reducer's order, by wrapper-free name."""
    # torch 2.13 nn/parallel/distributed.py, _build_params_for_reducer.
    raw = {
        name: parameter
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in module.parameters_to_ignore
    }
    return by_clean_name(module.module, raw)


def _buckets(module: DistributedDataParallel) -> Buckets:
    # torch 2.13 nn/parallel/distributed.py; no public API returns the buckets.
    logged = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    listed = str(logged.get("rebuilt_per_bucket_param_indices") or "")
    names = list(_parameters(module))
    return [[names[int(n)] for n in bucket.split()] for bucket in listed.split(",") if bucket]


def _learn_order(module: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
    """Runs a backward pass in which gradients become ready in the order of the parameters."""
    gradients = [parameter.grad for parameter in parameters]
    module.reducer.prepare_for_forward()
    module.reducer.prepare_for_backward([])
    with torch.enable_grad():
        for parameter in parameters:
            parameter.grad = None
            _accumulate_zeros(parameter)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    _rebuild(module)


def _accumulate_zeros(parameter: Tensor) -> None:
    """Runs a backward pass, below the functions that tools wrap to see the losses of a script."""
    output = parameter.reshape(-1)[:1]
    zeros = torch.zeros_like(output)
    # torch 2.13 autograd/__init__.py, backward: the same call.
    _engine_run_backward(
        (output,), (zeros,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
