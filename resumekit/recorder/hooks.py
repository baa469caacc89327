"""The hooks of torch that the recorder listens to, and the steps of DeepSpeed's engines."""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from resumekit.record.conditions import initialize_vector_math
from resumekit.recorder.launches import RecorderSettings
from resumekit.recorder.recorder import TRAINER_VARIABLE, Recorder


class _Process:
    """The recorder of this process, for the activations that follow the first."""

    recorder: Recorder | None = None


def current_recorder() -> Recorder | None:
    """The recorder of this process."""
    return _Process.recorder


def install(settings: RecorderSettings) -> None:
    """Registers every hook; without a step of an optimizer nothing is written.

    A process that another recorded process has started is not recorded.
    """
    if os.environ.get(TRAINER_VARIABLE, str(os.getpid())) != str(os.getpid()):
        return
    initialize_vector_math()  # a run that resumekit has resumed has done it, too
    recorder = _Process.recorder = Recorder(settings)
    register_optimizer_step_pre_hook(_only_eager(lambda it, *_: recorder.before_step(it)))
    register_optimizer_step_post_hook(_only_eager(lambda it, *_: recorder.after_step(it)))
    _listen_to_models(recorder)
    _listen_to_backward(recorder)
    _listen_to_loaders(recorder)


def _only_eager(hook: Any) -> Any:
    """A hook that torch.compile leaves out of its graphs, which stay as without it."""

    @functools.wraps(hook)
    def called(*arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*arguments)

    return called


def _listen_to_models(recorder: Recorder) -> None:
    register_module_parameter_registration_hook(lambda module, *_: recorder.saw_module(module))
    depth = threading.local()

    def enter(module: Any, inputs: Any) -> None:
        depth.value = getattr(depth, "value", 0) + 1

    def leave(module: Any, inputs: Any, keywords: Any, output: Any) -> None:
        depth.value = max(getattr(depth, "value", 1) - 1, 0)
        # A loss function is a module, too: what it is called with depends on the weights.
        is_outermost = depth.value == 0 and torch.is_grad_enabled()
        if is_outermost and _is_training(module) and next(module.parameters(), None) is not None:
            recorder.saw_batch([inputs, keywords])

    register_module_forward_pre_hook(_only_eager(enter))
    # torch 2.13 _dynamo/eval_frame.py warns that a hook is called for the wrapper, too: ours counts
    # the outermost call only.
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are")
    # Only the hook after forward sees keyword arguments; called after an exception, too.
    register_module_forward_hook(_only_eager(leave), with_kwargs=True, always_call=True)


def _is_training(module: Any) -> bool:
    # lightning 2.6 loops/evaluation_loop.py: a validation leaves the wrapper of DDP in evaluation.
    return any(each.training for each in module.modules())


def _listen_to_backward(recorder: Recorder) -> None:
    # There is no hook: `Tensor.backward` calls this function by its name in the module.
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def recorded(tensors: Any, *arguments: Any, **keywords: Any) -> None:
        if not torch.compiler.is_compiling():
            recorder.saw_loss(tensors)
        backward(tensors, *arguments, **keywords)

    torch.autograd.backward = recorded


def _listen_to_loaders(recorder: Recorder) -> None:
    # There is no hook: an epoch is a pass of this class over the dataset.
    iterators: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - torch 2.13 dataloader.py
    fetch = iterators.__next__

    @functools.wraps(fetch)
    def recorded(iterator: Any) -> Any:
        if not torch.compiler.is_compiling():
            recorder.saw_fetch(iterator)
        return fetch(iterator)

    iterators.__next__ = recorded


# ---------------------------------------------------------------- engines of DeepSpeed


def install_in_deepspeed() -> None:
    """Wraps ``deepspeed.initialize``: the optimizer of each engine that it makes is recorded."""
    deepspeed: Any = sys.modules["deepspeed"]
    initialize = deepspeed.initialize

    @functools.wraps(initialize)
    def initialize_and_listen(*arguments: Any, **keywords: Any) -> Any:
        made = initialize(*arguments, **keywords)
        _listen_to(made[0])
        return made

    deepspeed.initialize = initialize_and_listen


def _listen_to(engine: Any) -> None:
    recorder, optimizer = current_recorder(), engine.optimizer
    if recorder is None or optimizer is None or isinstance(optimizer, Optimizer):
        return  # a torch optimizer calls the hooks itself
    recorder.saw_engine(engine.module)
    step = optimizer.step

    @functools.wraps(step)
    def recorded(*arguments: Any, **keywords: Any) -> Any:
        # The inner optimizer has the partitions of this rank. The wrapper may call its step once
        # for each group, and changes its groups while it does: the whole is one step.
        inner = getattr(optimizer, "optimizer", optimizer)
        recorder.before_step(optimizer, inner)
        done = step(*arguments, **keywords)
        recorder.after_step(optimizer, inner, is_skipped=getattr(optimizer, "overflow", False))
        return done

    optimizer.step = recorded
