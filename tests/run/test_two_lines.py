"""Loops of two lines: what is not passed is found, and steps are counted without ``step()``.

Every training here is killed by an exception and resumed in other weights; what each iteration did
is written to a file, which no checkpoint holds.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import runpy
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.capture.optimizer import OptimizerState
from resumekit.errors import (
    ConfigurationError,
    LoopError,
    StateMismatchError,
    UnsupportedValueError,
)
from resumekit.record.journal import STEP, find_attempts
from resumekit.run.discovery import find_objects
from resumekit.run.steps_taken import StepsTaken
from resumekit.state import SharingPattern, Slot, StateComponent
from resumekit.storage.store import Store

BATCHES = 6
CRASH = "TWO_LINES_CRASH_AFTER"
Train = Callable[..., Any]


class CrashError(Exception):
    """Stands for whatever ends a process."""


def record(directory: Path, loss: Any, *values: Any) -> None:
    """Writes what an iteration did; crashes after as many as the test asks for."""
    digest = xxhash.xxh3_64()
    for module in values:
        for tensor in module.state_dict().values():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    with open(f"{directory}.txt", "a+", encoding="utf-8") as file:
        file.write(f"{loss.item().hex()} {digest.hexdigest()}\n")
        file.seek(0)
        count = len(file.readlines())
    if str(count) == os.environ.get(CRASH):
        raise CrashError


def data() -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, BATCHES * 2 * 3).reshape(BATCHES * 2, 3)
    return DataLoader(TensorDataset(inputs), batch_size=2, shuffle=True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))


def descend(model: Any, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---------------------------------------------------------------- the shapes of a loop


def in_a_function(directory: Path, **options: Any) -> None:
    net = network()
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.5)
    loader = data()
    ckpt = Checkpointer(directory, save_every=2, **options)
    with ckpt:
        for (x,) in ckpt.batches(loader, epochs=2):
            record(directory, descend(net, x, opt), net)
            sched.step()


def with_epochs(directory: Path, **options: Any) -> None:
    net = network()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = data()
    with Checkpointer(directory, save_every=2, **options) as ckpt:
        for _ in ckpt.epochs(2):
            for (x,) in ckpt.batches(loader):
                record(directory, descend(net, x, opt), net)


class Trainer:
    """Keeps everything in attributes; the loop is in one of its methods."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory, self.loader = directory, data()
        self.model = network()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ckpt = Checkpointer(directory, save_every=2, **options)

    def fit(self) -> None:
        with self.ckpt:
            for (x,) in self.ckpt.batches(self.loader, epochs=2):
                record(self.directory, self.train(x), self.model)

    def train(self, x: torch.Tensor) -> torch.Tensor:
        return descend(self.model, x, self.opt)


def in_a_class(directory: Path, **options: Any) -> None:
    Trainer(directory, **options).fit()


def two_networks(directory: Path, **options: Any) -> None:
    nets = {"gen": nn.Linear(3, 3), "disc": network()}
    opts = {name: torch.optim.AdamW(nets[name].parameters(), lr=0.05) for name in ("gen", "disc")}
    loader = data()
    with Checkpointer(directory, save_every=2, **options) as ckpt:
        for (x,) in ckpt.batches(loader, epochs=2):
            descend(nets["disc"], nets["gen"](x).detach(), opts["disc"])
            loss = nets["disc"](nets["gen"](x)).mean()
            opts["gen"].zero_grad()
            loss.backward()
            opts["gen"].step()
            record(directory, loss.detach(), nets["gen"], nets["disc"])


def with_an_average(directory: Path, **options: Any) -> None:
    net = network()
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    average = AveragedModel(net)
    loader = data()
    with Checkpointer(directory, save_every=2, **options) as ckpt:
        for (x,) in ckpt.batches(loader, epochs=2):
            loss = descend(net, x, opt)
            average.update_parameters(net)
            record(directory, loss, net, average)


