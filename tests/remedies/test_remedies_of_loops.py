"""The remedies for the loop, its loaders and its values, followed."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

import resumekit.run
from resumekit.adapters.torch import Checkpointer
from resumekit.data import DistributedResumableSampler
from resumekit.run.options import Options
from resumekit.state import StateComponent
from resumekit.storage.io.file_system import Free, LocalFileSystem

if TYPE_CHECKING:
    from followed_remedies import Remedy

ROOT = Path(__file__).resolve().parents[2]


class Parts:
    """A model and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def make(self, directory: Path, **options: Any) -> Checkpointer:
        given = {"model": self.model, "optimizer": self.optimizer, "save_every": 1, **options}
        return Checkpointer(directory, **given)

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch.float().reshape(-1, 1)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def loader(length: int = 4, **settings: Any) -> DataLoader[Any]:
    return DataLoader(range(length), **{"batch_size": 2, **settings})  # type: ignore[arg-type]


Loop = Callable[[Checkpointer], None]


def one_epoch(checkpointer: Checkpointer) -> None:
    for _ in checkpointer.batches(loader(), epochs=1):
        checkpointer.step()


def launch(directory: Path, loop: Loop = one_epoch, **options: Any) -> int:
    """The number of steps after it."""
    with Parts().make(directory, **options) as checkpointer:
        loop(checkpointer)
        return checkpointer.progress.step


# ---------------------------------------------------------------- arguments


def written(remedy: str) -> dict[str, Any]:
    """The argument that a remedy spells out."""
    found = re.search(r"(\w+)=(\{.*?\}|\"[^\"]*\")", remedy)
    assert found, remedy
    return {found[1]: eval(found[2])}  # noqa: S307  (as a user pastes it)


@pytest.mark.remedy('Pass resume_from="{}"')
def test_a_number_as_checkpoint_is_written_as_its_name(tmp_path: Path, remedy: Remedy) -> None:
    launch(tmp_path)
    text = remedy.of(Parts().make, tmp_path, resume_from=1)
    assert launch(tmp_path, **written(text)) == 2


@pytest.mark.remedy('Pass the name alone, resume_from="{}", and its run directory')
def test_a_path_as_checkpoint_is_written_as_its_name(tmp_path: Path, remedy: Remedy) -> None:
    launch(tmp_path)
    text = remedy.of(Parts().make, tmp_path / "b", resume_from=f"{tmp_path}/step-00000001")
    assert launch(tmp_path, **written(text)) == 2


@pytest.mark.remedy('Pass e.g. extras={"phase": 1}')
def test_extras_are_a_dict(tmp_path: Path, remedy: Remedy) -> None:
    assert launch(tmp_path, **written(remedy.of(Parts().make, tmp_path, extras=[1]))) == 2


@pytest.mark.remedy('Pass {}={"first": ..., "second": ...}')
def test_several_objects_have_names(tmp_path: Path, remedy: Remedy) -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    ((name, given),) = written(remedy.of(Parts().make, tmp_path, model=models)).items()
    options: dict[str, Any] = {name: dict(zip(given, models, strict=True))}
    assert launch(tmp_path, **options) == 2


@pytest.mark.remedy("docs/reference/options.md and help(resumekit.run.Options) list the options")
def test_the_options_are_listed_where_the_message_says(tmp_path: Path, remedy: Remedy) -> None:
    text = remedy.of(Parts().make, tmp_path, frobnicate=1)
    page = ROOT / re.findall(r"docs/\S+\.md", text)[0]
    described = attrgetter(re.findall(r"help\(resumekit\.(.*?)\)", text)[0])(resumekit).__doc__
    for name in Options.__dataclass_fields__:
        assert f"`{name}" in page.read_text(), name
        assert f"{name}:" in described, name


@pytest.mark.remedy("Give each component its own key")
def test_components_have_keys_of_their_own(tmp_path: Path, remedy: Remedy) -> None:
    def make(*keys: str) -> None:
        components = [StateComponent(key, nn.Linear(1, 1)) for key in keys]
        with resumekit.Checkpointer(tmp_path, components=components) as checkpointer:
            checkpointer.resume()

    remedy.of(make, "model/a", "model/a")
    make("model/a", "model/b")


