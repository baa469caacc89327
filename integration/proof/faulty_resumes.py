"""Resumes that are wrong in one known way, for processes that the recorder looks at.

A script resumes exactly. Before its first forward pass, or from its first batch on, one thing is
made wrong, by the means of torch alone: so it is the same under every framework, and the library
has no part in it.
"""

from __future__ import annotations

import gc
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from resumekit.recorder import record_deepspeed, record_torch

SAVE_EVERY = 10
T = TypeVar("T")


@dataclass(frozen=True)
class Resume:
    """What is known of a resume.

    Args:
        reference: a directory with what the uninterrupted run left: ``order.jsonl`` with the
            indices of each batch, ``after-10.pt`` with weights and states.
        step: the last step that is not trained again.
        amount: how far it is wrong, from 1.
    """

    reference: Path
    step: int
    amount: int

    def order(self) -> list[Any]:
        """The indices of each batch of the uninterrupted run."""
        return [json.loads(line) for line in (self.reference / "order.jsonl").open()]

    def older(self) -> dict[str, Any]:
        """Weights and states of the uninterrupted run, of the checkpoint before this one."""
        path = self.reference / f"after-{self.step - SAVE_EVERY}.pt"
        found: dict[str, Any] = torch.load(path, weights_only=False)
        return found


# ---------------------------------------------------------------- what lives in this process


def live(kind: type[T]) -> list[T]:
    """The objects of a class; the wrappers of a framework are none."""
    found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    return [each for each in found if type(each).__module__.startswith("torch.")]


def optimizer() -> Optimizer:
    (found,) = [each for each in live(Optimizer) if hasattr(each, "param_groups")]
    return found


def parameters() -> list[torch.Tensor]:
    """What the optimizer trains; under ZeRO, partitions."""
    return [each for group in optimizer().param_groups for each in group["params"]]


# ---------------------------------------------------------------- wrong states


def weights_restarted(resume: Resume, model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(resume.amount)
    for each in {id(p): p for p in (*model.parameters(), *parameters())}.values():
        each.data.normal_(std=0.1, generator=generator)


def one_weight(resume: Resume, model: nn.Module) -> None:
    last = [each for each in model.parameters() if each.ndim > 1][-1]
    last.data.normal_(std=0.1, generator=torch.Generator().manual_seed(resume.amount))


def older_weights(resume: Resume, model: nn.Module) -> None:
    older = resume.older()
    then = [*older["model"], *older["parameters"]]
    for each, value in zip([*model.parameters(), *parameters()], then, strict=True):
        each.data.copy_(value)


def cold_optimizer(resume: Resume, model: nn.Module) -> None:
    optimizer().state.clear()


def zero_moments(resume: Resume, model: nn.Module) -> None:
    for state in optimizer().state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def one_group_cold(resume: Resume, model: nn.Module) -> None:
    del optimizer().state[parameters()[0]]


def older_optimizer(resume: Resume, model: nn.Module) -> None:
    older = zip(parameters(), resume.older()["optimizer"], strict=True)
    optimizer().state.update(dict(older))


def optimizer_counter(resume: Resume, model: nn.Module) -> None:
    for state in optimizer().state.values():
        state["step"] += resume.amount


def weight_decay(resume: Resume, model: nn.Module) -> None:
    for group in optimizer().param_groups:
        group["weight_decay"] += 0.1 * resume.amount


def _set_schedule(step: int) -> None:
    (scheduler,) = live(LRScheduler)
    scheduler.last_epoch = step
    for group, lr in zip(optimizer().param_groups, scheduler.get_lr(), strict=True):
        group["lr"] = lr


def lr_restarted(resume: Resume, model: nn.Module) -> None:
    _set_schedule(0)


def lr_shifted(resume: Resume, model: nn.Module) -> None:
    _set_schedule(resume.step - resume.amount)


def other_lr(resume: Resume, model: nn.Module) -> None:
    for group in optimizer().param_groups:
        group["lr"] *= 1 + 0.1 * resume.amount


def ema_restarted(resume: Resume, model: nn.Module) -> None:
    (ema,) = live(AveragedModel)
    for each, weight in zip(ema.module.parameters(), model.parameters(), strict=True):
        each.data.copy_(weight)
    ema.n_averaged.zero_()


def buffers(resume: Resume, model: nn.Module) -> None:
    for each in live(nn.BatchNorm1d):
        if each in list(model.modules()):
            each.reset_running_stats()


def grad_scaler(resume: Resume, model: nn.Module) -> None:
    (scaler,) = live(torch.amp.grad_scaler.GradScaler)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 0})


def rng_ahead(resume: Resume, model: nn.Module) -> None:
    torch.rand(resume.amount)


def rng_behind(resume: Resume, model: nn.Module) -> None:
    torch.set_rng_state(resume.older()["rng"])


def rng_reseeded(resume: Resume, model: nn.Module) -> None:
    torch.manual_seed(1000 + resume.amount)


