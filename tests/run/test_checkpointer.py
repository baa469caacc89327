"""What a Checkpointer does for its user: starting, resuming, refusing, finishing, logging."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from failpoints import failing
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from resumekit import Checkpointer as BaseCheckpointer
from resumekit.adapters.torch import Checkpointer
from resumekit.capture.model import ModelState
from resumekit.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    DeclarationError,
    DirectoryError,
    DirectoryInUseError,
    DriftError,
    InexactError,
    LoopError,
    NoUsableCheckpointError,
    ResumekitError,
    SaveError,
    StateMismatchError,
    UnsupportedValueError,
)
from resumekit.record.trace import rng_digests
from resumekit.state import (
    AfterResume,
    AfterRng,
    BeforeSave,
    ComponentState,
    InPlace,
    Renamed,
    SharingPattern,
    StateComponent,
)
from resumekit.storage.store import Store

NUM_BATCHES = 4


class Job:
    """A small run whose parts can be replaced; ``train`` is its whole loop.

    What the judge notes, ``losses`` and ``seen``, is no state of the loop.
    """

    def __init__(self, directory: Path, *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = options.pop("model", None) or nn.Linear(3, 2)
        make = options.pop("optimizer_class", torch.optim.AdamW)
        self.optimizer = make(self.model.parameters(), lr=0.1)
        make_scheduler = options.pop("make_scheduler", None)
        scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.scheduler = scheduler
        inputs = torch.arange(24.0).reshape(8, 3) / 24
        data = TensorDataset(inputs, torch.arange(8) % 2)
        self.loader = DataLoader(data, batch_size=2, shuffle=True)
        self.losses: list[str] = []
        settings: dict[str, Any] = {"save_every": 2, "transient": {"losses", "seen"}, **options}
        self.checkpointer = Checkpointer(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=scheduler,
            **settings,
        )

    def on_batch(self, batch: Any) -> None:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.losses.append(float(loss.detach()).hex())
        self.checkpointer.step(loss=loss)

    def train(self, *, epochs: int = 2, stop_after: int | None = None) -> Job:
        """The loop; ``stop_after`` raises in the middle of it, like a crash that leaves no time."""
        with suppress(CrashError), self.checkpointer:
            for batch in self.checkpointer.batches(self.loader, epochs=epochs):
                self.on_batch(batch)
                if stop_after is not None and len(self.losses) == stop_after:
                    raise CrashError
        return self


class Counter:
    """A custom component."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _unlike_any_hook(self: Any, path: str, *, mode: str) -> list[str]:
    return [path, mode]


# A user's object with methods named like every hook of the library, and of another signature.
BASES = (ComponentState, Renamed, InPlace, BeforeSave, AfterResume, AfterRng)
HOOKS = {name for base in BASES for name in vars(base) if not name.startswith("_")}
Everyday: Any = type(
    "Everyday",
    (Counter,),
    dict.fromkeys(HOOKS - {"state_dict", "load_state_dict"}, _unlike_any_hook),
)


class CrashError(Exception):
    """Stands for whatever ends a process."""


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


def weights(job: Job) -> list[float]:
    return [value for p in job.model.parameters() for value in p.detach().flatten().tolist()]


# ---------------------------------------------------------------- starting


def test_the_identical_command_starts_resumes_and_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Job(tmp_path / "whole").train()
    broken = Job(tmp_path / "run").train(stop_after=5)
    again = Job(tmp_path / "run", seed=99).train()
    done = Job(tmp_path / "run", seed=98).train()
    assert broken.losses[:4] + again.losses == whole.losses
    assert weights(again) == weights(whole) == weights(done)
    assert done.losses == []
    lines = capsys.readouterr().err.splitlines()
    assert sum("starting in" in line for line in lines) == 2
    assert sum("resuming at step 4" in line for line in lines) == 1
    assert sum("nothing to do, the run finished at step 8" in line for line in lines) == 1


