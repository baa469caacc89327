"""``resumekit fork``: what a new run takes, what it records, and what is refused."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.cli import main
from resumekit.errors import CorruptCheckpointError, ForeignCheckpointError, StateMismatchError
from resumekit.fork import fork_checkpoint
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import (
    ForkOrigin,
    Manifest,
    StepReader,
    forked_details,
    lineage_of,
)
from resumekit.storage.store import Store

NUM_STEPS = 12
Losses = dict[int, str]


def train(
    directory: Path, *, seed: int = 0, stop_at: int | None = None, **options: Any
) -> tuple[Losses, nn.Module]:
    """Trains with dropout, momentum, a schedule and a shuffled loader; the loss of each step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 4, generator=generator)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    losses: Losses = {}
    with Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        save_every=2,
        keep_latest=None,
        transient={"losses"},  # the judge's, of each launch
        **options,
    ) as checkpointer:
        loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
        for (batch,) in checkpointer.batches(loader, epochs=2):
            loss = (model(batch) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            checkpointer.step()
            losses[checkpointer.progress.step] = loss.item().hex()
            if checkpointer.progress.step == stop_at:
                break
    return losses, model


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def reader(directory: Path, step: int) -> StepReader:
    return Store(directory).open_step(StepName(step))


def newest(directory: Path) -> Manifest:
    store = Store(directory)
    return store.open_step(store.step_names()[0]).manifest


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Losses]:
    directory = tmp_path_factory.mktemp("runs") / "original"
    return directory, train(directory)[0]


