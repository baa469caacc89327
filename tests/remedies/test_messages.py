"""What a user's mistake is answered with: where, what was found, what was expected, one remedy."""

from __future__ import annotations

import contextlib
import logging
import runpy
import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit import Checkpointer as BaseCheckpointer
from resumekit.adapters.torch import Checkpointer
from resumekit.errors import (
    ConfigurationError,
    DeclarationError,
    DirectoryInUseError,
    DriftError,
    LoopError,
)
from resumekit.log import logger
from resumekit.state import StateComponent


def make(directory: Any, **options: Any) -> Checkpointer:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # Where `train` leaves its loop differs between the launches of a test.
    given = {"model": model, "optimizer": optimizer, "transient": {"leave_after"}, **options}
    return Checkpointer(directory, **given)


def loader(num_samples: int = 8) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(num_samples)), batch_size=2)  # type: ignore[arg-type]


def train(checkpointer: Checkpointer, *, epochs: int = 1, leave_after: int | None = None) -> None:
    with checkpointer:
        for _ in checkpointer.batches(loader(), epochs=epochs):
            checkpointer.step()
            if checkpointer.progress.step == leave_after:
                break


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (500, ("resume_from: 500", 'resume_from="step-00000500"')),
        ("500", ("resume_from: '500'", 'resume_from="step-00000500"')),
        ("latest", ("resume_from: 'latest'", '"step-00000500"')),
        ("runs/b/step-00000500", ("resume_from", "the name alone")),
    ],
)
def test_resume_from_is_a_name_and_the_error_shows_it(
    tmp_path: Path, given: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        make(tmp_path, resume_from=given)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save_evry": 5}, ("save_evry", "Did you mean save_every?")),
        ({"scheduler": None}, ("scheduler", "Did you mean lr_scheduler?")),
        ({"keep_last": 3}, ("keep_last", "Did you mean keep_latest?")),
        ({"frobnicate": 5}, ("frobnicate", "docs/reference/options.md")),
        ({"extras": [1]}, ("extras: [1]", "a dict", 'extras={"phase": 1}')),
        ({"extras": 5}, ("extras: 5",)),
        ({"model": "gpt2"}, ("model: a str", "state_dict")),
        ({"generators": [torch.Generator()]}, ("generators", "a list", "a dict")),
    ],
)
def test_a_wrong_argument_is_named_with_what_to_write(
    tmp_path: Path, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        make(tmp_path, **options)
    assert all(word in str(error.value) for word in words), error.value
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        ("", ("directory: ''", "a path")),
        ("  ", ("directory: '  '", "a path")),
        ("s3://bucket/runs/a", ("'s3://bucket/runs/a'", "a local or mounted path")),
        ("gs://bucket/runs/a", ("gs://",)),
        ("file:///tmp/a", ("file:///tmp/a",)),
        (Path("s3://bucket/a"), ("s3:/bucket/a", "a local or mounted path")),
        (None, ("directory: None", "a path")),
        (nn.Linear(1, 1), ("directory: a Linear", "a path")),
    ],
)
def test_what_is_no_directory_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Any, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as error:
        make(directory)
    assert all(word in str(error.value) for word in words), error.value
    assert list(tmp_path.iterdir()) == []


def test_a_home_directory_is_expanded_and_a_relative_one_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert make("~/runs/a").directory == tmp_path / "runs" / "a"
    relative = make("runs/b")
    assert relative.directory == tmp_path / "runs" / "b"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(relative)  # a script that changes its directory still saves in the same directory
    assert (tmp_path / "runs" / "b" / "step-00000004").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("value", ["x", None, [1.0], torch.ones(2)])
def test_a_metric_that_is_no_number_is_named(tmp_path: Path, value: Any) -> None:
    checkpointer = make(tmp_path)
    with checkpointer:
        next(checkpointer.batches(loader(), epochs=1))
        with pytest.raises(ConfigurationError, match=r"report\(eval_loss=\.\.\.\): .*a number"):
            checkpointer.report(eval_loss=value)


@pytest.mark.parametrize("key", ["modell", "my/model", "weights"])
def test_a_component_of_an_unknown_slot_is_refused_when_it_is_declared(key: str) -> None:
    with pytest.raises(DeclarationError) as error:
        StateComponent(key, nn.Linear(1, 1))
    assert "model, optimizer" in str(error.value)
    if key == "modell":
        assert "Did you mean model?" in str(error.value)