def test_two_kills_in_one_epoch_continue_exactly(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", save_every=1).train()
    first = Job(tmp_path / "run", save_every=1).train(stop_after=6)
    second = Job(tmp_path / "run", save_every=1, seed=5).train(stop_after=1)
    third = Job(tmp_path / "run", save_every=1, seed=6).train()
    # The safe point of the last step is never passed when the loop is left by an exception.
    assert first.losses[:5] + third.losses == whole.losses
    assert second.losses == whole.losses[5:6]


def test_a_directory_that_a_live_job_owns_is_refused_and_freed_by_close(tmp_path: Path) -> None:
    first = Job(tmp_path)
    first.checkpointer.resume()
    with pytest.raises(DirectoryInUseError, match=f"in use by.*{os.getpid()}"):
        Job(tmp_path).checkpointer.resume()
    first.checkpointer.close()
    Job(tmp_path).train()


def test_a_directory_that_another_process_owns_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from resumekit.storage.store import Store;"
        "store = Store(Path(sys.argv[1])); store.acquire();"
        "print('owned', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        with pytest.raises(DirectoryInUseError, match=str(owner.pid)):
            Job(tmp_path).checkpointer.resume()
        owner.kill()
    Job(tmp_path).train()


def test_a_file_in_place_of_the_directory_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a directory")
    with pytest.raises(DirectoryError):
        Job(tmp_path / "run").checkpointer.resume()


@pytest.mark.parametrize(
    "options",
    [
        {"save_every": 0},
        {"mtbf": "soon"},
        {"mtbf": 24},
        {"save_every": "soon"},
        {"save_every": True},
        {"keep_latest": 0},
        {"mode": "best"},
        {"randomness": "dice"},
        {"on_save_error": "ignore"},
        {"strict": "yes"},
        {"record_command": None},
        {"exclude": "optimizer"},
        {"exclude": {"optimiser"}},
        {"per_rank": "optimizer"},
        {"per_rank": {"optimiser"}},
        {"allow_changes": {"everything"}},
        {"async_save": "always"},
        {"on_save_in_flight": "drop"},
        {"mid_accumulation": "end"},
        {"leave_on": {"SIGKILL"}},
        {"validate": "never"},
        {"loop_variables": "on"},
        {"on_divergence": "stop"},
        {"keep_lastest": 3},
    ],
    ids=str,
)
def test_an_option_without_meaning_is_refused_with_its_name(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Job(tmp_path, **options)


def test_wrong_declarations_are_refused() -> None:
    linear = nn.Linear(1, 1)
    with pytest.raises(DeclarationError, match="per_rank"):
        StateComponent("rng", linear, SharingPattern.REPLICATED)
    with pytest.raises(DeclarationError, match="process group"):
        StateComponent("model", linear, SharingPattern.PER_GROUP)
    with pytest.raises(DeclarationError, match="replicated with a process group"):
        StateComponent("model", linear, SharingPattern.REPLICATED, process_group=[0])
    with pytest.raises(DeclarationError, match="state_dict"):
        StateComponent("model", 3)  # type: ignore[arg-type]


def test_a_group_that_nobody_declared_is_refused(tmp_path: Path) -> None:
    pattern = SharingPattern.PER_GROUP
    for group, groups in (("stage", {"stages": [0]}), ([1], {}), (3, {})):
        component = StateComponent("model", nn.Linear(1, 1), pattern, process_group=group)
        checkpointer = BaseCheckpointer(tmp_path, components=[component], groups=groups)
        with pytest.raises(DeclarationError, match=r"model: .*group"):
            checkpointer.resume()
        checkpointer.close()


def test_a_trainer_of_ones_own_joins_by_returning_components(tmp_path: Path) -> None:
    def run(stop_after: int | None = None) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        loader = DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2, shuffle=True)
        components = [StateComponent("model", model), StateComponent("callbacks/count", Counter())]
        seen: list[str] = []
        with (
            suppress(CrashError),
            BaseCheckpointer(
                tmp_path, components=components, save_every=2, transient={"seen"}
            ) as checkpointer,
        ):
            for (batch,) in checkpointer.batches(loader, epochs=1):
                with torch.no_grad():
                    model.weight += batch.sum()
                components[1].stateful.count += 1  # type: ignore[attr-defined]
                checkpointer.step()
                seen.append(f"{components[1].stateful.count} {model.weight.item()}")  # type: ignore[attr-defined]
                if len(seen) == stop_after:
                    raise CrashError
        return seen

    first, second = run(3), run()
    assert [line.split()[0] for line in (*first[:2], *second)] == ["1", "2", "3", "4"]
    assert second[0] == first[2]


# ---------------------------------------------------------------- what does not fit


def test_a_missing_slot_is_refused_and_allowed(tmp_path: Path) -> None:
    Job(tmp_path).train(stop_after=3)
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(3, 2))
    with pytest.raises(StateMismatchError, match=r"ema: .* has no ema .*allow_missing"):
        Job(tmp_path, ema=average).train()
    Job(tmp_path, ema=average, allow_missing={"ema"}).train()