# ---------------------------------------------------------------- the shape of the loop


def run_code(header: str, body: str, checkpointer: Checkpointer, **names: Any) -> None:
    """Runs a loop header from a message, as a user pastes it."""
    exec(f"{header}:\n{body}", {"checkpointer": checkpointer, "loader": loader(), **names})  # noqa: S102


def two_phases(checkpointer: Checkpointer) -> None:
    for _ in checkpointer.epochs(2):
        checkpointer.step()
    for _ in range(3):
        checkpointer.step()


@pytest.mark.parametrize("loop", [Checkpointer.step, two_phases])
@pytest.mark.remedy(
    "Write the loop as: for batch in checkpointer.batches(loader, epochs=...); "
    "several phases as one epochs(total)"
)
def test_a_step_needs_a_batch(tmp_path: Path, remedy: Remedy, loop: Loop) -> None:
    text = remedy.of(launch, tmp_path / "a", loop)
    one, several = text.partition(": ")[2].replace("...", "2").split("; several phases as one ")
    body = "    checkpointer.step()"
    assert launch(tmp_path / "b", lambda each: run_code(one, body, each)) == 4
    header = f"for epoch in checkpointer.{several}"
    body = "    phase = epoch // 2\n    checkpointer.step()"
    assert launch(tmp_path / "c", lambda each: run_code(header, body, each, total=5)) == 5


def once(loader: Any, name: str, checkpointer: Checkpointer) -> None:
    for _ in checkpointer.batches(loader, name=name):
        checkpointer.step()


def two_loops(checkpointer: Checkpointer) -> None:
    for name in "ab":
        for _ in checkpointer.batches(loader(), steps=5, name=name):
            checkpointer.step()
            if checkpointer.progress.step == 3:
                break


@pytest.mark.remedy("Write several loops as: for epoch in checkpointer.epochs(...)")
def test_two_loops_are_in_epochs(tmp_path: Path, remedy: Remedy) -> None:
    text = remedy.of(launch, tmp_path / "a", two_loops)
    header = text.partition(": ")[2].replace("...", "2")
    body = "    for loop in loops:\n        loop(checkpointer)"
    loops = [partial(once, loader(), name) for name in "ab"]
    follow = partial(run_code, header, body, loops=loops)
    assert launch(tmp_path, follow) == 8


def one_after_the_other(checkpointer: Checkpointer) -> None:
    one_epoch(checkpointer)
    for _ in checkpointer.batches(loader(), epochs=2):
        checkpointer.step()


def whole_horizon(checkpointer: Checkpointer) -> None:
    for _ in checkpointer.batches(loader(), epochs=2):
        checkpointer.step()


@pytest.mark.remedy("Give the first loop the horizon of the whole run")
def test_the_first_loop_has_the_whole_horizon(tmp_path: Path, remedy: Remedy) -> None:
    remedy.of(launch, tmp_path / "a", one_after_the_other)
    assert launch(tmp_path / "b", whole_horizon) == 4


def no_step(checkpointer: Checkpointer) -> None:
    for _ in checkpointer.batches(loader(), epochs=2):
        pass


def step_at_the_end_of_each_epoch(checkpointer: Checkpointer) -> None:
    for index, _ in enumerate(checkpointer.batches(loader(), epochs=2)):
        if index % 2:
            checkpointer.step()


@pytest.mark.remedy("An accumulation window must not be longer than an epoch")
def test_an_epoch_has_a_step(tmp_path: Path, remedy: Remedy) -> None:
    remedy.of(launch, tmp_path / "a", no_step)
    assert launch(tmp_path / "b", step_at_the_end_of_each_epoch) == 2


def episodes(checkpointer: Checkpointer) -> None:
    for episode in checkpointer.epochs(6):
        if episode % 3 == 2:
            checkpointer.step()


def no_episode_with_a_step(checkpointer: Checkpointer) -> None:
    for _ in checkpointer.epochs(1):
        pass


