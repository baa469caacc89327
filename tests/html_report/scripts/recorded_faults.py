"""Trains with a recorder, and resumes in many ways, each of which is wrong in one thing.

Usage: ``recorded_faults.py DIRECTORY STOP``. The records of each run are in a folder with the name
of its fault; ``reference`` is the run that never stops, ``exact`` has no fault.
"""

from __future__ import annotations

import copy
import gc
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.prove.execution import write_positions
from resumekit.record.moments import launch_directory
from resumekit.recorder import RecorderSettings
from resumekit.recorder.recorder import Recorder

BATCHES, BATCH_SIZE, SAVE_EVERY = 6, 4, 4
LAST = 4 * BATCHES


class Target(nn.Linear):
    """Follows the last layer, as the target network of a DQN follows the one that is trained."""


class Training:
    """All that the loop carries from step to step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.data = TensorDataset(torch.randn(BATCHES * BATCH_SIZE, 4))
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))
        self.head = nn.Linear(6, 2)
        self.model = nn.ModuleList([self.body, self.head])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.target = Target(6, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.step = self.position = 0
        self.order_seed, self.order = 7, slice(BATCH_SIZE)  # of an epoch, and inside a batch
        self.factor = 1.0

    @property
    def _components(self) -> list[Any]:
        modules = [self.model, self.averaged, self.target]
        return [*modules, self.optimizer, self.lr_scheduler, self.scaler]

    def state(self) -> dict[str, Any]:
        """What a checkpoint of this training has."""
        states = [copy.deepcopy(each.state_dict()) for each in self._components]
        return {"states": states, "rng": torch.get_rng_state(), "step": self.step}

    def load(self, saved: dict[str, Any]) -> None:
        """Resumes exactly."""
        for each, state in zip(self._components, copy.deepcopy(saved["states"]), strict=True):
            each.load_state_dict(state)
        torch.set_rng_state(saved["rng"])
        self.step = self.position = saved["step"]
        self.factor = 1.01**self.step

    def train(self, recorder: Recorder, until: int = LAST) -> list[dict[str, Any]]:
        """Trains until this step; returns all checkpoints."""
        saved = []
        while True:
            iterator = self._rest_of_epoch()
            for _ in range(self.position % BATCHES, BATCHES):
                recorder.saw_fetch(iterator)
                self._train_step(recorder, *next(iterator))
                if self.step % SAVE_EVERY == 0:
                    saved.append(self.state())
                if self.step == until:
                    return saved

    def _rest_of_epoch(self) -> Any:
        epoch, batch = divmod(self.position, BATCHES)
        generator = torch.Generator().manual_seed(self.order_seed + epoch)
        rows = torch.randperm(len(self.data), generator=generator).view(BATCHES, BATCH_SIZE)
        batches = [each[self.order] for each in rows.tolist()]
        # Without a generator each iterator draws from the global one.
        loader = DataLoader(self.data, batch_sampler=batches[batch:], generator=generator)
        return iter(loader)

    def _train_step(self, recorder: Recorder, batch: torch.Tensor) -> None:
        recorder.saw_batch([batch])
        hidden = self.body(batch)
        difference = self.head(hidden) - self.target(hidden.detach()) - 1
        loss = self.scaler.scale(difference.square().mean() * self.factor)
        recorder.saw_loss(loss)
        loss.backward()
        recorder.before_step(self.optimizer)
        self.scaler.step(self.optimizer)
        recorder.after_step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.averaged.update_parameters(self.model)
        with torch.no_grad():
            for mine, other in zip(self.target.parameters(), self.head.parameters(), strict=True):
                mine.lerp_(other, 0.1)
        self.factor *= 1.01
        self.step, self.position = self.step + 1, self.position + 1


Fault = Callable[[Training, Training], Any]  # the resumed training, and one at another step


def _state_of(name: str) -> Fault:
    """The state of a component is the one at the other step."""
    return lambda resumed, other: getattr(resumed, name).load_state_dict(
        copy.deepcopy(getattr(other, name).state_dict())
    )


def _field(**values: Any) -> Fault:
    return lambda resumed, other: vars(resumed).update(values)


def _new_weights(resumed: Training, other: Training) -> None:
    for each in resumed.model.parameters():
        nn.init.normal_(each, generator=torch.Generator().manual_seed(3))


def _one_weight(resumed: Training, other: Training) -> None:
    nn.init.normal_(resumed.head.weight, generator=torch.Generator().manual_seed(3))


def _buffers(resumed: Training, other: Training) -> None:
    for each in resumed.body.buffers():
        each.zero_()


def _older_optimizer(resumed: Training, other: Training) -> None:
    states = copy.deepcopy(list(other.optimizer.state.values()))
    resumed.optimizer.state.update(dict(zip(resumed.model.parameters(), states, strict=True)))


def _count(resumed: Training, other: Training) -> None:
    for state in resumed.optimizer.state.values():
        state["step"] += 1


def _settings(resumed: Training, other: Training) -> None:
    resumed.optimizer.param_groups[0]["weight_decay"] = 0.5


def _lr(resumed: Training, other: Training) -> None:
    resumed.lr_scheduler.base_lrs = [0.02]
    _set_lr(resumed, resumed.lr_scheduler.last_epoch)


def _lr_of(resumed: Training, other: Training) -> None:
    _set_lr(resumed, other.step)


def _set_lr(resumed: Training, epoch: int) -> None:
    resumed.lr_scheduler.last_epoch = epoch
    (lr,) = resumed.lr_scheduler._get_closed_form_lr()
    resumed.optimizer.param_groups[0]["lr"] = lr


def _position(by: int) -> Fault:
    return lambda resumed, other: vars(resumed).update(position=resumed.position + by)


def _epoch(resumed: Training, other: Training) -> None:
    resumed.position -= resumed.position % BATCHES


# What is wrong, and whether the other training is at step 0 or at the first checkpoint.
FAULTS: dict[str, tuple[Fault, int]] = {
    "exact": (lambda resumed, other: None, 0),
    "weights": (_new_weights, 0),
    "older weights": (_state_of("model"), SAVE_EVERY),
    "one weight": (_one_weight, 0),
    "buffers": (_buffers, 0),
    "optimizer": (lambda resumed, other: resumed.optimizer.state.clear(), 0),
    "one parameter": (lambda resumed, other: resumed.optimizer.state.popitem(), 0),
    "older optimizer": (_older_optimizer, SAVE_EVERY),
    "counter": (_count, 0),
    "settings": (_settings, 0),
    "lr restarted": (_lr_of, 0),
    "lr shifted": (_lr_of, SAVE_EVERY),
    "lr changed": (_lr, 0),
    "averaged": (_state_of("averaged"), 0),
    "target": (_state_of("target"), 0),
    "scaler": (_state_of("scaler"), 0),
    "rng drawn": (lambda resumed, other: torch.rand(1), 0),
    "rng seeded": (lambda resumed, other: torch.manual_seed(9), 0),
    "data": (_field(position=0), 0),
    "epoch": (_epoch, 0),
    "repeated": (_position(-1), 0),
    "skipped": (_position(1), 0),
    "other epoch": (_field(order_seed=6), 0),
    "order": (_field(order_seed=99), 0),
    "order in a batch": (_field(order=slice(None, None, -1)), 0),
    "batch size": (_field(order=slice(2)), 0),
    "variable": (_field(factor=1.0), 0),
}


def main(directory: Path, stop: int) -> None:
    """Runs the reference, and each fault in two launches, of which the first is the same one."""
    Training().train(_recorder(directory, "reference", 0))
    gc.collect()
    gc.freeze()  # what torch has imported meanwhile: a recorder need not look at it again
    saved = Training().train(_recorder(directory, "stopped", 0), until=stop)
    for name, (fault, at) in FAULTS.items():
        shutil.copytree(directory / "stopped", directory / name)
        resumed, other = Training(), Training()
        if at:
            other.load(saved[at // SAVE_EVERY - 1])
        resumed.load(saved[-1])
        fault(resumed, other)
        del other
        resumed.train(_recorder(directory, name, 1))
        del resumed


def _recorder(directory: Path, run: str, launch: int) -> Recorder:
    gc.collect()  # a recorder finds what is alive
    positions = ""
    if launch:
        known = launch_directory(directory / f"positions of {run}", launch)
        positions = str(write_positions(known, [directory / "reference", directory / run]))
    records = launch_directory(directory / run, launch)
    return Recorder(RecorderSettings(str(records), positions=positions))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