def test_an_extra_slot_is_refused_and_excluded(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(3, 2))
    Job(tmp_path, ema=average).train(stop_after=3)
    with pytest.raises(StateMismatchError, match=r"ema: .* has ema, and this run has none"):
        Job(tmp_path).train()
    Job(tmp_path, exclude={"ema"}).train()


def test_what_belongs_to_an_excluded_component_is_excluded(tmp_path: Path) -> None:
    models = {name: nn.Linear(3, 2) for name in ("first", "second")}
    with Checkpointer(tmp_path, model=models, optimizer=None) as before:
        for _ in before.batches([0, 1], epochs=1):
            before.step()
    del models["second"]
    with Checkpointer(tmp_path, model=models, optimizer=None, exclude={"model/second"}) as after:
        assert after.resume().step == 2


class Forgetful:
    """An average whose ``state_dict`` lacks its count."""

    def __init__(self) -> None:
        self.mean, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / self.count

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean = state["mean"]


@pytest.mark.parametrize("slot", ["ema", "extras"])
@pytest.mark.parametrize("is_excluded", [False, True])
def test_what_the_state_of_a_component_lacks_is_restored_and_excluded_with_it(
    tmp_path: Path, slot: str, *, is_excluded: bool
) -> None:
    found = []
    for launch in range(2):
        average, model = Forgetful(), nn.Linear(3, 2)
        options: dict[str, Any] = {slot: average if slot == "ema" else {"average": average}}
        if launch and is_excluded:
            options["exclude"] = {slot}
        ckpt = Checkpointer(tmp_path, model=model, optimizer=None, save_every=4, **options)
        with suppress(CrashError), ckpt:
            for _ in ckpt.batches(range(9), epochs=1):
                if launch or ckpt.progress.step == 4:
                    found.append((average.mean, average.count))
                    raise CrashError
                average.update(ckpt.progress.step)
                ckpt.step()
    assert found == [(1.5, 4), (0.0, 0) if is_excluded else (1.5, 4)]


class Counts(ComponentState):
    def __init__(self) -> None:
        self.count = 7

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def fingerprint(self) -> dict[str, int]:
        return {"setting": 1}


def of_framework(directory: Path, **frameworks: str) -> BaseCheckpointer:
    """A run with counts that frameworks keep for their loops."""
    model = StateComponent("model", ModelState(nn.Linear(1, 1)))
    counts = [
        StateComponent(f"callbacks/{key}", Counts(), SharingPattern.PER_RANK, framework=framework)
        for key, framework in frameworks.items()
    ]
    return BaseCheckpointer(directory, components=[model, *counts])


def test_what_belongs_to_another_framework_is_left_out_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with of_framework(tmp_path, counts="Somebody", batch_count="Somebody") as checkpointer:
        checkpointer.save()
    lines = [
        f"step-00000000 has callbacks/{key}, which belongs to Somebody: not needed here"
        for key in ("batch_count", "counts")
    ]
    with of_framework(tmp_path, other="Another") as checkpointer:
        report = checkpointer.resume()
    assert list(report.not_needed) == lines
    assert report.fresh == ("callbacks/other",)
    started = "step-00000000 has no callbacks/other: it starts from its live state"
    assert f"resumekit: {started}" in capsys.readouterr().err
    with of_framework(tmp_path) as checkpointer:
        report = checkpointer.resume()
    assert list(report.not_needed) == lines
    assert report.differences == ()
    assert [f"resumekit: {line}" for line in lines] == capsys.readouterr().err.splitlines()[:2]


def test_parameters_that_the_run_has_frozen_since_it_began_are_restored(tmp_path: Path) -> None:
    first = Job(tmp_path, loop_variables="off")
    with suppress(CrashError), first.checkpointer:
        for batch in first.checkpointer.batches(first.loader, epochs=2):
            first.on_batch(batch)
            first.model.bias.requires_grad_(False)
            if len(first.losses) == 3:
                raise CrashError
    second = Job(tmp_path, loop_variables="off")
    assert not second.checkpointer.resume().differences
    next(second.checkpointer.batches(second.loader, epochs=2))
    assert not second.model.bias.requires_grad
    assert second.model.weight.requires_grad