def under_ddp(directory: Path, **options: Any) -> None:
    net = network()
    ddp = DistributedDataParallel(net)
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    loader = data()
    with Checkpointer(directory, save_every=2, **options) as ckpt:
        for (x,) in ckpt.batches(loader, epochs=2):
            record(directory, descend(ddp, x, opt), net)


def compiled(directory: Path, **options: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    fast = torch.compile(net, backend="eager")
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    loader = data()
    with Checkpointer(directory, save_every=2, **options) as ckpt:
        for (x,) in ckpt.batches(loader, epochs=2):
            record(directory, descend(fast, x, opt), net)


def in_closures(directory: Path, **options: Any) -> None:
    state = SimpleNamespace(net=network())
    state.opt = torch.optim.AdamW(state.net.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        return descend(state.net, x, state.opt)

    loop_over(train, directory, options)


def loop_over(train: Train, directory: Path, options: Any) -> None:
    loader = data()
    with Checkpointer(directory, save_every=2, **options) as ckpt:
        for (x,) in ckpt.batches(loader, epochs=2):
            record(directory, train(x))


LOOP = """
    for (x,) in ckpt.batches(loader, epochs=2):
        record(directory, train(x), net)
"""
BEFORE = """
import torch

loader = data()
net = network()
opt = torch.optim.AdamW(net.parameters(), lr=0.1)

def train(x):
    return descend(net, x, opt)
"""
AT_MODULE_LEVEL = f"""{BEFORE}
with Checkpointer(directory, save_every=2, **options) as ckpt:{LOOP}
"""
IN_MAIN = f"""{BEFORE}
def main():
    ckpt = Checkpointer(directory, save_every=2, **options){LOOP}
    ckpt.close()

main()
"""


def script(text: str) -> Train:
    """Runs a script as ``python script.py`` does, with the functions of this file as globals."""

    def run(directory: Path, **options: Any) -> None:
        path = directory.with_suffix(".py")
        path.write_text(text, encoding="utf-8")
        names = (Checkpointer, data, descend, network, record)
        given = {each.__name__: each for each in names}
        runpy.run_path(str(path), {**given, "directory": directory, "options": options}, "__main__")

    return run


MODEL, OPTIMIZER = "model (net)", "optimizer (opt)"
ONE = f"{MODEL}, {OPTIMIZER}"
SHAPES: dict[str, tuple[Train, str]] = {
    "function": (in_a_function, f"{ONE}, lr_scheduler (sched)"),
    "epochs": (with_epochs, ONE),
    "class": (in_a_class, "model (model), optimizer (opt)"),
    "two networks": (two_networks, "model (gen, disc), optimizer (gen, disc)"),
    "average": (with_an_average, f"{ONE}, ema (average)"),
    "DDP": (under_ddp, f"model (ddp), {OPTIMIZER}"),
    "compiled": (compiled, f"model (fast), {OPTIMIZER}"),
    "closures": (in_closures, ONE),
    "module level": (script(AT_MODULE_LEVEL), ONE),
    "main()": (script(IN_MAIN), ONE),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", list(SHAPES))


@pytest.fixture(autouse=True)
def _one_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of one rank for the loop under DDP."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if parameters.get("shape") == "DDP":
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def launch(
    train: Train, directory: Path, *, seed: int = 0, crash_after: int | None = None, **options: Any
) -> list[str]:
    """One process of a run; gives what its iterations and those of earlier launches recorded."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch, suppress(CrashError):
        if crash_after is not None:
            patch.setenv(CRASH, str(crash_after))
        train(directory, **options)
    return Path(f"{directory}.txt").read_text(encoding="utf-8").splitlines()


def components(directory: Path) -> set[str]:
    store = Store(directory)
    manifest = store.open_step(store.step_names()[0]).manifest
    slots = ("model", "optimizer", "lr_scheduler", "grad_scaler", "ema")
    return {each.key for each in manifest.components if each.key.partition("/")[0] in slots}


# ---------------------------------------------------------------- what is found


@EVERY_SHAPE
def test_a_killed_loop_of_two_lines_continues_exactly(
    tmp_path: Path, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    train, expected = SHAPES[shape]
    with caplog.at_level(logging.INFO, "resumekit"):
        whole = launch(train, tmp_path / "whole", strict=True)
    assert [line for line in caplog.messages if "found" in line] == [f"found {expected}"]
    assert len(whole) == 2 * BATCHES
    launch(train, tmp_path / "run", strict=True, crash_after=7)
    again = launch(train, tmp_path / "run", strict=True, seed=5)
    assert again[:6] + again[7:] == whole


@EVERY_SHAPE
def test_without_one_of_the_objects_that_were_found_it_differs(tmp_path: Path, shape: str) -> None:
    train, _ = SHAPES[shape]
    whole = launch(train, tmp_path / "whole")
    launch(train, tmp_path / "run", crash_after=7)
    found = [key for key in components(tmp_path / "run") if key.split("/")[-1] in PARTS]
    assert found
    for number, key in enumerate(found):
        copied = tmp_path / str(number)
        copy_run(tmp_path / "run", copied)
        again = launch(train, copied, seed=5, exclude={key})
        assert again[:6] + again[7:] != whole, key


PARTS = {"model", "optimizer", "lr_scheduler", "ema", "gen", "disc"}


def copy_run(directory: Path, copied: Path) -> None:
    shutil.copytree(directory, copied, ignore=shutil.ignore_patterns(".staging"))
    shutil.copy(f"{directory}.txt", f"{copied}.txt")


def found_in(given: dict[Slot, Any] | None = None, **variables: Any) -> dict[str, dict[str, Any]]:
    found = find_objects(variables, {slot: [each] for slot, each in (given or {}).items()})
    return {slot.value: objects for slot, objects in found.items()}


def test_wrappers_and_parts_of_a_model_are_the_model() -> None:
    net = network()
    fast, head, opt = torch.compile(net, backend="eager"), net[3], sgd(net)
    assert found_in(head=head, net=net, fast=fast, opt=opt)["model"] == {"fast": fast}


def test_an_optimizer_of_two_models_has_both() -> None:
    one, other = network(), network()
    opt = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    assert found_in(one=one, other=other, opt=opt)["model"] == {"one": one, "other": other}


def test_a_model_that_nothing_trains_is_no_component() -> None:
    net, teacher = network(), network()
    found = found_in(net=net, teacher=teacher, loss=nn.BCEWithLogitsLoss(), opt=sgd(net))
    assert found == {"model": {"net": net}, "optimizer": {"opt": found["optimizer"]["opt"]}}


class TwoSteps(torch.optim.Optimizer):
    """As sharpness-aware minimisation: another optimizer takes its step."""

    def __init__(self, parameters: Any, base: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {})
        self.base, self.param_groups = base, base.param_groups

    def second_step(self) -> None:
        self.base.step()


def test_an_optimizer_inside_another_one_is_a_part_of_it() -> None:
    net = network()
    base = sgd(net)
    opt = TwoSteps(net.parameters(), base)
    sched = torch.optim.lr_scheduler.StepLR(base, 3)
    found = found_in(base=base, opt=opt, sched=sched, net=net)
    assert (found["optimizer"], found["lr_scheduler"]) == ({"opt": opt}, {"sched": sched})


def test_a_scheduler_inside_another_one_or_of_another_optimizer_is_none() -> None:
    net = network()
    opt = sgd(net)
    warmup, decay = (torch.optim.lr_scheduler.ConstantLR(opt) for _ in range(2))
    whole = torch.optim.lr_scheduler.SequentialLR(opt, [warmup, decay], [3])
    other = torch.optim.lr_scheduler.ConstantLR(sgd(network()))
    found = found_in(warmup=warmup, decay=decay, whole=whole, other=other, opt=opt)
    assert found["lr_scheduler"] == {"whole": whole}


def test_only_a_scaler_that_is_enabled_is_found() -> None:
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    net = network()
    assert found_in(opt=sgd(net), on=on, off=off)["grad_scaler"] == {"on": on}


def test_the_slots_that_were_passed_are_not_searched() -> None:
    net, other = network(), network()
    opt = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    found = found_in(given={Slot.MODEL: net}, net=net, other=other, opt=opt)
    assert found == {"optimizer": {"opt": opt}}
    found = found_in(given={Slot.OPTIMIZER: opt}, net=net, opt=opt)
    assert found == {"model": {"net": net}}


class Slotted:
    """An object without ``__dict__``."""

    __slots__ = ("net", "not_set")

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"user code ran for {name}")


def through_default(net: Any) -> Any:
    return lambda x, model=net: model(x)


@pytest.mark.parametrize(
    "hide",
    [
        lambda net: [[net]],
        lambda net: {("a", 1): {"b/c": net}},
        lambda net: functools.partial(descend, net),
        lambda net: functools.partial(descend, model=net),
        through_default,
        lambda net: lambda x: net(x),
        Slotted,
        lambda net: SimpleNamespace(a=SimpleNamespace(b=net)),
        lambda net: type("Config", (), {"net": net}),
        lambda net: [*range(1000), net],
    ],
)
def test_a_model_is_found_behind(hide: Callable[[Any], Any]) -> None:
    net = network()
    (found,) = found_in(hidden=hide(net), opt=sgd(net))["model"].values()
    assert found is net


def test_long_lists_of_data_do_not_hide_a_model() -> None:
    net = network()
    samples = [[object(), [object()]] for _ in range(30_000)]
    found = found_in(samples=samples, trainer=SimpleNamespace(a=SimpleNamespace(b=net)), o=sgd(net))
    assert found["model"] == {"b": net}


def test_names_are_the_shortest_that_differ() -> None:
    nets = [network() for _ in range(4)]
    one, other = SimpleNamespace(net=nets[0]), SimpleNamespace(net=nets[1])
    optimizers = [*map(sgd, nets)]
    found = found_in(one=one, other=other, nets=nets[2:], optimizers=optimizers)
    assert list(found["model"]) == ["one.net", "other.net", "nets.0", "nets.1"]


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def test_a_loop_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    net, loader = network(), data()
    ckpt = Checkpointer(tmp_path)
    with pytest.raises(ConfigurationError, match=r"none is in the variables.*net.*pass model="):
        ckpt.batches(loader, epochs=1)
    del net


def test_a_loop_that_is_entered_again_after_a_refusal_finds_the_same(tmp_path: Path) -> None:
    net, loader = network(), data()
    opt = sgd(net)
    extras: dict[str, Any] = {"note": lambda: None}
    ckpt = Checkpointer(tmp_path, extras=extras, save_every=2)
    with pytest.raises(UnsupportedValueError):
        next(iter(ckpt.batches(loader, epochs=1)))
    extras["note"] = "text"
    with ckpt:
        for (x,) in ckpt.batches(loader, epochs=1):
            descend(net, x, opt)
    assert components(tmp_path) >= {"model", "optimizer"}


def test_transient_variables_are_not_found(tmp_path: Path) -> None:
    launch(in_a_function, tmp_path / "run", transient={"sched"})
    assert components(tmp_path / "run") & PARTS == {"model", "optimizer"}


def test_values_of_extras_are_not_found_a_second_time(tmp_path: Path) -> None:
    net, loader = network(), data()
    opt = sgd(net)
    average = AveragedModel(net)
    with Checkpointer(tmp_path, extras={"average": average}) as ckpt:
        for (x,) in ckpt.batches(loader, epochs=1):
            descend(net, x, opt)
            average.update_parameters(net)
    assert components(tmp_path) & PARTS == {"model", "optimizer"}


def test_resume_looks_in_the_functions_that_call_it(tmp_path: Path) -> None:
    launch(in_a_function, tmp_path, crash_after=7)
    net = network()
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.5)
    ckpt = Checkpointer(tmp_path)
    assert ckpt.resume().step == 6
    assert sched.last_epoch == 6
    assert opt.state_dict()["state"][0]["step"] == 6
    ckpt.close()


# ---------------------------------------------------------------- renamed variables


def renamed(names: tuple[str, str], *, alike: bool = False) -> Train:
    """A loop over two networks whose variables have these names."""

    def train(directory: Path, **options: Any) -> None:
        width = 3 if alike else 1
        nets = {names[0]: nn.Linear(3, 3), names[1]: nn.Linear(3, width)}
        opts = {f"{name}_opt": torch.optim.AdamW(net.parameters()) for name, net in nets.items()}
        loader = data()
        with Checkpointer(directory, save_every=2, **options) as ckpt:
            for (x,) in ckpt.batches(loader, epochs=2):
                loss = sum(net(x).pow(2).mean() for net in nets.values())
                for opt in opts.values():
                    opt.zero_grad()
                loss.backward()
                for opt in opts.values():
                    opt.step()
                record(directory, loss.detach(), *nets.values())

    return train


def test_renamed_variables_continue_as_the_same_objects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = renamed(("gen", "disc"))
    whole = launch(train, tmp_path / "whole")
    launch(train, tmp_path / "run", crash_after=7)
    with caplog.at_level(logging.INFO, "resumekit"):
        again = launch(renamed(("generator", "critic")), tmp_path / "run", seed=5, crash_after=11)
        again = launch(renamed(("generator", "critic")), tmp_path / "run", seed=6)
    assert again[:6] + again[7:9] + again[11:] == whole
    assert "model/gen continues as generator" in caplog.messages
    assert "optimizer/disc_opt continues as critic_opt" in caplog.messages


def test_renamed_variables_of_equal_networks_are_refused(tmp_path: Path) -> None:
    launch(renamed(("gen", "disc"), alike=True), tmp_path / "run", crash_after=7)
    with pytest.raises(StateMismatchError, match=r"model/\w+: step-00000006 has no model/"):
        launch(renamed(("generator", "critic"), alike=True), tmp_path / "run", seed=5)


# ---------------------------------------------------------------- steps that are counted


class Steps:
    """A loop that either counts its steps by ``step()`` or leaves it."""

    def __init__(self, directory: Path, *, marks: bool, **options: Any) -> None:
        self.marks = marks
        self.net, self.loader = network(), data()
        self.ckpt = Checkpointer(directory, save_every=1, keep_latest=None, **options)

    def batches(self) -> Iterator[Any]:
        batches = self.ckpt.batches(self.loader, epochs=2)
        for number, (x,) in enumerate(batches, start=batches.initial):
            yield number, x

    def mark(self) -> None:
        if self.marks:
            self.ckpt.step()


def plain(steps: Steps) -> None:
    opt = sgd(steps.net)
    for _, x in steps.batches():
        descend(steps.net, x, opt)
        steps.mark()


def accumulating(steps: Steps) -> None:
    opt = sgd(steps.net)
    for number, x in steps.batches():
        steps.net(x).mean().backward()
        if number % 4 == 3:
            opt.step()
            opt.zero_grad()
            steps.mark()


def two_optimizers(steps: Steps) -> None:
    first, second = sgd(steps.net[0]), sgd(steps.net[3])
    for number, x in steps.batches():
        steps.net(x).mean().backward()
        first.step()
        if number % 3 == 0:  # the other one rests
            second.step()
        steps.mark()


def scaled(steps: Steps) -> None:
    opt, scaler = sgd(steps.net), torch.amp.GradScaler("cpu")
    for number, x in steps.batches():
        loss = steps.net(x).mean() * (float("inf") if number in (0, 5) else 1.0)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        steps.mark()


def with_closures(steps: Steps) -> None:
    opt = torch.optim.LBFGS(steps.net.parameters(), max_iter=4)
    for _, x in steps.batches():

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            opt.zero_grad()
            loss: torch.Tensor = steps.net(x).pow(2).mean()
            loss.backward()
            return loss

        opt.step(closure)
        steps.mark()


def in_backward_hooks(steps: Steps) -> None:
    optimizers: dict[Any, Any] = {p: torch.optim.SGD([p], lr=0.1) for p in steps.net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in steps.net.parameters():
        each.register_post_accumulate_grad_hook(step)
    for _, x in steps.batches():
        steps.net(x).mean().backward()
        steps.mark()


def inside_another(steps: Steps) -> None:
    opt = TwoSteps(steps.net.parameters(), sgd(steps.net))
    for _, x in steps.batches():
        steps.net(x).mean().backward()
        opt.second_step()
        steps.mark()


def in_a_compiled_function(steps: Steps) -> None:
    opt = sgd(steps.net)
    step = torch.compile(lambda: opt.step(), backend="eager")
    for _, x in steps.batches():
        opt.zero_grad()
        steps.net(x).mean().backward()
        step()
        steps.mark()


def counted(directory: Path) -> tuple[list[int], list[int]]:
    (attempt,) = find_attempts(directory / "journal")
    recorded = [each.step for each in attempt.records() if each.kind == STEP]
    return recorded, [each.step for each in Store(directory).step_names()]


# torch 2.13 warns of its own torch.jit when it compiles an optimizer's step.
IGNORED = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (plain, 12),
        (accumulating, 3),
        (two_optimizers, 12),
        (scaled, 12),
        (with_closures, 12),
        (in_backward_hooks, 12),
        (inside_another, 12),
        pytest.param(in_a_compiled_function, 12, marks=IGNORED),
    ],
)
def test_steps_are_counted_as_if_they_were_marked(
    tmp_path: Path, loop: Callable[[Steps], None], expected: int
) -> None:
    for marks in (True, False):
        steps = Steps(tmp_path / str(marks), marks=marks)
        with steps.ckpt:
            loop(steps)
        assert steps.ckpt.progress.step == expected
    assert counted(tmp_path / "True") == counted(tmp_path / "False")
    assert counted(tmp_path / "False")[0] == [*range(1, expected + 1)]


def test_a_step_that_the_scaler_skips_is_seen_by_its_private_name() -> None:
    net = network()
    opt, scaler = sgd(net), torch.amp.GradScaler("cpu")
    before = scaler._per_optimizer_states
    scaler.scale(net(torch.ones(2, 3)).mean() * float("inf")).backward()
    scaler.step(opt)
    assert scaler._per_optimizer_states is before
    scaler.update()
    assert scaler._per_optimizer_states is not before


def test_steps_of_an_optimizer_that_takes_over_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(tmp_path, marks=False)
    opt: Any = sgd(steps.net)
    with steps.ckpt:
        for number, x in steps.batches():
            descend(steps.net, x, opt)
            if number == 4:
                opt = torch.optim.ASGD(steps.net.parameters(), lr=0.1)
    assert steps.ckpt.progress.step == 12
    assert ".opt: lost (an ASGD that training made" in caplog.text


def test_steps_of_optimizers_that_are_not_of_the_run_count_none(tmp_path: Path) -> None:
    steps = Steps(tmp_path, marks=False, transient={"other"})
    opt, other = sgd(steps.net), sgd(network())
    with steps.ckpt:
        for number, x in steps.batches():
            other.step()
            if number % 2:
                descend(steps.net, x, opt)
    assert steps.ckpt.progress.step == 6


def test_a_loop_that_marks_its_steps_counts_no_others(tmp_path: Path) -> None:
    """As adversarial training: five steps of one optimizer and one of the other are one step."""

    def train(crash_after: int | None) -> int:
        steps = Steps(tmp_path, marks=True)
        opt = sgd(steps.net)
        with suppress(CrashError), steps.ckpt:
            for number, x in steps.batches():
                descend(steps.net, x, opt)
                if number % 3 == 0:
                    steps.mark()
                if number == crash_after:
                    raise CrashError
        return steps.ckpt.progress.step

    assert train(7) == 3
    assert train(None) == 4


def test_steps_before_the_first_call_of_step_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(tmp_path, marks=True)
    opt = sgd(steps.net)
    with steps.ckpt, caplog.at_level(logging.INFO, "resumekit"):
        for number, x in steps.batches():
            descend(steps.net, x, opt)
            if number > 1:
                steps.mark()
    assert steps.ckpt.progress.step == 12
    lines = [line for line in caplog.messages if "step() is called" in line]
    assert lines == [
        "step() is called from here on and counts the steps; 2 were counted without it"
    ]


def test_an_epoch_without_any_step_is_an_error_and_many_batches_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = network()
    opt = sgd(net)
    loader = DataLoader(TensorDataset(torch.ones(50, 3)), batch_size=2)

    def train() -> None:
        with Checkpointer(tmp_path) as ckpt:
            for (x,) in ckpt.batches(loader, epochs=1):
                net(x).mean().backward()
        opt.step()

    with (
        caplog.at_level(logging.INFO, "resumekit"),
        pytest.raises(LoopError, match="not one call of step"),
    ):
        train()
    assert sum("no optimizer step in 20 batches" in line for line in caplog.messages) == 1


def collecting_first(directory: Path, **options: Any) -> None:
    """A first epoch without a step: it collects what the others are scaled by."""
    net, loader, total = network(), data(), torch.zeros(3)
    opt = sgd(net)
    with Checkpointer(directory, save_every=2, **options) as ckpt:
        for epoch in ckpt.epochs(3):
            for (x,) in ckpt.batches(loader):
                if epoch == 0:
                    total += x.abs().sum(0)
                else:
                    record(directory, descend(net, x / total, opt), net)


def evaluating_first(directory: Path, **options: Any) -> None:
    """A first epoch without a batch."""
    net, loader = network(), data()
    opt = sgd(net)
    with Checkpointer(directory, save_every=2, **options) as ckpt:
        for epoch in ckpt.epochs(3):
            if epoch == 0:
                continue
            for (x,) in ckpt.batches(loader):
                record(directory, descend(net, x, opt), net)


@pytest.mark.parametrize("loop", [collecting_first, evaluating_first])
def test_a_first_epoch_without_a_step_is_a_line_and_resumes_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: Train
) -> None:
    with caplog.at_level(logging.INFO, "resumekit"):
        whole = launch(loop, tmp_path / "whole", strict=True)
    lines = [each for each in caplog.records if "had no optimizer step" in each.message]
    assert [each.levelname for each in lines] == ["INFO"]
    for crash_after in (3, 6, 9):
        directory, saved = tmp_path / str(crash_after), (crash_after - 1) // 2 * 2
        launch(loop, directory, crash_after=crash_after)
        assert launch(loop, directory, seed=5)[crash_after:] == whole[saved:]
    launch(loop, tmp_path / "control", crash_after=5)
    assert launch(loop, tmp_path / "control", seed=5, exclude={"model"})[5:] != whole[4:]


def test_a_second_epoch_without_a_step_is_an_error(tmp_path: Path) -> None:
    def train() -> None:
        net, loader = network(), data()
        opt = sgd(net)
        with Checkpointer(tmp_path) as ckpt:
            for epoch in ckpt.epochs(4):
                for (x,) in ckpt.batches(loader):
                    if epoch == 0:
                        descend(net, x, opt)

    with pytest.raises(LoopError, match="epoch 2: not one call of step"):
        train()


@pytest.mark.parametrize(("begins_at", "steps_every"), [(40, 1), (0, 25), (40, 25)])
def test_a_loop_that_collects_before_it_trains_lacks_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begins_at: int, steps_every: int
) -> None:
    net = network()
    opt = sgd(net)
    loader = DataLoader(TensorDataset(torch.ones(160, 3)), batch_size=2)
    with caplog.at_level(logging.INFO, "resumekit"), Checkpointer(tmp_path) as ckpt:
        for number, (x,) in enumerate(ckpt.batches(loader, epochs=1)):
            if number >= begins_at and (number - begins_at) % steps_every == 0:
                descend(net, x, opt)
    assert ckpt.progress.step == len(range(begins_at, 80, steps_every))
    assert not any("no optimizer step" in line for line in caplog.messages)


def test_a_metric_belongs_to_the_step_that_was_just_taken(tmp_path: Path) -> None:
    best = []
    for marks in (True, False):
        options = {"best_metric": "loss", "mode": "min"}
        steps = Steps(tmp_path / str(marks), marks=marks, **options)
        opt = sgd(steps.net)
        with steps.ckpt:
            for number, x in steps.batches():
                descend(steps.net, x, opt)
                steps.mark()
                steps.ckpt.report(loss=abs(number - 4))
        best.append(steps.ckpt.best())
    assert best[0] is not None
    assert best[1] is not None
    assert best[0][1:] == best[1][1:] == (5, 0.0)


def test_hooks_are_removed_at_the_end(tmp_path: Path) -> None:
    steps = Steps(tmp_path, marks=False)
    opt = sgd(steps.net)
    with steps.ckpt:
        for _, x in steps.batches():
            descend(steps.net, x, opt)
            assert len(opt._optimizer_step_post_hooks) == 1
    assert not opt._optimizer_step_post_hooks


# ---------------------------------------------------------------- a save at exit

SCRIPT_THAT_BREAKS = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from resumekit.adapters.torch import Checkpointer

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 24).reshape(12, 2)), 2, shuffle=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = Checkpointer(sys.argv[1], save_every=1, strict=sys.argv[2] == "strict")
for epoch in ckpt.epochs(3):
    for (x,) in ckpt.batches(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if epoch == 1:
        break
if "close" in sys.argv:
    ckpt.close()
"""


@pytest.mark.parametrize(
    ("words", "saved"), [(("strict",), 11), (("lenient",), 12), (("strict", "close"), 12)]
)
def test_a_save_that_is_refused_at_exit_is_one_line(
    tmp_path: Path, words: tuple[str, ...], saved: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT_THAT_BREAKS, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "run"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in ended.stderr.splitlines() if "not saved at exit: " in line]
    assert "Traceback" not in ended.stderr
    assert len(lines) == (saved == 11)
    assert all("strict=True: train.py:<module>: lost" in line for line in lines)
    assert Store(tmp_path / "run").step_names()[0].step == saved


def test_a_run_that_is_collected_during_a_step_does_not_end_it() -> None:
    """As with several trainings in one process; torch goes over the hooks of all optimizers."""
    former, model = network(), network()
    steps = StepsTaken()
    optimizer = torch.optim.SGD(former.parameters(), 0.1)
    state = OptimizerState(optimizer, {"": former})
    steps.watch([StateComponent("optimizer", state, SharingPattern.REPLICATED)])
    is_there = weakref.ref(steps)
    del steps, state, optimizer  # they refer to each other

    def collect(*_: Any) -> None:
        gc.collect()

    # Torch notices a change of its hooks when it reads the next one.
    handles = [register_optimizer_step_post_hook(each) for each in (collect, lambda *_: None)]
    try:
        descend(model, torch.ones(2, 3), torch.optim.SGD(model.parameters(), 0.1))
    finally:
        for each in handles:
            each.remove()
    assert is_there() is None
