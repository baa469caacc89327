"""Records what each optimizer step of a program trains, by hooks of torch; Python imports this.

A program of a how-to page has no line for it. Each process writes a folder of its own: a file for
each optimizer step with the loss, the gradients, the weights, and the tensors that models were
given since the step before. The library is not asked for anything.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

RECORDS, WAIT_AT = "HOW_TO_RECORDS", "HOW_TO_WAIT_AT"


class StepRecorder:
    """Writes the steps of this process, and waits once at one of them.

    Args:
        folder: of the records of all processes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = time.time_ns()  # in containers each launch is process 1
        self._num_steps = 0
        self._loss: Any = None
        self._before: Any = None
        self._used: list[Any] = []  # the tensors that models were given since the last step
        self._depth = 0  # of calls of modules in each other

    def note_weights(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook of every optimizer step, before it: keeps the weights that it begins with."""
        self._before = _weights_of(optimizer)

    def enter(self, module: Any, inputs: Any) -> None:
        """Hook of every forward pass, before it."""
        self._depth += not _is_backward()

    def note_call(self, module: Any, inputs: Any, named_inputs: Any, output: Any) -> None:
        """Hook of every forward pass: keeps the output of a loss module, and a model's inputs."""
        import torch
        from torch.nn.modules.loss import _Loss

        if _is_backward():  # activation checkpointing computes it again
            return
        self._depth -= 1
        if isinstance(module, _Loss):
            self._loss = output.detach().clone()
        elif self._depth == 0 and torch.is_grad_enabled():
            given = [*inputs, *named_inputs.values()]
            self._used += [each.detach().clone() for each in given if torch.is_tensor(each)]

    def record(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hook of every optimizer step."""
        import torch

        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
        launch = self._folder / f"rank-{rank}" / f"{os.getpid()}-{self._began}"
        launch.mkdir(parents=True, exist_ok=True)
        content = {
            "time": time.time(),
            "loss": self._loss,
            "before": self._before,
            "weights": _weights_of(optimizer),
            "used": self._used,
            "gradients": _gradients_of(optimizer),
        }
        self._used = []
        torch.save(content, launch / "part")
        os.rename(launch / "part", launch / f"{self._num_steps:06}.pt")
        self._num_steps += 1
        if self._num_steps == int(os.environ.get(WAIT_AT, "0")):
            self._wait(rank)

    def _wait(self, rank: str) -> None:
        (self._folder / f"waits-{rank}").write_text(f"{os.getpid()}")
        while not (self._folder / "go").exists():
            time.sleep(0.01)


def _is_backward() -> bool:
    import torch

    return torch._C._current_graph_task_id() >= 0


def _parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _gradients_of(optimizer: Any) -> list[Any]:
    """Those of the step; a closure computes them inside it."""
    found = (each.grad for each in _parameters_of(optimizer))
    return [each.detach().clone() for each in found if each is not None]


def _weights_of(optimizer: Any) -> list[Any]:
    return [each.detach().clone() for each in _parameters_of(optimizer)]


class AfterTorch(importlib.abc.MetaPathFinder):
    """Adds the hooks once torch is imported, in programs that import it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec of torch, whose loader also adds the hooks."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, self)  # transformers looks whether there is a torch, before
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_hook(module: Any) -> None:
            sys.meta_path.remove(self)
            execute(module)
            from torch.nn.modules.module import (
                register_module_forward_hook,
                register_module_forward_pre_hook,
            )
            from torch.optim.optimizer import (
                register_optimizer_step_post_hook,
                register_optimizer_step_pre_hook,
            )

            recorder = StepRecorder(Path(os.environ[RECORDS]))
            register_module_forward_pre_hook(recorder.enter)
            register_module_forward_hook(recorder.note_call, with_kwargs=True, always_call=True)
            register_optimizer_step_pre_hook(recorder.note_weights)
            register_optimizer_step_post_hook(recorder.record)

        loader.exec_module = execute_and_hook
        return spec


if RECORDS in os.environ:
    sys.meta_path.insert(0, AfterTorch())