def test_what_belongs_to_the_framework_in_use_is_needed(tmp_path: Path) -> None:
    both = {"counts": "Somebody", "batch_count": "Somebody"}
    with of_framework(tmp_path / "two", **both) as checkpointer:
        checkpointer.save()
    with (
        of_framework(tmp_path / "two", counts="Somebody") as checkpointer,
        pytest.raises(StateMismatchError, match="has callbacks/batch_count, and this run has none"),
    ):
        checkpointer.resume()
    with of_framework(tmp_path / "one", counts="Somebody") as checkpointer:
        checkpointer.save()
    with (
        of_framework(tmp_path / "one", **both) as checkpointer,
        pytest.raises(StateMismatchError, match="has no callbacks/batch_count"),
    ):
        checkpointer.resume()


@pytest.mark.parametrize("option", ["extras", "ema"])
def test_methods_of_a_users_object_that_are_named_like_hooks_are_not_called(
    tmp_path: Path, option: str
) -> None:
    def job(given: Any) -> Job:
        options: dict[str, Any] = {option: {"given": given}}
        return Job(tmp_path, **options)

    first, second = Everyday(), Everyday()
    first.count = 7
    job(first).train(stop_after=3)
    job(second).train()
    assert second.count == 7


def test_methods_of_a_component_that_are_named_like_hooks_are_not_called(tmp_path: Path) -> None:
    def checkpointer(given: Any) -> BaseCheckpointer:
        model = StateComponent("model", ModelState(nn.Linear(1, 1)))
        component = StateComponent("callbacks/given", given, SharingPattern.PER_RANK)
        return BaseCheckpointer(tmp_path, components=[model, component])

    first, second = Everyday(), Everyday()
    first.count = 7
    with checkpointer(first) as running:
        running.save()
    with checkpointer(second) as resumed:
        resumed.resume()
    assert second.count == 7