def test_what_is_no_component_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"components: a Linear.*StateComponent"):
        BaseCheckpointer(tmp_path, components=[nn.Linear(1, 1)])  # type: ignore[list-item]


def test_a_module_as_component_logs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        model = StateComponent("model", nn.Linear(2, 1))
        with BaseCheckpointer(tmp_path, components=[model]) as checkpointer:
            checkpointer.resume()
            checkpointer.save()
    assert "[]" not in capsys.readouterr().err


# ---------------------------------------------------------------- the loop


def test_a_cell_that_is_run_twice_must_close_the_first_checkpointer(tmp_path: Path) -> None:
    first = make(tmp_path)
    next(first.batches(loader(), epochs=1))
    second = make(tmp_path)
    with pytest.raises(DirectoryInUseError, match=r"this process.*close\(\)"):
        next(second.batches(loader(), epochs=1))
    first.close()
    train(second)


def test_an_accumulation_window_that_is_longer_than_an_epoch_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(LoopError, match=r"epoch 1.*not one call.*accumulation"),
        make(tmp_path) as checkpointer,
    ):
        for _ in checkpointer.batches(loader(), epochs=2):
            pass


@pytest.fixture
def sigint() -> Any:
    former = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, former)


def test_a_signal_that_the_shell_ignores_for_us_is_no_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sigint: None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train(make(tmp_path))
    assert "SIGINT" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_signal_that_other_code_handles_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sigint: None
) -> None:
    handler: Callable[..., None] = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    train(make(tmp_path))
    assert "SIGINT: handled by other code" in capsys.readouterr().err


# ---------------------------------------------------------------- the first line, and a resume


@pytest.fixture
def caplog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """The messages of the logger itself, which hands nothing to the root logger."""
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield caplog
    logger.setLevel(level)


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno == level]
    found = [each for each in found if not each.startswith("changed in the script: ")]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("options", "cadence"),
    [
        ({}, "automatically, first after 3 min"),
        ({"save_every": "10min"}, "every 10 min"),
        ({"save_every": "90s"}, "every 90 s"),
        ({"save_every": "2h"}, "every 2 h"),
        ({"save_every": 500}, "every 500 steps"),
        ({"save_every": 1}, "every step"),
        ({"save_every": None}, "only on save(), on an improved metric and at the end"),
    ],
)
def test_a_start_is_one_line_that_says_where_and_when_it_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], cadence: str
) -> None:
    train(make(tmp_path, **options))
    expected = f"starting in {tmp_path}; saves {cadence}; all saved state is exact"
    assert messages(caplog) == [expected]


def test_a_resume_and_a_finished_run_are_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make(tmp_path, save_every=2), leave_after=3)
    caplog.clear()
    train(make(tmp_path))
    resumed, verdict = messages(caplog)
    where = f"resuming at step 2 from {tmp_path}/step-00000002"
    assert resumed == f"{where}; saves automatically, first after 3 min"
    assert verdict.startswith("1 repeated step: ")
    train(make(tmp_path))
    (line,) = messages(caplog)
    assert line.startswith(f"nothing to do, the run finished at step 4 (epochs=1): {tmp_path}")
    assert not messages(caplog, logging.WARNING)


@pytest.mark.parametrize("loop", ["batches", "epochs"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["in the loop", "by resume()"])
def test_a_finished_run_with_a_longer_horizon_is_resumed_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: str, by_hand: bool
) -> None:
    def run(epochs: int, **options: Any) -> list[str]:
        caplog.clear()
        with make(tmp_path, **options) as checkpointer:
            if by_hand:
                checkpointer.resume()
            in_epochs = loop == "epochs"
            for _ in checkpointer.epochs(epochs) if in_epochs else [0]:
                for _ in checkpointer.batches(loader(), epochs=None if in_epochs else epochs):
                    checkpointer.step()
        return messages(caplog)

    run(1)
    assert run(2, allow_changes={"horizon"}) == [
        "horizon: was epochs=1 in the checkpoint, the script's epochs=2 is used",
        f"resuming at step 4 from {tmp_path}/step-00000004; saves automatically, first after 3 min",
    ]
    (line,) = run(2, allow_changes={"horizon"})
    assert line.startswith(f"nothing to do, the run finished at step 8 (epochs=2): {tmp_path}")