@pytest.mark.parametrize("loop", [episodes, no_episode_with_a_step])
@pytest.mark.remedy(
    "Where not each needs a step, write: for i in checkpointer.batches(range(n), epochs=1)"
)
def test_episodes_without_a_step_are_batches(tmp_path: Path, remedy: Remedy, loop: Loop) -> None:
    header = remedy.of(launch, tmp_path / "a", loop).partition(": ")[2]
    body = "    if i % 3 == 2:\n        checkpointer.step()"
    assert launch(tmp_path / "b", lambda each: run_code(header, body, each, n=6)) == 2


def twice_in_an_epoch(*names: str | None) -> Loop:
    def loop(checkpointer: Checkpointer) -> None:
        loaders = [loader()] * 2 if None in names else [loader(), loader()]
        for _ in checkpointer.epochs(2):
            for each, name in zip(loaders, names, strict=True):
                for _ in checkpointer.batches(each, name=name):
                    checkpointer.step()

    return loop


@pytest.mark.remedy("Give the second loop a name of its own")
def test_two_loops_over_one_loader_have_names(tmp_path: Path, remedy: Remedy) -> None:
    remedy.of(launch, tmp_path / "a", twice_in_an_epoch(None, None))
    assert launch(tmp_path / "b", twice_in_an_epoch("a", "b")) == 8


@pytest.mark.remedy("Give each loader its own name=; a new one may take over with a new epoch")
def test_two_loaders_have_names(tmp_path: Path, remedy: Remedy) -> None:
    remedy.of(launch, tmp_path / "a", twice_in_an_epoch("a", "a"))
    assert launch(tmp_path / "b", twice_in_an_epoch("a", "b")) == 8

    def new_one_each_epoch(checkpointer: Checkpointer) -> None:
        for _ in checkpointer.epochs(2):
            for _ in checkpointer.batches(loader()):
                checkpointer.step()

    assert launch(tmp_path / "c", new_one_each_epoch) == 4


def drawn_from(*, inside: bool) -> Loop:
    def loop(checkpointer: Checkpointer) -> None:
        extra = checkpointer.batches(loader(), name="extra", repeat=True)
        if not inside:
            next(extra)
        for _ in checkpointer.batches(loader(), epochs=1):
            if inside:
                next(extra)
            checkpointer.step()

    return loop


@pytest.mark.remedy("Call next() on it inside the loop, after the loop has a batch")
def test_another_loader_is_drawn_from_inside_the_loop(tmp_path: Path, remedy: Remedy) -> None:
    remedy.of(launch, tmp_path / "a", drawn_from(inside=False))
    assert launch(tmp_path / "b", drawn_from(inside=True)) == 2