class Noted:
    """What a callback keeps."""

    def __init__(self, **notes: Any) -> None:
        self.notes = notes

    def state_dict(self) -> dict[str, Any]:
        return {"notes": self.notes, "lines": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.notes = state["notes"]


def with_callbacks(directory: Path, **callbacks: Noted) -> BaseCheckpointer:
    model = StateComponent("model", ModelState(nn.Linear(1, 1)))
    kept = [
        StateComponent(f"callbacks/{key}", each, SharingPattern.PER_RANK)
        for key, each in callbacks.items()
    ]
    return BaseCheckpointer(directory, components=[model, *kept])


def test_a_callback_that_keeps_nothing_stops_no_run(tmp_path: Path) -> None:
    with with_callbacks(tmp_path / "empty", hooks=Noted()) as checkpointer:
        checkpointer.save()
    with with_callbacks(tmp_path / "empty", others=Noted()) as checkpointer:
        assert checkpointer.resume().resumed
    with with_callbacks(tmp_path / "full", hooks=Noted(best=1.0)) as checkpointer:
        checkpointer.save()
    with (
        with_callbacks(tmp_path / "full") as checkpointer,
        pytest.raises(StateMismatchError, match="has callbacks/hooks, and this run has none"),
    ):
        checkpointer.resume()
    with (
        with_callbacks(tmp_path / "empty", others=Noted(best=1.0)) as checkpointer,
        pytest.raises(StateMismatchError, match="has no callbacks/others"),
    ):
        checkpointer.resume()


@pytest.mark.parametrize(
    ("then", "now", "frameworks", "is_same"),
    [
        ({"epochs": 2}, {"epochs": 2}, ("", ""), True),
        ({"epochs": 2}, {"steps": 9, "epochs": 2}, ("", "Somebody"), True),
        ({"steps": 9, "epochs": 2}, {"epochs": 2}, ("Somebody", ""), True),
        ({"steps": 9, "epochs": 2}, {"epochs": 2}, ("Somebody", "Another"), True),
        ({"steps": 9, "epochs": 2}, {"epochs": 2}, ("Somebody", "Somebody"), False),
        ({"steps": 9, "epochs": 2}, {"epochs": 3}, ("Somebody", ""), False),
        ({"steps": 9}, {"epochs": 2}, ("Somebody", ""), False),
    ],
)
def test_frameworks_that_count_otherwise_agree_in_what_both_count(
    tmp_path: Path,
    then: dict[str, Any],
    now: dict[str, Any],
    frameworks: tuple[str, str],
    is_same: bool,
) -> None:
    first, second = ({"batch_count": name} if name else {} for name in frameworks)
    with of_framework(tmp_path, **first) as checkpointer:
        checkpointer.drive(**then)
        checkpointer.save()
    with of_framework(tmp_path, **second) as checkpointer:
        if is_same:
            checkpointer.drive(**now)
            assert checkpointer.progress.epoch == 0
            return
        with pytest.raises(DriftError, match="allow_changes"):
            checkpointer.drive(**now)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.linear(inputs) * self.scale


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": Scaled()}, "lacks scale"),
        ({"model": nn.Linear(3, 5)}, "weight"),
        ({"model": nn.Linear(3, 2).double()}, "weight"),
        ({"optimizer_class": torch.optim.SGD}, "optimizer"),
    ],
    ids=["another parameter", "other shape", "other dtype", "other optimizer"],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_live_changes(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    Job(tmp_path).train(stop_after=3)
    job = Job(tmp_path, **change)
    before = weights(job), rng_digests()
    with pytest.raises(StateMismatchError, match=named):
        job.checkpointer.resume()
    assert (weights(job), rng_digests()) == before
    assert job.optimizer.state_dict()["state"] == {}


def test_another_horizon_is_refused_unless_allowed(tmp_path: Path) -> None:
    Job(tmp_path).train()
    with pytest.raises(DriftError, match=r"epochs=3.*expected epochs=2"):
        Job(tmp_path).train(epochs=3)
    longer = Job(tmp_path, allow_changes={"horizon"}).train(epochs=3)
    assert len(longer.losses) == NUM_BATCHES


def test_a_schedule_planned_for_another_horizon_is_refused(tmp_path: Path) -> None:
    def cosine(num_steps: int) -> Any:
        return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    Job(tmp_path, make_scheduler=cosine(8)).train(stop_after=3)
    with pytest.raises(DriftError, match="T_max"):
        Job(tmp_path, make_scheduler=cosine(80)).train()
    changed = Job(tmp_path, make_scheduler=cosine(80), allow_changes={"horizon"})
    changed.checkpointer.resume()
    assert changed.scheduler is not None
    assert changed.scheduler.T_max == 80
    changed.checkpointer.close()
    Job(tmp_path, make_scheduler=cosine(8)).train()


def test_a_run_without_amp_may_turn_it_on_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Job(tmp_path).train(stop_after=3)
    Job(tmp_path, grad_scaler=torch.amp.GradScaler("cpu")).train()
    assert "without a gradient scaler" in capsys.readouterr().err


# ---------------------------------------------------------------- naming a checkpoint


def test_a_named_checkpoint_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="step-00000002"):
        Job(tmp_path, resume_from="step-00000002").train()


def test_a_named_checkpoint_is_the_start_and_the_same_command_continues_from_it(
    tmp_path: Path,
) -> None:
    whole = Job(tmp_path, keep_latest=None).train()
    branch = Job(tmp_path, keep_latest=None, resume_from="step-00000002").train(stop_after=3)
    assert branch.losses == whole.losses[2:5]
    rest = Job(tmp_path, keep_latest=None, resume_from="step-00000002").train()
    assert rest.losses == whole.losses[4:]


def test_excluded_state_is_left_as_it_is_and_recorded(tmp_path: Path) -> None:
    Job(tmp_path, loop_variables="off").train(stop_after=3)
    job = Job(tmp_path, exclude={"optimizer"}, loop_variables="off")
    report = job.checkpointer.resume()
    assert job.optimizer.state_dict()["state"] == {}
    assert "optimizer" not in [line.key for line in report.components]
    job.train()
    newest = max(tmp_path.glob("step-*"))
    assert '"exclude"' in (newest / "manifest.json").read_text()


# ---------------------------------------------------------------- keeping and finishing