def content(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_a_fork_continues_as_the_original_did(
    original: tuple[Path, Losses], tmp_path: Path
) -> None:
    directory, expected = original
    before = content(directory)
    for step in (4, 8):
        assert command("fork", directory / f"step-{step:08d}", tmp_path / f"{step}") == 0
        losses, _ = train(tmp_path / f"{step}", seed=99)
        assert losses == {each: expected[each] for each in range(step + 1, NUM_STEPS + 1)}
    assert content(directory) == before


def test_a_fork_of_another_step_differs(original: tuple[Path, Losses], tmp_path: Path) -> None:
    directory, expected = original
    fork_checkpoint(reader(directory, 4), tmp_path / "new")
    losses, _ = train(tmp_path / "new")
    after_step_6 = [loss for step, loss in expected.items() if step > 6]
    assert list(losses.values())[: len(after_step_6)] != after_step_6


def test_the_lineage_is_in_every_manifest_of_the_new_run(
    original: tuple[Path, Losses], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = original
    fork_checkpoint(reader(directory, 4), tmp_path / "b")
    train(tmp_path / "b", stop_at=6)
    fork_checkpoint(reader(tmp_path / "b", 6), tmp_path / "c")
    train(tmp_path / "c", stop_at=8)
    first, second = lineage_of(newest(tmp_path / "c"))
    assert newest(tmp_path / "c").step == 8
    assert (first.run_id, first.checkpoint) == (newest(directory).run_id, "step-00000004")
    assert (second.run_id, second.checkpoint) == (newest(tmp_path / "b").run_id, "step-00000006")
    assert newest(tmp_path / "c").run_id not in (first.run_id, second.run_id)
    assert not first.only_weights

    assert command("inspect", tmp_path / "c") == 0
    assert "forked from  step-00000004 of run" in capsys.readouterr().out
    assert command("list", tmp_path / "c") == 0
    assert capsys.readouterr().out.count("\nforked from step-0000000") == 2
    assert command("list", "--json", tmp_path / "c") == 0
    (row, *_) = json.loads(capsys.readouterr().out)
    assert [each["checkpoint"] for each in row["lineage"]] == ["step-00000004", "step-00000006"]


def test_the_checkpoint_belongs_to_the_new_run(
    original: tuple[Path, Losses], tmp_path: Path
) -> None:
    directory, _ = original
    fork_checkpoint(reader(directory, 4), tmp_path / "b")
    store = Store(tmp_path / "b")
    store.acquire()
    store.open_step(StepName(4)).verify()
    store.release()
    os.rename(directory / "step-00000002", tmp_path / "b" / "step-00000002")
    try:
        store.acquire()
        with pytest.raises(ForeignCheckpointError):  # what a copy by hand gives
            store.open_step(StepName(2))
        store.release()
    finally:
        os.rename(tmp_path / "b" / "step-00000002", directory / "step-00000002")


@pytest.mark.parametrize("cause", [None, errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_files_are_links_or_else_copies(
    original: tuple[Path, Losses],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: int | None,
) -> None:
    directory, _ = original

    def refuse(*arguments: Any, **options: Any) -> None:
        assert cause is not None
        raise OSError(cause, os.strerror(cause))

    if cause is not None:
        monkeypatch.setattr(os, "link", refuse)
    made = fork_checkpoint(reader(directory, 6), tmp_path / "b")
    source = directory / "step-00000006"
    for path in content(source):
        if path != "manifest.json":
            is_link = (made / path).stat().st_ino == (source / path).stat().st_ino
            assert is_link is (cause is None)
            assert (made / path).read_bytes() == (source / path).read_bytes()
    reader(tmp_path / "b", 6).verify()


def test_a_file_that_changes_while_it_is_copied_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "a", stop_at=2)
    source = reader(tmp_path / "a", 2)

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # it has been verified
        raise OSError(errno.EXDEV, "another device")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(CorruptCheckpointError, match="its digest is"):
        fork_checkpoint(source, tmp_path / "b")
    assert Store(tmp_path / "b").step_names() == []


def test_a_fork_does_not_continue_the_trackers(original: tuple[Path, Losses]) -> None:
    details = {"trackers": [{"kind": "csv", "run": "logs"}], "saves": "every 2 steps"}
    manifest = replace(newest(original[0]), details=details)
    origin = ForkOrigin("a", "step-00000002", "0", "now", only_weights=False)
    assert forked_details(manifest, origin).keys() == {"saves", "lineage"}


@pytest.mark.parametrize("rows", [None, 1, [1], [{}], [{"run_id": 1}], {"run_id": "a"}])
def test_a_lineage_of_another_form_is_none(original: tuple[Path, Losses], rows: Any) -> None:
    manifest = replace(newest(original[0]), details={"lineage": rows})
    assert lineage_of(manifest) == ()


# Only the weights


def test_weights_alone_start_a_new_run(
    original: tuple[Path, Losses], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = original
    _, trained = train(directory)  # it has finished: this only loads it
    assert command("fork", directory, tmp_path / "b", "--weights-only") == 0
    losses, _ = train(tmp_path / "b", seed=5, stop_at=4, strict=True)
    assert list(losses) == [1, 2, 3, 4]
    assert losses == fine_tuned(trained, seed=5, num_steps=4)
    (origin,) = lineage_of(newest(tmp_path / "b"))
    assert (origin.only_weights, origin.checkpoint) == (True, "step-00000012")
    resumed, _ = train(tmp_path / "b", seed=6, stop_at=6)
    assert list(resumed) == [5, 6]
    assert {**losses, **resumed} == fine_tuned(trained, seed=5, num_steps=6)


def fine_tuned(trained: nn.Module, *, seed: int, num_steps: int) -> Losses:
    """The same loop from these weights, written without the library."""
    torch.manual_seed(seed)
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    model.load_state_dict(trained.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    losses: Losses = {}
    for _ in range(2):
        for (batch,) in DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True):
            loss = (model(batch) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses[len(losses) + 1] = loss.item().hex()
            if len(losses) == num_steps:
                return losses
    return losses


def test_a_run_from_weights_alone_differs_from_one_without(
    original: tuple[Path, Losses], tmp_path: Path
) -> None:
    directory, _ = original
    fork_checkpoint(reader(directory, 12), tmp_path / "b", only_weights=True)
    with_weights, _ = train(tmp_path / "b", seed=5, stop_at=2)
    assert with_weights != train(tmp_path / "c", seed=5, stop_at=2)[0]


def test_the_report_says_what_the_run_started_with(
    original: tuple[Path, Losses], tmp_path: Path
) -> None:
    directory, _ = original
    made = fork_checkpoint(reader(directory, 12), tmp_path / "b", only_weights=True)
    assert {path.split("/")[0] for path in content(made)} == {"manifest.json", "model"}
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # another one than in the source
    with Checkpointer(
        tmp_path / "b", model=model, optimizer=optimizer, strict=True
    ) as checkpointer:
        report = checkpointer.resume()
        assert not report.resumed
        assert str(report).startswith("starting with the weights of step-00000012 of run ")
        assert str(report).endswith("; all else is fresh")
        assert checkpointer.progress.step == 0


def test_weights_of_another_model_are_refused(
    original: tuple[Path, Losses], tmp_path: Path
) -> None:
    directory, _ = original
    fork_checkpoint(reader(directory, 12), tmp_path / "b", only_weights=True)
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters())
    with (
        pytest.raises(StateMismatchError),
        Checkpointer(tmp_path / "b", model=model, optimizer=optimizer) as checkpointer,
    ):
        checkpointer.resume()


# What is refused


@pytest.mark.parametrize("location", ["", "step-00000004", "new", "step-00000004/new"])
def test_a_location_inside_the_source_is_refused(
    original: tuple[Path, Losses], capsys: pytest.CaptureFixture[str], location: str
) -> None:
    directory, _ = original
    before = content(directory)
    assert command("fork", directory / "step-00000004", directory / location) == 2
    assert "inside the run" in capsys.readouterr().err
    assert content(directory) == before


def test_a_directory_in_use_is_refused(
    original: tuple[Path, Losses], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = original
    (tmp_path / "b").mkdir()
    assert command("fork", directory, tmp_path / "b") == 0
    before = content(tmp_path / "b")
    assert command("fork", directory, tmp_path / "b") == 2
    assert "it is not empty, expected a new directory" in capsys.readouterr().err
    (tmp_path / "c").write_text("a file")
    assert command("fork", directory, tmp_path / "c") == 2
    assert content(tmp_path / "b") == before


def test_a_damaged_source_is_refused_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", stop_at=2)
    (path,) = (tmp_path / "a" / "step-00000002" / "optimizer").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert command("fork", tmp_path / "a", tmp_path / "b") == 2
    assert "rank-00000.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    # Its weights are whole.
    assert command("fork", tmp_path / "a", tmp_path / "b", "--weights-only") == 0