@pytest.mark.parametrize("options", [{}, {"allow_changes": {"horizon"}}], ids=["same", "any"])
def test_a_finished_run_that_only_resume_asks_for_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    train(make(tmp_path))
    caplog.clear()
    with make(tmp_path, **options) as checkpointer:
        checkpointer.resume()
        checkpointer.resume()
    checkpointer.close()
    (line,) = messages(caplog)
    assert line.startswith(f"nothing to do, the run finished at step 4 (epochs=1): {tmp_path}")


def test_each_part_that_is_not_exact_is_a_warning_and_the_table_is_for_debug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path) as checkpointer:
        next(checkpointer.batches(deque([1, 2, 3]), epochs=1))
        checkpointer.step()
    records, expected = caplog.records, "data: equivalent"
    warnings = [each for each in records if each.levelno == logging.WARNING]
    assert [each.getMessage()[: len(expected)] for each in warnings] == [expected]
    (start,) = [each.getMessage() for each in records if each.levelno == logging.INFO]
    assert start.endswith("; saves automatically, first after 3 min; 1 part not exact:")
    table = [each.getMessage() for each in records if each.levelno == logging.DEBUG]
    assert "in each checkpoint: model: exact" in table
    assert "in each checkpoint: ema: none (no ema was given)" in table


def interrupted(directory: Path, **options: Any) -> None:
    train(make(directory, save_every=1, **options), leave_after=3)


def with_rate(rate: float, gamma: float = 0.5) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma)
    return {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}


def test_a_setting_that_has_no_effect_is_one_warning_that_says_which_value_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(tmp_path, **with_rate(5e-05))
    caplog.clear()
    given = with_rate(0.01, gamma=0.25)
    make(tmp_path, **given).resume()
    assert [group["lr"] for group in given["optimizer"].param_groups] == [5e-05] * 2
    assert given["lr_scheduler"].gamma == 0.5
    assert messages(caplog, logging.WARNING) == [
        "learning rate: the script says 0.01, the checkpoint's 5e-05 is used; "
        "exclude={'optimizer'} uses the script's, with a fresh optimizer [RK-821]",
        "gamma: the script says 0.25, the checkpoint's 0.5 is used; "
        "exclude={'lr_scheduler'} uses the script's, with a fresh lr_scheduler [RK-821]",
    ]


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_learning_rate_that_has_no_effect_is_named_once_whatever_was_computed_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_groups: int
) -> None:
    def scheduled(rate: float, decay: float = 0.0, end: float = 1e4) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_groups)))
        groups = [{"params": list(part.parameters())} for part in model]
        optimizer = torch.optim.SGD(groups, rate, momentum=0.9, weight_decay=decay)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=20, final_div_factor=end
        )
        return {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}

    def warnings(**given: Any) -> list[str]:
        caplog.clear()
        make(tmp_path, **given).resume()
        return messages(caplog, logging.WARNING)

    interrupted(tmp_path, **scheduled(0.1))
    rest = "exclude={'optimizer'} uses the script's, with a fresh optimizer [RK-821]"
    rate = f"learning rate: the script says 0.2, the checkpoint's 0.1 is used; {rest}"
    decay = f"weight_decay: the script says 0.3, the checkpoint's 0.0 is used; {rest}"
    assert warnings(**scheduled(0.1)) == []
    assert warnings(**scheduled(0.2)) == [rate]
    assert warnings(**scheduled(0.2, decay=0.3)) == [rate, decay]
    (end,) = warnings(**scheduled(0.1, end=1e3))
    assert end.startswith("min_lr: the script says ")