def test_retention_keeps_the_latest_and_the_best(tmp_path: Path) -> None:
    job = Job(tmp_path, save_every=1, best_metric="score", mode="max")
    with job.checkpointer as checkpointer:
        for batch in checkpointer.batches(job.loader, epochs=2):
            job.on_batch(batch)
            checkpointer.report(score=1.0 if checkpointer.progress.step == 3 else 0.0)
        best = checkpointer.best()
    assert steps(tmp_path) == ["step-00000003", "step-00000007", "step-00000008"]
    assert best is not None
    assert (best.path.name, best.step, best.value) == ("step-00000003", 3, 1.0)


def test_the_best_checkpoint_is_that_of_the_metric_in_use(tmp_path: Path) -> None:
    def train(metric: str, *, num_batches: int) -> None:
        job = Job(tmp_path, save_every=1, keep_latest=None, best_metric=metric)
        with job.checkpointer as checkpointer:
            batches = checkpointer.batches(job.loader, epochs=2)
            for batch, _ in zip(batches, range(num_batches), strict=False):
                job.on_batch(batch)
                checkpointer.report(**{metric: 10.0 - checkpointer.progress.step})

    def best(metric: str) -> tuple[int, float] | None:
        found = Job(tmp_path, best_metric=metric).checkpointer.best()
        return None if found is None else (found.step, found.value)

    train("loss", num_batches=5)
    assert best("loss") == (5, 5.0)
    assert best("error") is None
    train("error", num_batches=2)
    assert best("loss") == (5, 5.0)
    assert best("error") == (7, 3.0)


def test_an_improved_metric_makes_a_save_due(tmp_path: Path) -> None:
    job = Job(tmp_path, save_every=None, best_metric="loss")
    with job.checkpointer as checkpointer:
        for batch in checkpointer.batches(job.loader, epochs=1):
            job.on_batch(batch)
            checkpointer.report(loss=float(abs(checkpointer.progress.step - 2)))
    assert "step-00000002" in steps(tmp_path)


def test_a_report_inside_an_accumulation_window_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(directory: Path, *, at: int, **options: Any) -> str:
        job = Job(directory, save_every=None, best_metric="loss", **options)
        with job.checkpointer as checkpointer:
            for number, batch in enumerate(checkpointer.batches(job.loader, epochs=1)):
                if number % 2:
                    job.on_batch(batch)
                if number == at:
                    checkpointer.report(loss=0.5)
        return capsys.readouterr().err

    assert "report(loss=...) was called inside" in lines(tmp_path / "open", at=2)
    assert "report(loss=...)" not in lines(tmp_path / "whole", at=1)


@pytest.mark.parametrize("verb", ["save", "report"])
def test_what_comes_after_the_end_is_a_warning(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, best_metric="loss")
    with job.checkpointer as checkpointer:
        for batch in checkpointer.batches(job.loader, epochs=1):
            job.on_batch(batch)
        before = steps(tmp_path)
        checkpointer.save() if verb == "save" else checkpointer.report(loss=0.5)
    assert steps(tmp_path) == before
    message = f"{verb}() was called after the run finished (epochs=1): its last checkpoint stays"
    assert message in capsys.readouterr().err


def test_stop_finishes_early_and_for_good(tmp_path: Path) -> None:
    def run() -> tuple[str | None, list[str]]:
        job = Job(tmp_path)
        finished = job.checkpointer.resume().finished
        with job.checkpointer as checkpointer:
            for batch in checkpointer.batches(job.loader, epochs=2):
                job.on_batch(batch)
                if checkpointer.progress.step == 3:
                    checkpointer.stop("no improvement")
        return finished, job.losses

    finished, losses = run()
    assert finished is None
    assert len(losses) == 3
    assert run() == ("no improvement", [])


def test_break_does_not_finish_and_saves_what_is_due(tmp_path: Path) -> None:
    def run(directory: Path, leave_at: int | None = None, *, seed: int = 0) -> list[str]:
        job = Job(directory, seed=seed)
        with job.checkpointer as checkpointer:
            for batch in checkpointer.batches(job.loader, epochs=2):
                job.on_batch(batch)
                if checkpointer.progress.step == leave_at:
                    break
        return job.losses

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "run", 4) == whole[:4]
    assert run(tmp_path / "run", seed=3) == whole[4:]


