"""What other programs have saved: recognised, read without running it, and taken over once."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.cli import main
from resumekit.data.position import DataPosition
from resumekit.errors import (
    ConfigurationError,
    DataPositionError,
    DirectoryError,
    StateMismatchError,
)
from resumekit.imports.content import StartPosition, _position, read_content
from resumekit.imports.importing import _counted, import_checkpoint
from resumekit.imports.reading import read_attributes
from resumekit.imports.recognition import WrittenBy, recognise
from resumekit.storage.imported import import_of
from resumekit.storage.store import Store

NUM_BATCHES = 6


class Net(nn.Module):
    """Two layers, the second of which shares the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def made(*, groups: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    parameters = list(net.parameters())
    split = [parameters] if groups == 1 else [parameters[:1], parameters[1:]]
    return net, torch.optim.AdamW([{"params": each} for each in split], lr=0.1)


def stock(path: Path, **values: Any) -> Path:
    """A file of a loop without resumekit, after three steps."""
    net, optimizer = made()
    for number in range(3):
        net.second(net.first(torch.full((2, 4), float(number)))).sum().backward()
        optimizer.step()
    torch.save({"net": net.state_dict(), "optim": optimizer.state_dict(), **values}, path)
    return path


def train(
    run: Path,
    num_steps: int | None = None,
    *,
    groups: int = 1,
    scheduled: bool = False,
    **options: Any,
) -> Net:
    """Two epochs under resumekit."""
    net, optimizer = made(groups=groups)
    if scheduled:
        options["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(TensorDataset(torch.ones(2 * NUM_BATCHES, 4)), batch_size=2)
    given: dict[str, Any] = {"model": net, "optimizer": optimizer, "save_every": 2}
    with Checkpointer(run, **given, **options) as checkpointer:
        for (inputs,) in checkpointer.batches(loader, epochs=2):
            net.second(net.first(inputs)).sum().backward()
            optimizer.step()
            checkpointer.step()
            if checkpointer.progress.step == num_steps:
                break
    return net


def command(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


# ---------------------------------------------------------------- recognition


def foreign(directory: Path, kind: WrittenBy) -> Path:
    """The smallest thing that is recognised as this."""
    folder = directory / kind.name
    folder.mkdir()
    names = {
        WrittenBy.TRAINER: ("trainer_state.json",),
        WrittenBy.ACCELERATE: ("random_states_0.pkl", "model.safetensors"),
        WrittenBy.DCP: (".metadata", "__0_0.distcp"),
        WrittenBy.DEEPSPEED: ("mp_rank_00_model_states.pt",),
    }
    if kind in names:
        for name in names[kind]:
            (folder / name).write_text('{"global_step": 7}')
        return folder
    version = {"pytorch-lightning_version": "2.6.6"} if kind is WrittenBy.LIGHTNING else {}
    torch.save({"epoch": 0, **version, "state_dict": {}}, folder / "any.name")
    return folder / "any.name"


@pytest.mark.parametrize("kind", WrittenBy)
def test_each_kind_is_recognised_by_its_content(tmp_path: Path, kind: WrittenBy) -> None:
    found = recognise(foreign(tmp_path, kind))
    assert found is not None
    assert found.kind is kind
    assert found.step == (7 if kind is WrittenBy.TRAINER else None)


def test_a_folder_of_tags_of_deepspeed_is_its_latest_one(tmp_path: Path) -> None:
    foreign(tmp_path, WrittenBy.DEEPSPEED).rename(tmp_path / "global_step7")
    (tmp_path / "latest").write_text("global_step7")
    found = recognise(tmp_path)
    assert found is not None
    assert found.path == tmp_path / "global_step7"


def test_a_run_its_steps_and_other_files_are_none(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    (tmp_path / "run" / "trainer_state.json").write_text("{}")  # of Trainer.save_state()
    (tmp_path / "text").write_text("PK")
    (tmp_path / "empty").mkdir()
    others = ("run", "run/step-00000002", "text", "empty", "missing")
    assert not any(recognise(tmp_path / each) for each in others)


@pytest.mark.parametrize("name", ["list", "inspect", "verify", "history", "report", "prune"])
def test_a_command_names_what_a_directory_is_and_how_to_import_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = foreign(tmp_path, WrittenBy.TRAINER)
    assert command(name, path, *(["--keep-latest", "1"] if name == "prune" else [])) == 2
    error = capsys.readouterr().err
    assert f"{path}: a checkpoint of the Trainer at step 7, expected the run directory" in error
    assert f"Make it the start of a run: resumekit import {path} RUN." in error


def test_the_import_that_an_error_names_can_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stock(tmp_path / "a b.pt")
    assert command("list", path) == 2
    words = re.findall(r"resumekit (import .+) RUN", capsys.readouterr().err)[0]
    assert command(*shlex.split(words), tmp_path / "run") == 0
    assert command("verify", tmp_path / "run") == 0
    assert command("list", tmp_path / "run") == 0


@pytest.mark.parametrize("kind", [WrittenBy.TRAINER, WrittenBy.DEEPSPEED, WrittenBy.DCP])
def test_a_run_does_not_start_in_a_checkpoint_of_another_program(
    tmp_path: Path, kind: WrittenBy
) -> None:
    path = foreign(tmp_path, kind)
    before = sorted(path.iterdir())
    remedy = "import it first: resumekit import"
    with pytest.raises(DirectoryError, match=f"{kind.value}.*, not a run.*{remedy}"):
        train(path)
    assert sorted(path.iterdir()) == before


# ---------------------------------------------------------------- nothing of it runs


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_an_object_in_a_file_is_refused_and_not_made(tmp_path: Path) -> None:
    proof, file = tmp_path / "proof", tmp_path / "any.pt"
    torch.save({"model": {"w": torch.ones(1)}, "more": Hostile(proof)}, file)
    with pytest.raises(ConfigurationError, match="only an unrestricted pickle can make") as caught:
        import_checkpoint(file, tmp_path / "run")
    assert caught.value.remedy is not None
    assert not proof.exists()
    assert not (tmp_path / "run").exists()
    torch.load(file, weights_only=False)
    assert proof.exists()  # the control: another reader would have made it
    saved = {"model": {"w": torch.ones(1)}}  # as the remedy says
    torch.save(saved, file)
    import_checkpoint(file, tmp_path / "run")


def test_what_the_user_trusts_is_made_and_only_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run, proof = tmp_path / "whole.pt", tmp_path / "run", tmp_path / "proof"
    net, optimizer = made()
    net.first(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"net": net, "optim": optimizer, "more": Hostile(proof)}, file)
    assert command("import", file, run) == 2
    error = capsys.readouterr().err
    assert f"{Net.__module__}.Net, torch.nn.modules.linear.Linear" in error
    assert "run what it names: --trust, trust_import=True" in error
    assert not proof.exists()
    assert not run.exists()
    found, live = made()
    nn.init.zeros_(found.first.weight)
    options: Any = {"import_from": file, "trust_import": True}
    with Checkpointer(run, model=found, optimizer=live, **options) as checkpointer:
        assert checkpointer.resume().step == 1
    assert proof.exists()
    assert all(map(torch.equal, found.parameters(), net.parameters()))
    moments = (each.state_dict()["state"][0]["exp_avg"] for each in (live, optimizer))
    assert torch.equal(*moments)
    assert command("import", "--trust", run / "step-00000001", tmp_path / "other") == 2
    assert "not a checkpoint that can be imported" in capsys.readouterr().err
    monkeypatch.delattr(sys.modules[Net.__module__], "Net")  # as that of a script elsewhere
    assert command("import", "--trust", file, tmp_path / "other") == 2
    error = capsys.readouterr().err
    assert "an object whose class is not here" in error
    assert "Pass import_from=PATH and trust_import=True in the script that has them" in error


def test_the_arguments_of_a_trainer_are_read_without_their_classes(tmp_path: Path) -> None:
    proof, file = tmp_path / "proof", tmp_path / "training_args.bin"
    module = nn.Module()  # any object with attributes
    vars(module).update(gradient_accumulation_steps=4, device=torch.device("cpu"))
    vars(module).update(more=Hostile(proof))
    torch.save(module, file)
    found = read_attributes(file)
    assert (found["gradient_accumulation_steps"], found["training"]) == (4, True)
    assert "device" not in found
    assert not proof.exists()
    file.write_bytes(file.read_bytes()[:100])
    assert read_attributes(file) == {}


def test_a_damaged_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    whole = stock(tmp_path / "a.pt").read_bytes()
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 3, "epoch": 0.5}')
    (folder / "model.safetensors").write_bytes(whole[:50])
    with pytest.raises(ConfigurationError, match="it cannot be read"):
        read_content(folder)
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    (folder / "optimizer.pt").write_bytes(whole[:-200])
    with pytest.raises(ConfigurationError, match="it cannot be read"):
        read_content(folder)
    (folder / "optimizer.pt").unlink()
    (folder / "trainer_state.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="not one as a checkpoint of the Trainer"):
        read_content(folder)


# ---------------------------------------------------------------- the position


@pytest.mark.parametrize("length", [1, 7, 10, 12])
@pytest.mark.parametrize("accumulation", [1, 2, 4, 5])
def test_the_position_of_a_trainer_follows_from_its_counts(length: int, accumulation: int) -> None:
    per_epoch = -(-length // accumulation)
    for step in range(1, 40 * per_epoch):
        # transformers 5.23 trainer.py _run_epoch and _init_training_state
        epoch, in_epoch = divmod(step - 1, per_epoch)
        used = min((in_epoch + 1) * accumulation, length)
        found = _position(step, epoch + used / length, accumulation)
        done, batch = divmod(step, per_epoch)
        assert found[:2] == (done, batch * accumulation)


def test_a_position_is_what_the_source_says_or_what_is_given() -> None:
    assert StartPosition(5).with_asked(StartPosition(epoch=2)) == StartPosition(5, 2)
    assert StartPosition(5).with_asked(StartPosition(5)) == StartPosition(5)
    with pytest.raises(ConfigurationError, match="--step 6: the checkpoint is at step 5"):
        StartPosition(5).with_asked(StartPosition(6))


def test_a_file_that_says_an_epoch_needs_an_option_for_it(tmp_path: Path) -> None:
    file = stock(tmp_path / "a.pt", epoch=1)
    with pytest.raises(ConfigurationError) as caught:
        import_checkpoint(file, tmp_path / "run")
    remedy = str(caught.value.remedy)
    assert remedy == "Run `resumekit import` with --epoch 1 or --epoch 2"
    assert command("import", file, tmp_path / "run", *remedy.split()[-2:]) == 0
    manifest = Store(tmp_path / "run").open_newest()[0].manifest
    assert (manifest.step, manifest.progress["epoch"]) == (3, 2)


# ---------------------------------------------------------------- the run


def test_a_run_begins_from_a_file_and_the_same_launch_continues_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = stock(tmp_path / "a.pt"), tmp_path / "run"
    whole = train(tmp_path / "whole", import_from=file)
    train(run, 7, import_from=file)
    first = capsys.readouterr().err
    line = "imported from torch.save file a.pt: no state of LR scheduler, RNG state, position in"
    assert first.count(line) == 2  # of the two runs
    file.unlink()
    found = train(run, import_from=file)
    assert "imported from" not in capsys.readouterr().err
    assert all(map(torch.equal, found.parameters(), whole.parameters()))
    newest = Store(run).open_newest()[0].manifest
    origin = import_of(newest)
    assert origin is not None
    assert (origin.source, origin.as_given) == ("torch.save file a.pt", ())
    assert any(line in change for each in newest.details["changes"] for change in each["changes"])


def test_every_command_reads_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert command("import", stock(tmp_path / "a.pt"), run) == 0
    assert "the run continues with epoch 0, batch 0\n" in capsys.readouterr().out
    step = run / "step-00000003"
    assert command("inspect", step) == 0
    assert "torch.save file a.pt" in capsys.readouterr().out
    assert command("diff", step, step) == 0
    assert command("export", step, tmp_path / "weights.safetensors") == 0
    assert command("report", run, "--output", out) == 0
    assert command("fork", step, tmp_path / "forked") == 0
    whole = train(tmp_path / "forked")
    assert all(map(torch.equal, train(run).parameters(), whole.parameters()))


def counted(batch: int, **more: Any) -> dict[str, Any]:
    """A position in the one loader, as it is written for a program that counts batches of two."""
    found = _counted(1, batch, [], 2)
    return {"train": {**found, **more}}


def indices_after(position: DataPosition, loader: Any) -> list[int]:
    source = position.open(loader, "train")
    source.begin(1)
    left = iter(source.next_batch, None)
    found: list[int] = []
    with suppress(StopIteration):
        for batch in left:
            found += batch.tolist()
    return found


def loader_of(batch_size: int) -> Any:
    data: Any = torch.arange(12)
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
    return DataLoader(data, batch_size, sampler=sampler)


@pytest.mark.parametrize(("batch_size", "allowed"), [(2, ()), (3, ("batch_size",))])
def test_a_counted_position_continues_in_the_order_of_its_epoch(
    batch_size: int, allowed: tuple[str, ...]
) -> None:
    whole = loader_of(2)
    whole.sampler.set_epoch(1)
    expected = [int(each) for batch in whole for each in batch]
    position = DataPosition(allowed_changes=allowed)
    position.load_state_dict(counted(3))
    assert indices_after(position, loader_of(batch_size)) == expected[6:]
    iterable: Any = [torch.tensor([number]) for number in range(5)]
    position = DataPosition()
    position.load_state_dict(counted(3))
    assert indices_after(position, iterable) == [3, 4]  # what was used is replayed


@pytest.mark.parametrize(
    ("batch_size", "more", "text"),
    [(3, {}, "batch_size"), (2, {"ranks": [2, 1]}, "expected 2 until it is over")],
)
def test_a_counted_position_is_of_one_geometry(
    batch_size: int, more: dict[str, Any], text: str
) -> None:
    position = DataPosition()
    position.load_state_dict(counted(3, **more))
    with pytest.raises(DataPositionError, match=text):
        position.open(loader_of(batch_size), "train")


def test_moments_and_weights_are_those_of_the_file(tmp_path: Path) -> None:
    file, run = stock(tmp_path / "a.pt", step=3), tmp_path / "run"
    saved = torch.load(file, weights_only=True)
    del saved["net"]["second.weight"]  # as a file of safetensors has it
    torch.save(saved, file)
    net, optimizer = made()
    nn.init.zeros_(net.first.weight)
    checkpointer = Checkpointer(run, model=net, optimizer=optimizer, import_from=file)
    report = checkpointer.resume()
    checkpointer.close()
    assert (report.step, report.resumed) == (3, True)
    assert torch.equal(net.second.weight, saved["net"]["first.weight"])
    moments = [optimizer.state_dict()["state"], saved["optim"]["state"]]
    for index, values in moments[1].items():
        assert all(torch.equal(moments[0][index][name], values[name]) for name in values)


def test_a_directory_with_checkpoints_is_not_imported_into(tmp_path: Path) -> None:
    file, run = stock(tmp_path / "a.pt"), tmp_path / "run"
    train(run, 2)
    for begin in (lambda: import_checkpoint(file, run), lambda: train(run, import_from=file)):
        with pytest.raises(ConfigurationError, match="holds step-00000002") as caught:
            begin()
        remedy = "Choose another run directory, or leave the import out to continue that run"
        assert caught.value.remedy == remedy
    assert [str(name) for name in Store(run).step_names()] == ["step-00000002"]
    train(run)
    other = tmp_path / "other"
    train(other, 4, import_from=file)
    with pytest.raises(ConfigurationError, match=r"which began from torch\.save file a\.pt"):
        train(other, import_from=stock(tmp_path / "b.pt"))
    train(other, import_from=file)


def test_an_optimizer_with_other_groups_is_refused_before_anything_changes(tmp_path: Path) -> None:
    file = stock(tmp_path / "a.pt")
    with pytest.raises(StateMismatchError, match="groups of 1, 2 parameters"):
        train(tmp_path / "run", import_from=file, groups=2)


def test_only_the_step_of_an_import_may_lack_components(tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = stock(tmp_path / "a.pt")
    train(run, 4, scheduled=True, import_from=file)
    train(tmp_path / "other", 5, import_from=file)  # its steps have all, but for a scheduler
    with pytest.raises(StateMismatchError, match="step-00000004 has no lr_scheduler"):
        train(tmp_path / "other", scheduled=True, import_from=file)


def test_what_cannot_be_taken_over_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file or directory, not a checkpoint"):
        read_content(tmp_path / "missing")
    two = {"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}
    torch.save(two, tmp_path / "two.pt")
    assert set(read_content(tmp_path / "two.pt").given) == {"model/a", "model/b"}
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ConfigurationError, match="of a list"):
        read_content(tmp_path / "list.pt")


# ---------------------------------------------------------------- several objects


def pair() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two models of one shape with an optimizer each, by name."""
    nets = {name: nn.Linear(3, 3) for name in ("maker", "judge")}
    return nets, {n: torch.optim.AdamW(net.parameters(), lr=0.1) for n, net in nets.items()}


def pair_saved(path: Path) -> dict[str, Any]:
    """The file of a loop that trained a pair."""
    nets, optimizers = pair()
    for name, net in nets.items():
        net(torch.ones(1, 3)).sum().backward()
        optimizers[name].step()
    saved = {"nets": {n: net.state_dict() for n, net in nets.items()}}
    saved["optimizers"] = {n: each.state_dict() for n, each in optimizers.items()}
    torch.save(saved, path)
    return saved


def resume_pair(file: Path, run: Path, names: tuple[str, str]) -> Any:
    nets, optimizers = pair()
    nets = dict(zip(names, nets.values(), strict=True))
    optimizers = dict(zip(names, optimizers.values(), strict=True))
    options: Any = {"model": nets, "optimizer": optimizers, "import_from": file}
    with Checkpointer(run, **options) as checkpointer:
        checkpointer.resume()
    return nets


@pytest.mark.parametrize("names", [("maker", "judge"), ("judge", "maker")])
def test_several_objects_are_matched_by_their_names(tmp_path: Path, names: tuple[str, str]) -> None:
    saved = pair_saved(tmp_path / "a.pt")
    nets = resume_pair(tmp_path / "a.pt", tmp_path / "run", names)
    for name, net in nets.items():
        assert torch.equal(net.weight, saved["nets"][name]["weight"])


def test_names_that_are_not_those_of_the_run_are_an_error_with_both_lists(tmp_path: Path) -> None:
    saved = pair_saved(tmp_path / "a.pt")
    text = "model/maker, model/judge in the .* those of this run: model/left, model/right"
    with pytest.raises(StateMismatchError, match=text) as caught:
        resume_pair(tmp_path / "a.pt", tmp_path / "run", ("left", "right"))
    remedy = "Pass as many objects, under these names or, if they are numbers, in this order"
    assert caught.value.remedy == remedy
    nets = resume_pair(tmp_path / "a.pt", tmp_path / "run", ("maker", "judge"))  # as it says
    assert torch.equal(nets["judge"].weight, saved["nets"]["judge"]["weight"])
    net, optimizer = made()
    with pytest.raises(StateMismatchError, match="those of this run: model"):
        Checkpointer(tmp_path / "run", model=net, optimizer=optimizer).resume()