def test_the_learning_rates_of_two_optimizers_and_of_their_groups_are_distinguished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def given(*rates: float) -> dict[str, Any]:
        nets = {"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}
        groups = [
            {"params": [each], "lr": lr}
            for each, lr in zip(nets["a"].parameters(), rates, strict=False)
        ]
        optimizers = {
            "a": torch.optim.SGD(groups),
            "b": torch.optim.SGD(nets["b"].parameters(), rates[2]),
        }
        return {"model": nets, "optimizer": optimizers}

    interrupted(tmp_path, **given(0.1, 0.2, 0.3))
    caplog.clear()
    make(tmp_path, **given(0.4, 0.5, 0.6)).resume()
    begins = [line.partition(";")[0] for line in messages(caplog, logging.WARNING)]
    assert begins == [
        "a learning rate: the script says 0.4, 0.5, the checkpoint's 0.1, 0.2 is used",
        "b learning rate: the script says 0.6, the checkpoint's 0.3 is used",
    ]


def test_a_rate_that_the_loop_sets_is_none_of_the_settings_when_state_is_added_late(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(rate: float, leave_after: int) -> list[str]:
        given = with_rate(rate)
        optimizer = given["optimizer"]
        with make(tmp_path, save_every=2, **given) as checkpointer:
            for _ in checkpointer.batches(loader(40), epochs=1):
                for parameter in given["model"].parameters():  # the gradients outlive their step
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.add_(1)
                for group in optimizer.param_groups:
                    group["lr"] = 0.5 / (checkpointer.progress.step + 1)
                optimizer.step()
                checkpointer.step()
                if checkpointer.progress.step == leave_after:
                    break
        newest = max(tmp_path.glob("step-*")) / "manifest.json"
        assert '"model/gradients"' in newest.read_text()
        return messages(caplog, logging.WARNING)

    launch(0.5, leave_after=4)
    assert launch(0.5, leave_after=8) == []
    (warning,) = launch(0.25, leave_after=12)
    assert warning.startswith("learning rate: the script says 0.25, the checkpoint's 0.5 is used")


def test_a_setting_of_what_is_excluded_is_the_scripts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(tmp_path, **with_rate(5e-05))
    caplog.clear()
    given = with_rate(0.01)
    make(tmp_path, exclude={"optimizer"}, **given).resume()
    assert [group["lr"] for group in given["optimizer"].param_groups] == [0.01] * 2
    records = [(each.levelno, each.getMessage()) for each in caplog.records]
    assert not [line for level, line in records if level == logging.WARNING]
    used = "optimizer.param_groups[0].lr: was 5e-05 in the checkpoint, the script's 0.01 is used"
    assert (logging.INFO, used) in records


def one_cycle(steps: int) -> dict[str, Any]:
    given = with_rate(0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(given["optimizer"], 0.1, total_steps=steps)
    return {**given, "lr_scheduler": scheduler}


@pytest.mark.parametrize(
    ("batch_size", "epochs", "steps", "found"),
    [
        (4, 1, 10, "batch_size: was 2, now 4, expected"),
        (2, 3, 60, "epochs: was 1, now 3, expected"),
        (4, 2, 40, "epochs: was 1, now 2; batch_size: was 2, now 4, expected"),
        (2, 1, 40, "lr_scheduler.horizon._schedule_phases[0].end_step: was "),
    ],
)
def test_a_schedule_that_a_changed_setting_makes_another_one_is_refused_with_the_setting(
    tmp_path: Path, batch_size: int, epochs: int, steps: int, found: str
) -> None:
    def run(batch_size: int, epochs: int, steps: int) -> None:
        data: DataLoader[Any] = DataLoader([0.0] * 40, batch_size=batch_size)  # type: ignore[arg-type]
        with make(tmp_path, save_every=1, **one_cycle(steps)) as checkpointer:
            for _ in checkpointer.batches(data, epochs=epochs):
                checkpointer.step()
                if checkpointer.progress.step == 3:
                    break

    run(2, 1, 20)
    with pytest.raises(DriftError) as refusal:
        run(batch_size, epochs, steps)
    assert str(refusal.value).removeprefix("horizon: ").startswith(found)


def test_a_loader_that_repeats_is_no_cause_of_another_schedule(tmp_path: Path) -> None:
    def run(steps: int) -> None:
        data = DataLoader(TensorDataset(torch.zeros(40)), batch_size=2)
        aside = DataLoader(TensorDataset(torch.zeros(40)), batch_size=4)
        with make(tmp_path, save_every=1, **one_cycle(steps)) as checkpointer:
            others = iter(checkpointer.batches(aside, name="aside", repeat=True))
            for _ in checkpointer.batches(data, epochs=1):
                next(others)
                checkpointer.step()
                if checkpointer.progress.step == 3:
                    break

    run(20)
    with pytest.raises(DriftError) as refusal:
        run(40)
    assert "batch_size" not in str(refusal.value)


def test_a_longer_schedule_that_is_allowed_is_the_scripts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scheduled(steps: int) -> dict[str, Any]:
        given = with_rate(0.1)
        optimizer = given["optimizer"]
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {**given, "lr_scheduler": scheduler}

    interrupted(tmp_path, **scheduled(10))
    caplog.clear()
    checkpointer = make(tmp_path, allow_changes={"horizon"}, **scheduled(20))
    train(checkpointer, epochs=2)
    logged = messages(caplog)
    used = "was {} in the checkpoint, the script's {} is used"
    assert f"lr_scheduler.horizon.T_max: {used.format(10, 20)}" in logged
    assert f"horizon: {used.format('epochs=1', 'epochs=2')}" in logged


def test_another_best_metric_is_reported_with_both_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(tmp_path, best_metric="eval_loss")
    caplog.clear()
    make(tmp_path, best_metric="eval_accuracy", mode="max").resume()
    assert any(
        "eval_loss (min) in the checkpoint, the script's eval_accuracy (max) is used" in line
        for line in messages(caplog)
    )


def test_damage_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    interrupted(tmp_path)
    (tmp_path / "step-00000003" / "manifest.json").write_text("{}")
    caplog.clear()
    make(tmp_path).resume()
    (line,) = messages(caplog, logging.WARNING)
    assert line.startswith("passed over step-00000003: step-00000003/manifest.json")
    assert line.count("manifest.json") == 1
    assert "It was moved to" in line


# ---------------------------------------------------------------- a finished run, launched again

TAIL = """
import json, torch
from torch import nn
from torch.utils.data import DataLoader
from resumekit.adapters.torch import Checkpointer

torch.manual_seed(0)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2)
with Checkpointer("runs/a", model=model, optimizer=optimizer{options}) as ckpt:
    for epoch in ckpt.epochs(2):
        for batch in ckpt.batches(loader):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            ckpt.step()
        eval_metric = loss.item()
    {guard}
        with open("all_results.json", "w") as file:
            json.dump({{"eval_loss": eval_metric}}, file)
"""


def launch_script(guard: str, options: str = "") -> None:
    Path("train.py").write_text(TAIL.format(guard=guard, options=options))
    runpy.run_path("train.py", run_name="__main__")


def test_a_finished_run_that_is_launched_again_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "all_results.json"
    guard = "if not ckpt.already_finished:"
    launch_script(guard)
    before = results.read_bytes()
    capsys.readouterr()
    launch_script(guard)
    again = capsys.readouterr().err
    assert "nothing to do, the run finished at step 8 (epochs=2)" in again
    assert "already_finished" in again
    assert results.read_bytes() == before
    # Without it, the tail has the variables of the finished run, and writes the same file.
    launch_script("if True:")
    assert results.read_bytes() == before
    # Without these, it ends as both no_trainer examples did, and empties the file.
    with pytest.raises(NameError):
        launch_script("if True:", ', loop_variables="off"')
    assert results.read_bytes() != before


def test_whether_a_run_had_finished_is_known_after_resume_and_in_the_loop(tmp_path: Path) -> None:
    first = make(tmp_path)
    assert not first.already_finished
    train(first)
    assert first.finished == "epochs=1"
    assert not first.already_finished  # it finished in this launch
    second = make(tmp_path)
    second.resume()
    assert second.already_finished
    train(second)
    assert second.already_finished
    longer = make(tmp_path, allow_changes={"horizon"})
    train(longer, epochs=2)
    assert not longer.already_finished
    assert longer.finished == "epochs=2"


# ---------------------------------------------------------------- step() and report()


def test_step_twice_for_one_batch_is_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path) as checkpointer:
        for _ in checkpointer.batches(loader(), epochs=1):
            checkpointer.step()
            checkpointer.step()
    (line,) = messages(caplog, logging.WARNING)
    assert line.startswith("step() was called twice for batch 0 of epoch 0")


def test_several_steps_for_one_number_of_a_range_are_no_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of PPO in steps of an environment; batches of a loader inside or beside it are batches."""
    with make(tmp_path / "a") as checkpointer:
        replay = checkpointer.batches(loader(8), name="replay", repeat=True)
        for _ in checkpointer.batches(range(3), epochs=1):
            next(replay)
            for _ in range(4):
                checkpointer.step()
        assert checkpointer.progress.step == 12
    assert messages(caplog, logging.WARNING) == []
    inner = loader(4)
    with make(tmp_path / "b") as checkpointer:
        for _ in checkpointer.epochs(1):
            for _ in checkpointer.batches(range(3), name="phase"):
                for _ in checkpointer.batches(inner, name="inner"):
                    checkpointer.step()
                    checkpointer.step()
    (line,) = messages(caplog, logging.WARNING)
    assert line.startswith("step() was called twice for batch")


def test_several_steps_in_an_epoch_without_batches_are_no_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of PPO, which trains a few times on what it has collected."""
    with make(tmp_path) as checkpointer:
        for _ in checkpointer.epochs(2):
            checkpointer.step()
            checkpointer.step()
        assert checkpointer.progress.step == 4
    assert messages(caplog, logging.WARNING) == []


def test_a_step_for_each_batch_of_an_inner_loop_is_no_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = loader(4)
    with make(tmp_path) as checkpointer:
        for _ in checkpointer.epochs(1):
            for _ in checkpointer.batches(loader()):
                for _ in checkpointer.batches(inner, name="inner"):
                    checkpointer.step()
    assert not messages(caplog, logging.WARNING)


@pytest.mark.parametrize("by_epochs", [True, False])
def test_a_best_metric_that_is_never_reported_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by_epochs: bool
) -> None:
    with make(tmp_path, best_metric="eval_loss") as checkpointer:
        if by_epochs:
            for epoch in checkpointer.epochs(3):
                if epoch == 1:
                    assert len(messages(caplog, logging.WARNING)) == 1
                for _ in checkpointer.batches(loader()):
                    checkpointer.step()
                checkpointer.report(eval_accuracy=0.5)
            assert not messages(caplog, logging.WARNING)  # once
            return
        for _ in checkpointer.batches(loader(), epochs=2):
            checkpointer.step()
            checkpointer.report(eval_accuracy=0.5)
    (line,) = messages(caplog, logging.WARNING)
    assert "best_metric='eval_loss' was never reported (report() got eval_accuracy)" in line


def test_a_best_metric_that_is_reported_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path, best_metric="eval_loss") as checkpointer:
        for _ in checkpointer.epochs(2):
            for _ in checkpointer.batches(loader()):
                checkpointer.step()
            checkpointer.report(eval_loss=0.5)
    assert not messages(caplog, logging.WARNING)