def test_steps_can_be_the_horizon(tmp_path: Path) -> None:
    def run(directory: Path, stop_after: int | None = None) -> list[str]:
        job = Job(directory)
        with suppress(CrashError), job.checkpointer as checkpointer:
            for batch in checkpointer.batches(job.loader, steps=6):
                job.on_batch(batch)
                if len(job.losses) == stop_after:
                    raise CrashError
        return job.losses

    whole = run(tmp_path / "whole")
    assert len(whole) == 6
    assert run(tmp_path / "run", 5)[:4] + run(tmp_path / "run") == whole
    assert run(tmp_path / "run") == []


def test_epochs_give_absolute_numbers_and_the_rest_of_the_epoch(tmp_path: Path) -> None:
    def run(stop_after: int | None = None) -> list[tuple[int, int]]:
        job = Job(tmp_path)
        seen = []
        with suppress(CrashError), job.checkpointer as checkpointer:
            for epoch in checkpointer.epochs(3):
                batches = checkpointer.batches(job.loader)
                for number, batch in enumerate(batches, start=batches.initial):
                    job.on_batch(batch)
                    seen.append((epoch, number))
                    if len(seen) == stop_after:
                        raise CrashError
        return seen

    every = [(epoch, number) for epoch in range(3) for number in range(NUM_BATCHES)]
    assert run(7)[:6] + run() == every
    assert run() == []


def test_a_progress_bar_can_be_drawn(tmp_path: Path) -> None:
    Job(tmp_path).train(stop_after=6)
    job = Job(tmp_path)
    with job.checkpointer as checkpointer:
        batches = checkpointer.batches(job.loader, epochs=2)
        assert (len(batches), batches.initial) == (2 * NUM_BATCHES, 4)


# ---------------------------------------------------------------- the loop


def test_a_loop_without_step_is_an_error(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(LoopError, match="not one call of step"), job.checkpointer as checkpointer:
        for _ in checkpointer.batches(job.loader, epochs=1):
            pass


def test_step_without_a_loop_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoopError, match="without a batch"):
        Job(tmp_path).checkpointer.step()


@pytest.mark.parametrize("arguments", [{}, {"epochs": 1, "steps": 2}], ids=str)
def test_batches_take_one_horizon(tmp_path: Path, arguments: dict[str, Any]) -> None:
    job = Job(tmp_path)
    with pytest.raises(TypeError, match="epochs="):
        job.checkpointer.batches(job.loader, **arguments)