class Endless(Sampler[int]):
    """Yields for ever, and has a length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(4)

    def __len__(self) -> int:
        return 4


def endless(**horizon: int) -> Loop:
    def loop(checkpointer: Checkpointer) -> None:
        for _ in checkpointer.batches(loader(sampler=Endless()), **horizon):  # type: ignore[arg-type]
            checkpointer.step()

    return loop


@pytest.mark.remedy("For an endless loader pass steps= instead of epochs=")
def test_an_endless_loader_is_counted_in_steps(tmp_path: Path, remedy: Remedy) -> None:
    text = remedy.of(launch, tmp_path / "a", endless(epochs=2))
    use, instead_of = re.findall(r"(\w+)=", text)
    assert instead_of == "epochs"
    assert launch(tmp_path / "b", endless(**{use: 5})) == 5


@pytest.mark.remedy(
    "Make it before the first call of batches() or epochs(), or pass optimizer=...; one that the "
    "loop makes, or none: pass model=... and call step()"
)
def test_an_optimizer_is_made_before_the_loop_or_passed(tmp_path: Path, remedy: Remedy) -> None:
    def without_optimizer() -> None:
        checkpointer = Checkpointer(tmp_path / "a")
        batches = checkpointer.batches(loader(), repeat=True)
        parts = Parts()
        next(batches)
        parts.optimizer.step()

    def with_optimizer() -> int:
        parts = Parts()
        model, optimizer = parts.model, parts.optimizer
        with Checkpointer(tmp_path / "b") as checkpointer:
            for batch in checkpointer.batches(loader(), epochs=1):
                model(batch.float().reshape(-1, 1)).sum().backward()
                optimizer.step()
            return checkpointer.progress.step

    text = remedy.of(without_optimizer)
    assert with_optimizer() == 2
    parts = Parts()
    for number, name in enumerate(re.findall(r"(\w+)=\.\.\.", text)):
        given: Any = {name: getattr(parts, name)}
        with Checkpointer(tmp_path / f"c{number}", **given) as checkpointer:
            one_epoch(checkpointer)  # which calls step()
            assert checkpointer.progress.step == 2


def counts(checkpointer: Checkpointer, leave_after: int = 9) -> None:
    total = 0
    for batch in checkpointer.batches(loader(), epochs=1):
        total += int(batch.sum())
        checkpointer.step()
        if checkpointer.progress.step == leave_after:
            raise ZeroDivisionError
    assert total == 6


@pytest.mark.remedy(
    'Request it there, or pass exclude={"variables"} to leave variables as they are'
)
def test_a_loop_in_another_function_leaves_the_variables(tmp_path: Path, remedy: Remedy) -> None:
    with pytest.raises(ZeroDivisionError):
        launch(tmp_path, partial(counts, leave_after=2))
    copy = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"copy of {tmp_path.name}")))
    text = remedy.of(launch, tmp_path, one_epoch)
    assert launch(copy, one_epoch, **written(text)) == 2
    assert launch(tmp_path, partial(counts, leave_after=9)) == 2


# ---------------------------------------------------------------- the run directory


@pytest.mark.remedy("Call close() on the first Checkpointer")
def test_the_first_checkpointer_of_a_process_is_closed(tmp_path: Path, remedy: Remedy) -> None:
    first = Parts().make(tmp_path)
    next(first.batches(loader(), epochs=1))
    text = remedy.of(launch, tmp_path)
    getattr(first, re.findall(r"(\w+)\(\)", text)[0])()
    assert launch(tmp_path) == 2


@pytest.mark.remedy("Wait for it, stop it, or give this job another directory")
def test_another_job_in_the_directory_is_stopped(tmp_path: Path, remedy: Remedy) -> None:
    code = (
        "import sys, pathlib, resumekit.storage.store as storage;"
        "store = storage.Store(pathlib.Path(sys.argv[1])); store.acquire();"
        "print('x', flush=True); input()"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as job:
        assert job.stdout is not None
        job.stdout.readline()
        remedy.of(launch, tmp_path / "a")
        assert launch(tmp_path / "b") == 2
        job.kill()
    assert launch(tmp_path / "a") == 2


@pytest.mark.remedy("Keep each run in a directory of its own")
def test_two_runs_have_two_directories(tmp_path: Path, remedy: Remedy) -> None:
    launch(tmp_path / "a")
    launch(tmp_path / "b", whole_horizon)
    stranger = tmp_path / "a" / "step-00000004"
    (tmp_path / "b" / stranger.name).rename(stranger)
    text = error_of(launch, tmp_path / "a", resume_from=stranger.name)
    assert remedy.in_text(text)
    stranger.rename(tmp_path / "b" / stranger.name)
    assert launch(tmp_path / "a") == 2
    assert launch(tmp_path / "b", whole_horizon) == 4


def error_of(call: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(resumekit.ResumekitError) as error:
        call(*arguments, **keywords)
    return str(error.value)


@pytest.mark.remedy("Give the run a directory of its own")
def test_the_checkpoints_of_another_program_stay(tmp_path: Path, remedy: Remedy) -> None:
    (tmp_path / "latest").write_text("global_step1")
    remedy.of(launch, tmp_path)
    assert launch(tmp_path / "run") == 2


def damage(directory: Path) -> None:
    for step in directory.glob("step-*"):
        (step / "manifest.json").write_text("{}")


@pytest.mark.remedy("Restore one from a copy, or start a new run in an empty directory")
def test_damaged_checkpoints_are_restored_from_a_copy(tmp_path: Path, remedy: Remedy) -> None:
    launch(tmp_path / "a")
    copy = shutil.copytree(tmp_path / "a", tmp_path / "copy")
    damage(tmp_path / "a")
    remedy.of(launch, tmp_path / "a")
    assert launch(tmp_path / "new") == 2
    shutil.copytree(copy / "step-00000002", tmp_path / "a" / "step-00000002", dirs_exist_ok=True)
    assert launch(tmp_path / "a") == 2


@pytest.mark.remedy("Restore one from a copy, or, to start a new run, remove {}")
def test_the_quarantine_is_removed_to_start_a_new_run(tmp_path: Path, remedy: Remedy) -> None:
    launch(tmp_path)
    damage(tmp_path)
    error_of(launch, tmp_path)
    text = remedy.of(launch, tmp_path)
    shutil.rmtree(text.rpartition(" ")[2])
    assert launch(tmp_path) == 2


class Quota(LocalFileSystem):
    """A file system with this many bytes for the checkpoints of a directory."""

    num_bytes = 0

    def free(self, path: Path) -> Free:
        files = path.glob("step-*/**/*.*")
        return Free(self.num_bytes - sum(each.stat().st_size for each in files), None)


@pytest.mark.remedy("Free space first; then a lower keep_latest keeps it free")
def test_a_full_disk_is_cleaned_and_kept_so(
    tmp_path: Path, remedy: Remedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(tmp_path / "a")
    size = sum(each.stat().st_size for each in tmp_path.glob("a/step-00000001/**/*.*"))
    monkeypatch.setattr("resumekit.storage.store.LocalFileSystem", Quota)
    needed = re.findall(r"expected ([\d,]+)", error_of(launch, tmp_path / "full"))
    monkeypatch.setattr(Quota, "num_bytes", int(needed[0].replace(",", "")) + 3 * size // 2)
    text = remedy.of(launch, tmp_path / "b", whole_horizon, keep_latest=None)
    (name,) = re.findall(r"keep_\w+", text)
    remedy.of(launch, tmp_path / "b", whole_horizon, **{name: 1})  # frees nothing by itself
    shutil.rmtree(min(tmp_path.glob("b/step-*")))
    assert launch(tmp_path / "b", whole_horizon, **{name: 1}) == 4


@pytest.mark.remedy("Pass async_save=False")
def test_without_memory_a_save_is_not_asynchronous(
    tmp_path: Path, remedy: Remedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(num_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("resumekit.run.saving.snapshot.HostBuffer", no_memory)
    text = remedy.of(launch, tmp_path, async_save=True)
    name, value = text.removeprefix("Pass ").split("=")
    options: dict[str, Any] = {name: value == "True"}
    assert launch(tmp_path, **options) == 2


# ---------------------------------------------------------------- values


class Handle:
    """A value that cannot be stored."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


