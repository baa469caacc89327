"""What the DeepSpeed adapter takes over, refuses and leaves alone, and what it relies on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import DEPRECATIONS, one_rank
from preloads import DEEPSPEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("deepspeed")

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed_workloads import LoadsItself, start_from_weights

from resumekit.adapters.deepspeed import Checkpointer
from resumekit.adapters.torch import Checkpointer as PlainCheckpointer
from resumekit.capture.objects import KnownObjects
from resumekit.errors import (
    ConfigurationError,
    InexactError,
    StateMismatchError,
    UnsupportedValueError,
)
from resumekit.frameworks.deepspeed import engine_faults
from resumekit.record.trace import KILL_VARIABLE, TRACE_VARIABLE
from resumekit.storage.store import Store
from resumekit.testing import Cell, Kit

PRELOAD = DEEPSPEED

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"
PINNED = f"read from deepspeed 0.19, installed is {deepspeed.__version__}"

pytestmark = DEPRECATIONS


@pytest.fixture(scope="module")
def _ranks() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def alone(_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank of a job."""
    monkeypatch.setenv("LOCAL_RANK", "0")


def make_engine(
    stage: int = 1,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    zero: Any = None,
    **settings: Any,
) -> Any:
    torch.manual_seed(0)
    if model is None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **settings,
    }
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    return deepspeed.initialize(
        model=model,
        optimizer=optimizer and optimizer(model.parameters(), lr=1e-2),
        model_parameters=model.parameters(),
        config=config,
    )[0]


def make_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(48.0).view(12, 4) / 48), 2, shuffle=True)


def one_step(engine: Any, batch: torch.Tensor) -> float:
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def train(engine: Any, directory: Path, **options: Any) -> list[float]:
    """Two epochs of six batches."""
    with Checkpointer(engine, directory, **{"save_every": 2, **options}) as checkpointer:
        return [
            one_step(engine, batch) for (batch,) in checkpointer.batches(make_loader(), epochs=2)
        ]


def newest_step(directory: Path) -> Path:
    return directory / str(Store(directory).step_names()[0])


def saved_keys(directory: Path) -> list[str]:
    store = Store(directory)
    return [record.key for record in store.open_step(store.step_names()[0]).manifest.components]


def test_the_private_attributes_are_where_the_adapter_looks(alone: None) -> None:
    settings: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (3, {})]
    settings += [(0, {"bf16": {"enabled": True}}), (1, {"bf16": {"enabled": True}})]
    for stage, precision in settings:
        assert not list(engine_faults(make_engine(stage, **precision))), PINNED
    engine = make_engine(3)
    for name in ("pipeline_parallelism", "has_moe_layers", "zenflow", "autotp_size"):
        assert not getattr(engine, name) or not getattr(engine, name)(), PINNED
    for name in ("zero_nvme_offload_optimizer", "zero_elastic_checkpoint"):
        assert getattr(engine, name)() is False, PINNED
    for name in ("curriculum_learning_enabled", "random_ltd_enabled", "load_universal_checkpoint"):
        assert getattr(engine, name)() is False, PINNED
    assert engine.zero_load_from_fp32_weights() is True, PINNED
    assert (engine.mp_world_size, engine.torch_autocast_z0_gradscaler) == (1, None), PINNED
    assert engine.save_non_zero_checkpoint is True, PINNED
    assert (engine.global_steps, engine.global_samples) == (0, 0), PINNED
    assert (engine.micro_steps, engine.skipped_steps) == (0, 0), PINNED
    shapes = [(name, tuple(shape)) for name, shape in engine._get_zero_param_shapes()[0].items()]
    assert shapes[0] == ("0.weight", (4, 4)), PINNED
    assert engine.module[0].weight.ds_tensor.numel() == 16, PINNED
    assert engine._is_gradient_accumulation_boundary is None, PINNED
    assert engine._unmanaged_backward_count == 0, PINNED
    assert (engine.optimizer.micro_step_id, engine.optimizer._epilogue_ran_this_backward) == (
        0,
        False,
    ), PINNED
    second = make_engine(2).optimizer
    assert (second.micro_step_id, second.cpu_offload) == (-1, False), PINNED
    assert (second.all_grad_tensors, second.averaged_gradients) == ({}, {}), PINNED
    assert second._use_compact_grad_partition_buffer(0) is False, PINNED
    for name in ("prologue", "epilogue"):
        getattr(engine.optimizer, f"checkpoint_event_{name}")()
    engine.optimizer.refresh_fp32_params()