def variable(resume: Resume, model: nn.Module) -> None:
    """A weight of the loss that grows, such as that of a curriculum."""
    cross_entropy = nn.functional.cross_entropy

    def weighted(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return cross_entropy(*arguments, **keywords) * (1 + 0.01 * resume.amount)

    nn.functional.cross_entropy = weighted


STATES: dict[str, Callable[[Resume, nn.Module], None]] = {
    each.__name__: each
    for each in (
        *(weights_restarted, one_weight, older_weights, cold_optimizer, zero_moments),
        *(one_group_cold, older_optimizer, optimizer_counter, weight_decay, lr_restarted),
        *(lr_shifted, other_lr, ema_restarted, buffers, grad_scaler, rng_ahead, rng_behind),
        *(rng_reseeded, variable),
    )
}


# ---------------------------------------------------------------- wrong batches


def _from(first: int) -> Callable[[Resume, list[Any]], Iterator[Any]]:
    def batches(resume: Resume, order: list[Any]) -> Iterator[Any]:
        yield from order[first:]

    return batches


def _moved(direction: int) -> Callable[[Resume, list[Any]], Iterator[Any]]:
    def batches(resume: Resume, order: list[Any]) -> Iterator[Any]:
        yield from order[resume.step + direction * resume.amount :]

    return batches


def _epoch_length(order: list[Any]) -> int:
    """Each sample is in an epoch once."""
    seen: set[int] = set()
    for number, batch in enumerate(order):
        if not seen.isdisjoint(batch):
            return number
        seen.update(batch)
    raise AssertionError("there is one epoch")


def epoch_restarted(resume: Resume, order: list[Any]) -> Iterator[Any]:
    length = _epoch_length(order)
    yield from order[resume.step // length * length :]


def other_epoch(resume: Resume, order: list[Any]) -> Iterator[Any]:
    yield from order[resume.step - _epoch_length(order) :]


def reshuffled(resume: Resume, order: list[Any]) -> Iterator[Any]:
    samples = sorted({index for batch in order for index in batch})
    generator = torch.Generator().manual_seed(resume.amount)
    shuffled = torch.randperm(len(samples), generator=generator).tolist()
    yield from ([samples[shuffled[index]] for index in batch] for batch in order[resume.step :])


def batch_order(resume: Resume, order: list[Any]) -> Iterator[Any]:
    yield from (batch[::-1] for batch in order[resume.step :])


def batch_size(resume: Resume, order: list[Any]) -> Iterator[Any]:
    yield from (batch[: -resume.amount] or batch for batch in order[resume.step :])


BATCHES: dict[str, Callable[[Resume, list[Any]], Iterator[Any]]] = {
    "data_restarted": _from(0),
    "samples_repeated": _moved(-1),
    "samples_skipped": _moved(+1),
    **{
        each.__name__: each
        for each in (epoch_restarted, other_epoch, reshuffled, batch_order, batch_size)
    },
}


# ---------------------------------------------------------------- installing them


def _before_first_step(action: Callable[[nn.Module], None]) -> None:
    """Calls it with the model, before the first forward pass and the first step.

    Lightning runs the forward pass in a closure that the step of the optimizer calls.
    """
    is_done: list[bool] = []

    def once(model: nn.Module | None) -> None:
        if model is not None and not is_done:
            is_done.append(True)
            action(model)

    def before_forward(module: nn.Module, inputs: Any) -> None:
        if not is_done and module.training and torch.is_grad_enabled():
            once(module)

    def before_step(*_: Any) -> None:
        if not is_done:
            once(_trained_model())

    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_pre_hook(before_step)


def _trained_model() -> nn.Module | None:
    """The outermost model that has the parameters of the optimizer."""
    first = parameters()[0]
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    owners = [each for each in modules if any(first is one for one in each.parameters())]
    return max(owners, key=lambda each: len(list(each.modules())), default=None)


def _replace_batches(wrong: Callable[[Resume, list[Any]], Iterator[Any]], resume: Resume) -> None:
    order = resume.order()
    batches = wrong(resume, order)
    fetch = _MapDatasetFetcher.fetch

    def replaced(self: Any, indices: Any) -> Any:
        return fetch(self, next(batches, indices))

    _MapDatasetFetcher.fetch = replaced  # type: ignore[method-assign]


def keep_history(directory: Path) -> None:
    """Keeps what the resumes of other runs are made wrong with."""
    directory.mkdir(parents=True)
    fetch = _MapDatasetFetcher.fetch
    models: list[nn.Module] = []
    _before_first_step(models.append)
    done: list[int] = []

    def noted(self: Any, indices: Any) -> Any:
        with (directory / "order.jsonl").open("a") as file:
            file.write(json.dumps(list(indices)) + "\n")
        return fetch(self, indices)

    def after_step(one: Optimizer, *_: Any) -> None:
        if not type(one).__module__.startswith("torch."):
            return
        done.append(1)
        if len(done) % SAVE_EVERY == 0:
            state = {
                "model": [each.detach().clone() for each in models[0].parameters()],
                "parameters": [each.detach().clone() for each in parameters()],
                "optimizer": [one.state[each] for each in parameters()],
                "rng": torch.get_rng_state(),
            }
            torch.save(state, directory / f"after-{len(done)}.pt")

    _MapDatasetFetcher.fetch = noted  # type: ignore[method-assign]
    register_optimizer_step_post_hook(after_step)


def run_recorded(
    directory: str,
    *,
    script: str,
    settings: dict[str, Any],
    history: str,
    fault: str = "",
    step: int = 0,
    amount: int = 1,
) -> None:
    """Runs a script as ``prove`` launches it: recorded, and perhaps with one fault.

    Args:
        directory: of the script.
        script: its path.
        settings: of the recorder.
        history: of the uninterrupted run, which is to be kept if there is none yet.
        fault: a key of ``STATES`` or ``BATCHES``; empty for none.
        step: the last step that is not trained again.
        amount: how far the fault goes.
    """
    resume = Resume(Path(history), step, amount)
    if not resume.reference.exists():
        keep_history(resume.reference)
    if fault in STATES:
        _before_first_step(lambda model: STATES[fault](resume, model))
    elif fault:
        _replace_batches(BATCHES[fault], resume)
    record_torch(settings)  # its hooks come after those of the fault
    if "deepspeed" in sys.modules:
        record_deepspeed({})
    sys.argv = [script, "--directory", directory, "--save-every", str(SAVE_EVERY)]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