FACTORY = defaultdict(lambda: 0, a=1)
VALUES = [
    ("Store dict(value)", FACTORY, dict(FACTORY)),
    ("Use a name as the key", {torch.ones(1): 1}, {"a": 1}),
    ("Flatten it", itself(), [1]),
    ("Store its state_dict() or its plain values instead", Handle(), {"name": "a"}),
]


@pytest.mark.parametrize(
    ("bad", "good"),
    [pytest.param(*each, marks=pytest.mark.remedy(text), id=text) for text, *each in VALUES],
)
def test_a_value_of_the_user_is_stored_in_another_form(
    tmp_path: Path, remedy: Remedy, bad: Any, good: Any
) -> None:
    remedy.of(launch, tmp_path, extras={"value": bad})
    assert launch(tmp_path, extras={"value": good}) == 2
    extras = {"value": None}
    Parts().make(tmp_path, extras=extras).resume()
    assert extras == {"value": good}


# ---------------------------------------------------------------- what the script changes


class WithLock(nn.Module):
    """A module with an attribute that cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.handle = count()

    def forward(self, batch: torch.Tensor) -> Any:
        next(self.handle)
        return self.linear(batch)


def strictly(directory: Path, model: nn.Module, **options: Any) -> int:
    """Two epochs, of which the second begins in a process that resumes."""
    for num_epochs in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = {"allow_changes": {"horizon"}, "on_divergence": "raise", **options}
        with Checkpointer(directory, model=model, optimizer=optimizer, **given) as checkpointer:
            for batch in checkpointer.batches(loader(), epochs=num_epochs):
                model(batch.float().reshape(-1, 1)).sum().backward()
                optimizer.step()
                checkpointer.step()
            step = checkpointer.progress.step
    return step


@pytest.mark.remedy("keep it in an object with state_dict, or {}")
def test_what_is_lost_is_transient(
    tmp_path: Path, remedy: Remedy, capsys: pytest.CaptureFixture[str]
) -> None:
    strictly(tmp_path / "a", WithLock())
    text = capsys.readouterr().err
    assert remedy.in_text(text)
    (names,) = [ast.literal_eval(each) for each in set(re.findall(r"transient=(\{.*?\})", text))]
    strictly(tmp_path / "b", WithLock(), transient=names)
    assert "transient=" not in capsys.readouterr().err


@pytest.mark.remedy("Follow the reasons, or drop strict")
def test_the_reasons_of_a_strict_run_are_followed(tmp_path: Path, remedy: Remedy) -> None:
    def run(name: str, **options: Any) -> int:
        given = deque([torch.ones(2, 1)] * 3) if options.pop("lists", True) else loader()
        with Parts().make(tmp_path / name, **options) as checkpointer:
            for _ in checkpointer.batches(given, epochs=1):
                checkpointer.step()
            return checkpointer.progress.step

    text = remedy.of(run, "a", strict=True)
    assert text
    assert run("b") == 3
    assert run("c", strict=True, lists=False) == 2


def changed(
    directory: Path, change: Callable[[nn.Sequential], object], *, when: str, **options: Any
) -> None:
    """Two launches; the script changes the model before the loop, or later in the second one."""
    for is_resumed in (False, True):
        parts = Parts()
        model = nn.Sequential(parts.model)
        if when == "before":
            change(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parts.make(directory, model=model, optimizer=optimizer, **options) as checkpointer:
            checkpointer.resume()
            batches = checkpointer.batches(loader(8), epochs=1)
            if when == "after" and is_resumed:
                change(model)
            for _ in batches:
                checkpointer.step()
                if checkpointer.progress.step == 2:
                    break


def widen(model: nn.Sequential) -> None:
    model[0] = nn.Linear(1, 2)


@pytest.mark.remedy(
    "Build it before the loop begins, or pass exclude={{}} to leave it to the script"
)
def test_a_module_is_rebuilt_before_the_loop(tmp_path: Path, remedy: Remedy) -> None:
    changed(tmp_path / "b", widen, when="before")
    excluded = set[str]()
    for _ in ("optimizer", "model"):  # one error for each component
        text = remedy.of(changed, tmp_path / "a", widen, when="after", exclude=excluded)
        excluded |= written(text)["exclude"]
        shutil.rmtree(tmp_path / "a")
    changed(tmp_path / "a", widen, when="after", exclude=excluded)


@pytest.mark.remedy(
    "Call init_process_group before the sampler is made, or give num_replicas, rank"
)
def test_a_sampler_of_several_ranks_has_their_number(
    remedy: Remedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = remedy.of(DistributedResumableSampler, range(4))
    names = text.rpartition("give ")[2].split(", ")
    given: dict[str, Any] = dict(zip(names, (2, 0), strict=True))
    assert len([*DistributedResumableSampler(range(4), **given)]) == 2


@pytest.mark.remedy(
    "The resume was not exact. Find the cause with `resumekit prove`, or pass on_divergence='warn'"
)
def test_a_repeated_step_that_differs_is_warned_of(
    tmp_path: Path, remedy: Remedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The journal compares attempts of one program; a worker of pytest-xdist has no file.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)

    def run(loss: float, *, leave_after: int, **options: Any) -> int:
        with Parts().make(tmp_path, save_every=2, transient={"loss"}, **options) as checkpointer:
            for _ in checkpointer.batches(loader(12), epochs=1):
                checkpointer.step(loss=torch.tensor(loss))
                if checkpointer.progress.step == leave_after:
                    raise ZeroDivisionError
            return checkpointer.progress.step

    with pytest.raises(ZeroDivisionError):
        run(0.5, leave_after=4)
    text = remedy.of(run, 0.25, leave_after=9, on_divergence="raise")
    name, value = re.findall(r"(\w+)='(\w+)'", text)[0]
    assert run(0.25, leave_after=9, **{name: value}) == 6


@pytest.mark.remedy("Zip the loaders of the interrupted run; others may join at the next epoch")
def test_loaders_are_zipped_as_before(tmp_path: Path, remedy: Remedy) -> None:
    def run(*names: str, leave_after: int = 99) -> int:
        loaders = {name: loader(8) for name in names}
        with Parts().make(tmp_path, transient={"names", "leave_after"}) as checkpointer:
            for _ in checkpointer.batches(loaders, epochs=2):
                checkpointer.step()
                if checkpointer.progress.step == leave_after:
                    raise ZeroDivisionError
            return checkpointer.progress.step

    with pytest.raises(ZeroDivisionError):
        run("a", "b", leave_after=3)
    remedy.of(run, "a", "b", "c")
    assert run("a", "b") == 8


class InHalves:
    """A batch sampler of the user's: even samples, then odd ones."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = [*range(0, 8, 2), *range(1, 8, 2)]
        for begin in range(0, len(order), self.batch_size):
            yield order[begin : begin + self.batch_size]

    def __len__(self) -> int:
        return 8 // self.batch_size