# ---------------------------------------------------------------- an error that the program catches


def fetch_from(checkpointer: Checkpointer) -> None:
    """Asks for two epochs of batches without a step: an error at the end of the second."""
    for _ in checkpointer.batches(loader(), epochs=2):
        pass


def step_of_another_optimizer() -> None:
    """The training runs on."""
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], 0.1).step()


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]


def test_an_error_of_the_loop_that_the_program_catches_is_logged_if_it_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path) as checkpointer, contextlib.suppress(Exception):
        fetch_from(checkpointer)
    assert not errors_in(caplog)  # it may end, with a message of its own
    for _ in range(2):
        step_of_another_optimizer()
    (message,) = errors_in(caplog)
    assert message.startswith("the program caught an error and trains on, nothing is saved: epoch")


def test_an_error_of_the_loop_that_is_passed_on_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path) as checkpointer, pytest.raises(LoopError) as raised:
        fetch_from(checkpointer)
    step_of_another_optimizer()
    assert raised.value is not None
    assert not errors_in(caplog)


def test_an_error_of_a_former_training_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path / "former") as checkpointer, contextlib.suppress(Exception):
        fetch_from(checkpointer)
    with make(tmp_path / "next") as checkpointer:
        for _ in checkpointer.batches(loader(), epochs=1):
            step_of_another_optimizer()
            checkpointer.step()
    assert not errors_in(caplog)