def test_the_partitions_are_where_the_adapter_looks(alone: None) -> None:
    zero = make_engine(1).optimizer
    (weight, *_), flat = zero.bit16_groups[0], zero.single_partition_of_fp32_groups[0]
    assert zero.optimizer.param_groups[0]["params"] == [flat], PINNED
    mapping = weight._hp_mapping
    assert (mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel) == (0, 16), PINNED
    assert mapping.lp_fragment_address.start == 0, PINNED
    assert zero._hp_optimizer_states_linked is False, PINNED
    zero.update_lp_params()
    zero = make_engine(3).optimizer
    (weight, *_), flat = zero.fp16_groups[0], zero.fp32_partitioned_groups_flat[0]
    assert (zero.sub_group_to_group_id[0], flat.shape) == (0, (30,)), PINNED
    assert (weight.partition_numel(), weight.ds_numel, weight.ds_shape) == (16, 16, (4, 4)), PINNED
    unfused = make_engine(0, bf16={"enabled": True}).optimizer
    assert unfused.fp32_groups[0] == unfused.optimizer.param_groups[0]["params"], PINNED
    assert unfused.fp32_groups[0][0].shape == unfused.fp16_groups[0][0].shape, PINNED


def test_a_resume_begins_a_window_also_where_windows_have_another_length(
    alone: None, tmp_path: Path
) -> None:
    engine = make_engine(1, gradient_accumulation_steps=2)
    with Checkpointer(engine, tmp_path, save_every=3) as checkpointer:
        for (batch,) in checkpointer.batches(make_loader(), epochs=1):
            one_step(engine, batch)
    assert engine.micro_steps == 6
    again = make_engine(2, gradient_accumulation_steps=4)
    with Checkpointer(again, tmp_path) as checkpointer:
        checkpointer.resume()
    assert (again.global_steps, again.micro_steps) == (3, 4)


@pytest.mark.parametrize("is_changed", [True, False], ids=["changed by the training", "as it was"])
def test_windows_that_the_training_has_changed_are_as_long_after_a_resume(
    alone: None, tmp_path: Path, is_changed: bool
) -> None:
    def train_on(directory: Path, until: int, *, resumes: bool = False) -> dict[int, float]:
        engine, losses = make_engine(1, gradient_accumulation_steps=2), {}
        checkpointer = Checkpointer(engine, directory, save_every=2)
        assert checkpointer.resume().resumed is resumes
        for (batch,) in checkpointer.batches(make_loader(), epochs=4):
            if is_changed and engine.global_steps == 3:
                engine.set_train_batch_size(2)  # one micro-batch a step from here on
            losses[engine.micro_steps] = one_step(engine, batch)
            if engine.micro_steps == until:
                with pytest.raises(KeyboardInterrupt), checkpointer:
                    raise KeyboardInterrupt
                return losses
        assert engine.global_steps == (3 + 18 if is_changed else 12)
        checkpointer.close()
        return losses

    whole = train_on(tmp_path / "whole", 0)
    crashed = train_on(tmp_path / "crashed", 13)
    assert crashed == {number: whole[number] for number in range(1, 14)}
    assert train_on(tmp_path / "crashed", 0, resumes=True) == whole