@pytest.mark.remedy("Restore the former settings until the epoch is over")
def test_a_batch_size_changes_between_two_epochs(tmp_path: Path, remedy: Remedy) -> None:
    allowed: Any = {"allow_changes": {"batch_size"}, "loop_variables": "off"}

    def run(batch_size: int, leave_after: int = 99) -> list[list[int]]:
        seen: list[list[int]] = []
        given: Any = DataLoader(range(8), batch_sampler=InHalves(batch_size))  # type: ignore[arg-type]
        with Parts().make(tmp_path, **allowed) as checkpointer:
            for batch in checkpointer.batches(given, epochs=2):
                if checkpointer.progress.step == leave_after:
                    break
                seen.append(batch.tolist())
                checkpointer.step()
        return seen

    assert run(2, leave_after=3) == [[0, 2], [4, 6], [1, 3]]
    remedy.of(run, 4)
    assert run(2, leave_after=4) == [[5, 7]]
    assert run(4) == [[0, 2, 4, 6], [1, 3, 5, 7]]


class Turned(Sampler[int]):
    """An order of the user's that can begin anywhere; its name does not say where it is turned."""

    def __init__(self, turn: int) -> None:
        self.turn = turn

    def iterate_from(self, position: int) -> Iterator[int]:
        return ((each + self.turn) % 16 for each in range(position, 16))

    def order_name(self) -> dict[str, Any]:
        return {"kind": "turned", "length": 16}

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def __len__(self) -> int:
        return 16


