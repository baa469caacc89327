"""Copies in the memory of the node: when they are made, who can read them, and when they go."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from resumekit import Place
from resumekit.adapters.torch import Checkpointer
from resumekit.cli.views import list_directory
from resumekit.errors import ConfigurationError
from resumekit.places import memory
from resumekit.places.copies import open_client
from resumekit.run.saving import memory as saving
from resumekit.storage.store import Store

EACH_STEP = Place("memory", save_every=1)


class CrashError(Exception):
    """An error of the training code."""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of the shared memory of this machine."""
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(memory, "ROOT", root)
    monkeypatch.setattr(saving, "ROOT", root)
    return root


def train(
    directory: Path,
    *,
    at_step: Callable[[int], object] = lambda step: None,
    hidden: int = 4,
    **options: Any,
) -> torch.Tensor:
    """The weights at the end of a run that saves every five steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, hidden), torch.nn.Dropout(0.5), torch.nn.Linear(hidden, 4)
    )
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    options = {"save_every": 5, "places": [EACH_STEP], **options}
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:
        for (x,) in ckpt.batches(loader, steps=12):
            at_step(ckpt.progress.step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            ckpt.step()
    return model.state_dict()["0.weight"].clone()


def crash_at(step: int) -> Callable[[int], None]:
    def check(now: int) -> None:
        if now == step:
            raise CrashError

    return check


def copies_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("resumekit-*/step-*"))


# ---------------------------------------------------------------- used


def test_after_an_error_the_run_continues_from_the_step_before_it(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = train(tmp_path / "reference", places=())
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(8))
    assert copies_in(root) == ["step-00000008"]
    capsys.readouterr()
    assert torch.equal(train(tmp_path / "a"), reference)
    text = capsys.readouterr().err
    assert "step-00000008 was fetched from memory" in text
    assert "resuming at step 8" in text
    assert not [*root.iterdir()]  # the run has ended


def test_a_lost_machine_falls_back_to_the_disk(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = train(tmp_path / "reference", places=())
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(8))
    shutil.rmtree(next(root.iterdir()))
    capsys.readouterr()
    assert torch.equal(train(tmp_path / "a"), reference)
    text = capsys.readouterr().err
    assert "resuming at step 5" in text


def test_a_damaged_copy_is_passed_over(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = train(tmp_path / "reference", places=())
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(8))
    (file,) = root.glob("resumekit-*/step-*/model/*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    capsys.readouterr()
    assert torch.equal(train(tmp_path / "a"), reference)
    text = capsys.readouterr().err
    assert "passed over step-00000008" in text
    assert "resuming at step 5" in text


def test_a_step_that_was_just_saved_is_not_copied(tmp_path: Path, root: Path) -> None:
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(5))
    assert copies_in(root) == []  # that of step 4 was older than the checkpoint
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(6))
    assert copies_in(root) == ["step-00000006"]


def test_after_a_signal_the_disk_has_the_step_and_memory_is_given_back(
    tmp_path: Path, root: Path
) -> None:
    def leave(step: int) -> None:
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        train(tmp_path / "a", at_step=leave)
    assert not [*root.iterdir()]
    assert Store(tmp_path / "a").step_names()[0].step == 9


def test_a_launch_without_the_place_drops_copies_that_it_would_make_old(
    tmp_path: Path, root: Path
) -> None:
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(8))
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(7), places=())
    assert not [*root.iterdir()]


def test_by_default_copies_take_a_twentieth_of_the_time(tmp_path: Path, root: Path) -> None:
    found: list[list[str]] = []

    def look(step: int) -> None:
        found.append(copies_in(root))
        crash_at(10)(step)

    with pytest.raises(CrashError):
        train(tmp_path / "a", places=["memory"], at_step=look)
    made = {name for names in found for name in names}
    # The first copy is due at once; its cost, times twenty, is more than nine of these steps.
    assert made == {"step-00000001"}


def test_the_list_shows_the_copies_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(8))
    capsys.readouterr()
    list_directory(tmp_path / "a", as_json=True, places=["memory"])
    assert '"memory"' in capsys.readouterr().out


# ---------------------------------------------------------------- never the cause of an end


@pytest.mark.parametrize("where", ["memory", "shared memory"])
def test_without_room_for_two_copies_there_is_none_and_one_line_says_so(
    where: str,
    tmp_path: Path,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = train(tmp_path / "reference", places=(), hidden=1000)
    size = sum(path.stat().st_size for path in (tmp_path / "reference").glob("step-*12/*/*"))
    if where == "memory":
        monkeypatch.setattr(saving, "available_memory", lambda: 2 * size)  # a tenth stays free
    else:
        free = saving.LocalFileSystem.free
        room = free(saving.LocalFileSystem(), root)

        def small(self: Any, path: Path) -> Any:
            return type(room)(2 * size - 1, None) if path == root else free(self, path)

        monkeypatch.setattr(saving.LocalFileSystem, "free", small)
    assert torch.equal(train(tmp_path / "a", hidden=1000), reference)
    text = capsys.readouterr().err
    assert text.count("no copies in memory, training continues") == 1
    assert not [*root.iterdir()]


def test_a_full_memory_ends_the_copies_and_not_the_training(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = train(tmp_path / "reference", places=())
    monkeypatch.setattr(saving.SharedMemoryFileSystem, "write", _refuse_after(40))
    assert torch.equal(train(tmp_path / "a"), reference)
    text = capsys.readouterr().err
    assert text.count("no copies in memory, training continues") == 1
    assert "No space left on device" in text
    assert not [*root.iterdir()]


def _refuse_after(number: int) -> Callable[..., None]:
    write, calls = saving.SharedMemoryFileSystem.write, iter(range(number))

    def refusing(self: Any, *arguments: Any) -> None:
        if next(calls, None) is None:
            raise OSError(28, os.strerror(28))
        write(self, *arguments)

    return refusing


# ---------------------------------------------------------------- of this user, and of this run


def test_nobody_else_can_read_or_forge_a_copy(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = train(tmp_path / "reference", places=())
    with pytest.raises(CrashError):
        train(tmp_path / "a", at_step=crash_at(8))
    (path,) = root.iterdir()
    assert path.stat().st_mode & 0o777 == 0o700
    run_id = Store(tmp_path / "a").recorded_run_id()
    assert run_id is not None
    assert path.name == f"resumekit-{os.getuid()}-{run_id}"
    assert memory.find_memory(run_id) == path
    path.chmod(0o770)
    assert memory.find_memory(run_id) is None
    moved = path.rename(root / "elsewhere")
    moved.chmod(0o700)
    path.symlink_to(moved)
    assert memory.find_memory(run_id) is None
    capsys.readouterr()
    assert torch.equal(train(tmp_path / "a"), reference)
    text = capsys.readouterr().err
    assert "resuming at step 5" in text
    assert "no copies in memory, training continues" in text  # the name is taken
    assert (moved / "owner.json").exists()


def test_copies_of_runs_that_are_gone_are_removed_and_of_others_not(
    tmp_path: Path, root: Path
) -> None:
    for name in ("gone", "there"):
        with pytest.raises(CrashError):
            train(tmp_path / name, at_step=crash_at(8))
    left = Store(tmp_path / "there").recorded_run_id()
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(CrashError):
        train(tmp_path / "new", at_step=crash_at(3))
    run_ids = {path.name.rpartition("-")[2] for path in root.iterdir()}
    assert run_ids == {left, Store(tmp_path / "new").recorded_run_id()}


def _hold(directory: Path, root: Path, ready: Any, end: Any) -> None:
    memory.ROOT = saving.ROOT = root

    def wait(step: int) -> None:
        if step == 3:
            ready.set()
            end.wait(60)
            raise CrashError

    with pytest.raises(CrashError):
        train(directory, at_step=wait)


@pytest.fixture
def live_run(tmp_path: Path, root: Path) -> Iterator[Path]:
    """The directory of a run that another process trains."""
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "live", root, ready, end))
    process.start()
    assert ready.wait(60)
    yield tmp_path / "live"
    end.set()
    process.join(60)


def test_the_copies_of_a_live_run_stay_though_its_directory_is_gone(
    live_run: Path, tmp_path: Path, root: Path
) -> None:
    shutil.rmtree(live_run)
    train(tmp_path / "new")
    assert copies_in(root) == ["step-00000003"]


# ---------------------------------------------------------------- what the user writes


@pytest.mark.parametrize("given", [{"keep_latest": 2}, {"storage_options": {"a": "b"}}])
def test_what_has_no_meaning_in_memory_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="save_every only"):
        Place("memory", **given)


def test_memory_is_no_place_for_copies_by_hand() -> None:
    with pytest.raises(ConfigurationError, match="a run alone copies to memory"):
        open_client(Place("memory"))