@pytest.mark.parametrize("stage", [1, 3], ids="stage {}".format)
def test_a_resume_knows_the_gradient_norm_of_the_last_step(
    alone: None, tmp_path: Path, stage: int
) -> None:
    engine = make_engine(stage)
    assert engine.get_global_grad_norm() is None
    train(engine, tmp_path)
    again = make_engine(stage)
    with Checkpointer(again, tmp_path) as checkpointer:
        checkpointer.resume()
    assert again.get_global_grad_norm() == engine.get_global_grad_norm() > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage {}".format)
def test_a_checkpoint_holds_the_engine_in_slots_and_nothing_that_was_pickled(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    train(make_engine(stage), tmp_path / "run")
    assert saved_keys(tmp_path / "run") == [
        "model",
        "optimizer",
        "model/attributes",
        "callbacks/deepspeed",
        "data",
        "data/attributes",
        "rng",
        "progress",
        "best_metric",
        "extras",
        "variables",
    ]
    files = [path for path in newest_step(tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:  # what torch.save writes is a zip archive; a pickle begins with its protocol
        assert not path.read_bytes().startswith((b"PK", b"\x80")), path
    # torch's compiler makes a folder of its own when DeepSpeed imports it.
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")]


def test_a_checkpoint_without_zero_is_that_of_plain_pytorch(alone: None, tmp_path: Path) -> None:
    engine = make_engine(0)
    train(engine, tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with PlainCheckpointer(tmp_path, model=model, optimizer=optimizer) as plain:
        report = plain.resume()
    assert report.step == 12
    assert report.not_needed == (
        "step-00000012 has callbacks/deepspeed, which belongs to DeepSpeed: not needed here",
    )
    for name, value in engine.module.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    moments = zip(optimizer.state.values(), engine.optimizer.state.values(), strict=True)
    assert all(torch.equal(ours["exp_avg"], theirs["exp_avg"]) for ours, theirs in moments)


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("horizon", [{"steps": 3}, {"epochs": 1}], ids=["steps", "epochs"])
def test_every_step_of_the_engine_is_counted_once_however_often_it_is_marked(
    alone: None, tmp_path: Path, calls: int, horizon: dict[str, Any]
) -> None:
    engine = make_engine(0, gradient_accumulation_steps=2)
    counted = []
    with Checkpointer(engine, tmp_path) as checkpointer:
        for (batch,) in checkpointer.batches(make_loader(), **horizon):
            one_step(engine, batch)
            for _ in range(calls):
                checkpointer.step()
            counted.append(checkpointer.progress.step)
    assert engine.global_steps == checkpointer.progress.step == 3
    assert counted == ([0, 1, 1, 2, 2, 3] if calls else [0, 0, 1, 1, 2, 2])


def test_steps_before_the_loop_are_none_of_the_loop(alone: None, tmp_path: Path) -> None:
    engine = make_engine(0, gradient_accumulation_steps=2)
    counted = []
    with Checkpointer(engine, tmp_path) as checkpointer:
        for _ in range(4):
            one_step(engine, torch.rand(2, 4))
        for (batch,) in checkpointer.batches(make_loader(), epochs=1):
            one_step(engine, batch)
            checkpointer.step()
            counted.append(checkpointer.progress.step)
    assert (engine.global_steps, counted) == (5, [0, 1, 1, 2, 2, 3])


def test_a_save_that_a_step_made_due_is_made_when_the_loop_is_left(
    alone: None, tmp_path: Path
) -> None:
    engine = make_engine(0)
    with Checkpointer(engine, tmp_path, save_every=2) as checkpointer:
        for (batch,) in checkpointer.batches(make_loader(), epochs=1):
            one_step(engine, batch)
            if engine.global_steps == 4:
                break
    assert newest_step(tmp_path).name == "step-00000004"


def test_a_step_that_an_error_broke_off_is_not_saved_later(alone: None, tmp_path: Path) -> None:
    engine = make_engine(0)
    checkpointer = Checkpointer(engine, tmp_path, save_every=2)

    def loop() -> None:
        with checkpointer:
            for (batch,) in checkpointer.batches(make_loader(), epochs=1):
                one_step(engine, batch)
                if engine.global_steps == 4:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    checkpointer.close()
    assert newest_step(tmp_path).name == "step-00000002"


def test_a_resume_brings_the_counters_back_and_reports_a_changed_setting(
    alone: None, tmp_path: Path
) -> None:
    train(make_engine(1), tmp_path)
    again = make_engine(1, gradient_clipping=0.5)
    with Checkpointer(again, tmp_path) as checkpointer:
        report = checkpointer.resume()
    assert (again.global_steps, again.micro_steps, again.global_samples) == (12, 12, 24)
    reported = [str(difference) for difference in report.differences]
    assert "callbacks/deepspeed.config.gradient_clipping: was None, now 0.5" in reported


def test_another_engine_of_the_same_loop_is_reported_as_lost(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former, engine, critic, average = make_engine(), make_engine(), make_engine(), nn.Linear(1, 1)
    one_step(former, torch.ones(2, 4))
    decay, warmup = (
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1)
        for _ in range(2)
    )
    extras = {"warmup": warmup}
    with Checkpointer(engine, tmp_path / "warned", extras=extras, ema=average) as checkpointer:
        for (batch,) in checkpointer.batches(make_loader(), epochs=1):
            one_step(engine, batch)
            decay.optimizer.step()
            decay.step()
    log = capsys.readouterr().err
    lost = re.findall(r"^resumekit: WARNING: (\S+: lost) \(", log, re.MULTILINE)
    assert lost == ["model/critic: lost"]  # the schedule is a variable, and saved
    (state,) = newest_step(tmp_path / "warned").glob("state/*.json")
    saved = json.loads(state.read_text())["states"]["variables"]["slots"]
    assert ["last_epoch", decay.last_epoch] in [slot[2:] for slot in saved]
    with (
        Checkpointer(engine, tmp_path / "strict", strict=True) as checkpointer,
        pytest.raises(InexactError, match="model/critic"),
    ):
        next(checkpointer.batches(make_loader(), epochs=1))
    assert critic.global_steps == 0


def test_several_engines_are_stored_under_their_names(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    critic, actor = make_engine(0), make_engine(2)
    average = nn.Linear(1, 1)
    engines = {"critic": critic, "actor": actor}
    with Checkpointer(engines, tmp_path, ema=average, strict=True) as checkpointer:
        for (batch,) in checkpointer.batches(make_loader(), epochs=1):
            one_step(critic, batch)
            one_step(actor, batch)
    assert "lost" not in capsys.readouterr().err
    assert checkpointer.progress.step == 6
    expected = {
        f"{kind}/{name}"
        for name in engines
        for kind in ("model", "optimizer", "callbacks/deepspeed")
    }
    assert {*expected, "ema"} <= {*saved_keys(tmp_path)}
    assert not {"model", "optimizer", "callbacks/deepspeed"} & {*saved_keys(tmp_path)}


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((1, 1), [1, 2, 3, 4, 5, 6]),
        ((1, 2), [0, 1, 1, 2, 2, 3]),
        ((2, 3), [0, 0, 0, 0, 0, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_an_iteration_of_several_engines_counts_once_when_no_window_is_open(
    alone: None, tmp_path: Path, windows: tuple[int, int], expected: list[int], calls: int
) -> None:
    engines = {
        name: make_engine(0, gradient_accumulation_steps=window)
        for name, window in zip("ab", windows, strict=True)
    }
    counted = []
    with Checkpointer(engines, tmp_path) as checkpointer:
        for (batch,) in checkpointer.batches(make_loader(), epochs=1):
            counted.append(checkpointer.progress.step)
            for engine in engines.values():
                one_step(engine, batch)
            for _ in range(calls):
                checkpointer.step()
    assert [*counted, checkpointer.progress.step] == [0, *expected]


def test_a_step_marked_between_two_engines_is_not_saved_inside_a_window(
    alone: None, tmp_path: Path
) -> None:
    first, second = make_engine(0), make_engine(0, gradient_accumulation_steps=2)
    engines = {"first": first, "second": second}
    with Checkpointer(engines, tmp_path, save_every=1, keep_latest=9) as checkpointer:
        for (batch,) in checkpointer.batches(make_loader(), epochs=1):
            one_step(first, batch)
            checkpointer.step()
            one_step(second, batch)
            checkpointer.step()
    store = Store(tmp_path)
    manifests = [store.open_step(name).manifest for name in store.step_names()]
    assert sorted(each.progress["micro_step"] for each in manifests) == [2, 4, 6]


def test_engines_that_step_at_different_frequencies_count_each_iteration_once(
    alone: None, tmp_path: Path
) -> None:
    critic, actor = make_engine(0), make_engine(0)
    with Checkpointer({"critic": critic, "actor": actor}, tmp_path) as checkpointer:
        for number, (batch,) in enumerate(checkpointer.batches(make_loader(), epochs=1)):
            for _ in range(2):
                one_step(critic, batch)
            if number % 3 == 2:
                one_step(actor, batch)
    assert (critic.global_steps, actor.global_steps, checkpointer.progress.step) == (12, 2, 6)


def test_windows_that_a_script_ends_by_itself_are_seen(alone: None, tmp_path: Path) -> None:
    manual, unmanaged = make_engine(0), make_engine(0, managed_gradient_accumulation=False)
    counted = []
    with Checkpointer({"m": manual, "u": unmanaged}, tmp_path) as checkpointer:
        for number, (batch,) in enumerate(checkpointer.batches(make_loader(), epochs=1)):
            counted.append(checkpointer.progress.step)
            manual.set_gradient_accumulation_boundary(number % 2 == 1)
            one_step(manual, batch)
            unmanaged.backward(unmanaged(batch).square().mean())
            if number % 3 == 2:
                unmanaged.step()
    assert (*counted, checkpointer.progress.step) == (0, 0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "an empty dict"),
        ({"a": nn.Linear(1, 1)}, "engine 'a': a Linear"),
        (nn.Linear(1, 1), "engine: a Linear"),
        ([], "a list.*Pass {"),
        ({"a/b": 0}, "the name 'a/b'"),
        ({1: 0}, "the name 1"),
    ],
    ids=str,
)
def test_what_is_no_engine_is_refused_and_named(
    alone: None, tmp_path: Path, given: Any, found: str
) -> None:
    with pytest.raises(ConfigurationError, match=found):
        Checkpointer(given, tmp_path)


def test_an_engine_given_twice_is_refused_and_named(alone: None, tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(ConfigurationError, match="engine 'b': the engine 'a' again"):
        Checkpointer({"a": engine, "b": engine}, tmp_path)


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = MoE(hidden_size=4, expert=nn.Linear(4, 4), num_experts=2)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"zero": {"elastic_checkpoint": True}}, "elastic_checkpoint"),
        ({"zero": {"load_from_fp32_weights": False}}, "load_from_fp32_weights=false"),
        ({"checkpoint": {"load_universal": True}}, "load_universal"),
        ({"stage": 0, "model": WithExperts}, "mixture-of-experts layers"),
        ({"stage": 0, "model": PipelineModule}, "a pipeline module"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_resumed_yet_is_refused_and_named(
    alone: None, tmp_path: Path, settings: dict[str, Any], found: str
) -> None:
    kind = settings.pop("model", None)
    if kind is PipelineModule:
        settings["model"] = PipelineModule([nn.Linear(4, 4)], num_stages=1)
    elif kind is not None:
        settings["model"] = kind()
    with pytest.raises(ConfigurationError, match=f"{found}: not available yet"):
        Checkpointer(make_engine(**settings), tmp_path)


def test_another_layout_is_refused_before_anything_changes(alone: None, tmp_path: Path) -> None:
    train(make_engine(1), tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    model[3].requires_grad_(False)
    other = make_engine(1, model=model)
    before = [parameter.clone() for parameter in other.module.parameters()]
    with pytest.raises(StateMismatchError, match=r"optimizer: 3\.weight.*no such parameter"):
        Checkpointer(other, tmp_path).resume()
    assert all(map(torch.equal, before, other.module.parameters()))


def test_an_object_that_no_table_knows_is_refused_with_its_path(
    alone: None, tmp_path: Path
) -> None:
    engine = make_engine(1, optimizer=LoadsItself, zero_allow_untested_optimizer=True)
    engine.optimizer.clip_grad = nn.Identity()
    path = r"optimizer\['zero_pp_rank_0_.*'\]\['optimizer_state_dict'\]\['clip_grad'\]"
    with (
        Checkpointer(engine, tmp_path) as checkpointer,
        pytest.raises(UnsupportedValueError, match=f"{path}.*torch.nn.*Identity"),
    ):
        checkpointer.save()


@pytest.mark.parametrize("stage", [2, 3], ids="stage {}".format)
def test_a_dynamic_loss_scaler_is_a_component_of_its_own(
    alone: None, tmp_path: Path, stage: int
) -> None:
    def with_scaler(scale: float) -> Any:
        engine = make_engine(stage)  # what DeepSpeed makes for fp16, which it refuses on the CPU
        engine.optimizer.loss_scaler = DynamicLossScaler(
            scale, 2, 1.0, 2, False, dtype=torch.float16
        )
        return engine

    engine, again = with_scaler(2.0**16), with_scaler(2.0)
    for overflow in (False, True, True, False):
        engine.optimizer.loss_scaler.update_scale(overflow)
    with Checkpointer(engine, tmp_path) as checkpointer:
        checkpointer.save()
    assert "grad_scaler" in saved_keys(tmp_path)
    with Checkpointer(again, tmp_path) as checkpointer:
        checkpointer.resume()
    assert vars(again.optimizer.loss_scaler) == vars(engine.optimizer.loss_scaler)


def test_a_dynamic_loss_scaler_is_made_again_as_it_was() -> None:
    scaler = DynamicLossScaler(2.0**16, 2, 1.0, 2, False, dtype=torch.float16)
    overflows = (False, True, True, False, False, False)
    for overflow in overflows[:3]:
        scaler.update_scale(overflow)
    known = KnownObjects(DynamicLossScaler)
    again = known.live(known.plain(scaler, where="scaler"))
    assert type(again) is DynamicLossScaler
    for overflow in overflows:
        scaler.update_scale(overflow)
        again.update_scale(overflow)
    assert vars(again) == vars(scaler)


@pytest.mark.parametrize("stage", [1, 3], ids="stage {}".format)
def test_weights_that_are_tied_are_restored_tied(alone: None, tmp_path: Path, stage: int) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    engine, again = make_engine(stage, model=tied()), make_engine(stage, model=tied())
    train(engine, tmp_path)
    with Checkpointer(again, tmp_path) as checkpointer:
        checkpointer.resume()
    batch = torch.rand(2, 4)
    assert torch.equal(again(batch), engine(batch))
    untied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    refusal = r"2\.weight: tied to '0.weight' in the checkpoint"
    with (
        Checkpointer(make_engine(stage, model=untied), tmp_path) as checkpointer,
        pytest.raises(StateMismatchError, match=refusal),
    ):
        checkpointer.resume()


@pytest.mark.parametrize("stage", [0, 1, 3], ids="stage {}".format)
def test_the_engines_own_saving_still_works_with_the_checkpointer(
    alone: None, tmp_path: Path, stage: int
) -> None:
    def run(directory: str, *, native: bool, save_every: int) -> list[float]:
        engine, losses = make_engine(stage), []
        with Checkpointer(engine, tmp_path / directory, save_every=save_every) as checkpointer:
            for (batch,) in checkpointer.batches(make_loader(), epochs=2):
                losses.append(one_step(engine, batch))
                if native:
                    engine.save_checkpoint(str(tmp_path / "native"))
        return losses

    alone_losses = run("ours", native=False, save_every=100)
    assert run("both", native=True, save_every=1) == alone_losses
    path, _ = make_engine(stage).load_checkpoint(str(tmp_path / "native"))
    assert path is not None
    assert Path(path).parent.name == "global_step12"


def test_the_loader_that_the_engine_makes_is_refused_when_strict(
    alone: None, tmp_path: Path
) -> None:
    engine = make_engine(0)
    loader = engine.deepspeed_io(TensorDataset(torch.rand(8, 4)))
    with (
        Checkpointer(engine, tmp_path, strict=True) as checkpointer,
        pytest.raises(InexactError, match="data: equivalent"),
    ):
        next(checkpointer.batches(loader, epochs=1))


@pytest.mark.parametrize("stage", [1, 3], ids="stage {}".format)
def test_the_weights_alone_can_be_taken_over(kit: Kit, stage: int) -> None:
    assert not kit.run_uninterrupted(Cell(start_from_weights, {"stage": stage}, 2)).failure


class Launch:
    """One run of a script for two epochs without ZeRO, and what it printed for its epochs."""

    def __init__(self, script: str, directory: Path, **variables: str) -> None:
        command = [sys.executable, "-u", str(SCRIPTS / script), "--directory", str(directory)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(
            [*command, "--epochs", "2", "--stage", "0"],  # with ZeRO, torch's compiler is imported
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.status, self.log = done.returncode, done.stderr
        self.epochs = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]


@pytest.mark.full
def test_the_script_started_twice_prints_what_its_stock_twin_prints(tmp_path: Path) -> None:
    stock = Launch("stock_deepspeed.py", tmp_path / "unused")
    assert len(stock.epochs) == 2, stock.log

    directory = tmp_path / "killed"
    at_step_45 = {TRACE_VARIABLE: str(tmp_path / "trace"), KILL_VARIABLE: "step:45"}
    killed = Launch("train_deepspeed.py", directory, **at_step_45)
    assert (killed.status, killed.epochs) == (-signal.SIGKILL, stock.epochs[:1]), killed.log
    continued = Launch("train_deepspeed.py", directory)
    assert "resuming at step 40" in continued.log
    assert continued.epochs == stock.epochs[1:]


def test_the_script_differs_from_its_stock_twin_by_the_resume_alone() -> None:
    stock, ours = (
        (SCRIPTS / name).read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()
        for name in ("stock_deepspeed.py", "train_deepspeed.py")
    )
    assert [line.strip() for line in ours if line and line not in stock] == [
        "from resumekit.adapters.deepspeed import Checkpointer",
        "checkpointer = Checkpointer(",
        "engine, arguments.directory, ema=ema, save_every=arguments.save_every",
        "for epoch in checkpointer.epochs(arguments.epochs):",
        "for inputs, targets in checkpointer.batches(loader):",
        "checkpointer.step(loss=loss)",
        "checkpointer.close()",
    ]
    gone = [line.strip() for line in stock if line and line not in ours]
    assert "path, client_state = engine.load_checkpoint(arguments.directory)" in gone
    assert "sampler.set_epoch(epoch)" in gone
    assert "if epoch * len(loader) + index < step:" in gone


def test_swapped_arguments_are_answered_with_the_right_call(alone: None, tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(ConfigurationError, match=r'Checkpointer\(engine, "runs/a"\)'):
        Checkpointer(str(tmp_path), engine)
    with pytest.raises(ConfigurationError, match="extras"):
        Checkpointer(engine, tmp_path, extras=[1])  # type: ignore[arg-type]
