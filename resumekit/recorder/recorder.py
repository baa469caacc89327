"""One record for each optimizer step of this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from resumekit.record.trace import Trace, rng_digests
from resumekit.recorder.digests import BatchRecord, rng_positions, value_digest
from resumekit.recorder.launches import Origin, Position, RecorderSettings, align
from resumekit.recorder.models import (
    Modules,
    learning_rates,
    parameter_digests,
    parameters_of,
    position_of,
    settings_of,
    state_digests,
)

# The process that trains. What it starts belongs to its own work, not to the run.
TRAINER_VARIABLE = "RESUMEKIT_RECORDED_PROCESS"


class Recorder:
    """Sees losses, batches and steps, and writes a line after each step.

    A process that never steps writes nothing. A recorder that fails writes that, and then nothing
    more; the script runs on.

    Args:
        settings: of this launch.
    """

    def __init__(self, settings: RecorderSettings) -> None:
        self._settings = settings
        self._modules = Modules()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._trace: Trace | None = None
        self._step = 0  # the last one that was recorded, counted over the whole run
        self._before: Position | None = None
        self._running: list[int] = []  # ids of optimizers inside their step, wrappers first
        self._losses: list[str] = []
        self._batch = BatchRecord()
        # A pass over a dataset is an epoch, or an evaluation between two of its batches.
        self._passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._num_passes = self._pass = 0
        self._is_rest = False  # a resume inside an accumulation window repeats the rest of it
        self._is_off = False

    # ------------------------------------------------------------------ what the hooks see

    def saw_module(self, module: torch.nn.Module) -> None:
        """A module gets a parameter."""
        self._modules.saw_module(module)

    def saw_loss(self, tensors: Any) -> None:
        """``backward`` is called on these."""
        self._guarded(lambda: self._losses.extend(map(_loss, _as_list(tensors))))

    def saw_batch(self, inputs: Any) -> None:
        """A model in training was called with these."""
        self._guarded(lambda: self._batch.add(inputs))

    def saw_fetch(self, iterator: Any) -> None:
        """A batch is requested from this iterator of a ``DataLoader``."""
        self._guarded(lambda: self._count_pass(iterator))

    def saw_engine(self, model: torch.nn.Module) -> None:
        """An optimizer that has copies of these parameters trains them."""
        self._modules.saw_trained(model)

    def before_step(self, optimizer: Any, inner: Any = None) -> None:
        """A step begins.

        Args:
            optimizer: what steps.
            inner: what has the parameters and the state, if another object does.
        """
        if id(optimizer) in self._running:  # its last step raised
            self._running.clear()
        self._running.append(id(optimizer))
        if len(self._running) == 1:
            self._guarded(lambda: self._begin(inner or optimizer))

    def after_step(self, optimizer: Any, inner: Any = None, *, is_skipped: bool = False) -> None:
        """A step has ended, and its state is final; a skipped one changed nothing."""
        if id(optimizer) not in self._running:
            return
        is_outermost = self._running[0] == id(optimizer)
        del self._running[self._running.index(id(optimizer)) :]
        if is_outermost and not is_skipped:
            self._guarded(lambda: self._record(inner or optimizer))

    def _count_pass(self, iterator: Any) -> None:
        if not iterator._num_yielded:  # noqa: SLF001 - torch 2.13 dataloader.py, 0 after _reset
            self._num_passes += 1
            self._passes[iterator] = self._num_passes
        self._pass = self._passes.get(iterator, 0)

    # ------------------------------------------------------------------ what is written

    def _begin(self, optimizer: Any) -> None:
        self._before = position_of(optimizer)
        # torch 2.13 checkpoint/state_dict.py _init_optim_state: get_state_dict() makes the moments
        # by a step without a backward pass and with learning rate 0. Training has not begun yet.
        if not self._losses and {*self._before.lr} == {(0.0).hex()}:
            self._before = None
            return
        if self._trace is None:
            os.environ[TRAINER_VARIABLE] = str(self._pid)
            rank = _rank()
            self._trace = Trace(
                Path(self._settings.directory), rank=rank, kill=self._settings.kill or None
            )
            origin = self._origin(rank)
            record = {"kind": "origin", "step": origin.step, "by": origin.by}
            if self._settings.positions:
                record["components"] = self._restored(optimizer)
            self._trace.write(record)
            self._step = origin.step - 1
            self._is_rest = self._step > 0

    def _origin(self, rank: int) -> Origin:
        path = self._settings.positions_of(rank)
        if path is None or not path.exists() or self._before is None:
            return Origin(1, "weights")
        known = [Position(s, w, c, tuple(lr)) for s, w, c, lr in json.loads(path.read_text())]
        return align(self._before, known)

    def _record(self, optimizer: Any) -> None:
        before, trace = self._before, self._trace
        if before is None or trace is None:
            return
        self._step += 1
        losses, self._losses = self._losses, []
        batch, self._batch = self._batch, BatchRecord()
        record: dict[str, Any] = {
            "kind": "step",
            "step": self._step,
            "weights": before.weights,
            "counter": before.counter,
            "values": {"loss" if not i else f"loss {i + 1}": v for i, v in enumerate(losses)},
            "lr": learning_rates(optimizer),
            "samples": batch.digests,
            "sample_counts": batch.counts,
            "sample_sets": batch.sets,
            "data_pass": self._pass,
            "rng": rng_digests(),
            "rng_positions": rng_positions(),
        }
        if self._is_rest:
            record["is_rest"], self._is_rest = True, False
        if (self._step - 1) % self._settings.digest_every == 0:
            record["components"] = self._components(optimizer)
        trace.write(record)

    def _restored(self, optimizer: Any) -> dict[str, dict[str, str]]:
        """Weights and optimizer state before the first step; what else there is, it leaves."""
        self._modules.scan()
        components, key = self._states(optimizer)
        return {name: components[name] for name in ("parameters", key) if name in components}

    def _components(self, optimizer: Any) -> dict[str, dict[str, str]]:
        self._modules.scan_if_due(self._step)
        components, key = self._states(optimizer)
        components[key].update(settings_of(optimizer))
        return components

    def _states(self, optimizer: Any) -> tuple[dict[str, dict[str, str]], str]:
        """The components, and the key of this optimizer among them."""
        components, names = self._modules.components(parameters_of(optimizer))
        loose = parameter_digests(optimizer, names)
        if loose:
            components.setdefault("parameters", {}).update(loose)
        number = self._modules.number_of(optimizer, names)
        key = f"optimizer/{number}" if number else "optimizer"
        components[key] = state_digests(optimizer, names)
        return components, key

    def _guarded(self, action: Callable[[], None]) -> None:
        """Runs it; what it raises is recorded instead of reaching the script."""
        if os.getpid() != self._pid:  # a forked child has hooks, too, and a run of its own
            self._reset()
        if self._is_off or _is_capturing():
            return
        try:
            with torch.no_grad():
                action()
        except Exception as error:  # noqa: BLE001 - the script must not end because of the judge
            self._is_off = True
            text = f"{type(error).__name__}: {error}"
            if self._trace is None:
                self._trace = Trace(Path(self._settings.directory), rank=_rank())
            self._trace.write({"kind": "failed", "step": self._step, "text": text})


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: reading a value would end it."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no hints
    return is_used and torch.cuda.is_current_stream_capturing()


def _loss(tensor: Any) -> str:
    if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and not tensor.is_complex():
        return float(tensor.detach().item()).hex()
    return value_digest(tensor)


def _as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ.get("RANK", "0"))