def test_strict_refuses_what_would_not_be_restored_exactly(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter([torch.ones(2, 3)] * 4)

    job = Job(tmp_path, strict=True)
    with pytest.raises(InexactError, match="data: equivalent"), job.checkpointer as checkpointer:
        for _ in checkpointer.batches(Stream(), epochs=1):
            pass


def test_extras_are_restored_in_place(tmp_path: Path) -> None:
    extras = {"phase": 1, "counter": torch.zeros(2)}
    job = Job(tmp_path, extras=extras)
    extras["phase"] = 7
    job.train(stop_after=3)
    again: dict[str, Any] = {"phase": 1, "counter": torch.ones(2)}
    Job(tmp_path, extras=again).checkpointer.resume()
    assert again["phase"] == 7
    assert again["counter"].tolist() == [0.0, 0.0]


# ---------------------------------------------------------------- saving that fails


def test_a_value_that_cannot_be_stored_is_refused_by_path_before_any_write(tmp_path: Path) -> None:
    extras: dict[str, Any] = {}

    class Late(Job):
        def on_batch(self, batch: Any) -> None:
            super().on_batch(batch)
            extras["hook"] = {"on_step": lambda: None}

    job = Late(tmp_path, extras=extras)
    with pytest.raises(UnsupportedValueError, match="on_step"):
        job.train()
    assert steps(tmp_path) == []
    assert list((tmp_path / ".staging").iterdir()) == []


HOLDERS = ("optimizer['param_groups'][0]", "lr_scheduler['state']", "extras['values']")


def job_with(directory: Path, where: str, value: Any, **options: Any) -> tuple[Job, dict[str, Any]]:
    """A job with a value in one of the holders, and the holder."""
    extras: dict[str, Any] = {}
    job = Job(directory, extras=extras, make_scheduler=lambda each: StepLR(each, 2), **options)
    holders = (job.optimizer.param_groups[0], vars(job.scheduler), extras)
    holder = holders[HOLDERS.index(where)]
    holder["given"] = value
    return job, holder


@pytest.mark.parametrize("where", HOLDERS)
def test_what_no_save_can_store_is_refused_before_the_first_batch(
    tmp_path: Path, where: str
) -> None:
    job, _ = job_with(tmp_path, where, [object()])
    path = re.escape(f"{where}['given'][0]: an object of class")
    with pytest.raises(UnsupportedValueError, match=f"^{path}"):
        job.train()
    assert job.losses == []


def test_a_new_extra_that_no_save_can_store_is_refused_at_the_resume(tmp_path: Path) -> None:
    extras: dict[str, Any] = {"kept": 1}
    Job(tmp_path, extras=extras, save_every=2).train(stop_after=5)
    before = steps(tmp_path)
    job = Job(tmp_path, extras={"kept": object(), "added": object()}, save_every=2)
    with pytest.raises(UnsupportedValueError, match=re.escape("extras['added']: an object of")):
        job.train()
    assert job.losses == []
    assert steps(tmp_path) == before
    again: dict[str, Any] = {"kept": object(), "added": 5}  # a saved value replaces the first one
    Job(tmp_path, extras=again, save_every=2).train(stop_after=1)
    assert again == {"kept": 1, "added": 5}


@pytest.mark.parametrize("where", HOLDERS)
@pytest.mark.parametrize("value", [torch.bfloat16, torch.device("cpu"), torch.Size([2])])
def test_a_constant_of_torch_is_restored_unless_its_component_is_excluded(
    tmp_path: Path, where: str, value: Any
) -> None:
    job_with(tmp_path, where, value)[0].train(stop_after=5)
    for excluded, expected in (({where.split("[")[0]}, None), (set[str](), value)):
        resumed, holder = job_with(tmp_path, where, None, exclude=excluded)
        resumed.checkpointer.resume()
        resumed.checkpointer.close()
        assert holder["given"] == expected


def test_a_failing_save_raises_or_by_policy_warns_and_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resumekit.storage.store.LocalFileSystem", failing("fsync:3=ENOSPC"))
    with pytest.raises(SaveError, match="No space left"):
        Job(tmp_path / "raise").train()
    warned = Job(tmp_path / "warn", on_save_error="warn").train()
    assert len(warned.losses) == 2 * NUM_BATCHES
    assert "training continues" in capsys.readouterr().err
    assert steps(tmp_path / "warn")[-1] == "step-00000008"


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_afresh(tmp_path: Path) -> None:
    Job(tmp_path).train(stop_after=5)
    for step in tmp_path.glob("step-*"):
        (step / "manifest.json").write_text("{}")
    for _ in range(2):  # the second time they are in quarantine already
        job = Job(tmp_path)
        before = weights(job)
        with pytest.raises(NoUsableCheckpointError, match="step-0000000"):
            job.train()
        assert weights(job) == before


def test_every_error_says_where_what_was_found_and_travels_between_ranks() -> None:
    import copy

    error = StateMismatchError("ema", found="nothing", expected="one", remedy="Give one.")
    assert str(error) == "ema: nothing, expected one. Give one. [RK-501]"
    assert str(copy.copy(error)) == str(error)
    assert isinstance(error, (ValueError, ResumekitError))


def test_files_of_a_model_are_in_the_manifest_and_a_resume_needs_none(tmp_path: Path) -> None:
    def run(text: bytes) -> BaseCheckpointer:
        model = nn.Linear(3, 2)
        files = {"config.json": text, "readme.md": b""}
        component = StateComponent("model", ModelState(model), files=lambda: files)
        return BaseCheckpointer(tmp_path, components=[component])

    with run(b"{}") as first:
        first.save()
    (step,) = Store(tmp_path).step_names()
    reader = Store(tmp_path).open_step(step)
    reader.verify()
    assert {"model/config.json", "model/readme.md"} <= {f.path for f in reader.manifest.files}
    with run(b"another") as second:
        assert second.resume().resumed


def test_files_of_anything_but_a_model_are_refused() -> None:
    with pytest.raises(DeclarationError, match="model"):
        StateComponent("extras/table", ModelState(nn.Linear(1, 1)), files=dict)