@pytest.mark.remedy("Check the sampler, or pass on_divergence='warn'")
def test_a_sampler_gives_the_same_order_again(
    tmp_path: Path, remedy: Remedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The journal compares attempts of one program; a worker of pytest-xdist has no file.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    interrupted, changed = tmp_path / "interrupted", tmp_path / "changed"

    def run(
        directory: Path, turn: int, batch_size: int = 4, leave_after: int = 99, **options: Any
    ) -> list[int]:
        given = {"allow_changes": {"batch_size"}, "loop_variables": "off", "save_every": 2}
        seen: list[int] = []
        with Parts().make(directory, **{**given, **options}) as checkpointer:
            turned: Any = loader(16, batch_size=batch_size, sampler=Turned(turn))
            for batch in checkpointer.batches(turned, epochs=1):
                seen += batch.tolist()
                checkpointer.step()
                if checkpointer.progress.step == leave_after:
                    raise ZeroDivisionError
        return seen

    with pytest.raises(ZeroDivisionError):
        run(interrupted, 0, batch_size=2, leave_after=5)
    shutil.copytree(interrupted, changed)
    raises: Any = {"save_every": 1, "on_divergence": "raise"}
    shutil.rmtree(interrupted / "step-00000004")
    shutil.rmtree(changed / "step-00000004")
    copy = Path(shutil.copytree(changed, tmp_path / "warned"))
    text = remedy.of(run, changed, 8, **raises)
    assert run(interrupted, 0, **raises) == [*range(4, 16)]
    name, value = re.findall(r"(\w+)='(\w+)'", text)[0]
    assert run(copy, 8, save_every=1, **{name: value}) == [*range(12, 16), *range(8)]
